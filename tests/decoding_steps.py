"""Steps that a proposer, a grammar or a verifier is shown without a scheduler that made them."""

from __future__ import annotations

from runner.engine.request import Request
from runner.engine.schedule import Schedule, ScheduledRequest


def scheduled(request: Request, max_draft_tokens: int = 4, *, is_decoding: bool = True) -> ScheduledRequest:
    """A request of which the last token alone is computed; one that does not decode yet ends its prompt with it."""
    return ScheduledRequest(
        request=request,
        start=request.num_tokens - 1,
        num_new_tokens=1,
        max_draft_tokens=max_draft_tokens,
        yields_token=True,
        is_decoding=is_decoding,
    )


def schedule_of(*requests: Request, max_draft_tokens: int = 4) -> Schedule:
    """A step in which all of them decode."""
    return Schedule(scheduled=[scheduled(request, max_draft_tokens) for request in requests])
