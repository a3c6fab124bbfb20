"""Gated delta rule: attention whose memory of the past is one matrix a head (Yang et al., arXiv 2412.06464).

Follows Qwen3-Next and Qwen3.5: a short causal convolution and SiLU over queries, keys and values, queries and keys of
unit length, and behind it a norm gated by SiLU. Everything between the projections and the result is float32.

Kimi's delta attention (arXiv 2510.26692) forgets each channel of a key by as much as is said of that channel, where the
gated delta rule has one number for a head; and a sigmoid gates what is behind its norm. Ling 3 bounds what one token
can make it forget.

Mamba-2's state space (Dao and Gu, arXiv 2405.21060) is the same memory with less done to it: its C, B and x are
queries, keys and values, of which a token's are written as they are, by as much as the memory forgets; x passes by the
memory, too, and what is found is gated, not normed.

A head's state after the tokens before a position is (memory, that position, the rows of the tokens from a few before
it on). Rows are computed one after another from the last position that the memory has come to, those that are kept
and are still valid first: so a row's bits depend on the tokens before it and on nothing else, and rows that turn out to
be drafts in vain cost nothing to take back. The memory itself moves up to what is certain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent_segments import RecurrentSegments

LENGTH_EPS = 1e-6  # of the unit lengths of queries and keys
ROW_NUMBERS = 8  # that what is kept of a token is a multiple of: 16 bytes


@dataclass(frozen=True, kw_only=True)
class DeltaHeads:
    """Shapes; value heads share key heads, neighbours the same one."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    taps: int  # tokens that a convolution sees, the row's own included
    is_state_space: bool = False  # Mamba-2's
    forgets_by_channel: bool = False  # Kimi's: of keys
    most_forgotten: float | None = None  # a token leaves exp(-most_forgotten) of a memory at least (Ling 3's)
    writes_twice: bool = False  # as much as a sigmoid says: what keys find may be reversed (OLMo Hybrid's)

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def own(self) -> int:
        """Numbers of a token's query, key and value of one value head."""
        return 2 * self.key_dim + self.value_dim

    @property
    def forgotten(self) -> int:
        """Numbers of a token and value head that say how much is forgotten."""
        return self.key_dim if self.forgets_by_channel else 1

    @property
    def gates(self) -> int:
        """Of a value head: how much is written, where that is something else, and behind it how much is forgotten."""
        return self.forgotten if self.is_state_space else 1 + self.forgotten

    @property
    def row(self) -> int:
        """Numbers of a token that a value head keeps: these, behind them its gates, and up to whole vectors."""
        return -(-(self.own + self.gates) // ROW_NUMBERS) * ROW_NUMBERS

    def first_columns(self, head: int) -> tuple[int, int, int]:
        """Of a value head's query, key and value."""
        shared = head // (self.num_value_heads // self.num_key_heads)
        return shared * self.key_dim, self.keys + shared * self.key_dim, 2 * self.keys + head * self.value_dim


@dataclass(frozen=True, kw_only=True)
class DeltaRows:
    """What a launch's rows are projected to, of one dtype; rows may lie further apart."""

    mixed: Tensor  # [num_rows, convolved]: queries, keys and values
    gate: Tensor  # [num_rows, values]: of what is found
    forgotten: Tensor  # [num_rows, num_value_heads * heads.forgotten]: how much, head by head
    written: Tensor | None = None  # [num_rows, num_value_heads]: how much of a token; None: a state space's

    def require(self, heads: DeltaHeads) -> None:
        """Asserts the shapes of these heads, one dtype, and whole rows."""
        count, written = len(self.mixed), self.written
        assert self.mixed.shape == (count, heads.convolved) and self.gate.shape == (count, heads.values)
        assert self.forgotten.shape == (count, heads.num_value_heads * heads.forgotten)
        assert (written is None) == heads.is_state_space
        assert written is None or written.shape == (count, heads.num_value_heads)
        for own in (self.mixed, self.gate, self.forgotten, *([] if written is None else [written])):
            assert own.dtype == self.mixed.dtype and own.stride(1) == 1


@dataclass(frozen=True, kw_only=True)
class DeltaWeights:
    """Of one layer. A token leaves exp(-exp(a_log) * softplus(a + dt_bias)) of a head's memory, or of a channel of it.

    Where heads forget most_forgotten at most that is exp(-most_forgotten * sigmoid(exp(a_log) * (a + dt_bias))).
    """

    convolution: Tensor  # [taps, convolved], of the rows' dtype, the row's own tap last
    a_log: Tensor  # [num_value_heads] float32
    dt_bias: Tensor  # [num_value_heads * heads.forgotten] float32
    norm: Tensor | None = None  # [value_dim] float32; None: a state space's
    eps: Tensor | None = None  # [] float32, likewise
    bias: Tensor | None = None  # [convolved], of the convolution; as its dtype
    skip: Tensor | None = None  # [num_value_heads] float32, of a state space: what of a value passes by its memory


@dataclass(frozen=True, kw_only=True)
class DeltaStates:
    """Of one layer, by slot and value head; slot 0 is nobody's."""

    memory: Tensor  # [num_slots, num_value_heads, value_dim, key_dim] float32
    recent: Tensor  # [num_slots, num_value_heads, ring, row], of the rows' dtype: of position p at p % ring
    reached: Tensor  # [num_slots, num_value_heads] int64: tokens that are in the memory

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + self.recent.nbytes + self.reached.nbytes

    @classmethod
    def empty(
        cls, heads: DeltaHeads, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaStates:
        """num_uncertain: the most tokens of a launch that may be taken back."""
        ring, count = num_uncertain + heads.taps - 1, heads.num_value_heads
        return cls(
            memory=torch.zeros(num_slots, count, heads.value_dim, heads.key_dim, dtype=_wide(dtype), device=device),
            recent=torch.zeros(num_slots, count, max(ring, 1), heads.row, dtype=dtype, device=device),
            reached=torch.zeros(num_slots, count, dtype=torch.int64, device=device),
        )


def gated_delta(
    rows: DeltaRows, segments: RecurrentSegments, states: DeltaStates, weights: DeltaWeights, heads: DeltaHeads
) -> Tensor:
    """Compute a launch's rows and move the states on.

    Returns:
        [num_rows, values], of the rows' dtype; rows that are nobody's, or of no segment, hold zeros.
    """
    out = torch.zeros(len(rows.mixed), heads.values, dtype=rows.mixed.dtype, device=rows.mixed.device)
    first_rows, counts = segments.rows()
    starts, ends = segments.starts + segments.offset, segments.ends + segments.end_offset
    columns = (first_rows, counts, starts, ends, segments.slots)
    for first, count, start, end, slot in zip(*(column.tolist() for column in columns), strict=True):
        for head in range(heads.num_value_heads if count and slot else 0):
            own, of_head = slice(first, first + count), slice(head * heads.value_dim, (head + 1) * heads.value_dim)
            kept = [rows.mixed[own, columns] for columns in _columns(heads, head)]
            kept += [] if rows.written is None else [rows.written[own, head : head + 1]]
            kept += [rows.forgotten[own, head * heads.forgotten : (head + 1) * heads.forgotten]]
            out[own, of_head] = _go_on(
                torch.cat(kept, dim=1), rows.gate[own, of_head], max(start, 0), end, slot, head, states, weights, heads
            )
    return out


def _columns(heads: DeltaHeads, head: int) -> list[slice]:
    sizes = (heads.key_dim, heads.key_dim, heads.value_dim)
    return [slice(first, first + size) for first, size in zip(heads.first_columns(head), sizes, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in; float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _go_on(
    rows: Tensor,  # [count, own + gates]
    gate: Tensor,  # [count, value_dim]
    start: int,
    end: int,
    slot: int,
    head: int,
    states: DeltaStates,
    weights: DeltaWeights,
    heads: DeltaHeads,
) -> Tensor:  # [count, value_dim]
    memory, recent, reached = states.memory[slot, head], states.recent[slot, head], states.reached[slot, head]
    # Further back no rows are kept, and no state that has come further is the slot's request's: it never came by here,
    # and nobody reads its rows, but all are written.
    begin = min(max(int(reached), start - (len(recent) - heads.taps + 1)), start) if start > 0 else 0
    current = memory.clone() if start > 0 else torch.zeros_like(memory)
    stop = start + len(rows)
    certain, ring = min(max(end, begin), stop), len(recent)
    number = _wide(rows.dtype)
    taps = torch.cat([weights.convolution[:, columns] for columns in _columns(heads, head)], dim=1).to(number)
    bias = torch.zeros_like(taps[0])
    if weights.bias is not None:
        bias = torch.cat([weights.bias[columns] for columns in _columns(heads, head)]).to(number)
    out = torch.zeros(len(rows), heads.value_dim, dtype=number, device=rows.device)
    for position in range(begin, stop):
        if position == certain:
            memory.copy_(current)
        total = bias.clone()
        for tap in range(heads.taps):
            place = position - heads.taps + 1 + tap
            if place >= 0:
                row = rows[place - start] if place >= start else recent[place % ring]
                total += row[: heads.own].to(number) * taps[tap]
        own = rows[position - start] if position >= start else recent[position % ring]
        query, key, value = F.silu(total).split_with_sizes((heads.key_dim, heads.key_dim, heads.value_dim))
        gates = own[heads.own : heads.own + heads.gates].to(number)
        written, forgotten = gates.split_with_sizes((heads.gates - heads.forgotten, heads.forgotten))
        said, by = forgotten + weights.dt_bias[head * heads.forgotten :][: heads.forgotten], weights.a_log[head].exp()
        rate = F.softplus(said)
        current *= torch.exp(
            -by * rate if heads.most_forgotten is None else -heads.most_forgotten * torch.sigmoid(by * said)
        )
        if heads.is_state_space:
            current += torch.outer(value * rate, key)
            found = current @ query + _of(weights.skip)[head] * value
        else:
            query, key = (part * torch.rsqrt(part.square().sum() + LENGTH_EPS) for part in (query, key))
            share = torch.sigmoid(written) * (2 if heads.writes_twice else 1)
            current += torch.outer((value - current @ key) * share, key)
            found = current @ query * heads.key_dim**-0.5
        if position >= start:
            out[position - start] = found
    if certain == stop:
        memory.copy_(current)
    reached.fill_(certain)
    for position in range(max(start, stop - ring), stop):
        recent[position % ring, : heads.own + heads.gates] = rows[position - start]
    if not heads.is_state_space:
        out *= torch.rsqrt(out.square().mean(dim=1, keepdim=True) + _of(weights.eps)) * _of(weights.norm)
    gated = torch.sigmoid(gate.to(number)) if heads.forgets_by_channel else F.silu(gate.to(number))
    return (out * gated).to(rows.dtype)


def _of(weight: Tensor | None) -> Tensor:
    """One that the heads have."""
    assert weight is not None
    return weight
