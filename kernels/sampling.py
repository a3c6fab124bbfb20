"""A token for each logits row: the argmax, or the Gumbel-max draw from the row's distribution.

The vocabulary is cut among programs that each leave their best token, ranked by (score, lowest id) in one integer; the
last to arrive takes the best of a row. Every score depends on its row and token alone and the largest integer is the
same in any order, so neither the rows beside a row nor the way the vocabulary is cut can move a token. Rows that cut
their distribution (min_p, top_k, top_p) take the cut from kernels/truncation.py. Follows kernels/reference/sampling.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.drawn_scores import BLOCK_WITH_IDS, load_scores
from kernels.kernel import Kernel
from kernels.last_to_arrive import arrival_counters, is_last_to_arrive
from kernels.scores import best_of_splits, check_rows, ranks_of, token_of
from kernels.sizes import cdiv, next_power_of_2
from kernels.truncation import TruncatedRows, truncate_rows

BLOCK = 4096  # tokens of a program
NUM_WARPS = 8


@Kernel
@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["positions_ptr", "cuts_ptr"])
def draw_kernel(
    drawn_ptr,  # [num_rows] int64
    ranks_ptr,  # [num_rows, num_splits] int64
    arrivals_ptr,  # [num_rows] int32, zeros before and after
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    positions_ptr,  # [num_rows] int64
    seeds_ptr,  # [num_rows] int64, or None: all rows are greedy
    draft_steps_ptr,  # [num_rows] int64, or None: 0
    is_greedy_ptr,  # [num_rows] bool, or None: no row is
    temperatures_ptr,  # [num_rows] float32, or None: 1
    cuts_ptr,  # [num_rows] float32, or None: no row has one
    token_ids_ptr,  # [vocab_size] int64, or None: a column's number is its token
    row_stride,
    vocab_size,
    stream,
    num_splits,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # >= num_splits
):
    """The best token of each row, -1 for padding; ranks[row, split] = the best of BLOCK tokens."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if position >= 0:
        scores, tokens, end = load_scores(
            logits_ptr,
            row,
            row,
            position,
            seeds_ptr,
            draft_steps_ptr,
            is_greedy_ptr,
            temperatures_ptr,
            cuts_ptr,
            token_ids_ptr,
            row_stride,
            vocab_size,
            stream,
            split * BLOCK,
            BLOCK,
        )
        ranks_ptr += row * num_splits
        tl.store(ranks_ptr + split, tl.max(ranks_of(scores, tokens, end), axis=0))
        if is_last_to_arrive(arrivals_ptr + row, num_splits):
            tl.store(drawn_ptr + row, token_of(best_of_splits(ranks_ptr, num_splits, 1, SPLITS)))
    elif split == 0:
        tl.store(drawn_ptr + row, tl.full((), -1, dtype=tl.int64))


def sample(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    stream: int,
    draft_steps: Tensor | None = None,  # [num_rows] int64; None = 0
    is_greedy: Tensor | None = None,  # [num_rows] bool: argmax of the logits as they are; None = no row
    temperatures: Tensor | None = None,  # [num_rows] float32
    min_p: Tensor | None = None,  # [num_rows] float32; 0: no cut
    top_k: Tensor | None = None,  # [num_rows] int64; <= 0 or >= vocab: no cut
    top_p: Tensor | None = None,  # [num_rows] float64; 1: no cut
    token_ids: Tensor | None = None,  # [vocab] int64, all different, below 2**31 - 1: the token of each column
) -> Tensor:
    """Token ids [num_rows] int64, -1 for padding: gumbel_argmax of the rows as process_logits cuts them.

    A parameter that is None costs nothing; one that is off for a row leaves that row's token. With token_ids, columns
    are a part of a larger vocabulary, whose noise they have; its other tokens are never drawn.
    """
    truncated = None
    if min_p is not None or top_k is not None or top_p is not None:
        truncated = truncate_rows(
            logits,
            positions,
            is_greedy=is_greedy,
            temperatures=temperatures,
            min_p=min_p,
            top_k=top_k,
            top_p=top_p,
            need_mass=False,
        )
    return _best_tokens(logits, positions, seeds, draft_steps, is_greedy, temperatures, truncated, token_ids, stream)


def greedy(logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """argmax of each row, ties to the lowest id, -1 for padding, [num_rows] int64; arguments as `sample` has them."""
    return _best_tokens(logits, positions, None, None, None, None, None, token_ids, 0)


def _best_tokens(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    draft_steps: Tensor | None,
    is_greedy: Tensor | None,
    temperatures: Tensor | None,
    truncated: TruncatedRows | None,
    token_ids: Tensor | None,
    stream: int,
) -> Tensor:
    check_rows(logits, positions, seeds, draft_steps, is_greedy, temperatures, token_ids)
    assert temperatures is None or temperatures.dtype == torch.float32, "the interpreter would take any"
    num_rows, vocab_size = logits.shape
    block = BLOCK if token_ids is None else BLOCK_WITH_IDS
    num_splits = cdiv(vocab_size, block)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return drawn
    ranks = torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
    draw_kernel[(num_rows, num_splits)](
        drawn,
        ranks,
        arrival_counters(num_rows, logits.device),
        logits,
        positions,
        seeds,
        draft_steps,
        is_greedy,
        temperatures,
        None if truncated is None else truncated.cuts,
        token_ids,
        logits.stride(0),
        vocab_size,
        int(stream),
        num_splits,
        BLOCK=block,
        SPLITS=next_power_of_2(num_splits),
        num_warps=max(1, NUM_WARPS * block // BLOCK),
        enable_fp_fusion=False,
    )
    return drawn
