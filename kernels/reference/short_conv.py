"""A short causal convolution between two gates in place of attention: LFM2's (Liquid AI, arXiv 2511.23404).

Channel by channel a token's number is a weighted sum over the last few tokens of gate times value, times another gate
of its own. What later tokens need of the past is these few products. They lie in a ring, a token's where its position
says, so rows that turn out to be drafts in vain are written over, and a row's bits depend on the tokens before it and
on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrent_segments import RecurrentSegments


@dataclass(frozen=True, kw_only=True)
class ConvWeights:
    """Of one layer, of the rows' dtype."""

    convolution: Tensor  # [taps, width], the row's own tap last
    bias: Tensor | None = None  # [width]


@dataclass(frozen=True, kw_only=True)
class ConvStates:
    """Of one layer, by slot; slot 0 is nobody's."""

    recent: Tensor  # [num_slots, ring, width], of the rows' dtype: gate times value of position p at p % ring

    @property
    def num_bytes(self) -> int:
        return self.recent.nbytes

    @classmethod
    def empty(
        cls, width: int, taps: int, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device
    ) -> ConvStates:
        """num_uncertain: the most tokens of a launch that may be taken back."""
        return cls(recent=torch.zeros(num_slots, num_uncertain + taps, width, dtype=dtype, device=device))


def short_conv(mixed: Tensor, segments: RecurrentSegments, states: ConvStates, weights: ConvWeights) -> Tensor:
    """Compute a launch's rows and keep what those behind them need.

    mixed: [num_rows, 3 * width]: what gates values, what gates results, and values, as they are projected.

    Returns:
        [num_rows, width], of mixed's dtype, computed in float32 and rounded once, but for the product of gate and
        value, which is rounded as it is kept; rows that are nobody's, or of no segment, hold zeros.
    """
    taps, width = weights.convolution.shape
    wide = torch.promote_types(mixed.dtype, torch.float32)
    kernel = weights.convolution.to(wide)
    out = torch.zeros(len(mixed), width, dtype=mixed.dtype, device=mixed.device)
    first_rows, counts = segments.rows()
    columns = (first_rows, counts, segments.starts + segments.offset, segments.slots)
    for first, count, begin, slot in zip(*(column.tolist() for column in columns), strict=True):
        if count == 0 or slot == 0:
            continue
        own, start, recent = slice(first, first + count), max(begin, 0), states.recent[slot]
        gate, result_gate, values = mixed[own].chunk(3, dim=1)
        products = gate * values
        before = [
            recent[place % len(recent)] if place >= 0 else torch.zeros_like(products[0])
            for place in range(start - taps + 1, start)
        ]
        seen = torch.cat((torch.stack(before), products)) if before else products
        total = torch.zeros_like(products, dtype=wide)
        if weights.bias is not None:
            total += weights.bias.to(wide)
        for tap in range(taps):
            total += seen[tap : tap + count].to(wide) * kernel[tap]
        out[own] = (total * result_gate.to(wide)).to(mixed.dtype)
        for row in range(max(count - len(recent), 0), count):
            recent[(start + row) % len(recent)] = products[row]
    return out
