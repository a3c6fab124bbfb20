"""Shapes of gated delta nets, and how checkpoints hold their projections together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.reference.gated_delta import DeltaHeads
from runner.engine.errors import UserError
from runner.engine.families import Family
from runner.engine.fused_tensors import Fused


@dataclass(frozen=True, kw_only=True)
class DeltaShapes:
    """The gated delta nets that stand in place of layers' attention."""

    is_by_key_head: bool  # how tensors hold projections together (Family.delta_nets)
    heads: DeltaHeads  # of all ranks
    in_layers: tuple[bool, ...]  # of each layer; the others attend

    @property
    def projected_rows(self) -> dict[str, int]:
        """Rows of the matrices that give queries, keys, values and what gates the norm, by name."""
        keys, values = self.heads.keys, self.heads.values
        rows = {"q": keys, "k": keys, "v": values, "z": values}
        return {f"linear_attn.in_proj_{name}": count for name, count in rows.items()}

    @property
    def gate_rows(self) -> dict[str, int]:
        """Rows of the matrices that say how much is written and how much is forgotten."""
        return {f"linear_attn.in_proj_{name}": self.heads.num_value_heads for name in "ba"}

    @property
    def convolved_rows(self) -> dict[str, int]:
        """Channels of the convolution over queries, keys and values."""
        keys, values = self.heads.keys, self.heads.values
        return {"linear_attn.conv1d_q": keys, "linear_attn.conv1d_k": keys, "linear_attn.conv1d_v": values}

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        convolution = {"linear_attn.conv1d": Fused(parts=self.convolved_rows)}
        projected = self.projected_rows
        if not self.is_by_key_head:
            del projected["linear_attn.in_proj_z"]
            return {"linear_attn.in_proj_qkv": Fused(parts=projected), **convolution}
        count = self.heads.num_key_heads
        return {
            "linear_attn.in_proj_qkvz": Fused(parts=projected, num_groups=count),
            "linear_attn.in_proj_ba": Fused(parts=self.gate_rows, num_groups=count),
            **convolution,
        }


def read_delta_shapes(config: Any, family: Family) -> DeltaShapes:
    """From a transformers config; raises UserError for numbers of heads that cannot be."""
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    found = {key: int(getattr(config, f"linear_{key}")) for key in keys}
    for key, number in found.items():
        if number < 1:
            raise UserError(
                f"linear_{key} of a {config.model_type} checkpoint must be >= 1, got {number}; mend its config"
            )
    num_key_heads, num_value_heads, key_dim, value_dim, taps = found.values()
    if num_value_heads % num_key_heads:
        raise UserError(
            f"linear_num_value_heads of a {config.model_type} checkpoint must be divisible by linear_num_key_heads "
            f"({num_key_heads}), got {num_value_heads}; mend its config"
        )
    return DeltaShapes(
        is_by_key_head=family.delta_nets == "by_key_head",
        heads=DeltaHeads(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            taps=taps,
        ),
        in_layers=tuple(kind == "linear_attention" for kind in config.layer_types),
    )
