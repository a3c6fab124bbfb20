"""Prompt lookup over rows of tokens in two launches; kernels/reference/ngram_match.py is the definition.

The first scans every row once, a program a block of positions, and leaves the best occurrence of each block; the
second takes the best of a row and copies its draft. The grid covers the widest row, blocks behind a row's length end at
once, and nothing is read back: a captured CUDA graph serves any lengths.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.sizes import cdiv, next_power_of_2

BLOCK = 1024  # positions a program compares


@Kernel
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def scan_kernel(
    token_ids_ptr,  # [num_slots, width] int32
    lengths_ptr,  # [num_slots] int64
    slots_ptr,  # [B] int64
    best_ptr,  # [B, num_blocks] int64
    row_stride,
    num_blocks,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """best[b, block] = n << 32 | end of the longest, then right-most, match that ends in the block; 0: none does."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + request)
    length = tl.load(lengths_ptr + slot, mask=slot >= 0, other=0)
    row_ptr = token_ids_ptr + slot * row_stride
    best = tl.zeros((), dtype=tl.int64)
    if block * BLOCK < length - 1:
        last_token = block * BLOCK + tl.arange(0, BLOCK)  # of an occurrence: aligned, as the loads are
        matches = last_token < length - 1
        run = tl.zeros((BLOCK,), dtype=tl.int64)
        for back in tl.static_range(MAX_N):
            wanted = tl.load(row_ptr + length - 1 - back, mask=length - 1 - back >= 0, other=-1)
            matches = matches & (last_token >= back)
            # Where the shorter n-gram failed nothing is loaded, so longer ones cost next to nothing.
            found = tl.load(row_ptr + last_token - back, mask=matches, other=-2)
            matches = matches & (found == wanted)
            run += matches.to(tl.int64)
        best = tl.max(tl.where(run >= MIN_N, (run << 32) | (last_token + 1).to(tl.int64), 0), axis=0)
    tl.store(best_ptr + request * num_blocks + block, best)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def finalize_kernel(
    token_ids_ptr,  # [num_slots, width] int32
    lengths_ptr,  # [num_slots] int64
    slots_ptr,  # [B] int64
    best_ptr,  # [B, num_blocks] int64
    drafts_ptr,  # [B, num_tokens] int64
    row_stride,
    num_blocks,
    num_tokens,
    BLOCKS: tl.constexpr,  # >= num_blocks
    TOKENS: tl.constexpr,  # >= num_tokens
):
    """drafts[b] = the tokens from the row's best match on, through what has just been copied; -1 without a match."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    length = tl.load(lengths_ptr + slot, mask=slot >= 0, other=0)
    blocks = tl.arange(0, BLOCKS)
    best = tl.max(tl.load(best_ptr + request * num_blocks + blocks, mask=blocks < num_blocks, other=0), axis=0)
    end = best & 0xFFFFFFFF
    tokens = tl.arange(0, TOKENS)
    places = end + tokens % tl.maximum(length - end, 1)
    is_draft = (tokens < num_tokens) & (best > 0)
    drafts = tl.load(token_ids_ptr + slot * row_stride + places, mask=is_draft, other=-1)
    tl.store(drafts_ptr + request * num_tokens + tokens, drafts.to(tl.int64), mask=tokens < num_tokens)


def ngram_match(
    token_ids: Tensor, lengths: Tensor, slots: Tensor, *, min_n: int, max_n: int, num_tokens: int
) -> Tensor:
    """kernels.reference.ngram_match.ngram_match, by the kernels above; rows of token_ids contiguous."""
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1, "rows of int32 tokens side by side"
    assert lengths.dtype == slots.dtype == torch.int64 and lengths.is_contiguous() and slots.is_contiguous()
    num_requests, num_blocks = len(slots), cdiv(token_ids.shape[1], BLOCK)
    drafts = torch.empty(num_requests, num_tokens, dtype=torch.int64, device=token_ids.device)
    if drafts.numel() == 0:
        return drafts
    best = torch.empty(num_requests, num_blocks, dtype=torch.int64, device=token_ids.device)
    row_stride = token_ids.stride(0)
    scan_kernel[(num_requests, num_blocks)](
        token_ids, lengths, slots, best, row_stride, num_blocks, MIN_N=min_n, MAX_N=max_n, BLOCK=BLOCK
    )
    finalize_kernel[(num_requests,)](
        token_ids,
        lengths,
        slots,
        best,
        drafts,
        row_stride,
        num_blocks,
        num_tokens,
        BLOCKS=next_power_of_2(num_blocks),
        TOKENS=next_power_of_2(num_tokens),
    )
    return drafts
