"""A gated delta net in place of a layer's attention: Qwen3-Next, Qwen3.5, OLMo Hybrid (Yang et al., arXiv 2412.06464).

And Ling 3's delta attention, which forgets by channel.

What it knows of a request's past is a state of fixed size in place of keys and values for every token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.reference.gated_delta import DeltaRows, DeltaStates, DeltaWeights
from runner.engine.architecture import Architecture
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.mixer import RecurrentMixer
from runner.engine.operations import Rows
from runner.engine.quantization import Quantization
from runner.engine.recurrent_operations import gated_delta
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard


class GatedDeltaNet(RecurrentMixer):
    gates_are_whole = False  # in every rank

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        quantization: Quantization | None = None,  # by names within the layer
    ) -> None:
        assert arch.delta is not None
        self.layer, whole = layer, arch.delta.heads
        self.heads = replace(
            whole,
            num_key_heads=shard.split(whole.num_key_heads, arch.delta.keys.num_key_heads),
            num_value_heads=shard.split(whole.num_value_heads, arch.delta.keys.num_value_heads),
        )
        self.shapes, has_biases = arch.delta, arch.delta.has_biases
        self.in_proj = ColumnParallelLinear(
            arch.hidden_size,
            arch.delta.projected_rows,
            bias=has_biases,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        # What they say is taken to the power of e: never quantized. They are few, but for Ling's, which are as many as
        # its queries.
        self.gates_proj = ColumnParallelLinear(
            arch.hidden_size,
            arch.delta.gate_rows,
            bias=has_biases,
            shard=Shard() if self.gates_are_whole else shard,
            dtype=dtype,
        )
        self.out_proj = RowParallelLinear(
            whole.values,
            arch.hidden_size,
            arch.delta.out_proj,
            bias=has_biases,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self._convolved_rows = {name: shard.split(rows, name) for name, rows in arch.delta.convolved_rows.items()}
        self.weights = DeltaWeights(
            convolution=torch.empty(whole.taps, self.heads.convolved, dtype=dtype),
            bias=torch.empty(self.heads.convolved, dtype=dtype) if arch.delta.has_convolution_bias else None,
            a_log=torch.empty(self.heads.num_value_heads),
            dt_bias=torch.empty(self.heads.num_value_heads * self.heads.forgotten),
            **self.weights_of_results(),
        )

    def weights_of_results(self) -> dict[str, torch.Tensor]:
        """Fields of DeltaWeights: of what is done to what a head finds."""
        eps = torch.tensor(self.shapes.norm_eps, dtype=torch.float32)
        return {"norm": torch.empty(self.heads.value_dim), "eps": eps}

    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        states, segments = cache.states[self.layer], batch.recurrent
        assert isinstance(states, DeltaStates) and segments is not None, (
            "a launch of a tree has no states to go on from"
        )
        found = gated_delta(self.projected(hidden, batch.linear_tile), segments, states, self.weights, self.heads)
        return self.out_proj.in_parts(self.normed(found), batch.linear_tile)

    def projected(self, hidden: torch.Tensor, tile: int | None) -> DeltaRows:
        heads = self.heads
        mixed, gate = self.in_proj(hidden, tile).split_with_sizes((heads.convolved, heads.values), dim=1)
        sizes = [heads.num_value_heads * count for count in (heads.gates - heads.forgotten, heads.forgotten) if count]
        *written, forgotten = self.gates_proj(hidden, tile).split_with_sizes(sizes, dim=1)
        return DeltaRows(mixed=mixed, gate=gate, forgotten=forgotten, written=written[0] if written else None)

    def normed(self, found: torch.Tensor) -> torch.Tensor:
        """What heads find [num_rows, values], which may be overwritten; here each has normed its own."""
        return found

    def empty_states(self, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device) -> DeltaStates:
        return DeltaStates.empty(self.heads, num_slots, num_uncertain, dtype, device)

    @property
    def projections(self) -> list[ColumnParallelLinear]:
        return [self.in_proj, self.gates_proj]

    @property
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [*self.projections, self.out_proj]

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        weights, own = self.weights, f"{prefix}{self.shapes.block}."
        targets = {
            f"{own}A_log": self.target_of_a_log(),
            f"{own}dt_bias": WeightTarget(view=weights.dt_bias, shard_dim=0),
            **self.targets_of_results(prefix),
        }
        of_channels = {"weight": weights.convolution.t().unsqueeze(1)}  # [convolved, 1, taps]
        if weights.bias is not None:
            of_channels["bias"] = weights.bias
        for kind, channels in of_channels.items():
            parts = channels.split_with_sizes(list(self._convolved_rows.values()))
            for name, part in zip(self._convolved_rows, parts, strict=True):
                targets[f"{prefix}{name}.{kind}"] = WeightTarget(view=part, shard_dim=0)
        for product in self.products:
            targets |= product.weight_targets(prefix)
        return targets

    def target_of_a_log(self) -> WeightTarget:
        return WeightTarget(view=self.weights.a_log, shard_dim=0)

    def targets_of_results(self, prefix: str) -> dict[str, WeightTarget]:
        assert self.weights.norm is not None
        return {f"{prefix}{self.shapes.norm}.weight": WeightTarget(view=self.weights.norm)}
