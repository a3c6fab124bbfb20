"""Speculators that draft token by token from the target's last hidden state: what they have in common, and reading one.

Published are IBM's accelerators, whose tensors are called speculator.*, and those of Snowflake's Arctic family, where
they have no such prefix. Heads in 8 bits, as Arctic Inference runs them, are no part of a checkpoint: it makes them of
the dense ones, as method.quantization does here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from proposers.heads.head_sizes import require_target_sizes
from proposers.heads.lstm_speculator import GATES, LstmSpeculator
from proposers.heads.mlp_speculator import MlpSpeculator
from proposers.heads.speculator_shape import read_shape
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.loader import LoadedModel

PREFIX = "speculator."
Speculator = MlpSpeculator | LstmSpeculator


def load_speculator(
    source: ModelSource, target: LoadedModel, *, device: torch.device, dtype: torch.dtype
) -> Speculator:
    """Read the speculator of a target.

    Raises:
        UserError: another kind of speculator, another target's, or tensors that do not fit its config.
    """
    shape = read_shape(read_head_config(source), source)
    require_target_sizes(source, target, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    with torch.device(device):
        speculator = LstmSpeculator(shape, dtype) if shape.kind == "sum_lstm" else MlpSpeculator(shape, dtype)
    tensors = {name: tensor[...] for name, tensor in read_head_tensors(source).items()}
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
    own = speculator.weight_targets()
    copies = _copies_of_steps(own, shape.num_steps) if shape.is_tied else {}
    if shape.ties_gates:
        copies |= {f"{name}_emb.0.weight": f"{GATES[0]}_emb.0.weight" for name in GATES[1:]}
    _drop_copies(tensors, {f"{prefix}{copy}": f"{prefix}{name}" for copy, name in copies.items()}, source)
    kind = "an LSTM speculator" if shape.kind == "sum_lstm" else "an MLP speculator"
    fill_head({f"{prefix}{name}": view for name, view in own.items()}, tensors, source, kind)
    return speculator


def _copies_of_steps(names: Iterable[str], num_steps: int) -> dict[str, str]:
    """Of tied weights, what later steps would call what the last step that has some calls by these names."""
    parts = [name.split(".", 2) for name in names]
    last = dict[str, int]()
    for part, step, _ in parts:
        last[part] = max(int(step), last.get(part, 0))
    return {
        f"{part}.{later}.{rest}": f"{part}.{step}.{rest}"
        for part, step, rest in parts
        if int(step) == last[part]
        for later in range(int(step) + 1, num_steps)
    }


def _drop_copies(tensors: dict[str, torch.Tensor], copies: dict[str, str], source: ModelSource) -> None:
    """Take out what the config says is one tensor; a checkpoint may hold it once or under every name."""
    for copy, name in copies.items():
        if copy not in tensors or name not in tensors:
            continue
        if not torch.equal(tensors.pop(copy), tensors[name]):
            tie = "tie_lstm_embs" if "_emb." in copy else "tie_weights"
            raise UserError(
                f"{source.name}={source.model}: its config says {tie}, and {copy} differs from {name}; mend its "
                "config.json or download it again"
            )
