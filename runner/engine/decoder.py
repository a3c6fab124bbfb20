"""A dense pre-norm decoder over a paged KV cache: Llama, Mistral, Qwen2, Qwen3.

The same class serves targets and drafts. Weights are allocated empty; runner.engine.loader fills them through
weight_targets().
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels.cpu.panels import Weight, pack, unpacked
from runner.engine.architecture import Architecture
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import Attention, DecoderLayer, RMSNorm
from runner.engine.linear import Shard, WeightTarget
from runner.engine.operations import head_logits, take_rows


class Decoder:
    """Token ids to final hidden states, and hidden states to logits."""

    is_row_invariant = True

    def __init__(
        self, arch: Architecture, hf_config: Any, *, max_model_len: int, dtype: torch.dtype, shard: Shard | None = None
    ) -> None:
        shard = shard or Shard()
        self.vocab_size, self.num_layers, self.hidden_size = arch.vocab_size, arch.num_layers, arch.hidden_size
        self.max_model_len = max_model_len
        # Embedding and head are replicated: every rank samples the same token from the same logits.
        self.embed_tokens = torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype)
        self.layers = [DecoderLayer(arch, index, shard, dtype) for index in range(arch.num_layers)]
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype)
        self.lm_head: Weight = (
            self.embed_tokens
            if arch.tie_word_embeddings
            else torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype)
        )
        self._rope = self.layers[0].attention.rope(hf_config, max_model_len)

    @property
    def kv_widths(self) -> list[int]:
        """Elements a token takes in each layer's cache."""
        return [layer.attention.kv_width for layer in self.layers]

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        weights = [self.lm_head, *(weight for layer in self.layers for weight in layer.product_weights)]
        return sum(weight.shape.numel() for weight in weights)

    @property
    def attention(self) -> Attention:
        """Of one of the layers."""
        return self.layers[0].attention

    def __call__(
        self, batch: ForwardBatch, cache: PagedKVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the rows of one launch, writing their KV.

        Returns:
            normed hidden states [num_rows, hidden], and for each i of tap_layers the residual stream after i
            layers [num_rows, hidden] (0 = embeddings, num_layers = input of the final norm).
        """
        residual = self.embed(batch.token_ids)
        rope = self._rope(batch.positions, self.embed_tokens)
        hidden: torch.Tensor | None = None
        taps: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed, residual = layer.before_attention(hidden, residual)
            if index in tap_layers:
                taps[index] = residual
            hidden, residual = layer.after_input_norm(normed, residual, rope, batch, cache)
        assert hidden is not None
        normed, residual = self.norm.add(hidden, residual)
        taps[self.num_layers] = residual
        return normed, [taps[index] for index in tap_layers]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64 -> [num_rows, hidden]."""
        return take_rows(self.embed_tokens, token_ids)

    def logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden] (num_rows a multiple of tile) -> [num_rows, vocab] float32."""
        return head_logits(hidden, self.lm_head, tile)

    def pack(self) -> None:
        """Lay the weights of all products out as products on a CPU are fastest (kernels/cpu/panels.py).

        For good: they cannot be filled or listed any more. A head tied to the embedding becomes a copy of it.
        """
        for layer in self.layers:
            layer.pack()
        self.lm_head = pack(self.lm_head)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint names and weights, each weight once; views, to be written in place."""
        return ((name, target.view) for name, target in self.weight_targets().items())

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for _, parameter in self.named_parameters())

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {
            "model.embed_tokens.weight": WeightTarget(view=self.embed_tokens),
            "model.norm.weight": WeightTarget(view=self.norm.weight),
        }
        if self.lm_head is not self.embed_tokens:
            targets["lm_head.weight"] = WeightTarget(view=unpacked(self.lm_head))
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(f"model.layers.{index}.")
        return targets
