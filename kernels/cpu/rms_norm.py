"""kernels/reference/rms_norm.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

PART_NUMBERS = 1 << 13  # of rows, normed in some microseconds
NOTHING, ONE = np.float32(0.0), np.float32(1.0)
Arguments = arguments_of(
    # Addresses; rows of x: 0, each its own; x_weight 0: rows are added as they are; normed 0: the sum is all;
    # sum_scale 0: it stays as it is. x_eps: of the norm of x before the sum.
    *("normed", "total", "x", "rows", "residual", "x_weight", "weight", "eps", "x_eps", "sum_scale"),
    *("normed_stride", "total_stride", "x_stride", "residual_stride"),  # elements from row to row
    *("num_rows", "width", "x_rows"),
)


@cache
def rows_norm(element: Any, weight_element: Any) -> Kernel:
    """Of tensors of these elements, and weights of those."""

    def norm_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        """residual 0: there is none; total 0: nobody asks for the sum."""
        a = carray(arguments, 1, Arguments)[0]
        width, scales = a.width, elements(a.weight, 1, a.width, weight_element)[0]
        x_scales = elements(a.x_weight if a.x_weight else a.weight, 1, a.width, weight_element)[0]
        to = elements(a.normed if a.normed else a.x, a.num_rows, a.normed_stride, element)
        rows = elements(a.x, a.x_rows, a.x_stride, element)
        added = elements(a.residual if a.residual else a.x, a.num_rows, a.residual_stride, element)
        # Without a residual the rows of x are read, and nothing is written to a sum.
        sums = elements(a.total if a.residual else a.x, a.num_rows, a.total_stride, element)
        places = integers(a.rows if a.rows else a.x, a.num_rows)
        for row in range(part, a.num_rows, num_parts):
            own = rows[places[row] if a.rows else row]
            if a.residual:
                target = sums[row]
                if a.x_weight:
                    squares = NOTHING
                    for column in range(width):
                        number = widen(own[column])
                        squares += number * number
                    scale = ONE / np.sqrt(squares / np.float32(width) + floats(a.x_eps, 1, 1)[0, 0])
                    for column in range(width):
                        number = widen(own[column]) * scale * widen(x_scales[column])
                        target[column] = narrow(number, own[column])
                    for column in range(width):
                        target[column] = narrow(widen(target[column]) + widen(added[row, column]), own[column])
                else:
                    for column in range(width):
                        target[column] = narrow(widen(own[column]) + widen(added[row, column]), own[column])
                if a.sum_scale:
                    factor = floats(a.sum_scale, 1, 1)[0, 0]
                    for column in range(width):
                        target[column] = narrow(widen(target[column]) * factor, own[column])
                own = target
            if a.normed:
                squares = NOTHING
                for column in range(width):
                    number = widen(own[column])
                    squares += number * number
                scale = ONE / np.sqrt(squares / np.float32(width) + floats(a.eps, 1, 1)[0, 0])
                for column in range(width):
                    to[row, column] = narrow(widen(own[column]) * scale * widen(scales[column]), own[column])

    return Kernel(norm_rows, Arguments)


def norm_into(
    normed: Tensor | None,  # [num_rows, width], x itself perhaps; None: the sum is all
    x: Tensor,  # [num_rows, width]; of one dtype with all others, but weights may be of float32
    weight: Tensor,  # [width]; without `normed` it means nothing
    eps: Tensor,  # [] float32
    *,
    rows: Tensor | None = None,  # [num_rows] int64: which of x; None: each its own
    residual: Tensor | None = None,  # [num_rows, width]
    total: Tensor | None = None,  # [num_rows, width]: gets the sum, where there is a residual
    x_weight: Tensor | None = None,  # [width]: of the norm of x before the sum
    scale: Tensor | None = None,  # [] float32: of the sum
    x_eps: Tensor | None = None,  # [] float32: of the norm of x before the sum; None: eps
) -> None:
    """Rows may be strided."""
    out = total if normed is None else normed
    assert out is not None
    num_rows, width = out.shape
    assert (residual is None) == (total is None) and (rows is None or rows.dtype == torch.int64)
    for own in (x, *(own for own in (normed, residual, total) if own is not None)):
        assert own.dtype == x.dtype and own.shape[1] == width and own.stride(1) == 1
    for own in (weight, *(() if x_weight is None else (x_weight,))):
        assert own.dtype == weight.dtype in (x.dtype, torch.float32) and own.shape == (width,) and own.stride(0) == 1
    assert (x_weight is None and scale is None) or residual is not None
    assert scale is None or (scale.dtype == torch.float32 and scale.shape == ())
    assert x_eps is None or (x_weight is not None and x_eps.dtype == torch.float32)
    assert eps.dtype == torch.float32 and (rows is not None or len(x) == num_rows)
    rows_norm(ELEMENTS[x.dtype], ELEMENTS[weight.dtype])(
        0 if normed is None else normed.data_ptr(),
        0 if total is None else total.data_ptr(),
        x.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if x_weight is None else x_weight.data_ptr(),
        weight.data_ptr(),
        eps.data_ptr(),
        (eps if x_eps is None else x_eps).data_ptr(),
        0 if scale is None else scale.data_ptr(),
        out.stride(0),
        width if total is None else total.stride(0),
        x.stride(0),
        width if residual is None else residual.stride(0),
        num_rows,
        width,
        len(x),
        parts=parts_of(num_rows * width, PART_NUMBERS, num_rows),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x: [num_rows, hidden], weight: [hidden], eps: [] float32 -> [num_rows, hidden]."""
    normed = empty(*x.shape, dtype=x.dtype)
    norm_into(normed, x, weight, eps)
    return normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: Tensor,
    x_weight: Tensor | None = None,
    scale: Tensor | None = None,
    x_eps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden]; with x_weight [hidden] x is normed first.

    scale: [] float32, by which the rounded sum is multiplied. x_eps: [] float32, of the norm of x; None: eps.
    """
    normed, total = empty(*x.shape, dtype=x.dtype), empty(*x.shape, dtype=x.dtype)
    norm_into(normed, x, weight, eps, residual=residual, total=total, x_weight=x_weight, scale=scale, x_eps=x_eps)
    return normed, total


def add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: Tensor, scale: Tensor | None = None) -> Tensor:
    """norm(x) + residual, all [num_rows, hidden]; scale as above."""
    total = empty(*x.shape, dtype=x.dtype)
    norm_into(None, x, weight, eps, residual=residual, total=total, x_weight=weight, scale=scale)
    return total


def norm_in_place(x: Tensor, weight: Tensor, eps: Tensor) -> None:
    """rms_norm that overwrites x."""
    norm_into(x, x, weight, eps)


def sum_beside_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: Tensor,
    x_weight: Tensor | None = None,
    scale: Tensor | None = None,
    x_eps: Tensor | None = None,
) -> Tensor:
    """[x + residual, norm(x + residual)] side by side, [num_rows, 2 * hidden]; the rest as above."""
    both, width = empty(len(x), 2 * x.shape[1], dtype=x.dtype), x.shape[1]
    total = both[:, :width]
    own = {"residual": residual, "total": total, "x_weight": x_weight, "scale": scale, "x_eps": x_eps}
    norm_into(both[:, width:], x, weight, eps, **own)
    return both


def rms_norm_pair(
    embeddings: Tensor,  # [vocab, hidden]; [num_rows, hidden] without token_ids
    token_ids: Tensor | None,  # [num_rows] int64
    states: Tensor,  # [num_rows, hidden]
    embedding_weight: Tensor,  # [hidden]
    state_weight: Tensor,  # [hidden]
    eps: Tensor,  # [] float32
    *,
    states_first: bool = False,
) -> Tensor:  # [num_rows, 2 * hidden]
    """The norm of each token's embedding, and behind it that of its state, or the other way round."""
    num_rows, width = states.shape
    pair = empty(num_rows, 2 * width, dtype=states.dtype)
    first, second = pair[:, :width], pair[:, width:]
    of_tokens, of_states = (second, first) if states_first else (first, second)
    norm_into(of_tokens, embeddings, embedding_weight, eps, rows=token_ids)
    norm_into(of_states, states, state_weight, eps)
    return pair
