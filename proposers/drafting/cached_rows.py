"""The target's hidden states of the tokens that a step put into its cache for good, for drafters that store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from runner.engine.hidden_states import HiddenStates
from runner.engine.request import Request
from runner.engine.schedule import Schedule
from runner.engine.segment import Family, Segment


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Of one family, as the target keeps prompt tokens and generated ones apart."""

    family: Family
    segments: list[Segment] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)  # of each segment

    @property
    def states(self) -> torch.Tensor:
        """[num_rows, num_taps * hidden], of the segments' tokens one after another."""
        return torch.cat(self.pieces)


def cached_rows(
    schedule: Schedule, states: HiddenStates, may_draft: Callable[[Request], bool], max_model_len: int
) -> Iterator[CachedRows]:
    """Of requests that go on and may get drafts, up to max_model_len tokens of each; of each family that has some.

    The step is committed, so what lies behind a request's computed tokens was rejected.
    """
    prefill, decode = CachedRows(family="prefill"), CachedRows(family="decode")
    for index, item in enumerate(schedule.scheduled):
        request = item.request
        if request.is_finished or not may_draft(request):
            continue
        end = max(item.start, min(request.num_computed_tokens, max_model_len))
        boundary = min(max(request.num_prompt_tokens, item.start), end)
        own = states.of(index, end - item.start)
        for rows, start, stop in ((prefill, item.start, boundary), (decode, boundary, end)):
            if start < stop:
                rows.segments.append(Segment(start=start, num_tokens=stop - start, block_table=request.block_table))
                rows.pieces.append(own[start - item.start : stop - item.start])
    yield from (rows for rows in (prefill, decode) if rows.segments)
