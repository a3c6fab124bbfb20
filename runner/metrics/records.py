"""What the step loop hands over about steps and requests: counts and times, no tensors, frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.metrics.in_parts import InParts


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStep:
    """One request in one step that yielded tokens."""

    request_id: str
    num_draft_tokens: int  # drafted and verified
    num_accepted_tokens: int  # draft tokens committed, after eos and max_tokens
    num_output_tokens: int  # tokens committed: the accepted ones and at most one recovered or bonus token


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of the engine."""

    finished_at: float  # s, time.perf_counter
    seconds: Mapping[str, float]  # "propose", "verify", "whole_step", "schedule" -> s; the rest of the step is "other"
    total_seconds: float  # s, the whole step
    request_steps: tuple[RequestStep, ...]
    is_decoding: bool  # else it computes prompts
    max_draft_tokens: int  # that the load allowed each of those that decode
    in_parts: InParts | None  # why it did not run whole; None: it did


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request that is over, with one entry per step that yielded tokens in each per-step tuple."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"; the last two = failed
    category: str | None
    seed: int  # in [0, 2**64 - 1]; with the prompt and the sampling parameters it fixes the tokens
    arrival_time: float  # s, time.perf_counter
    token_times: tuple[float, ...]  # s, when the tokens of each step arrived
    tokens_per_step: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]  # the nodes of draft trees
    num_accepted_tokens: tuple[int, ...]
    # The most draft tokens that each step could accept, the depth of its draft tree; None = chains, all of them.
    draft_depths: tuple[int, ...] | None = None
    draft_sources: tuple[str | None, ...] | None = None  # whose drafts each step verified; None: one proposer drafts
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None: not looked for

    @property
    def drafts(self) -> list[tuple[int, int, int]]:
        """(drafted tokens, their depth, accepted ones) of every step that drafted."""
        return [draft for _, draft in self.sourced_drafts]

    @property
    def sourced_drafts(self) -> list[tuple[str | None, tuple[int, int, int]]]:
        """`drafts`, each with whose it is; None where one proposer drafts."""
        depths = self.num_draft_tokens if self.draft_depths is None else self.draft_depths
        sources = (None,) * len(depths) if self.draft_sources is None else self.draft_sources
        steps = zip(self.num_draft_tokens, depths, self.num_accepted_tokens, strict=True)
        return [(source, step) for source, step in zip(sources, steps, strict=True) if step[0] > 0]

    @property
    def failed(self) -> bool:
        return self.finish_reason in ("abort", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """What is kept of a step: sums over its requests, the points of the time series."""

    finished_at: float  # s, time.perf_counter
    total_seconds: float
    num_requests: int  # requests that yielded tokens
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    is_decoding: bool  # else it computes prompts
    is_whole: bool | None  # None: no request decodes, or steps are not captured here
