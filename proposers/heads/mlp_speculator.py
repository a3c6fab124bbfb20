"""The MLP speculator (Wertheimer et al., arXiv 2404.19124): a recurrence over the target's last state and the drafts.

State 0 is the target's normed hidden state. Step i mixes the state with the token before the one it guesses:
state = GELU(LN_i(P_i state + a E_i[token])), logits = H_i state; a makes the first state half of the mixture's
magnitude by the last step. LN divides by the root mean square and takes off no mean; tie_weights shares all between the
steps but the first projection. Arctic's sum_rnn may have layers behind embedding and projection (norm, GELU, product)
and behind the mixture (product, norm, GELU).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.heads.recurrence import Recurrence
from proposers.heads.speculator_norms import NormedGelu
from proposers.heads.speculator_shape import SpeculatorShape
from runner.engine.linear import WeightTarget
from runner.engine.operations import head_logits, linear


class _Layer:
    """A product, and the norm with GELU that stands before or behind it."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        self.weight: Weight = torch.empty(out_features, in_features, dtype=dtype)
        self.normed_gelu = NormedGelu(out_features, dtype)  # where it stands before it, both are alike

    def normed_first(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        return linear(self.normed_gelu(x), self.weight, None, tile)

    def normed_last(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        return self.normed_gelu(linear(x, self.weight, None, tile))


class MlpSpeculator(Recurrence):
    """The recurrence; a step that shares another's weights has the same tensors."""

    def __init__(self, shape: SpeculatorShape, dtype: torch.dtype) -> None:
        super().__init__(shape)
        width, last = shape.inner_sizes[0], shape.inner_sizes[-1]
        own = range(shape.num_steps if not shape.is_tied else 1)  # steps with all but a projection of their own
        self.embeddings = [torch.empty(shape.vocab_size, width, dtype=dtype) for _ in own]
        self.heads: list[Weight] = [torch.empty(shape.vocab_size, last, dtype=dtype) for _ in own]
        self.norms = [NormedGelu(width, dtype) for _ in own]
        num_projections = min(shape.num_steps, 2) if shape.is_tied else shape.num_steps
        sizes = [shape.hidden_size, *[last] * (num_projections - 1)]
        self.projections: list[Weight] = [torch.empty(width, size, dtype=dtype) for size in sizes]

        def layers(sizes: tuple[int, ...]) -> list[_Layer]:
            return [_Layer(before, behind, dtype) for before, behind in pairwise(sizes)]

        self.token_layers = [layers((width,) * shape.num_token_layers) for _ in own]
        self.state_layers = [layers((width,) * shape.num_state_layers) for _ in sizes]
        self.inner_layers = [layers(shape.inner_sizes) for _ in own]

    def next_state(self, step: int, state: torch.Tensor, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden or inner] and tokens [num_rows] (num_rows a multiple of tile) -> [num_rows, inner]."""
        own, projecting = self._own(step), min(step, len(self.projections) - 1)
        told = self.embeddings[own].index_select(0, token_ids)
        for layer in self.token_layers[own]:
            told = layer.normed_first(told, tile)
        projected = linear(state, self.projections[projecting], None, tile)
        for layer in self.state_layers[projecting]:
            projected = layer.normed_first(projected, tile)
        state = self.norms[own](torch.add(projected, told, alpha=self.token_weight))
        for layer in self.inner_layers[own]:
            state = layer.normed_last(state, tile)
        return state

    def logits(self, step: int, state: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, inner] (num_rows a multiple of tile) -> [num_rows, vocab] float32."""
        return head_logits(state, self.heads[self._own(step)], tile)

    def _own(self, step: int) -> int:
        return 0 if self.shape.is_tied else step

    @property
    def _layers(self) -> list[_Layer]:
        kinds = (self.token_layers, self.state_layers, self.inner_layers)
        return [layer for kind in kinds for layers in kind for layer in layers]

    @property
    def product_weights(self) -> list[Weight]:
        return [*self.projections, *self.heads, *(layer.weight for layer in self._layers)]

    def convert(self, change: Change) -> None:
        self.projections = [change(weight) for weight in self.projections]
        self.heads = [change(weight) for weight in self.heads]
        for layer in self._layers:
            layer.weight = change(layer.weight)

    def weight_targets(self) -> dict[str, WeightTarget]:
        first = ".0" if self.shape.kind == "sum_rnn" else ""  # whose parts are sequences of layers, GELUs counted
        targets = dict[str, WeightTarget]()
        for step, table in enumerate(self.embeddings):
            targets[f"emb.{step}{first}.weight"] = WeightTarget(view=table)
        for step, weight in enumerate(self.projections):
            targets[f"proj.{step}{first}.weight"] = WeightTarget(view=unpacked(weight))
        for step, weight in enumerate(self.heads):
            targets[f"head.{step}.weight"] = WeightTarget(view=unpacked(weight))
        for step, norm in enumerate(self.norms):
            targets |= norm.weight_targets(f"ln.{step}{first}")
        for part, places, of_steps in (  # of a layer's norm and product
            ("emb", (1, 3), self.token_layers),
            ("proj", (1, 3), self.state_layers),
            ("ln", (3, 2), self.inner_layers),
        ):
            for step, layers in enumerate(of_steps):
                for number, layer in enumerate(layers):
                    normed, product = (f"{part}.{step}.{place + 3 * number}" for place in places)
                    targets |= layer.normed_gelu.weight_targets(normed)
                    targets[f"{product}.weight"] = WeightTarget(view=unpacked(layer.weight))
        return targets
