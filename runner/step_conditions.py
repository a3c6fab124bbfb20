"""What a step and its requests must be like to run whole (runner/whole_steps.py), and which of it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proposers.captured.drafter import CapturedDrafter
from proposers.captured.host_drafts import MAX_ROWS
from runner.engine.backend import runs_kernels
from runner.engine.request import Request
from runner.engine.sampling_flags import TOP_LOGPROBS
from runner.engine.schedule import Schedule, ScheduledRequest
from runner.engine.scheduler import Scheduler
from runner.metrics import InParts

# Every place of a batch has room for as many.
MAX_BAD_WORDS, LONGEST_BEGINNING = 512, 16  # tokens before the last one
# Multiplications in rows that hold no draft, for which a step in parts takes as long. Measured for a CPU, on two cores
# with 6 M to 600 M in a row; for a GPU an estimate: a millisecond of the host, a fifth of an H200's speed.
EMPTY_PRODUCTS_ON_CPU, EMPTY_PRODUCTS_ON_GPU = 200_000_000, 200_000_000_000


@dataclass(frozen=True, kw_only=True)
class EmptyRows:
    """How many of a whole step's rows may hold no draft, where requests want fewer than there are places."""

    num_free: int  # rows of a step: where it has no more, it takes as long with fewer
    most: int  # of a larger step

    @classmethod
    def on(cls, device: torch.device, products_per_row: int) -> EmptyRows:
        on_gpu = runs_kernels(device)
        worth = EMPTY_PRODUCTS_ON_GPU if on_gpu else EMPTY_PRODUCTS_ON_CPU
        return cls(num_free=MAX_ROWS if on_gpu else 0, most=worth // products_per_row)


@dataclass(frozen=True, kw_only=True)
class StepConditions:
    drafter: CapturedDrafter
    greedy_only: bool  # the rule judges trees, in whole steps only those of greedy requests
    max_model_len: int  # tokens of a request that the target can see
    max_drafted_len: int  # tokens of a request that target and drafter can see
    empty_rows: EmptyRows

    def unmet(self, schedule: Schedule, scheduler: Scheduler) -> InParts | None:
        """Why a step must run in parts; None: every request decodes, and all have the same places for drafts."""
        scheduled = schedule.scheduled
        if not schedule.decoding:
            return InParts.PROMPT
        if len(scheduled) < scheduler.num_decoding:
            return InParts.TOKEN_BUDGET
        if self.drafter.max_requests is not None and len(scheduled) > self.drafter.max_requests:
            return InParts.HOST_DRAFTS
        if self._has_few_drafts([item.request for item in scheduled]):
            return InParts.FEW_DRAFTS
        for item in scheduled:
            reason = self._unmet_by(item.request) or self._unmet_room(item, schedule, scheduler)
            if reason is not None:
                return reason
            if item.request.sampling_params.speculates and not self.drafter.can_start(item.request):
                return InParts.CATCH_UP
        return None if scheduler.reserve_ahead(self.drafter.num_tokens) else InParts.KV_CACHE

    def _has_few_drafts(self, requests: Sequence[Request]) -> bool:
        if self.drafter.drafts_on_host:  # places go by the longest draft
            return False
        most = self.drafter.num_places
        limits = [request.sampling_params.max_draft_tokens for request in requests]
        num_empty = sum(most - min(most, limit) for limit in limits if limit is not None)
        return len(requests) * (most + 1) > self.empty_rows.num_free and num_empty > self.empty_rows.most

    def _unmet_by(self, request: Request) -> InParts | None:
        params = request.sampling_params
        if params.structured_outputs is not None and not self._may_follow_a_grammar(request):
            return InParts.STRUCTURED_OUTPUTS
        if params.logprobs is not None and not 0 <= params.logprobs <= TOP_LOGPROBS[-1]:
            return InParts.LOGPROBS
        words = request.bad_words_token_ids
        if len(words) > MAX_BAD_WORDS or any(len(word) > LONGEST_BEGINNING + 1 for word in words):
            return InParts.BAD_WORDS
        if self.greedy_only and not params.is_greedy:
            return InParts.SAMPLED
        reached = request.num_tokens + self.drafter.reach
        if reached > self.max_drafted_len:
            return InParts.MAX_MODEL_LEN if reached > self.max_model_len else InParts.DRAFTER_LENGTH
        return None

    def _may_follow_a_grammar(self, request: Request) -> bool:
        """The host knows the drafts before the step, and there is no mask that might leave nothing of the grammar's."""
        params, knows = request.sampling_params, self.drafter.num_tokens == 0 or self.drafter.drafts_on_host
        may_end = len(request.output_token_ids) >= params.min_tokens
        has_masks = params.allowed_token_ids is not None or bool(params.bad_words) or not may_end
        return knows and not has_masks

    def _unmet_room(self, item: ScheduledRequest, schedule: Schedule, scheduler: Scheduler) -> InParts | None:
        """Whether the schedule left less room for drafts than the request has."""
        if item.max_draft_tokens >= min(self.drafter.num_tokens, scheduler.draft_room(item.request)):
            return None
        num_tokens = sum(each.num_reserved_tokens for each in schedule.scheduled)
        return InParts.TOKEN_BUDGET if num_tokens >= scheduler.max_num_batched_tokens else InParts.KV_CACHE
