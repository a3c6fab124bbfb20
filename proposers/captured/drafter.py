"""How a proposer drafts in whole steps, which are captured (as CUDA graphs, on a CPU as programs): on the device alone.

`draft`, `learn` and `learn_logits` are captured. They read and write tensors that stay in place, upload nothing, read
nothing back, and give every request as many places for drafts; `find` and `place` come before each step, on the host.
`start` takes what the proposer knows of the requests to the device, and `stop` gives it back; between `stop` and the
next `start` the proposer drafts in its usual way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from runner.engine.device_batch import DeviceBatch
from runner.engine.request import DraftTokens, Request
from runner.engine.schedule import Schedule


class CapturedDrafts(NamedTuple):
    token_ids: Tensor  # [count, num_tokens] int64
    probs: Tensor | None = None  # [count * num_tokens, vocab] float32: q of each draft; None = one-hot
    # Of a tree [count, num_tokens] int64: an earlier draft, -1 = the last committed token; None = chains. The first n
    # drafts are those of a tree of n nodes, so that a request with room for n uses just these.
    parents: Tensor | None = None


class GoingOn(NamedTuple):
    row: int  # its place in `start`
    request: Request
    num_new_tokens: int  # that the last step brought


class CapturedDrafter(ABC):
    tap_layers: tuple[int, ...] = ()  # the target's hidden states that `learn` takes
    max_requests: int | None = None  # of a batch that it drafts for; None: any number
    reads_text = False  # `find` looks at the committed tokens: a step begins when the one before it has been read
    drafts_on_host = False  # `find` does all of the drafting
    source: str | None = None  # whose drafts those of requests are that `find` found none for, where several draft
    form: Hashable = None  # where steps with as many places can be unlike each other: which of them `place` has chosen
    draws = False  # the rule is to read the distributions that drafts were drawn from

    def __init__(
        self,
        num_tokens: int,
        max_model_len: int | None = None,
        num_scratch_rows: int = 0,
        *,
        tree_depth: int | None = None,
    ) -> None:
        """
        Args:
            num_tokens: drafts of every request.
            max_model_len: tokens of a request that the drafter can see.
            num_scratch_rows: rows that a launch may have behind those of the drafts; their results are not used.
            tree_depth: of the deepest draft, at most; None: drafts are chains.
        """
        self.num_tokens, self.max_model_len = num_tokens, max_model_len
        self.num_places = num_tokens  # of every request, in steps that draft for all
        self.drafts_trees = tree_depth is not None
        self.depth = num_tokens if tree_depth is None else tree_depth  # drafts of a step that can be accepted
        self.reach = num_tokens + num_scratch_rows  # positions behind the committed tokens that a launch may compute

    def can_start(self, request: Request) -> bool:
        """Whether `start` can begin from what is known of a request that drafts."""
        return True

    def start(self, requests: Sequence[Request]) -> None:  # noqa: B027 - optional
        """Begin with these requests, in the first places of the batches to come; the places behind them are absent.

        Those among them that never draft (`speculates`) are computed along: nothing need be known of them, and what is
        drafted for them is not used. Somebody does draft.
        """

    def find(self, schedule: Schedule) -> DraftTokens | None:
        """What the host drafts before each step, whose requests all decode; None: nothing."""
        return None

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        """Take what the host has found to the device; places for drafts that every request has, at most num_tokens.

        places: of the schedule's requests in the batch.
        """
        return self.num_tokens

    @abstractmethod
    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        """Draft behind the committed tokens; the drafts of absent requests are not used."""

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:  # noqa: B027
        """Take note of a verified step; the batch's lengths are still those from before it.

        hidden_states: of tap_layers, [count * (depth + 1), hidden] each, of every request's last committed token and
            its drafts; of a tree only the accepted drafts.
        token_ids: [count, depth + 1] int64: accepted, then recovered or bonus token, then -1.
        """

    def learn_logits(self, batch: DeviceBatch, draft_token_ids: Tensor, logits: Tensor) -> None:  # noqa: B027 - optional
        """Take note of what the target said of a verified step; captured, behind `learn`.

        draft_token_ids: [count, n] int64 of the drafts that were verified, -1 where there was none.
        logits: [count * (n + 1), vocab] float32 behind every request's last committed token and each of its drafts,
            also those that were rejected.
        """

    def stop(self, going_on: Sequence[GoingOn]) -> None:  # noqa: B027 - optional
        """All steps since `start` are committed; going_on: those of its requests that draft and have not ended."""


class NoDrafts(CapturedDrafter):
    """Plain decoding."""

    def __init__(self) -> None:
        super().__init__(0)

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        return no_drafts(batch)


def no_drafts(batch: DeviceBatch) -> CapturedDrafts:
    return CapturedDrafts(batch.last_token_ids[:, :0].contiguous())
