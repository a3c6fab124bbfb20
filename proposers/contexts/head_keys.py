"""Whose keys and values the rows of a head see, and what follows from it: where rows stand, what is computed of a text.

The head's own: it follows the target through texts to store them, and its drafts move on by a place each. The target's
(Gemma 4's assistants): nothing is stored, so only the last committed token's row is computed and drafts stay at its
place. Rows are laid out on the host, or on the device in captured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proposers.base import ProposerContext
from proposers.contexts.fresh_states import FreshStates
from proposers.contexts.known_states import KnownStates
from proposers.heads.autoregressive import AutoregressiveHead
from runner.engine.device_batch import DeviceBatch
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_runner import HeadRunner
from runner.engine.operations import take_rows
from runner.engine.request import Request
from runner.engine.segment import Family, Segment
from runner.engine.step_operations import tree_rows
from runner.engine.upload import to_device

MAX_STEPS_BEHIND = 16


class NumberedNodes(NamedTuple):
    """Nodes under the numbers that the fed ones among them have; there may be others."""

    slots: Tensor  # [count, 1 + number] int64: where KV lies; the first column is the pending token's
    parents: Tensor  # [count, number] int64: an earlier node, -1 = the pending token
    first: int  # number of the level's first row; its last row's is the last of all


class HeadKeys:
    """Those that the head stores, a place for each token."""

    taps_every_token = True
    max_steps_behind = MAX_STEPS_BEHIND  # without drafts, before `follow` is called

    def __init__(self, runner: HeadRunner) -> None:
        self.runner = runner

    def allocate_cache(self, context: ProposerContext, *, num_blocks: int, num_scratch_blocks: int) -> None:
        """num_blocks: of the engine; behind them scratch."""
        self.runner.allocate_cache(num_blocks + num_scratch_blocks)

    def follow(self, head: AutoregressiveHead, requests: Sequence[Request], known: Mapping[str, KnownStates]) -> None:
        """Compute all rows whose token and state are there but each request's last, which its next draft starts from.

        All requests share a launch for prompt tokens and one for generated ones, as the target keeps them apart.
        """
        segments: dict[Family, list[Segment]] = {"prefill": [], "decode": []}
        token_ids: dict[Family, list[int]] = {"prefill": [], "decode": []}
        rows: dict[Family, list[Tensor]] = {"prefill": [], "decode": []}
        for request in requests:
            own = known[request.request_id]
            first, end = own.next_position, request.num_computed_tokens
            boundary = min(max(request.num_prompt_tokens, first), end)
            states = own.advance(end)
            parts: tuple[tuple[Family, int, int], ...] = (("prefill", first, boundary), ("decode", boundary, end))
            for family, start, stop in parts:
                if start < stop:
                    segments[family].append(segment_of_tokens(request, start, stop))
                    token_ids[family] += request.tokens_between(start, stop)
                    rows[family].append(states[start - first : stop - first])
        for family, launched in segments.items():
            if launched:
                ids = to_device(token_ids[family], torch.int64, self.runner.device)
                self.runner.run(family, launched, ids, head.project(torch.cat(rows[family])))

    def offset(self, step: int) -> int:
        """Place of the row with `step` drafts before it, itself included, from the number of committed tokens on."""
        return step - 2

    def segment_of_draft(self, request: Request, step: int) -> Segment:
        """The row with `step` drafts before it, itself included."""
        start = request.num_tokens + self.offset(step)
        return Segment(start=start, num_tokens=1, block_table=request.block_table)

    def segment_of_node(self, request: Request, path: Sequence[int], table: list[int], first_place: int) -> Segment:
        """The row of a node (TreeNode.path); table: the request's, and blocks for its tree, from first_place on."""
        return Segment(
            start=request.num_tokens + self.offset(len(path)),
            num_tokens=1,
            block_table=table,
            branch_start=request.num_tokens - 1,
            branch=[first_place + number for number in path],
        )

    # In captured steps:

    def first_output(self, batch: DeviceBatch, fresh: FreshStates) -> Tensor:
        """The head's output for each request's last token, then for its masks, once it has seen the fresh tokens."""
        last = fresh.tokens.last_rows(batch).flatten()
        return take_rows(self._output_of_fresh(batch, fresh), last)

    def follow_fresh(self, batch: DeviceBatch, fresh: FreshStates) -> None:
        """Compute the fresh tokens, where nobody drafts."""
        self._output_of_fresh(batch, fresh)

    def _output_of_fresh(self, batch: DeviceBatch, fresh: FreshStates) -> Tensor:
        """The head's output for the fresh tokens, then for the masks, then for scratch rows."""
        token_ids, hidden = fresh.rows(batch)
        return self.output(batch, token_ids, hidden, offset=-1, lengths=fresh.tokens.first_positions(batch))

    def output(
        self, batch: DeviceBatch, token_ids: Tensor, hidden: Tensor, *, offset: int, lengths: Tensor | None = None
    ) -> Tensor:
        """The head's output for tokens [count, num_rows], which stand at lengths + offset and behind."""
        launch, _ = self.runner.decode_launch(
            batch, token_ids.flatten(), offset=offset, num_rows=token_ids.shape[1], lengths=lengths
        )
        return self.runner.compute(launch, hidden)

    def level_launch(
        self, batch: DeviceBatch, token_ids: Tensor, depth: int, fed: Callable[[], NumberedNodes]
    ) -> ForwardBatch:
        """A launch of nodes token_ids [count * num_rows] of this depth; fed: all nodes up to them."""
        shape, nodes = self.runner.paged_shape, fed()
        rows = tree_rows(
            batch.lengths,
            nodes.slots,
            nodes.parents,
            first=nodes.first + 1,
            offset=self.offset(0),  # of the pending token, from which the others count
            depth=depth,
            **shape.tree_tiles,
        )
        return batch.tree_launch(token_ids, rows, shape)


class TargetKeys(HeadKeys):
    """The target's in their place. Nothing would be left of what the head computed of a text, so it computes none."""

    taps_every_token = False
    max_steps_behind = 0

    def allocate_cache(self, context: ProposerContext, *, num_blocks: int, num_scratch_blocks: int) -> None:
        self.runner.read_cache(context.cache_of_target())

    def follow(self, head: AutoregressiveHead, requests: Sequence[Request], known: Mapping[str, KnownStates]) -> None:
        for request in requests:
            known[request.request_id].advance(request.num_computed_tokens)

    def offset(self, step: int) -> int:
        return -2

    def segment_of_node(self, request: Request, path: Sequence[int], table: list[int], first_place: int) -> Segment:
        return self.segment_of_draft(request, len(path))

    def first_output(self, batch: DeviceBatch, fresh: FreshStates) -> Tensor:
        token_ids, hidden = fresh.last(batch)
        return self.output(batch, token_ids, hidden, offset=self.offset(0))

    def follow_fresh(self, batch: DeviceBatch, fresh: FreshStates) -> None:
        pass

    def level_launch(
        self, batch: DeviceBatch, token_ids: Tensor, depth: int, fed: Callable[[], NumberedNodes]
    ) -> ForwardBatch:
        return batch.launch_of_copies(
            token_ids,
            offset=self.offset(depth),
            num_copies=len(token_ids) // batch.count,
            shape=self.runner.paged_shape,
            block_size=self.runner.block_size,
        )


def segment_of_tokens(request: Request, start: int, end: int) -> Segment:
    """The rows of tokens start..end-1: each stands at the place of the token before it."""
    return Segment(start=start - 1, num_tokens=end - start, block_table=request.block_table)
