"""A decoder over a paged KV cache, of the families that runner.engine.families lists.

The same class serves targets and drafts. Weights are allocated empty; runner.engine.decoder_weights fills them through
weight_targets().
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight, unpack
from kernels.reference.fp8_rows import NO_SCALES, KVScales
from runner.engine.architecture import Architecture
from runner.engine.attention import Attention, one_of_each_shape
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import LayerStates, PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.linear import WeightTarget, empty_weight, weight_target
from runner.engine.mixer import RecurrentMixer
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, add, head_logits, scale_rows, take_rows
from runner.engine.per_layer_inputs import PerLayerInputs
from runner.engine.quantization import Quantization, within
from runner.engine.rope import RopeKey, RopeRows
from runner.engine.shard import Shard


class Decoder:
    """Token ids to final hidden states, and hidden states to logits."""

    def __init__(
        self,
        arch: Architecture,
        hf_config: Any,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        shard: Shard | None = None,
        quantization: Quantization | None = None,  # of products, by their modules; None: all are dense
    ) -> None:
        self.shard = shard = shard or Shard()
        self.vocab_size, self.num_layers, self.hidden_size = arch.vocab_size, arch.num_layers, arch.hidden_size
        self.max_model_len = max_model_len
        self.kv_scales: list[KVScales] = [NO_SCALES] * arch.num_layers  # of a cache in FP8
        # Whole in every rank, as is the head where its rows cannot be shared: all ranks draw from the same logits.
        self.embed_tokens = torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype)
        self.layers = [
            DecoderLayer(arch, index, shard, dtype, quantization=within(quantization, LAYER.format(index)))
            for index in range(arch.num_layers)
        ]
        # What norms embeddings on their way into the first layer; heads see those of the table.
        self.input_norm = RMSNorm.by_no_weights(arch.hidden_size, arch.rms_norm_eps) if arch.is_input_normed else None
        self.norm = (
            RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, rounds_last=True)
            if arch.is_last_norm_plain
            else RMSNorm.of(arch, dtype)
        )
        self.per_layer_inputs = (
            None
            if arch.per_layer is None
            else PerLayerInputs(arch.per_layer, arch.num_layers, arch.hidden_size, arch.rms_norm_eps, dtype)
        )
        self.logits_softcap = constant(arch.logits_softcap)
        # Rounded as the rows are that it scales (transformers does so).
        self.embedding_scale = constant(arch.embedding_scale, dtype)
        scales = arch.multipliers
        self.input_scale, self.stream_scale = constant(scales.inputs), constant(scales.stream)
        self.logits_scale = constant(scales.logits)
        storage = (quantization or {}).get(HEAD)
        self.is_tied, self._splits_head = arch.tie_word_embeddings, arch.vocab_size % shard.size == 0
        num_rows = arch.vocab_size // shard.size if self._splits_head else arch.vocab_size
        first = shard.rank * num_rows if self._splits_head else 0
        self.tied_rows = self.embed_tokens[first : first + num_rows]  # of the embedding, in a tied head
        self.lm_head: Weight = (
            self.tied_rows
            if self.is_tied and storage is None  # quantized it is a copy of what the embedding stays
            else empty_weight(num_rows, arch.hidden_size, dtype, storage)
        )
        self.is_recurrent = any(isinstance(layer.mixer, RecurrentMixer) for layer in self.layers)
        # Behind the last layer that stores something; others, at the end, see keys of earlier ones (Gemma 4).
        self.late_from = 1 + max(
            (
                index
                for index, layer in enumerate(self.layers)
                if not isinstance(layer.mixer, Attention) or layer.mixer.has_own_keys
            ),
            default=-1,
        )
        attentions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        kinds = {attention.turns: attention for attention in attentions}
        self._ropes = {key: attention.rope(hf_config, max_model_len) for key, attention in kinds.items()}

    @property
    def kv_widths(self) -> list[int]:
        """Elements a token takes in each layer's cache."""
        return [layer.mixer.kv_width for layer in self.layers]

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        beside = sum(weight.shape.numel() for weight in self.beside_layers)
        return beside + sum(layer.products_per_row for layer in self.layers)

    @property
    def product_names(self) -> list[str]:
        """As DecoderLayer.product_names, of all layers."""
        return [f"{LAYER.format(at)}{name}" for at, layer in enumerate(self.layers) for name in layer.product_names]

    @property
    def sample_layers(self) -> list[DecoderLayer]:
        """One of each kind: that attends or has a state, with a mixture of experts or with an MLP."""
        kinds: dict[tuple[Any, ...], DecoderLayer] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, layer)
        return list(kinds.values())

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each: of all shapes that there are."""
        return [*(weight for layer in self.sample_layers for weight in layer.product_weights), *self.beside_layers]

    @property
    def beside_layers(self) -> list[Weight]:
        """Of products that are no layer's, the head's first."""
        return [self.lm_head, *([] if self.per_layer_inputs is None else [self.per_layer_inputs.projection.weight])]

    @property
    def attentions(self) -> list[Attention]:
        """As PagedLayers.attentions."""
        return one_of_each_shape(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    def empty_states(
        self, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device
    ) -> list[LayerStates | None]:
        """Of each layer that has some; num_uncertain: the most tokens of a launch that may be taken back."""
        return [
            layer.mixer.empty_states(num_slots, num_uncertain, dtype, device)
            if isinstance(layer.mixer, RecurrentMixer)
            else None
            for layer in self.layers
        ]

    def __call__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        tap_layers: tuple[int, ...] = (),
        added: torch.Tensor | None = None,  # [num_rows, hidden], to the embeddings
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the rows of one launch, writing their KV.

        Returns:
            normed hidden states [num_rows, hidden], and for each i of tap_layers the residual stream after i
            layers [num_rows, hidden] (0 = embeddings, num_layers = input of the final norm). Of a launch with late rows
            these alone, but for taps in front of layer late_from.
        """
        residual = self.embed(batch.token_ids)
        if self.input_scale is not None:
            residual = scale_rows(residual, self.input_scale)
        if self.input_norm is not None:
            residual = self.input_norm(residual)
        if added is not None:
            residual = add(residual, added)
        inputs: torch.Tensor | None = None
        if self.per_layer_inputs is not None:
            inputs = self.per_layer_inputs(batch.token_ids, residual, batch.linear_tile)
        ropes = self._turns(batch)
        hidden: Rows | None = None
        below: DecoderLayer | None = None
        taps: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed, residual = layer.before_attention(hidden, residual, below)
            if index in tap_layers:
                taps[index] = residual
            if batch.late is not None and index == self.late_from:
                rows = batch.late.rows
                if batch.late.batch is None:
                    return residual[:0], [self._tapped(taps.get(tap, residual[:0])) for tap in tap_layers]
                batch = batch.late.batch
                ropes, normed, residual = self._turns(batch), take_rows(normed, rows), take_rows(residual, rows)
                inputs = None if inputs is None else take_rows(inputs.flatten(1), rows).view(-1, *inputs.shape[1:])
            rope = ropes[layer.mixer.turns] if isinstance(layer.mixer, Attention) else None
            own = None if inputs is None else inputs[:, index]
            hidden, residual = layer.after_input_norm(normed, residual, rope, batch, cache, own)
            below = layer
        assert hidden is not None and below is not None
        normed, residual = below.add_output(hidden, residual, self.norm)
        taps[self.num_layers] = residual
        return normed, [self._tapped(taps[index]) for index in tap_layers]

    def of_first_layers(self, num_layers: int) -> Decoder:
        """A decoder of the first layers, with the norm and the head of this one behind them; it shares all weights.

        Weights that are converted from now on are so in one of the two alone.
        """
        own = copy(self)
        own.num_layers, own.layers = num_layers, self.layers[:num_layers]
        own.kv_scales = self.kv_scales[:num_layers]
        own.late_from = min(self.late_from, num_layers)
        turned = {layer.mixer.turns for layer in own.layers if isinstance(layer.mixer, Attention)}
        own._ropes = {key: rope for key, rope in self._ropes.items() if key in turned}
        return own

    def _turns(self, batch: ForwardBatch) -> dict[tuple[RopeKey | None, int], RopeRows]:
        """The rotations of a launch's rows, of each kind."""
        return {key: rope(batch.positions, self.embed_tokens) for key, rope in self._ropes.items()}

    def _tapped(self, residual: torch.Tensor) -> torch.Tensor:
        """The model's residual stream, of the one here."""
        return residual if self.stream_scale is None else scale_rows(residual, self.stream_scale)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64 -> [num_rows, hidden]."""
        rows = take_rows(self.embed_tokens, token_ids)
        return rows if self.embedding_scale is None else scale_rows(rows, self.embedding_scale)

    def logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden] (num_rows a multiple of tile) -> [num_rows, vocab] float32."""
        return self._project(hidden, tile, self.logits_softcap, self.logits_scale)

    def raw_logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """`logits` without a soft cap and scale, for a head that has some of its own or none."""
        return self._project(hidden, tile, None, None)

    def _project(
        self, hidden: torch.Tensor, tile: int | None, softcap: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        own = head_logits(hidden, self.lm_head, tile, softcap, scale=scale)
        return self.shard.beside(own) if self._splits_head else own

    def whole_head(self) -> torch.Tensor:
        """The projection to the vocabulary [vocab, hidden], dense; to be asked for in all ranks."""
        own = unpack(self.lm_head)
        return self.shard.stack(own) if self._splits_head else own

    def convert(self, change: Change) -> None:
        """Of the weights of all products, which are filled. A head tied to the embedding becomes a copy of it."""
        for layer in self.layers:
            layer.convert(change)
        if self.per_layer_inputs is not None:
            self.per_layer_inputs.convert(change)
        self.lm_head = change(self.lm_head)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint names and weights, each weight once, of quantized ones numbers and what belongs to them."""
        for name, target in self.weight_targets().items():
            yield name, target.view
            if target.quantized is not None:
                beside = [part for part in target.quantized.tensors.items() if part[0] != "numbers"]
                yield from ((f"{name}_{part}", tensor) for part, tensor in beside)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for _, parameter in self.named_parameters())

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {
            "model.embed_tokens.weight": WeightTarget(view=self.embed_tokens),
            "model.norm.weight": self.norm.target,
        }
        if self.lm_head is not self.tied_rows:
            targets[f"{HEAD}.weight"] = weight_target(self.lm_head, slice(None), 0 if self._splits_head else None)
        if self.per_layer_inputs is not None:
            targets |= self.per_layer_inputs.weight_targets("model.")
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(LAYER.format(index))
        return targets


HEAD = "lm_head"
LAYER = "model.layers.{}."  # before the names of a layer's tensors


def constant(number: float | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """[] float32, the number of dtype that is next to it; on the CPU whatever the weights are on."""
    return None if number is None else torch.tensor(number, dtype=dtype, device="cpu").float()
