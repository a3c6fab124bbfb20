"""What the tokens of a row are ranked by: logits over the temperature, cut, with the row's noise on top.

Of a greedy row the logits as they are. Every score depends on its row and token alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.philox import gumbel_block, gumbel_of
from kernels.scores import load_logits

# Columns of a program that is given token_ids: the noise of scattered tokens takes four times as many random words.
BLOCK_WITH_IDS = 1024
LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_scores(
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    row,
    owner,  # the place of the row's values in those below
    position,
    seeds_ptr,  # int64, or None: no noise
    draft_steps_ptr,  # int64, or None: 0
    is_greedy_ptr,  # bool, or None: no row is
    temperatures_ptr,  # float32, or None: 1
    cuts_ptr,  # [num_rows] float32, or None: no row has one
    token_ids_ptr,  # [vocab_size] int64, or None: a column's number is its token
    row_stride,
    vocab_size,
    stream,
    start,  # the first column
    BLOCK: tl.constexpr,
):
    """(scores [BLOCK] float32, tokens [BLOCK] int32, what the tokens of columns that are there are below)."""
    columns = start + tl.arange(0, BLOCK)
    scores = load_logits(logits_ptr + row * row_stride, columns, vocab_size)
    tokens, end = columns, vocab_size
    if token_ids_ptr is not None:
        tokens = tl.load(token_ids_ptr + columns, mask=columns < vocab_size, other=LAST_ID).to(tl.int32)
        end = LAST_ID
    is_random = True
    if is_greedy_ptr is not None:
        is_random = tl.load(is_greedy_ptr + owner) == 0
    if is_random:
        if temperatures_ptr is not None:
            scores = tl.div_rn(scores, tl.load(temperatures_ptr + owner))
        if cuts_ptr is not None:
            scores = tl.where(scores >= tl.load(cuts_ptr + row), scores, float("-inf"))
        if seeds_ptr is not None:
            has_any = True
            if cuts_ptr is not None:  # it leaves nothing of most programs, and noise is what takes the time
                has_any = tl.max(scores, axis=0) > float("-inf")
            if has_any:
                draft_step = tl.zeros((), dtype=tl.int64)
                if draft_steps_ptr is not None:
                    draft_step = tl.load(draft_steps_ptr + owner)
                seed = tl.load(seeds_ptr + owner)
                if token_ids_ptr is None:
                    scores += gumbel_block(seed, position, stream, draft_step, start, BLOCK)
                else:
                    scores += gumbel_of(seed, position, stream, draft_step, tokens)
    return scores, tokens, end
