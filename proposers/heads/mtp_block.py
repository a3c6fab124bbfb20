"""The decoder block inside an MTP module: our own layer, or a copy of the layers that transformers runs the target by.

Both take the residual stream and return it normed, keep their KV in layer 0 of the cache they are given, and say which
checkpoint tensor fills what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from kernels.cpu.panels import Change
from runner.engine.architecture import Architecture
from runner.engine.attention import Attention
from runner.engine.errors import UserError
from runner.engine.families import FAMILIES
from runner.engine.family import PRE_NORMS
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layer_kinds import ropes, sliding_windows
from runner.engine.layers import DecoderLayer
from runner.engine.linear import WeightTarget
from runner.engine.memory import require_memory
from runner.engine.norms import RMSNorm
from runner.engine.quantization import Quantization
from runner.engine.shard import Shard
from runner.engine.transformers_attention import Launch, Probe
from runner.engine.transformers_model import PROBE_ROWS, TransformersModel


class MtpBlock(Protocol):
    layers: Sequence[DecoderLayer]  # of our own
    kv_width: int  # elements a token takes in the cache
    attentions: Sequence[Attention]  # as PagedLayers.attentions

    def __call__(
        self, hidden: torch.Tensor, batch: ForwardBatch, cache: PagedKVCache, final_norm: RMSNorm
    ) -> torch.Tensor:
        """The residual stream behind the block and the norm, as hidden [num_rows, hidden]."""

    def convert(self, change: Change) -> None:
        """As DecoderLayer.convert."""

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]: ...


class OwnBlock:
    """A layer of the families that we build ourselves."""

    def __init__(
        self,
        arch: Architecture,
        hf_config: Any,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        quantization: Quantization,
    ) -> None:
        """arch: of block_architecture; name: the module's, for errors; quantization: by names within the layer.

        Raises:
            UserError: the layer does not fit memory.
        """
        new_layer = partial(DecoderLayer, arch, 0, Shard(), dtype, quantization=quantization)
        with torch.device("meta"):
            needed = sum(target.nbytes for target in new_layer().weight_targets("").values())
        require_memory(needed, device, f"the MTP module of {name}", "choose a smaller model")
        with torch.device(device):
            self.layer = new_layer()
        self.layers: Sequence[DecoderLayer] = [self.layer]
        self.attentions: Sequence[Attention] = [self.layer.attention]
        self.kv_width = self.layer.attention.kv_width
        self._rope = self.layer.attention.rope(hf_config, max_model_len)

    def __call__(
        self, hidden: torch.Tensor, batch: ForwardBatch, cache: PagedKVCache, final_norm: RMSNorm
    ) -> torch.Tensor:
        output, residual = self.layer(None, hidden, self._rope(batch.positions, hidden), batch, cache)
        return self.layer.add_output(output, residual, final_norm)[0]

    def convert(self, change: Change) -> None:
        self.layer.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return self.layer.weight_targets(prefix)


class TransformersBlock:
    """A copy of the target's last layer: the same class, with its own dtypes, experts and attention."""

    def __init__(self, target: TransformersModel, name: str) -> None:
        """name: the module's, for errors.

        Raises:
            UserError: the layer does not fit memory once more, or needs more than rotations and a launch.
        """
        device = target.embed_tokens.device
        require_memory(target.last_layer_bytes, device, f"the MTP module of {name}", "choose a smaller model")
        self.layers: Sequence[DecoderLayer] = ()
        self.attentions: Sequence[Attention] = ()
        self._target = target
        self._layer = target.last_layer()
        modules: Iterator[Any] = self._layer.modules()
        for module in modules:
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # its place in a cache that holds nothing else
        probe = Probe(num_rows=PROBE_ROWS, sliding_layers=frozenset())
        rows = target.embed_tokens.new_zeros(PROBE_ROWS, target.hidden_size)
        try:
            self._run(rows, torch.arange(PROBE_ROWS, device=device), probe)
        except (UserError, TypeError, AttributeError) as error:  # of Python's: it takes other arguments
            raise UserError(
                f"{name}: {type(self._layer).__name__} cannot run as an MTP module of its own: {error}; "
                "choose another method"
            ) from error
        self.kv_width = probe.kv_widths[0]

    def __call__(
        self, hidden: torch.Tensor, batch: ForwardBatch, cache: PagedKVCache, final_norm: RMSNorm
    ) -> torch.Tensor:
        return final_norm(self._run(hidden, batch.positions, Launch(batch=batch, cache=cache)))

    @torch.inference_mode()
    def _run(self, hidden: torch.Tensor, positions: torch.Tensor, launch: Launch | Probe) -> torch.Tensor:
        rows, position_ids = hidden.unsqueeze(0), positions.unsqueeze(0)
        output = self._layer(
            rows,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=self._target.rotations(rows, position_ids),
            launch=launch,
        )
        result: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return result

    def convert(self, change: Change) -> None:
        pass  # transformers' layers multiply for themselves

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        for name, tensor in self._layer.state_dict().items():
            root, _, matrix = name.rpartition(".")
            if not root.endswith("experts") or matrix not in ("gate_up_proj", "down_proj"):
                targets[f"{prefix}{name}"] = WeightTarget(view=tensor)
                continue
            # Checkpoints hold expert by expert what modules hold stacked: [num_experts, out_features, in_features].
            for index, expert in enumerate(tensor):
                parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                for part, view in parts if matrix == "gate_up_proj" else [(matrix, expert)]:
                    targets[f"{prefix}{root}.{index}.{part}.weight"] = WeightTarget(view=view)
        return targets


def block_architecture(arch: Architecture, hf_config: Any, kind: str | None) -> Architecture:
    """Of a block, from its target's; kind: of layer_types, what it attends to, None: where layers differ, to all."""
    family = FAMILIES[arch.family]
    if kind is None:
        window, rope = None if None in arch.sliding_windows else arch.sliding_windows[-1], arch.ropes[0]
    else:
        one = copy(hf_config)
        one.layer_types, one.num_hidden_layers = [kind], 1
        (window,), (rope,) = sliding_windows(one, family), ropes(one, family)
    # One thing each are layers of some targets, of which a block has two.
    norms = arch.norms[-1]
    if family.has_blocks:
        norms = replace(norms, before_mlp=PRE_NORMS.before_mlp)
    experts = arch.experts
    if experts is not None:
        in_layers = (True,) if family.has_blocks else experts.in_layers[-1:]
        experts = replace(experts, in_layers=in_layers, limits=(), shared_limits=())
    return replace(
        arch,
        num_layers=1,
        heads=(replace(arch.heads[-1], kv_layer=None),),
        sliding_windows=(window,),
        ropes=(rope,),
        norms=(norms,),
        experts=experts,
        delta=None,
        mixes=(True,),
        has_mlp=(True,),
    )
