"""What one launch of a model computes: rows of tokens, their positions, cache slots and the plan of their attention.

A launch holds rows of one family only, prompt tokens (prefill) or generated tokens (decode): which arithmetic
computes a token depends on the token, never on the schedule. Rows may be padded; padding rows read and write the null
block (block 0), whose content nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runner.engine.segment import Family, Segment
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class PlannedAttention:
    """A plan on the host: lists that travel to the device with the launch, and what is made of them there."""

    lists: Sequence[Sequence[int]]
    assemble: Callable[[Sequence[torch.Tensor]], Any]  # the lists on the device [len] int64 -> ForwardBatch.attention


class LaunchShape(Protocol):
    """The shapes of a family's arithmetic."""

    @property
    def linear(self) -> int | None:
        """Rows of one product; launches are padded to whole ones. None = products of any shape, not row-invariant."""

    def plan(
        self,
        family: Family,
        segments: Sequence[Segment],
        positions: Sequence[int],
        *,
        num_rows: int,
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
    linear_tile: int | None

    @classmethod
    def build(
        cls,
        family: Family,
        segments: Sequence[Segment],
        token_ids: Sequence[int],  # of all segments, concatenated; placeholders may be overwritten on the device
        *,
        shape: LaunchShape,
        block_size: int,
        device: torch.device,
        is_causal: bool = True,  # False: rows see their whole segment in layers that are not causal (DFlash's blocks)
    ) -> ForwardBatch:
        padding = [0] * (-len(token_ids) % (shape.linear or 1))
        positions: list[int] = []
        slots: list[int] = []
        for segment in segments:
            end = segment.start + segment.num_tokens
            positions += range(segment.start, end)
            slots += segment.slots(segment.start, end, block_size)
        planned = shape.plan(
            family,
            segments,
            positions,
            num_rows=len(token_ids) + len(padding),
            block_size=block_size,
            is_causal=is_causal,
        )
        # One upload for everything the launch needs to know, then views of it.
        lists = [[*token_ids, *padding], positions + padding, slots + padding, *planned.lists]
        packed = to_device([number for numbers in lists for number in numbers], torch.int64, device)
        ids, positions_, slots_, *of_attention = packed.split_with_sizes([len(part) for part in lists])
        return cls(
            family=family,
            token_ids=ids,
            positions=positions_,
            slot_mapping=slots_,
            attention=planned.assemble(of_attention),
            linear_tile=shape.linear,
        )
