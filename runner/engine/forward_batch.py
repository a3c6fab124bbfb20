"""What one launch of a model computes: rows of tokens, their positions, cache slots and the plan of their attention.

A launch holds rows of one family only, prompt tokens (prefill) or generated tokens (decode): which arithmetic
computes a token depends on the token, never on the schedule. Rows may be padded; padding rows read and write the null
block (block 0), whose content nobody sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.recurrent_segments import RecurrentSegments
from runner.engine.bucket import bucket
from runner.engine.segment import Family, Segment
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class PlannedAttention:
    """A plan on the host: lists that travel to the device with the launch, and what is made of them there."""

    lists: Sequence[Sequence[int]]
    assemble: Callable[[Sequence[torch.Tensor]], Any]  # the lists on the device [len] int64 -> ForwardBatch.attention
    key: Hashable = None  # plans of one key have lists of the same lengths, and differ in them alone; None = do not


class LaunchShape(Protocol):
    """The shapes of a family's arithmetic."""

    @property
    def linear(self) -> int | None:
        """Rows of one product, for those who compute some outside a launch; None = any number, not row-invariant."""

    def padded_rows(self, num_rows: int) -> int:
        """Rows that a launch of so many has, padding included."""

    def plan(
        self,
        family: Family,
        segments: Sequence[Segment],
        positions: Sequence[int],  # of all rows, padding excluded
        *,
        num_rows: int,  # of the launch, padding included
        block_size: int,
        is_causal: bool,
    ) -> PlannedAttention: ...


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One launch. Rows of a segment are consecutive, segments in the order given, padding rows last."""

    family: Family
    token_ids: torch.Tensor  # [num_rows] int64
    positions: torch.Tensor  # [num_rows] int64
    slot_mapping: torch.Tensor  # [num_rows] int64: cache slot each row's KV is written to
    attention: Any  # what the attention of the launch's shape takes: runner/engine/operations.py
    recurrent: RecurrentSegments | None  # whose rows are whose, for layers that ask; None: no such layers, or a tree
    linear_tile: int | None
    late: LateRows | None = None  # what goes on behind the last layer that stores something; None: all rows

    @classmethod
    def build(
        cls,
        family: Family,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        *,
        shape: LaunchShape,
        block_size: int,
        device: torch.device,
        is_causal: bool = True,
        reads_segments: bool = False,
    ) -> ForwardBatch:
        """The launch on the device; arguments as in PackedLaunch.of."""
        packed = PackedLaunch.of(
            family,
            segments,
            token_ids,
            shape=shape,
            block_size=block_size,
            is_causal=is_causal,
            reads_segments=reads_segments,
        )
        return packed.unpack(to_device(packed.numbers, torch.int64, device))


@dataclass(frozen=True, kw_only=True)
class LateRows:
    """Rows of a launch that layers are to see which store nothing themselves: nobody waits there for the others."""

    rows: torch.Tensor  # [num_rows] int64: their places in the launch, padding included
    batch: ForwardBatch | None  # they as a launch of their own; None: there are none


@dataclass(frozen=True, kw_only=True)
class PackedLaunch:
    """A launch as one list of numbers, so that it travels in one upload; the token ids come first."""

    numbers: list[int]
    unpack: Callable[[torch.Tensor], ForwardBatch]  # takes the numbers on the device; what it makes are views of them
    num_rows: int  # padding included
    key: Hashable  # launches of one key unpack alike; None = this one is like no other

    @classmethod
    def of(
        cls,
        family: Family,
        segments: Sequence[Segment],
        token_ids: Sequence[int],  # of all segments, concatenated; placeholders may be overwritten on the device
        *,
        shape: LaunchShape,
        block_size: int,
        is_causal: bool = True,  # False: rows see their whole segment in layers that are not causal (DFlash's blocks)
        reads_segments: bool = False,  # some layers do: those with states, or that convolve along a request's rows
        late_rows: Sequence[int] | None = None,  # of LateRows, ascending; None: all
    ) -> PackedLaunch:
        num_rows = shape.padded_rows(len(token_ids))
        padding = [0] * (num_rows - len(token_ids))
        positions: list[int] = []
        slots: list[int] = []
        for segment in segments:
            end = segment.start + segment.num_tokens
            positions += range(segment.start, end)
            slots += segment.slots(segment.start, end, block_size)
        seen, seen_positions = segments, positions
        if any(own.unseen_blocks for own in segments):
            seen = [own.as_seen(block_size) for own in segments]
            seen_positions = [*chain.from_iterable(range(own.start, own.start + own.num_tokens) for own in seen)]
        planned = shape.plan(
            family, seen, seen_positions, num_rows=num_rows, block_size=block_size, is_causal=is_causal
        )
        recurrent = _recurrent_lists(segments, num_rows) if reads_segments else []
        late: PackedLaunch | None = None
        of_late: list[list[int]] = []  # numbers and places
        if late_rows:
            late = cls.of(
                family,
                _segments_of(late_rows, segments),
                [0] * len(late_rows),
                shape=shape,
                block_size=block_size,
                is_causal=is_causal,
            )
            of_late = [late.numbers, [*late_rows, *[0] * (late.num_rows - len(late_rows))]]
        lists = [[*token_ids, *padding], positions + padding, slots + padding, *of_late, *recurrent, *planned.lists]
        sizes, numbers = [len(part) for part in lists], list(chain.from_iterable(lists))

        def unpack(numbers: torch.Tensor) -> ForwardBatch:
            ids, positions_, slots_, *others = numbers.split_with_sizes(sizes)
            late_batch, places = None, ids[:0]
            if late is not None:
                late_numbers, places, *others = others
                late_batch = late.unpack(late_numbers)
            of_states, of_attention = others[: len(recurrent)], others[len(recurrent) :]
            return ForwardBatch(
                family=family,
                token_ids=ids,
                positions=positions_,
                slot_mapping=slots_,
                attention=planned.assemble(of_attention),
                recurrent=_recurrent(*of_states) if reads_segments else None,
                linear_tile=shape.linear,
                late=None if late_rows is None else LateRows(rows=places, batch=late_batch),
            )

        key: Hashable = None
        if planned.key is not None:
            key_of_late = None if late is None else late.key
            key = (family, is_causal, num_rows, len(numbers), planned.key, late_rows is None, key_of_late)
        return cls(numbers=numbers, unpack=unpack, num_rows=num_rows, key=key)


def _segments_of(rows: Sequence[int], segments: Sequence[Segment]) -> list[Segment]:
    """These rows of the segments' own, ascending; neighbours stay together."""
    found: list[Segment] = []
    first = 0
    for own in segments:
        behind = first + own.num_tokens
        inside = rows[bisect_left(rows, first) : bisect_left(rows, behind)]
        # Neighbours have the same distance to their numbers.
        for _, run in groupby(enumerate(inside), lambda pair: pair[1] - pair[0]):
            places = [row - first for _, row in run]
            found.append(replace(own, start=own.start + places[0], num_tokens=len(places)))
        first = behind
    return found


def _recurrent_lists(segments: Sequence[Segment], num_rows: int) -> list[list[int]]:
    """Starts, ends, slots, first rows and counts; rows of nobody are the last segment's. As many for a bucket."""
    columns: list[tuple[int, ...]] = []
    row = 0
    for own in segments:
        stop = own.start + own.num_tokens
        columns.append((own.start, stop - own.num_uncertain, own.state_slot, row, own.num_tokens))
        row += own.num_tokens
    columns += [(0, 0, 0, row, 0)] * (bucket(len(segments)) - len(segments))
    columns.append((0, 0, 0, row, num_rows - row))
    return [list(column) for column in zip(*columns, strict=True)]


def _recurrent(starts: Tensor, ends: Tensor, slots: Tensor, first_rows: Tensor, counts: Tensor) -> RecurrentSegments:
    return RecurrentSegments(starts=starts, ends=ends, slots=slots, first_rows=first_rows, counts=counts)
