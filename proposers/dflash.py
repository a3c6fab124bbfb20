"""A block of tokens in one pass over the target's hidden states (DFlash, Chen et al., arXiv 2602.06036).

Each row of the block is the distribution at one depth, whatever the tokens before it, so the rows make trees too
(DDTree, arXiv 2604.12989). Heads that go through them token by token (DFlash 2, Domino) draft as DSpark does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from proposers.base import Proposer, ProposerContext
from proposers.captured.dflash import CapturedDFlash
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.blocks import BlockProposer
from proposers.drafting.in_one_pass import OnePassProposer
from proposers.drafting.level_by_level import TREE_DEPTH, TREE_TOP_K
from proposers.drafting.ranked_trees import RankedTreeProposer, RankedTrees
from proposers.drafting.sequential_blocks import SequentialBlockProposer
from proposers.heads.dflash import DFlashHead
from proposers.heads.dflash_family import load_head_of_family
from proposers.heads.sequential import SequentialBlockHead
from proposers.trees.static import Choices
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.checkpoint import ModelSource
from runner.engine.request import Request

logger = logging.getLogger(__name__)


class DFlashProposer(RankedTreeProposer, BlockProposer, OnePassProposer):
    @classmethod
    def build(cls, **keys: Any) -> Proposer:
        """The head's config says what it is; tree_depth and tree_top_k are for one that is gone through by tokens."""
        source: ModelSource = keys["source"]
        asked = [keys.pop(key, None) for key in ("max_model_len", "aux_hidden_state_layer_ids")]
        head = load_head_of_family(source, keys["context"], *asked)
        if isinstance(head, SequentialBlockHead):
            return SequentialBlockProposer(head, **keys)
        growth = keys.pop("tree_depth", TREE_DEPTH), keys.pop("tree_top_k", TREE_TOP_K)
        if growth != (TREE_DEPTH, TREE_TOP_K) and keys.get("speculative_token_tree") == "dynamic":
            logger.warning(
                "method.tree_depth=%d and tree_top_k=%d bound no tree of %s, a plain DFlash head: it has the likeliest "
                "nodes of one pass",
                *growth,
                source.model,
            )
        return cls(head, **keys)

    def __init__(
        self,
        head: DFlashHead,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        speculative_token_tree: str | Choices | None = None,
    ) -> None:
        super().__init__(
            head,
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            source=source,
            is_tree=speculative_token_tree is not None,
            draft_sample_method=draft_sample_method,
        )
        if speculative_token_tree is not None:
            self.trees = RankedTrees(self, speculative_token_tree, max_depth=self.most_rows)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if self.num_speculative_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        depths = None if self.trees is None else self.trees.depths(num_tokens)

        def chains(depth: int) -> CapturedChains:
            return CapturedDFlash(head=self.head, runner=self.runner, depths=depths, **self.captured_arguments(depth))

        return chains(num_tokens) if self.trees is None else self.trees.captured(num_tokens, chains)

    def all_logits(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        guessing = self.guessing_rows(self.blocks(requests, counts), counts)
        rows, tile = self.runner.in_tiles(guessing)
        return over_target_vocabulary(self.head.logits(rows, tile)[: len(guessing)], self.head.known_tokens)
