"""A block of tokens in one pass over the target's hidden states (DFlash, Chen et al., arXiv 2602.06036).

The target's states of committed tokens enter the head's cache in `update`; a draft is then one pass over the block
behind them. Each row of the block is the distribution at one depth, whatever the tokens before it, so the rows make
trees too (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.reference.likeliest_tree import Tree
from proposers.base import ProposerContext
from proposers.captured.dflash import CapturedDFlash
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.in_one_pass import OnePassProposer
from proposers.drafting.ranked_trees import RankedTrees
from proposers.heads.dflash import load_dflash_head
from proposers.heads.quantized import quantize_head_of_target
from proposers.trees.static import Choices
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.checkpoint import ModelSource
from runner.engine.head_runner import HeadRunner
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.scheduler import Schedule
from runner.engine.segment import Family, Segment
from runner.engine.upload import to_device

logger = logging.getLogger(__name__)


class DFlashProposer(OnePassProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,  # longest text that the head sees; None: the target's
        speculative_token_tree: str | Choices | None = None,
        aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.head = load_dflash_head(source, context, max_model_len, aux_hidden_state_layer_ids)
        most = self.head.config.max_draft_tokens
        if num_speculative_tokens > most and speculative_token_tree is None:
            logger.warning(
                "%d tokens are asked of %s, whose block holds %d drafts: so many are drafted at most",
                num_speculative_tokens,
                source.model,
                most,
            )
            num_speculative_tokens = most
        super().__init__(
            num_speculative_tokens=num_speculative_tokens, context=context, draft_sample_method=draft_sample_method
        )
        quantize_head_of_target(self.head, source, context.device)
        self.runner = HeadRunner(
            self.head,
            block_size=context.block_size,
            device=context.device,
            dtype=context.dtype,
            batch_invariant=context.batch_invariant,
            captures_graphs=context.captures_graphs,
        )
        self.trees: RankedTrees | None = None
        if speculative_token_tree is not None:
            self.trees = RankedTrees(self, speculative_token_tree, max_depth=most)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.head.config.tap_layers if self.num_speculative_tokens > 0 else ()

    @property
    def cache_bytes_per_block(self) -> int:
        return self.runner.cache_bytes_per_block

    def allocate_cache(self, num_blocks: int) -> None:
        self.runner.allocate_cache(num_blocks)

    def fills_blocks(self, request: Request) -> bool:
        return self.follows(request)

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        return max(0, min(limit, self.head.config.max_draft_tokens, self.head.max_model_len - request.num_tokens))

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if self.num_speculative_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        depths = None if self.trees is None else self.trees.depths(num_tokens)

        def chains(depth: int) -> CapturedChains:
            return CapturedDFlash(head=self.head, runner=self.runner, depths=depths, **self.captured_arguments(depth))

        return chains(num_tokens) if self.trees is None else self.trees.captured(num_tokens, chains)

    def propose(self, schedule: Schedule) -> DraftTokens:
        return super().propose(schedule) if self.trees is None else self.trees.propose(schedule)

    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request its dynamic tree, the likeliest nodes first."""
        assert self.trees is not None, "the tree is a dynamic one"
        return self.trees.nodes(schedule)

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        """Write the context of every token that entered the target's cache for good."""
        states = output.hidden_states
        assert states is not None or not self.tap_layers, "the verifier was asked for hidden states"
        if states is None:
            return
        segments: dict[Family, list[Segment]] = {"prefill": [], "decode": []}
        rows: dict[Family, list[torch.Tensor]] = {"prefill": [], "decode": []}
        for index, item in enumerate(schedule.scheduled):
            request = item.request
            if request.is_finished or not self.may_draft(request):
                continue
            end = max(item.start, min(request.num_computed_tokens, self.head.max_model_len))
            boundary = min(max(request.num_prompt_tokens, item.start), end)
            own = states.of(index, end - item.start)
            parts: tuple[tuple[Family, int, int], ...] = (("prefill", item.start, boundary), ("decode", boundary, end))
            for family, start, stop in parts:  # as the target does, prompt tokens apart from generated ones
                if start < stop:
                    segment = Segment(start=start, num_tokens=stop - start, block_table=request.block_table)
                    segments[family].append(segment)
                    rows[family].append(own[start - item.start : stop - item.start])
        for family, launched in segments.items():
            if launched:
                self._write_context(family, launched, torch.cat(rows[family]))

    def all_logits(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        config = self.head.config
        num_silent = 0 if config.samples_from_anchor else 1  # rows of a block that guess nothing
        segments, token_ids, drafting_rows = list[Segment](), list[int](), list[int]()
        for request, count in zip(requests, counts, strict=True):
            start, num_rows = request.num_tokens - 1, count + num_silent
            segments.append(Segment(start=start, num_tokens=num_rows, block_table=request.block_table))
            drafting_rows += range(len(token_ids) + num_silent, len(token_ids) + num_rows)
            token_ids += [*request.tokens_between(start, start + 1), *[config.mask_token_id] * (num_rows - 1)]
        ids = to_device(token_ids, torch.int64, self.context.device)
        output = self.runner.run("decode", segments, ids, self.head.embed(ids), is_causal=False)
        output = output.index_select(0, to_device(drafting_rows, torch.int64, self.context.device))
        rows, tile = self.runner.in_tiles(output)
        return over_target_vocabulary(self.head.logits(rows, tile)[: len(output)], self.head.known_tokens)

    def _write_context(self, family: Family, segments: list[Segment], states: torch.Tensor) -> None:
        """states: [num_rows, num_taps * hidden], of the segments' tokens one after another."""
        assert self.runner.cache is not None, "allocate_cache comes first"
        batch = self.runner.launch(family, segments, len(states))
        padding = len(batch.token_ids) - len(states)
        self.head.write_context(batch, F.pad(states, (0, 0, 0, padding)), self.runner.cache)
