"""What happened to each request of a run, step by step, until it becomes a RequestRecord."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.engine.request import Request
from runner.engine.schedule import CommittedTokens
from runner.engine.stopping import Decode
from runner.metrics import RequestRecord


@dataclass(kw_only=True)
class _Trace:
    token_times: list[float] = field(default_factory=list)
    tokens_per_step: list[int] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    num_accepted_tokens: list[int] = field(default_factory=list)
    draft_sources: list[str | None] = field(default_factory=list)


class RequestTraces:
    """Collects a run's steps by request."""

    def __init__(self, decode: Decode, categories: Mapping[str, str]) -> None:
        self.errors: dict[str, str] = {}  # request_id -> why it failed
        self._decode, self._categories = decode, categories
        self._open: dict[str, _Trace] = {}

    def observe(self, gain: CommittedTokens, arrived_at: float) -> None:
        trace = self._open.setdefault(gain.request.request_id, _Trace())
        trace.token_times.append(arrived_at)
        trace.tokens_per_step.append(len(gain.token_ids))
        trace.num_draft_tokens.append(gain.num_draft_tokens)
        trace.draft_depths.append(gain.draft_depth)
        trace.num_accepted_tokens.append(gain.num_accepted_tokens)
        trace.draft_sources.append(gain.draft_source)

    def finish(self, request: Request) -> RequestRecord:
        """The record of a request that is over; its text ends with what stopped it or, unless it asks so, before."""
        token_ids, reason, params = request.output_token_ids, request.stop_reason, request.sampling_params
        ends_with_token = request.finish_reason == "stop" and not isinstance(reason, str)
        if ends_with_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        text = self._decode(token_ids, params.skip_special_tokens)
        if isinstance(reason, str):  # it was looked for behind min_tokens only
            first = len(self._decode(token_ids[: params.min_tokens], params.skip_special_tokens))
            place = text.find(reason, first)
            place = text.find(reason) if place < 0 else place
            if place >= 0:
                text = text[: place + len(reason) if params.include_stop_str_in_output else place]
        request.text = text
        return self._record(request)

    def fail(self, request: Request, reason: str) -> RequestRecord:
        self.errors[request.request_id] = reason
        return self._record(request)

    def _record(self, request: Request) -> RequestRecord:
        trace = self._open.pop(request.request_id, _Trace())
        return RequestRecord(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            text=request.text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            category=self._categories.get(request.request_id),
            seed=request.seed,
            arrival_time=request.arrival_time,
            token_times=tuple(trace.token_times),
            tokens_per_step=tuple(trace.tokens_per_step),
            num_draft_tokens=tuple(trace.num_draft_tokens),
            draft_depths=tuple(trace.draft_depths),
            num_accepted_tokens=tuple(trace.num_accepted_tokens),
            draft_sources=tuple(trace.draft_sources) if any(trace.draft_sources) else None,
            num_cached_tokens=request.num_cached_tokens,
        )
