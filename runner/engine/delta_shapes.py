"""Shapes of gated delta nets, of what was made of them, and of Mamba-2's layers; and how checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.reference.gated_delta import DeltaHeads
from runner.engine.errors import UserError
from runner.engine.family import DeltaLayout, Family, StateKeys
from runner.engine.fused_tensors import Fused


@dataclass(frozen=True, kw_only=True)
class DeltaShapes:
    """What stands in place of layers' attention, and keeps a memory."""

    layout: DeltaLayout  # how tensors hold projections together, or that each lies apart
    heads: DeltaHeads  # of all ranks
    in_layers: tuple[bool, ...]  # of each layer; the others attend
    keys: StateKeys
    norm_eps: float  # of results
    has_biases: bool  # of its projections
    has_convolution_bias: bool

    @property
    def block(self) -> str:
        """Its name in the checkpoint, within a layer."""
        return {"mamba": "mamba", "kimi": "self_attn", "ling": "self_attn"}.get(self.layout, "linear_attn")

    @property
    def is_apart(self) -> bool:
        """Whether each matrix has a tensor of its own."""
        return self.layout in ("olmo", "kimi", "ling")

    def projection(self, name: str) -> str:
        """The name of a matrix, within a layer."""
        if self.is_apart:
            return f"{self.block}.{'g' if name == 'z' else name}_proj"
        return f"{self.block}.in_proj_{name}"

    @property
    def out_proj(self) -> str:
        return f"{self.block}.{'o_proj' if self.is_apart else 'out_proj'}"

    @property
    def norm(self) -> str:
        return f"{self.block}.{'o_norm' if self.is_apart else 'norm'}"

    @property
    def projected_rows(self) -> dict[str, int]:
        """Rows of the matrices that give queries, keys, values and what gates results, by name; the last unless that
        takes two of them (`gate_rows`)."""
        keys, values = self.heads.keys, self.heads.values
        rows = {"q": keys, "k": keys, "v": values, **({} if self.layout == "kimi" else {"z": values})}
        return {self.projection(name): count for name, count in rows.items()}

    @property
    def gate_rows(self) -> dict[str, int]:
        """Rows of the matrices that say how much is written, where that is said, and how much is forgotten.

        Kimi's say what is forgotten, and what gates results, by two matrices each, the first of which is here.
        """
        heads, count = self.heads, self.heads.num_value_heads
        rows = {"a": count} if heads.is_state_space else {"b": count, "a": count}
        if self.layout == "ling":
            rows = {"b": count, "f": heads.keys}
        if self.layout == "kimi":
            rows = {"f_a": heads.key_dim, "g_a": heads.value_dim, "b": count}
        return {self.projection(name): own for name, own in rows.items()}

    @property
    def convolved_rows(self) -> dict[str, int]:
        """Channels of the convolution over queries, keys and values."""
        form = "{}.{}_conv1d" if self.is_apart else "{}.conv1d_{}"
        rows = {"q": self.heads.keys, "k": self.heads.keys, "v": self.heads.values}
        return {form.format(self.block, name): count for name, count in rows.items()}

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        if self.is_apart:
            return {}
        if self.layout == "mamba":  # z, x, B, C, dt
            rows = self.projected_rows | self.gate_rows
            return {
                "mamba.in_proj": Fused(
                    parts={f"mamba.in_proj_{name}": rows[f"mamba.in_proj_{name}"] for name in "zvkqa"}
                ),
                "mamba.conv1d": Fused(parts=dict(reversed(self.convolved_rows.items()))),
            }
        convolution = {"linear_attn.conv1d": Fused(parts=self.convolved_rows)}
        projected = self.projected_rows
        if self.layout == "by_matrix":
            del projected["linear_attn.in_proj_z"]
            return {"linear_attn.in_proj_qkv": Fused(parts=projected), **convolution}
        count = self.heads.num_key_heads
        return {
            "linear_attn.in_proj_qkvz": Fused(parts=projected, num_groups=count),
            "linear_attn.in_proj_ba": Fused(parts=self.gate_rows, num_groups=count),
            **convolution,
        }


OLMO_EPS = 1e-5  # of the norms of results, whatever the config says of the others
IN_PLACE_OF_ATTENTION = ("linear_attention", "mamba")  # layer_types of a config


def read_delta_shapes(config: Any, family: Family) -> DeltaShapes:
    """From a transformers config; raises UserError for numbers of heads that cannot be."""
    layout, keys = family.delta_nets, family.state_keys
    assert layout is not None and keys is not None
    found = [int(getattr(config, key)) for key in keys[:5]]
    for key, number in zip(keys, found, strict=False):
        if number < 1:
            raise UserError(f"{key} of a {config.model_type} checkpoint must be >= 1, got {number}; mend its config")
    num_key_heads, num_value_heads, key_dim, value_dim, taps = found
    if num_value_heads % num_key_heads:
        raise UserError(
            f"{keys.num_value_heads} of a {config.model_type} checkpoint must be divisible by {keys.num_key_heads} "
            f"({num_key_heads}), got {num_value_heads}; mend its config"
        )
    if layout == "kimi":
        _require_unbounded(config)
    return DeltaShapes(
        layout=layout,
        keys=keys,
        heads=DeltaHeads(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            taps=taps,
            is_state_space=layout == "mamba",
            forgets_by_channel=layout in ("kimi", "ling"),
            most_forgotten=_most_forgotten(config) if layout == "ling" else None,
            writes_twice=bool(getattr(config, keys.writes_twice, False)),
        ),
        in_layers=tuple(kind in IN_PLACE_OF_ATTENTION for kind in config.layer_types),
        norm_eps=OLMO_EPS if layout == "olmo" else getattr(config, family.eps_key),
        has_biases=bool(getattr(config, keys.biases, False)),
        has_convolution_bias=bool(getattr(config, keys.convolution_bias, False)),
    )


def _require_unbounded(config: Any) -> None:
    """Raises UserError for what Kimi Linear's code does not read."""
    bound = (getattr(config, "linear_attn_config", None) or {}).get("gate_lower_bound")
    if bound is not None:
        raise UserError(
            f"linear_attn_config of a {config.model_type} checkpoint must have no gate_lower_bound, got {bound}; "
            "choose a checkpoint of Kimi Linear"
        )


def _most_forgotten(config: Any) -> float | None:
    """By a token, as Ling 3's configs bound its logarithm."""
    bound = config.kda_lower_bound if config.kda_safe_gate else None
    if bound is not None and bound >= 0:
        raise UserError(
            f"kda_lower_bound of a {config.model_type} checkpoint must be < 0, got {bound}; mend its config"
        )
    return None if bound is None else -float(bound)
