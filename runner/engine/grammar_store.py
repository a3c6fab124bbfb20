"""The grammars of the requests in flight, and what they mean for a step: masks of its rows, drafts cut short.

Owns them by request_id from admission to the end; preemption leaves them, since committed tokens stay committed.
`constrain` stands between proposer and verifier. It reads drafts to the host, but only when a request with a grammar
has some; a step without such a request passes untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.engine.constrained_drafts import Constrained, apply_to, follow, keep_first_paths
from runner.engine.grammar import Grammar, GrammarCompiler
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.schedule import CommittedTokens, Schedule
from runner.engine.upload import index_or_all, upload


class GrammarStore:
    def __init__(self, compiler: GrammarCompiler | None = None, *, device: torch.device | str = "cpu") -> None:
        """No compiler: for tests of a proposer on its own; no request has a grammar then."""
        self._compiler, self._device = compiler, torch.device(device)
        self._open: dict[str, Grammar] = {}

    def open(self, request: Request) -> str | None:
        """Take a request in; returns why it cannot be served, or None."""
        wanted = request.sampling_params.structured_outputs
        if wanted is None:
            return None
        try:
            self._open[request.request_id] = self.compiler.compile(wanted)
        except ValueError as error:
            return str(error)
        return None

    def commit(self, committed: Sequence[CommittedTokens]) -> dict[str, str]:
        """Move grammars on by what a step committed; returns why requests must fail, by request_id."""
        failures = {}
        for gain in committed:
            if (grammar := self._open.get(gain.request.request_id)) is not None:
                grammar.commit(gain.token_ids)
                if grammar.error is not None:
                    failures[gain.request.request_id] = grammar.error
        return failures

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def walk(self, request_ids: Sequence[str]) -> GrammarWalk:
        """For a drafter's way through a step; the grammars come back by themselves when they are next asked."""
        grammars = [self._open.get(request_id) for request_id in request_ids]
        for grammar in grammars:
            if grammar is not None:
                grammar.unwind()
        return GrammarWalk(self, grammars)

    def constrain(self, schedule: Schedule, drafts: DraftTokens) -> tuple[DraftTokens, BitmaskRows | None]:
        """Cut each draft before the first token its grammar forbids, carry it on where it allows one only.

        A draft tree is cut to its first path before that.

        Returns the drafts, what was cut counting as never drafted, and what is allowed in every row of verification:
        for each request that yields a token, one for each draft left and one behind them.
        """
        yielding = [item for item in schedule.scheduled if item.yields_token]
        followed = {
            place: grammar
            for place, item in enumerate(yielding)
            if (grammar := self._open.get(item.request.request_id)) is not None
        }
        if not followed:
            return drafts, None
        drafts = keep_first_paths(drafts, followed)
        # Requests that decode come first and all of them yield, so a place among these is a place among those.
        starts = drafts.cu_num_draft_tokens + drafts.cu_num_draft_tokens[-1:] * len(yielding)
        is_asked = any(starts[place] < starts[place + 1] for place in followed)
        token_ids = drafts.token_ids.tolist() if is_asked else []
        parts = [
            Constrained(
                place=place,
                grammar=grammar,
                draft=token_ids[starts[place] : starts[place + 1]],
                max_draft_tokens=yielding[place].max_draft_tokens,
                is_random=not yielding[place].request.sampling_params.is_greedy,
            )
            for place, grammar in followed.items()
        ]
        bitmask = follow(parts, self.compiler)
        asked_rows = torch.tensor([row for part in parts for row in part.rows])
        words = upload(bitmask.index_select(0, asked_rows), self._device)
        drafts = apply_to(drafts, parts, words)
        cu = drafts.cu_num_draft_tokens + drafts.cu_num_draft_tokens[-1:] * len(yielding)
        row_idx = [cu[part.place] + part.place + depth for part in parts for depth in range(len(part.rows))]
        num_rows = cu[-1] + len(yielding)
        return drafts, BitmaskRows(row_idx=index_or_all(row_idx, num_rows, self._device), words=words)

    @property
    def compiler(self) -> GrammarCompiler:
        assert self._compiler is not None, "a request with a grammar needs an engine"
        return self._compiler

    def bitmask(self, grammars: Sequence[Grammar], row_idx: list[int], num_rows: int) -> BitmaskRows:
        """What may come next in grammars whose rows are row_idx of num_rows."""
        words = upload(self.compiler.masks(grammars), self._device)
        return BitmaskRows(row_idx=index_or_all(row_idx, num_rows, self._device), words=words)


class GrammarWalk:
    """A drafter's way ahead of the committed text, step by step, over the requests it drafts for."""

    def __init__(self, store: GrammarStore, grammars: list[Grammar | None]) -> None:
        self._store, self._grammars = store, grammars

    def bitmask(self, active: Sequence[int]) -> BitmaskRows | None:
        """What may come next; row i is request active[i]. None when nobody there follows a grammar."""
        followed = [(row, g) for row, index in enumerate(active) if (g := self._grammars[index]) is not None]
        if not followed:
            return None
        return self._store.bitmask([grammar for _, grammar in followed], [row for row, _ in followed], len(active))

    def advance(self, active: Sequence[int], drafted: torch.Tensor) -> None:
        """Go ahead by what was drafted, [len(active)] int64; read to the host when somebody follows a grammar."""
        if all(self._grammars[index] is None for index in active):
            return
        for index, token_id in zip(active, drafted.tolist(), strict=True):
            if (grammar := self._grammars[index]) is not None:
                grammar.push(token_id)
