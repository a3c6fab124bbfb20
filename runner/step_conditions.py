"""What a step and its requests must be like to run whole (runner/whole_steps.py), and which of it is missing."""

from __future__ import annotations

from dataclasses import dataclass

from proposers.captured.drafter import CapturedDrafter
from runner.engine.request import Request
from runner.engine.sampling_flags import TOP_LOGPROBS
from runner.engine.scheduler import Schedule, ScheduledRequest, Scheduler
from runner.metrics import InParts

# Every place of a batch has room for as many.
MAX_BAD_WORDS, LONGEST_BEGINNING = 512, 16  # tokens before the last one


@dataclass(frozen=True, kw_only=True)
class StepConditions:
    drafter: CapturedDrafter
    greedy_only: bool  # the rule judges trees, in whole steps only those of greedy requests
    max_model_len: int  # tokens of a request that the target can see
    max_drafted_len: int  # tokens of a request that target and drafter can see

    def unmet(self, schedule: Schedule, scheduler: Scheduler) -> InParts | None:
        """Why a step must run in parts; None: every request decodes, and all have the same places for drafts."""
        scheduled = schedule.scheduled
        if not scheduled or not scheduled[-1].is_decoding:  # those that decode come first
            return InParts.PROMPT
        if len(scheduled) < len(scheduler.running):
            return InParts.TOKEN_BUDGET
        if self.drafter.max_requests is not None and len(scheduled) > self.drafter.max_requests:
            return InParts.HOST_DRAFTS
        for item in scheduled:
            reason = self._unmet_by(item.request) or self._unmet_room(item, schedule, scheduler)
            if reason is not None:
                return reason
            if not self.drafter.can_start(item.request):
                return InParts.CATCH_UP
        return None if scheduler.reserve_ahead(self.drafter.num_tokens) else InParts.KV_CACHE

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
        if params.max_draft_tokens == 0 and self.drafter.num_tokens > 0 and not self.drafter.drafts_on_host:
            return InParts.NO_DRAFTS
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
