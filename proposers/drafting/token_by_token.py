"""Drafts a chain token by token: logits, a draw, the next logits; requests leave when they have all they may have.

What yields logits is the subclass's: a small model, or a head over the target's hidden states. Drafts stay on the
device; only a request that follows a grammar has them read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from proposers.base import Proposer, ProposerContext
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits
from runner.engine.schedule import Schedule
from runner.engine.upload import index_or_all, to_device

# (processed logits [num_active, vocab], their rows, step, which requests are active) -> tokens [num_active] int64
Draw = Callable[[torch.Tensor, SamplingRows, int, list[int]], torch.Tensor]


class TokenByTokenProposer(Proposer):
    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext, draft_sample_method: str) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.draft_sample_method = draft_sample_method
        self.max_model_len = context.max_model_len  # the longest text that gets drafts; some drafters see less

    @abstractmethod
    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        """Compute what the drafter has not seen of these requests; logits [len(requests), vocab] after the last."""

    @abstractmethod
    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute one drafted token a request; logits [len(requests), vocab] after it.

        Args:
            requests: those that go on.
            step: tokens drafted so far, so that token_ids lie at position request.num_tokens + step - 1.
            token_ids: [len(requests)] int64, the last of them.
            row_idx: rows of the previous call that these requests are, [len(requests)] int64; None: all, in order.
        """

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        """How many of `limit` tokens the drafter can draft for a request."""
        return self.room(request, limit)

    def room(self, request: Request, limit: int) -> int:
        """Of `limit` places behind a request's tokens, those that the drafter sees."""
        return max(0, min(limit, self.max_model_len - request.num_tokens))

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        decoding, device = schedule.decoding, self.context.device
        requests = [item.request for item in decoding]
        counts = [self.max_draft_tokens(item.request, item.max_draft_tokens) for item in decoding]
        cu_num_draft_tokens = [0, *accumulate(counts)]
        if not any(counts):
            return DraftTokens.empty(len(decoding), device)

        probs: list[torch.Tensor] = []  # of each step, [active, vocab]
        keeps_probs = self.keeps_probs(requests)

        def draw(processed: torch.Tensor, rows: SamplingRows, step: int, active: list[int]) -> torch.Tensor:
            drafted, step_probs = draft_tokens(
                processed,
                rows,
                self.draft_sample_method,
                need_probs=self.context.needs_draft_probs,
                draft_step=self.draft_step(rows, step),
            )
            if keeps_probs:  # every draft has its row, so that rows and drafts stay aligned; a greedy one's is not read
                probs.append(torch.zeros_like(processed) if step_probs is None else step_probs)
            return drafted

        ids = self.walk(requests, counts, draw)
        widest = max(counts)
        flat = [row * widest + step for row, count in enumerate(counts) for step in range(count)]
        return DraftTokens(
            token_ids=ids.flatten().index_select(0, to_device(flat, torch.int64, device)),
            cu_num_draft_tokens=cu_num_draft_tokens,
            probs=_by_request(probs, counts) if probs else None,
        )

    def walk(self, requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> torch.Tensor:
        """counts[b] steps ahead of requests[b], all of them at once; what was drawn, [num_requests, max(counts)] int64.

        Requests leave when they have their tokens; behind these stands -1. The rows of a step have seen what was drawn
        before it.
        """
        device, widest = self.context.device, max(counts)
        ids = torch.full((len(requests), widest), -1, dtype=torch.int64, device=device)
        active = [index for index, count in enumerate(counts) if count > 0]
        grammars = self.context.grammars.walk([request.request_id for request in requests])
        logits = self.first_logits([requests[index] for index in active])
        for step in range(widest):
            if step > 0:
                before = active
                active = [index for index in before if counts[index] > step]
                stays = [row for row, index in enumerate(before) if counts[index] > step]
                row_idx = index_or_all(stays, len(before), device)
                fed = ids[_rows(active, len(ids), device), step - 1]
                logits = self.next_logits([requests[index] for index in active], step, fed, row_idx)
            places = _rows(active, len(ids), device)
            rows = SamplingRows.build(
                [requests[index] for index in active],
                list(range(len(active))),
                [step] * len(active),
                ids[places] if step > 0 else None,
                vocab_size=self.context.vocab_size,
                eos_token_ids=self.context.eos_token_ids,
                device=device,
                bitmask=grammars.bitmask(active),
            )
            drafted = draw(process_logits(logits, rows), rows, step, active)
            if step + 1 < widest:
                grammars.advance(active, drafted)
            ids[places, step] = drafted
        return ids

    def keeps_probs(self, requests: Sequence[Request]) -> bool:
        """Whether the drafts of these requests come with draft_probs, the distributions they were drawn from."""
        # The distribution of a greedy draft is one-hot, and DraftTokens.probs = None says just that.
        return (
            self.context.needs_draft_probs
            and self.draft_sample_method != "greedy"
            and any(not request.sampling_params.is_greedy for request in requests)
        )

    def draft_step(self, rows: SamplingRows, step: int) -> int | torch.Tensor:
        """The key of a step's draws, where the rule asks for one: the committed tokens of each row's request."""
        return rows.positions - step if self.context.keys_by_draft_step else 0

    def captured_arguments(self, num_tokens: int) -> dict[str, Any]:
        """Of CapturedChains, but for what the drafter is."""
        return {
            "num_tokens": num_tokens,
            "draft_sample_method": self.draft_sample_method,
            "needs_draft_probs": self.context.needs_draft_probs,
            "keys_by_draft_step": self.context.keys_by_draft_step,
            "device": self.context.device,
        }

    def may_draft(self, request: Request) -> bool:
        """Whether a request may ever get drafts; the last token of one is the target's own."""
        params = request.sampling_params
        return self.num_speculative_tokens > 0 and params.speculates and params.max_tokens > 1

    def follows(self, request: Request) -> bool:
        """What a drafter that computes prompts into KV of its own says to `fills_blocks`: those of `may_draft`."""
        return self.num_speculative_tokens == 0 or (not request.is_finished and self.may_draft(request))


def _rows(active: list[int], num_rows: int, device: torch.device) -> slice | torch.Tensor:
    """An index of the active rows; all of them need none on the device."""
    return slice(None) if len(active) == num_rows else to_device(active, torch.int64, device)


def _by_request(probs: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Distributions drawn step by step, [active, vocab] each, as rows [num_draft_tokens, vocab] request by request."""
    order: list[list[int]] = [[] for _ in counts]
    row = 0
    for step in range(len(probs)):
        for index, count in enumerate(counts):
            if count > step:
                order[index].append(row)
                row += 1
    stacked = torch.cat(probs)
    return stacked.index_select(0, to_device([row for rows in order for row in rows], torch.int64, stacked.device))
