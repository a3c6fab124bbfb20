"""DFlash's head: one pass over a block of mask tokens, all of which see each other (Chen et al., arXiv 2602.06036).

The block is the pending token and mask tokens behind it, in the target's embeddings. In every layer its keys and values
stand behind those of the context, which no layer below computes: they are projected from hidden_norm(fc(states of the
target)), the same for all layers, without the layer's input norm. The head keeps KV of the context only; that of a
block is scratch. Layouts: z-lab's, and speculators', whose heads may bring a draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from kernels.cpu.panels import Weight, pack, unpacked
from proposers.base import ProposerContext
from proposers.heads.dflash_config import DFlashConfig, read_dflash_config
from proposers.heads.draft_vocabulary import target_ids
from proposers.heads.head_sizes import longest_text
from proposers.vocabularies.partial import KnownTokens
from runner.engine.checkpoint import ModelSource, resolve_directory
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import Attention, DecoderLayer, RMSNorm
from runner.engine.linear import ColumnParallelLinear, Shard, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.operations import head_logits

EMBEDDING, LM_HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MASK_EMBEDDING = "mask_embedding.pt"


class DFlashHead:
    def __init__(
        self,
        config: DFlashConfig,
        target: LoadedModel,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        own: Collection[str],  # which of EMBEDDING, LM_HEAD and DRAFT_TO_TARGET the head brings
    ) -> None:
        arch, shard, target_size = config.arch, Shard(), target.model.hidden_size
        self.config, self.max_model_len = config, max_model_len
        self.target, self.vocab_size = target.model, target.model.vocab_size
        width, draft_vocab = arch.hidden_size, config.draft_vocab_size
        self.embed_tokens = torch.empty(arch.vocab_size, width, dtype=dtype) if EMBEDDING in own else None
        self.lm_head: Weight | None = torch.empty(draft_vocab, width, dtype=dtype) if LM_HEAD in own else None
        self.draft_to_target = torch.empty(draft_vocab, dtype=torch.int64) if DRAFT_TO_TARGET in own else None
        self.known_tokens: KnownTokens | None = None  # of the draft vocabulary; None: all of the target's
        tapped = len(config.tap_layers) * target_size
        self.fc = ColumnParallelLinear(tapped, {"fc": width}, bias=False, shard=shard, dtype=dtype)
        self.hidden_norm = RMSNorm(width, arch.rms_norm_eps, dtype)
        self.layers = [DecoderLayer(arch, index, shard, dtype) for index in range(arch.num_layers)]
        for layer, is_causal in zip(self.layers, config.causal_layers, strict=True):
            layer.attention.is_causal = is_causal
        self.norm = RMSNorm(width, arch.rms_norm_eps, dtype)
        self._rope = self.layers[0].attention.rope(config.hf_config, max_model_len)

    @property
    def kv_widths(self) -> list[int]:
        return [layer.attention.kv_width for layer in self.layers]

    @property
    def attention(self) -> Attention:
        return self.layers[0].attention

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64 -> [num_rows, hidden]."""
        if self.embed_tokens is None:
            return self.target.embed(token_ids)
        return self.embed_tokens.index_select(0, token_ids)

    def write_context(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKVCache) -> None:
        """states: the target's, [num_rows, num_taps * hidden], of the tokens at the launch's positions."""
        context = self.hidden_norm(self.fc(states, batch.linear_tile))
        rope = self._rope(batch.positions, context)
        for layer in self.layers:
            layer.attention.write_context(context, rope, batch, cache)

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """hidden: embeddings of blocks [num_rows, hidden] -> [num_rows, hidden], normed, as `logits` takes them."""
        rope = self._rope(batch.positions, hidden)
        output, residual = None, hidden
        for layer in self.layers:
            output, residual = layer(output, residual, rope, batch, cache)
        assert output is not None
        return self.norm.add(output, residual)[0]

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden], num_rows a multiple of tile -> [num_rows, known tokens] float32."""
        return self.target.logits(output, tile) if self.lm_head is None else head_logits(output, self.lm_head, tile)

    def pack(self) -> None:
        self.fc.pack()
        for layer in self.layers:
            layer.pack()
        if self.lm_head is not None:
            self.lm_head = pack(self.lm_head)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {
            "hidden_norm.weight": WeightTarget(view=self.hidden_norm.weight),
            "norm.weight": WeightTarget(view=self.norm.weight),
        } | self.fc.weight_targets("")
        own = ((EMBEDDING, self.embed_tokens), (LM_HEAD, self.lm_head), (DRAFT_TO_TARGET, self.draft_to_target))
        targets |= {name: WeightTarget(view=unpacked(weight)) for name, weight in own if weight is not None}
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(f"layers.{index}.")
        return targets


def load_dflash_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DFlashHead:
    """Read a DFlash head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    target = context.target
    assert target is not None, "heads need the target"
    config = read_dflash_config(source, read_head_config(source), target, aux_hidden_state_layer_ids)
    if not source.is_dummy:
        _require_no_mask_embedding(source)
    tensors = read_head_tensors(source)
    knows = tensors.pop(TARGET_TO_DRAFT, None)
    is_cut = config.draft_vocab_size != target.model.vocab_size
    needed = {LM_HEAD, DRAFT_TO_TARGET} if is_cut else set[str]()
    with torch.device(context.device):
        head = DFlashHead(
            config,
            target,
            max_model_len=longest_text(source, config.hf_config, max_model_len, context.max_model_len),
            dtype=context.dtype,
            own=needed | ({EMBEDDING, LM_HEAD, DRAFT_TO_TARGET} & tensors.keys()),
        )
    fill_head(head.weight_targets(), tensors, source, "a DFlash head")
    if head.draft_to_target is not None:
        ids = target_ids(head.draft_to_target, knows, head.vocab_size, source)
        head.known_tokens = KnownTokens(ids, head.vocab_size)
    return head


def _require_no_mask_embedding(source: ModelSource) -> None:
    """Raises UserError for a head (MiMo's) whose mask token has an embedding beside the table; vLLM would read it."""
    if (resolve_directory(source, pickles=(MASK_EMBEDDING,)) / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{source.name}={source.model} must take its mask token's embedding from the table of embeddings, got a "
            f"{MASK_EMBEDDING} beside its weights, which is not read here; choose a head without one"
        )
