"""A layer of a decoder: norm, attention or what stands in its place, norm, MLP.

Targets, drafts and draft heads (EAGLE, MTP, DFlash) are built from it. Objects hold one tensor-parallel shard;
weights are allocated empty, and weight_targets() says which checkpoint tensor fills which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight
from kernels.reference.act_and_mul import Activation, LimitedSilu
from runner.engine.architecture import Architecture
from runner.engine.attention import Attention
from runner.engine.delta_net import GatedDeltaNet
from runner.engine.experts import Experts
from runner.engine.families import FAMILIES
from runner.engine.family import DeltaLayout
from runner.engine.forward_batch import ForwardBatch
from runner.engine.grouped_query_attention import GroupedQueryAttention
from runner.engine.kimi_delta import KimiDeltaAttention
from runner.engine.kv_cache import PagedKVCache
from runner.engine.latent_attention import LatentAttention
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.mixer import Mixer, NoMixer
from runner.engine.mlp import MLP, NoMLP
from runner.engine.mlp_beside_experts import MLPBesideExperts
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, add
from runner.engine.per_layer_inputs import PerLayerInput
from runner.engine.quantization import Quantization
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard
from runner.engine.short_conv import ShortConv
from runner.engine.state_space import StateSpace

# Of layouts whose nets are others.
DELTA_NETS: dict[DeltaLayout, type[GatedDeltaNet]] = {"kimi": KimiDeltaAttention, "mamba": StateSpace}


class DecoderLayer:
    """norm, attention, norm, MLP, each with its residual; heads drop the first norm or bring their own.

    Some families norm what attention and MLP add to the residual stream, too (Gemma 2, GLM-4), or only that (OLMo 2).
    """

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        in_features: int | None = None,  # of the attention; None: the hidden size
        has_input_norm: bool = True,  # EAGLE's first layer has none
        quantization: Quantization | None = None,  # of its products, by names within the layer
    ) -> None:
        self._names = arch.norms[layer]
        names = self._names
        experts = arch.experts if arch.experts is not None and arch.experts.in_layers[layer] else None
        is_beside_mlp = experts is not None and experts.mixture.is_beside_mlp
        self.input_norm, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else RMSNorm.of(arch, dtype, eps=eps)
            for name, eps in (
                (names.before_attention if has_input_norm else None, None),
                (names.after_attention, arch.added_norm_eps),
                # An MLP and experts beside each other norm what they read themselves.
                (None if is_beside_mlp else names.before_mlp, None),
                (names.after_mlp, arch.added_norm_eps),
            )
        )
        self.mixer: Mixer
        if not arch.mixes[layer]:
            self.mixer = NoMixer()
        elif arch.delta is not None and arch.delta.in_layers[layer]:
            kind = DELTA_NETS.get(arch.delta.layout, GatedDeltaNet)
            self.mixer = kind(arch, layer, shard, dtype, quantization=quantization)
        elif arch.convs is not None and arch.convs.in_layers[layer]:
            self.mixer = ShortConv(arch, layer, shard, dtype, quantization=quantization)
        elif arch.latent is not None:
            self.mixer = LatentAttention(arch, layer, shard, dtype, quantization=quantization)
        else:
            self.mixer = GroupedQueryAttention(
                arch, layer, shard, dtype, in_features=in_features, quantization=quantization
            )
        self.per_layer_input = (
            None
            if arch.per_layer is None
            else PerLayerInput(arch.per_layer, arch.hidden_size, arch.rms_norm_eps, dtype, quantization=quantization)
        )
        # Of the residual stream behind the layer.
        self.scale = torch.empty((), dtype=torch.float32) if arch.has_layer_scales else None
        mlp = partial(
            MLP,
            arch.hidden_size,
            arch.intermediate_sizes[layer],
            shard,
            dtype,
            name=FAMILIES[arch.family].mlp,
            bias=arch.mlp_bias,
            activation=arch.activation,
            is_gated=FAMILIES[arch.family].is_mlp_gated,
            quantization=quantization,
        )
        self.mlp: MLP | Experts | MLPBesideExperts | NoMLP
        if not arch.has_mlp[layer]:
            self.mlp = NoMLP()
        elif experts is None:
            self.mlp = mlp()
        else:
            self.mlp = Experts(
                experts,
                arch.hidden_size,
                shard,
                dtype,
                activation=_limited(arch.activation, experts.limits, layer),
                shared_activation=_limited(arch.activation, experts.shared_limits, layer),
                quantization=quantization,
            )
            if is_beside_mlp:
                self.mlp = MLPBesideExperts(mlp(), self.mlp, arch, dtype)

    def __call__(
        self,
        hidden: Rows | None,  # output of the layer below, not yet added; None for the first layer
        residual: torch.Tensor,
        rope: RopeRows | None,  # None: the layer turns nothing
        batch: ForwardBatch,
        cache: PagedKVCache,
        below: DecoderLayer | None = None,
    ) -> tuple[Rows, torch.Tensor]:
        """As before_attention takes it and after_input_norm returns it."""
        normed, residual = self.before_attention(hidden, residual, below)
        return self.after_input_norm(normed, residual, rope, batch, cache)

    def before_attention(
        self, hidden: Rows | None, residual: torch.Tensor, below: DecoderLayer | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the attention, the residual stream in front of the layer), both [num_rows, hidden].

        below: the layer that hidden comes from; None: it comes from a plain one.
        """
        if hidden is None:
            return residual if self.input_norm is None else self.input_norm(residual), residual
        if below is None:
            return add_output(hidden, residual, None, self.input_norm)
        return below.add_output(hidden, residual, self.input_norm)

    def after_input_norm(
        self,
        normed: torch.Tensor,  # [num_rows, in_features]
        residual: torch.Tensor,  # [num_rows, hidden]
        rope: RopeRows | None,
        batch: ForwardBatch,
        cache: PagedKVCache,
        inputs: torch.Tensor | None = None,  # [num_rows, size], of this layer alone, where layers have some
    ) -> tuple[Rows, torch.Tensor]:
        """(output that add_output takes, residual), both [num_rows, hidden]."""
        tile = batch.linear_tile
        if isinstance(self.mixer, NoMixer) and not isinstance(self.mlp, NoMLP):
            return self.mlp(normed, tile), residual
        attended = self.mixer(normed, rope, batch, cache)
        if isinstance(self.mlp, NoMLP):
            return attended, residual
        normed, residual = add_output(attended, residual, self.after_attention, self.before_mlp)
        output = self.mlp(normed, tile)
        if self.per_layer_input is None:
            return output, residual
        assert inputs is not None
        _, residual = add_output(output, residual, self.after_mlp, None)
        return self.per_layer_input(residual, inputs, tile), residual

    def add_output(
        self, output: Rows, residual: torch.Tensor, next_norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the function, of what after_input_norm returns."""
        return add_output(output, residual, self.output_norm, next_norm, self.scale)

    def output_beside(self, output: Rows, residual: torch.Tensor, next_norm: RMSNorm) -> torch.Tensor:
        """What add_output returns as one tensor, the residual stream first: [num_rows, 2 * hidden]."""
        return next_norm.beside_sum(output, residual, self.output_norm, self.scale)

    @property
    def output_norm(self) -> RMSNorm | None:
        """Of what the layer adds last."""
        return self.after_mlp if self.per_layer_input is None else self.per_layer_input.norm

    @property
    def attention(self) -> Attention:
        """Of a layer that attends."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def experts(self) -> Experts | None:
        """In place of an MLP, or beside it."""
        if isinstance(self.mlp, MLPBesideExperts):
            return self.mlp.experts
        return self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What makes products and kernels' launches of layers differ: how weights are held, too."""
        mixer = self.mixer.shape if isinstance(self.mixer, Attention) else (type(self.mixer),)
        return (*mixer, type(self.mlp), *self.mlp.activations, *map(_held, self.product_weights))

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each; of experts those of one."""
        weights = [*self.mixer.product_weights, *self.mlp.product_weights]
        weights += [] if self.mlp.shared is None else self.mlp.shared.product_weights
        weights += [] if self.experts is None else [product.weight for product in self.experts.latent_projections]
        return [*weights, *(product.weight for product in self._products_of_input)]

    @property
    def _products_of_input(self) -> list[ColumnParallelLinear]:
        return [] if self.per_layer_input is None else self.per_layer_input.products

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        of_input = sum(product.weight.shape.numel() for product in self._products_of_input)
        return self.mlp.products_per_row + self.mixer.products_per_row + of_input

    @property
    def product_names(self) -> list[str]:
        """The checkpoint's modules whose weights may be quantized: all but routers and gates."""
        of_input = [name for own in self._products_of_input for name in own.part_rows]
        return [*self.mixer.product_names, *of_input, *self.mlp.product_names]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.mixer.convert(change)
        self.mlp.convert(change)
        if self.per_layer_input is not None:
            self.per_layer_input.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        names = self._names
        norms = {
            names.before_attention: self.input_norm,
            names.after_attention: self.after_attention,
            names.before_mlp: self.before_mlp,
            names.after_mlp: self.after_mlp,
        }
        own = {f"{prefix}{name}.weight": norm.target for name, norm in norms.items() if norm is not None}
        if self.per_layer_input is not None:
            own |= self.per_layer_input.weight_targets(prefix)
        if self.scale is not None:
            own[f"{prefix}layer_scalar"] = WeightTarget(view=self.scale.view(1))
        return own | self.mixer.weight_targets(prefix) | self.mlp.weight_targets(prefix)


def _limited(activation: Activation, limits: Sequence[float | None], layer: int) -> Activation:
    limit = limits[layer] if layer < len(limits) else None
    return activation if limit is None else LimitedSilu(limit)


def _held(weight: Weight) -> tuple[Any, ...]:
    """What products with weights differ by."""
    if isinstance(weight, torch.Tensor):
        return weight.shape, weight.dtype
    return weight.shape, weight.dtype, weight.kind, weight.group_size, weight.has_zeros


def add_output(
    output: Rows,
    residual: torch.Tensor,
    output_norm: RMSNorm | None,
    next_norm: RMSNorm | None,
    scale: torch.Tensor | None = None,  # [] float32, of the sum
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input of what comes next, the residual stream with the output added), all [num_rows, hidden]."""
    if next_norm is not None:
        return next_norm.add(output, residual, output_norm, scale)
    if output_norm is not None:
        residual = output_norm.add_to(residual, output, scale)
        return residual, residual
    assert scale is None, "of sums that something norms"
    residual = add(output, residual)
    return residual, residual
