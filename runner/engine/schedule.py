"""A step as the scheduler plans it, and what its requests gained: for whoever drafts, verifies or counts to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """One request's part of a step: committed tokens to compute, and room for drafts behind them.

    Facts of the moment of scheduling; they stay what they were when commit moves the request on.
    """

    request: Request
    start: int  # position of the first token that enters the cache in this step
    num_new_tokens: int  # committed tokens that enter the cache in this step
    max_draft_tokens: int  # drafts whose cache blocks are reserved; 0 unless decoding
    yields_token: bool  # its last committed token is in this step, so the target predicts the next one
    is_decoding: bool  # one pending token only, the one sampled last: the state in which drafts are proposed

    @property
    def num_reserved_tokens(self) -> int:
        return self.num_new_tokens + self.max_draft_tokens


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step: all of its requests decode, or none does."""

    scheduled: list[ScheduledRequest]
    max_draft_tokens: int = 0  # that the load allowed each of those that decode
    preempted: list[Request] = field(default_factory=list)

    @property
    def decoding(self) -> list[ScheduledRequest]:
        return [item for item in self.scheduled if item.is_decoding]


@dataclass(frozen=True, kw_only=True)
class CommittedTokens:
    """What one request gained in a step."""

    request: Request
    token_ids: list[int]
    num_draft_tokens: int
    draft_depth: int  # the most draft tokens that could be accepted: all of a chain, the deepest path of a tree
    num_accepted_tokens: int  # committed draft tokens, after eos and max_tokens
    draft_source: str | None = None  # the proposer that they begin with; None: no drafts, or there is one only
