"""From parts of requests to launches: what one pass of a model over a step's tokens consists of.

Prompt tokens and generated tokens go through different arithmetic, so a step is at most two launches. A part that
spans the end of a prompt, as when a preempted request is recomputed, is cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runner.engine.draft_trees import tree_shape
from runner.engine.request import Request
from runner.engine.segment import Family, Segment


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive tokens of one request: committed ones first, then drafts that are known on the device only."""

    request: Request
    start: int  # position of the first token
    end: int  # position behind the last committed token
    num_draft_tokens: int = 0  # they take the places from end on
    # Of a tree's drafts, -1 = the last committed token; None = a chain. Where there are more parents than
    # num_draft_tokens, the drafts before those of this part are in the cache already.
    parent_indices: Sequence[int] | None = None
    num_logits: int = 0  # how many of the last rows predict something that is wanted
    # How many of the request's tokens no later part computes again, so that states need not go back over them; None:
    # those before `end`.
    certain: int | None = None
    unseen_blocks: range = range(0)  # as a segment's
    scored_from: int | None = None  # prompt rows from this position on are scored: their successors are in the prompt


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Segments of one family and the tokens they hold."""

    family: Family
    segments: list[Segment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of all segments; draft rows hold placeholders
    draft_rows: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    scored_rows: list[int] = field(default_factory=list)  # rows of prompt tokens that are scored

    def add(self, part: Part, first: int, last: int, *, is_tail: bool) -> None:
        """Append the part's committed tokens first..last-1, and its drafts and logits if this is its tail."""
        num_drafts = part.num_draft_tokens if is_tail else 0
        num_tokens = last - first + num_drafts
        if num_tokens == 0:
            return
        if part.scored_from is not None:
            shift = len(self.token_ids) - first
            end_scored = min(last, part.request.num_prompt_tokens - 1)
            self.scored_rows.extend(range(max(first, part.scored_from) + shift, end_scored + shift))
        self.segments.extend(_segments(part, first, last, num_drafts))
        self.token_ids.extend(part.request.tokens_between(first, last))
        self.token_ids.extend([0] * num_drafts)
        end = len(self.token_ids)
        self.draft_rows.extend(range(end - num_drafts, end))
        if is_tail:
            assert part.num_logits <= num_tokens, "a part's logits come from one launch: not from across a prompt's end"
            self.logits_rows.extend(range(end - part.num_logits, end))


@dataclass(frozen=True, kw_only=True)
class StepLaunches:
    prefill: Launch
    decode: Launch
    logits_order: list[int] | None  # rows of cat(prefill logits, decode logits) by part; None: one launch, in order
    token_order: list[int] | None  # the same for the rows of all tokens, in the launches without their padding

    @classmethod
    def of(cls, parts: Sequence[Part]) -> StepLaunches:
        prefill, decode = Launch(family="prefill"), Launch(family="decode")
        by_part: list[tuple[bool, int, int]] = []  # (in decode, first logits row of the launch, count)
        tokens: list[tuple[range, range]] = []  # a part's rows of the prefill and of the decode launch
        for part in parts:
            first_rows = len(prefill.token_ids), len(decode.token_ids)
            boundary = min(max(part.request.num_prompt_tokens, part.start), part.end)
            tail_is_decode = boundary < part.end or part.num_draft_tokens > 0
            prefill.add(part, part.start, boundary, is_tail=not tail_is_decode)
            decode.add(part, boundary, part.end, is_tail=tail_is_decode)
            rows = (decode if tail_is_decode else prefill).logits_rows
            by_part.append((tail_is_decode, len(rows) - part.num_logits, part.num_logits))
            tokens.append((range(first_rows[0], len(prefill.token_ids)), range(first_rows[1], len(decode.token_ids))))
        order = token_order = None
        if prefill.segments and decode.segments:
            shift = len(prefill.token_ids)
            token_order = [
                row for in_prefill, in_decode in tokens for row in (*in_prefill, *(shift + r for r in in_decode))
            ]
        if prefill.logits_rows and decode.logits_rows:
            shift = len(prefill.logits_rows)
            order = [
                first + offset + (shift if in_decode else 0)
                for in_decode, first, count in by_part
                for offset in range(count)
            ]
        return cls(prefill=prefill, decode=decode, logits_order=order, token_order=token_order)


def _segments(part: Part, first: int, last: int, num_drafts: int) -> Iterator[Segment]:
    """The part's committed tokens first..last-1 and its drafts; those of a tree a run at a time.

    Node j of a tree is stored at place end + j, whatever its position. The first run goes on from the committed tokens.
    """
    num_committed, table = last - first, part.request.block_table
    if num_drafts == 0 or part.parent_indices is None:
        stop = last + num_drafts
        yield Segment(
            start=first,
            num_tokens=stop - first,
            block_table=table,
            state_slot=part.request.state_slot,
            num_drafts=num_drafts,
            num_uncertain=num_drafts if part.certain is None else max(0, stop - part.certain),
            unseen_blocks=part.unseen_blocks,
        )
        return
    shape = tree_shape(part.parent_indices)
    num_cached = len(part.parent_indices) - num_drafts
    assert num_cached == 0 or num_committed == 0, "drafts are in the cache only behind all committed tokens"
    for start, end in shape.runs(num_cached):
        path = shape.paths[end - 1]
        before = num_committed if start == 0 else 0
        yield Segment(
            start=last + shape.depths[start] - 1 - before,
            num_tokens=before + end - start,
            block_table=table,
            branch_start=last,
            branch=None if path[-1] == len(path) - 1 else [last + node for node in path],
        )
