"""IBM's MLP speculator (Wertheimer et al., arXiv 2404.19124): a recurrence over the target's last state and the drafts.

State 0 is the target's normed hidden state. Step i mixes the state with the token before the one it guesses:
state = GELU(LN_i(P_i state + a E_i[token])), logits = H_i state; a makes the first state half of the mixture's
magnitude by the last step. LN divides by the root mean square and takes off no mean. Read from the layout of IBM's
accelerators (MLPSpeculatorPreTrainedModel); tie_weights shares all between the steps but the first projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.heads.head_sizes import head_size, require_target_sizes
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.linear import WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.norms import RMSNorm
from runner.engine.operations import head_logits, linear

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
EPS = 1e-6


class MlpSpeculator:
    """The recurrence; a step that shares another's weights has the same tensors."""

    def __init__(
        self,
        *,
        hidden_size: int,
        inner_size: int,
        vocab_size: int,
        num_steps: int,
        is_tied: bool,
        scales_input: bool,
        dtype: torch.dtype,
    ) -> None:
        self.num_steps, self.is_tied = num_steps, is_tied
        own = range(num_steps if not is_tied else 1)  # steps with an embedding, a norm and a head of their own
        self.embeddings = [torch.empty(vocab_size, inner_size, dtype=dtype) for _ in own]
        self.heads: list[Weight] = [torch.empty(vocab_size, inner_size, dtype=dtype) for _ in own]
        self.norms = [RMSNorm(inner_size, EPS, dtype) for _ in own]
        self.norm_biases = [torch.empty(inner_size, dtype=dtype) for _ in own]
        num_projections = min(num_steps, 2) if is_tied else num_steps
        sizes = [hidden_size, *[inner_size] * (num_projections - 1)]
        self.projections: list[Weight] = [torch.empty(inner_size, size, dtype=dtype) for size in sizes]
        self.input_norm = RMSNorm(hidden_size, EPS, dtype) if scales_input else None
        if self.input_norm is not None:
            self.input_norm.weight.fill_(1.0)  # it has no parameters
        state_weight = 0.5 ** (0.5 / num_steps)
        self.token_weight = math.sqrt((1 - state_weight**2) * inner_size / 2) / state_weight

    def first_state(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [num_rows, hidden] as the first step takes them."""
        return states if self.input_norm is None else self.input_norm(states) / math.sqrt(2)

    def next_state(self, step: int, state: torch.Tensor, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden or inner] and tokens [num_rows] (num_rows a multiple of tile) -> [num_rows, inner]."""
        own = 0 if self.is_tied else step
        embedded = self.embeddings[own].index_select(0, token_ids)
        projected = linear(state, self.projections[min(step, len(self.projections) - 1)], None, tile)
        mixed = torch.add(projected, embedded, alpha=self.token_weight)
        return F.gelu(self.norms[own](mixed) + self.norm_biases[own])

    def logits(self, step: int, state: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, inner] (num_rows a multiple of tile) -> [num_rows, vocab] float32."""
        return head_logits(state, self.heads[0 if self.is_tied else step], tile)

    @property
    def product_weights(self) -> list[Weight]:
        return [*self.projections, *self.heads]

    def convert(self, change: Change) -> None:
        self.projections = [change(weight) for weight in self.projections]
        self.heads = [change(weight) for weight in self.heads]

    def weight_targets(self) -> dict[str, WeightTarget]:
        lists: dict[str, Sequence[Weight]] = {
            "emb.{}.weight": self.embeddings,
            "proj.{}.weight": self.projections,
            "head.{}.weight": self.heads,
            "ln.{}.weight": [norm.weight for norm in self.norms],
            "ln.{}.bias": self.norm_biases,
        }
        return {
            f"speculator.{name.format(step)}": WeightTarget(view=unpacked(weight))
            for name, weights in lists.items()
            for step, weight in enumerate(weights)
        }


def load_mlp_speculator(
    source: ModelSource, target: LoadedModel, *, device: torch.device, dtype: torch.dtype
) -> MlpSpeculator:
    """Read the speculator of a target.

    Raises:
        UserError: another kind of speculator, another target's, or tensors that do not fit its config.
    """
    config = read_head_config(source)
    _require_kind(config, source)
    hidden_size = head_size(config, "emb_dim", 4096, source)
    vocab_size = head_size(config, "vocab_size", 32000, source)
    require_target_sizes(source, target, hidden_size=hidden_size, vocab_size=vocab_size)
    with torch.device(device):
        speculator = MlpSpeculator(
            hidden_size=hidden_size,
            inner_size=head_size(config, "inner_dim", 0, source, minimum=0) or hidden_size,
            vocab_size=vocab_size,
            num_steps=head_size(config, "n_predict", 3, source),
            is_tied=bool(config.get("tie_weights", False)),
            scales_input=bool(config.get("scale_input", False)),
            dtype=dtype,
        )
    tensors = read_head_tensors(source)
    if speculator.is_tied:
        _drop_copies(tensors, speculator.num_steps, source)
    fill_head(speculator.weight_targets(), tensors, source, "an MLP speculator")
    return speculator


def _require_kind(config: Mapping[str, Any], source: ModelSource) -> None:
    architectures = [str(name) for name in config.get("architectures") or []]
    if architectures == [ARCHITECTURE] or (not architectures and config.get("model_type") == "mlp_speculator"):
        return
    found = ", ".join(architectures) or str(config.get("model_type"))
    remedy = "name the method that it was made for"
    if found.startswith("Arctic"):
        remedy = "Arctic's speculators have another recurrence, which is not built here: choose an accelerator of IBM's"
    raise UserError(f"{source.name}={source.model} must be an {ARCHITECTURE}, got {found}; {remedy}")


def _drop_copies(tensors: dict[str, torch.Tensor], num_steps: int, source: ModelSource) -> None:
    """Take out what tie_weights says is one tensor; a checkpoint may hold it once or for every step."""
    firsts = {"emb.{}.weight": 0, "proj.{}.weight": 1, "head.{}.weight": 0, "ln.{}.weight": 0, "ln.{}.bias": 0}
    for name, first in firsts.items():
        for step in range(first + 1, num_steps):
            copy = f"speculator.{name.format(step)}"
            original = tensors.get(f"speculator.{name.format(first)}")
            if original is None or copy not in tensors:
                continue
            if not torch.equal(tensors.pop(copy), original):
                raise UserError(
                    f"{source.name}={source.model}: its config says tie_weights, and {copy} differs from that of step "
                    f"{first}; mend its config.json or download it again"
                )
