"""Which requests run in a step, with how many tokens each, and what becomes of the result.

Continuous batching with chunked prefill under a token budget (Yu et al., Orca; Agrawal et al., arXiv 2308.16369),
preemption by recompute, and prompts that begin alike computed once (prefix caching, as in vLLM and SGLang). Steps that
decode take turns with steps that compute prompts: both have launches of their own in any case, so that one step of both
would save nothing, and those that decode alone run whole. What a step decided is written into requests by `commit`
alone. Knows no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.engine.block_manager import BlockManager
from runner.engine.draft_budget import DraftBudget
from runner.engine.prefix_cache import PrefixCache
from runner.engine.refusal import refusal
from runner.engine.request import Request, RequestStatus, StepOutcome
from runner.engine.schedule import CommittedTokens, Schedule, ScheduledRequest
from runner.engine.stopping import StopRules


class Scheduler:
    def __init__(
        self,
        *,
        block_manager: BlockManager,
        stop_rules: StopRules,
        vocab_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        draft_budget: DraftBudget,
        fills_blocks: Callable[[Request], bool] | None = None,
    ) -> None:
        """fills_blocks: the proposer's; None: no prefix caching."""
        self.blocks, self.stop_rules, self.vocab_size = block_manager, stop_rules, vocab_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.draft_budget = draft_budget
        self.prefixes = PrefixCache(block_manager, fills_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._had_prompts = False  # the last step
        self._free_slots = deque(range(1, max_num_seqs + 1))  # first in, first out, as blocks

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, or None when it can."""
        return refusal(request, stop_rules=self.stop_rules, vocab_size=self.vocab_size, blocks=self.blocks)

    def add(self, request: Request) -> None:
        self.prefixes.open(request)
        self.waiting.append(request)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts of a request in the next step, as far as the load allows, and anybody wants some."""
        if self.running and not any(request.sampling_params.speculates for request in self.running):
            return 0
        return self.draft_budget.max_draft_tokens(len(self.running), len(self.waiting))

    def schedule(self) -> Schedule:
        """Go on with prompts that are not done, and admit in order of arrival; every other step decode what runs.

        Whoever decodes has its blocks before prompts take any, whichever turn it is.
        """
        for request in self.running:  # the drafter has followed by now
            self.prefixes.make_known(request)
        budgets = dict.fromkeys((True, False), self.max_num_batched_tokens)  # of those that decode, and of prompts
        max_draft_tokens = self.max_draft_tokens
        preempted: list[Request] = []
        decoding: list[ScheduledRequest] = []
        prompts: list[ScheduledRequest] = []
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted below, by an earlier request's need
            budget = budgets[request.is_decoding]
            item = self._fit(request, request.num_computed_tokens, budget, max_draft_tokens)
            if item is None:
                continue  # no budget left; it keeps its blocks and its turn
            while not self._reserve(item):
                if item.max_draft_tokens:  # going without drafts for a step is cheaper than a neighbour's recompute
                    item = replace(item, max_draft_tokens=0)
                    continue
                victim = self.running[-1]  # the latest; it never has a part of this step yet
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                (decoding if item.is_decoding else prompts).append(item)
                budgets[item.is_decoding] -= item.num_reserved_tokens
        if decoding and self._had_prompts:
            prompts = []  # they keep what is reserved, and are scheduled anew, as those that decode otherwise
        elif self.waiting and not preempted:
            prompts += self._admit(budgets[False], max_draft_tokens)
        self._had_prompts = bool(prompts)
        return Schedule(scheduled=prompts or decoding, max_draft_tokens=max_draft_tokens, preempted=preempted)

    def commit(self, schedule: Schedule, outcome: StepOutcome) -> list[CommittedTokens]:
        """Write what the step decided into its requests."""
        committed = []
        row = 0
        for item in schedule.scheduled:
            request = item.request
            if request.is_finished:  # it ended while this step was under way
                row += item.yields_token
                continue
            request.num_computed_tokens += item.num_new_tokens
            prompt_logprobs, logprobs = outcome.logprobs.get(request.request_id, ((), ()))
            request.prompt_logprobs.extend(prompt_logprobs)
            if not item.yields_token:
                continue
            accepted = outcome.num_accepted_tokens[row]
            num_draft_tokens, draft_depth = outcome.num_draft_tokens[row], outcome.draft_depths[row]
            draft_source = outcome.draft_sources[row]
            new_token_ids = outcome.token_ids[row][: accepted + 1]
            row += 1
            stop = self.stop_rules.apply(request, new_token_ids)
            kept = new_token_ids[: stop.num_tokens]
            accepted = min(accepted, len(kept))
            request.output_token_ids.extend(kept)
            request.logprobs.extend(logprobs[: len(kept)])
            # Accepted drafts are in the cache already; rejected ones lie beyond this count and are overwritten.
            request.num_computed_tokens += min(accepted, len(kept) - 1)
            committed.append(
                CommittedTokens(
                    request=request,
                    token_ids=kept,
                    num_draft_tokens=num_draft_tokens,
                    draft_depth=draft_depth,
                    num_accepted_tokens=accepted,
                    draft_source=draft_source,
                )
            )
            if stop.finish_reason is not None:
                request.finish_reason, request.stop_reason = stop.finish_reason, stop.stop_reason
                self._finish(request, RequestStatus.FINISHED)
        return committed

    def draft_room(self, request: Request) -> int:
        """The most drafts of a step that could be committed, with the token behind them, and that it asked for."""
        params = request.sampling_params
        of_request = params.max_tokens - len(request.output_token_ids)
        room = min(of_request, self.stop_rules.max_model_len - request.num_tokens) - 1
        return max(0, room if params.max_draft_tokens is None else min(room, params.max_draft_tokens))

    @property
    def num_decoding(self) -> int:
        """Requests that run and wait for nothing but their next token."""
        return sum(request.is_decoding for request in self.running)

    @property
    def may_admit(self) -> bool:
        """Whether a request that waits has a place and room; the token budget may be against it all the same."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        return self._has_room(self.waiting[0], self.prefixes.find(self.waiting[0]))

    def reserve_ahead(self, num_tokens: int) -> bool:
        """Blocks for this many tokens behind those committed of every request that decodes.

        For steps that draft for all of them alike, and may be launched before the result of the last one is known.
        False: there are too few; what could be had is kept.
        """
        longest = self.stop_rules.max_model_len
        return all(
            self.blocks.grow(request.block_table, min(request.num_tokens + num_tokens, longest))
            for request in self.running
            if request.is_decoding
        )

    def abort(self, request: Request, finish_reason: str = "error") -> None:
        """Take a request out, with its blocks, whatever state it is in."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = finish_reason
        self._finish(request, RequestStatus.FAILED)

    def _admit(self, budget: int, max_draft_tokens: int) -> list[ScheduledRequest]:
        """Take in those that wait as long as there are places, budget and room; no prompt is found as a whole.

        Those whose prompts go on as one does that is being computed are passed over: they will find it in the cache.
        They keep their places and their room.
        """
        admitted, passed_over, num_promised_blocks = list[ScheduledRequest](), list[Request](), 0
        under_way = {key for request in self.running for key in self.prefixes.keys_to_come(request)}
        while self.waiting and len(self.running) + len(passed_over) < self.max_num_seqs:
            request = self.waiting[0]
            found = self.prefixes.find(request)
            if request.reads_prefix and not under_way.isdisjoint(request.prefix_keys[len(found) : len(found) + 1]):
                passed_over.append(self.waiting.popleft())
                num_promised_blocks += self._num_missing_blocks(request, found)
                continue
            item = self._fit(request, len(found) * self.blocks.block_size, budget, max_draft_tokens)
            if item is None or not self._has_room(request, found, num_promised_blocks):
                break
            self.prefixes.share(request, found)
            reserved = self._reserve(item)
            assert reserved, "a request with room for all its tokens has room for some"
            self.waiting.popleft()
            request.num_computed_tokens = item.start
            request.status = RequestStatus.RUNNING
            request.state_slot = self._free_slots.popleft()
            self.running.append(request)
            under_way.update(self.prefixes.keys_to_come(request))
            admitted.append(item)
            budget -= item.num_reserved_tokens
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _fit(self, request: Request, start: int, budget: int, max_draft_tokens: int) -> ScheduledRequest | None:
        """The largest part of a request, from token `start` on, that the token budget allows; None: that is nothing."""
        pending = request.num_tokens - start
        if budget <= 0 or (pending > budget and not self.enable_chunked_prefill):
            return None
        num_new_tokens = min(pending, budget)
        # Drafts beyond the last token that can be committed would be verified in vain.
        max_draft_tokens = min(max_draft_tokens, self.draft_room(request), budget - 1) if request.is_decoding else 0
        return ScheduledRequest(
            request=request,
            start=start,
            num_new_tokens=num_new_tokens,
            max_draft_tokens=max_draft_tokens,
            yields_token=num_new_tokens == pending,
            is_decoding=request.is_decoding,
        )

    def _has_room(self, request: Request, found: Sequence[int], num_promised_blocks: int = 0) -> bool:
        """Free blocks for all its tokens and the next one, but for those that it shares.

        Admitting for a first chunk alone would let a long prompt start, run out, be preempted and start again. Those
        that run have theirs: while one has yet to take blocks for its prompt, it takes the budget too.
        """
        num_free_blocks = self.blocks.num_free_blocks - self.blocks.num_unowned(found)
        return self._num_missing_blocks(request, found) + num_promised_blocks <= num_free_blocks

    def _num_missing_blocks(self, request: Request, found: Sequence[int]) -> int:
        return self.blocks.num_blocks_for(request.num_tokens + 1) - len(found)

    def _reserve(self, item: ScheduledRequest) -> bool:
        """Blocks for full acceptance, so that the step never stops for memory half way."""
        return self.blocks.grow(item.request.block_table, item.start + item.num_reserved_tokens)

    def _preempt(self, request: Request) -> None:
        """Give up a request's cache; it starts again, prompt and output, when blocks are free, behind what is found."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        if request in self.running:
            self.running.remove(request)
        self.prefixes.make_known(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give back what it holds on the device."""
        self.blocks.release(request.block_table)
        if request.state_slot:
            self._free_slots.append(request.state_slot)
            request.state_slot = 0
        request.tensors = None
