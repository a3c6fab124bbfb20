"""Gathers the logprobs that requests of a step ask for, from rows that verification has computed anyway.

Prompt rows come slab by slab while the target runs, output rows when the rule has decided. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.engine.logprobs import AskedRows, StepLogprobs
from runner.engine.schedule import Schedule, ScheduledRequest
from runner.engine.step_operations import top_logprobs
from runner.engine.upload import to_device


class LogprobGatherer:
    """One step's; `take_prompt_logits` fits ModelRunner.forward, `finish` comes last."""

    def __init__(
        self,
        schedule: Schedule,
        draft_counts: Sequence[int],
        draft_depths: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """draft_counts, draft_depths: drafts of each scheduled request, and how many of them can be accepted."""
        self._device = device
        self._asked: dict[str, AskedRows] = {}
        self._logits_rows: list[int] = []  # of all logits rows, those of requests that ask
        self._places: list[tuple[int, int]] = []  # (yielding request, new token) of each of them
        next_ids: list[int] = []  # what prompt rows predict
        num_yielding = first_row = 0
        for item, count, depth in zip(schedule.scheduled, draft_counts, draft_depths, strict=True):
            params = item.request.sampling_params
            start, end = _prompt_span(item)
            next_ids += item.request.prompt_token_ids[start + 1 : end + 1]
            num_output_rows = 0
            if item.yields_token:
                if params.logprobs is not None:
                    num_output_rows = depth + 1
                    self._logits_rows += range(first_row, first_row + depth + 1)
                    self._places += ((num_yielding, place) for place in range(depth + 1))
                num_yielding += 1
                first_row += count + 1
            if end > start or num_output_rows:
                self._asked[item.request.request_id] = AskedRows(
                    num_prompt_rows=end - start,
                    num_output_rows=num_output_rows,
                    num_prompt_top=_num_top(params.prompt_logprobs, vocab_size),
                    num_output_top=_num_top(params.logprobs, vocab_size),
                )
        self._num_top = max((max(a.num_prompt_top, a.num_output_top) for a in self._asked.values()), default=0)
        self._next_ids = to_device(next_ids, torch.int64, device)
        self._packed: list[torch.Tensor] = []
        self._num_taken = 0

    def take_prompt_logits(self, logits: torch.Tensor) -> None:
        """The next rows [num_rows, vocab] of prompt tokens whose successors are known."""
        next_ids = self._next_ids[self._num_taken : self._num_taken + len(logits)]
        self._packed.append(top_logprobs(logits.to(torch.float32), next_ids, self._num_top))
        self._num_taken += len(logits)

    def finish(
        self, logits: torch.Tensor, token_ids: torch.Tensor, row_order: torch.Tensor | None = None
    ) -> StepLogprobs | None:
        """All of the step's rows; None when no request asked for one of them.

        Args:
            logits: [num_rows, vocab] of all requests that yield, as they came from the target.
            token_ids: [num_yielding, deepest draft + 1] int64, what they yield.
            row_order: [num_rows] int64, the rows with each request's accepted path in front; None = as they are.
        """
        assert self._num_taken == len(self._next_ids), "every prompt row that was asked for has come"
        if self._logits_rows:
            index = to_device([self._logits_rows, *zip(*self._places, strict=True)], torch.int64, self._device)
            # Behind the first rejection stands -1; the values there are thrown away.
            yielded = token_ids[index[1], index[2]].clamp(min=0)
            rows = index[0] if row_order is None else row_order[index[0]]
            asked = logits.index_select(0, rows).to(torch.float32)
            self._packed.append(top_logprobs(asked, yielded, self._num_top))
        if not self._packed:
            return None
        return StepLogprobs(packed=torch.cat(self._packed), asked=self._asked)


def wants_logprobs(schedule: Schedule) -> bool:
    return any(
        item.request.sampling_params.logprobs is not None or item.request.sampling_params.prompt_logprobs is not None
        for item in schedule.scheduled
    )


def scored_from(item: ScheduledRequest) -> int | None:
    """The first prompt position in the step whose row is asked for; None when there is none."""
    start, end = _prompt_span(item)
    return start if start < end else None


def _prompt_span(item: ScheduledRequest) -> tuple[int, int]:
    """Prompt positions start..end-1 of the step, whose rows tell logprobs of start+1..end that are not known yet.

    A request that was preempted computes its prompt again, and keeps what it was told.
    """
    request = item.request
    if request.sampling_params.prompt_logprobs is None:
        return 0, 0
    start = max(item.start, len(request.prompt_logprobs))
    return start, max(start, min(item.start + item.num_new_tokens, request.num_prompt_tokens - 1))


def _num_top(asked: int | None, vocab_size: int) -> int:
    if asked is None:
        return 0
    return vocab_size if asked == -1 else min(asked, vocab_size)
