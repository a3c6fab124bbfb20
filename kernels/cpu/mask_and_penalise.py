"""kernels/reference/mask_and_penalise.py, compiled: a row as its request's tables say, then the tokens of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import exact
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.mask_and_penalise import PROMPT

SPLIT = 1 << 13  # tokens of a row that one part changes at a time: whole words of a bitmask
PART_TOKENS = 1 << 13  # changed in some microseconds
Arguments = arguments_of(
    *("changed", "logits", "bias", "forbidden", "bitmask", "said", "penalties", "ancestors"),  # 0: there is none
    *("num_rows", "num_requests", "num_forbidden", "num_words", "depth", "row_stride", "vocab_size"),
)
NOTHING, NEG_INF = np.float32(0.0), np.float32("-inf")
COUNT = np.int32(PROMPT - 1)
WORD, EVERYTHING, BIT = 32, np.int32(-1), np.int32(1)


@exact
def penalised(logit: Any, said: Any, repetition: Any, frequency: Any, presence: Any) -> Any:
    count = np.float32(said & COUNT)
    repeated = logit / repetition if logit > NOTHING else logit * repetition
    logit = (repeated if said > 0 else logit) - frequency * count
    return logit - presence * np.float32(count > NOTHING)


@exact
def put_biased(out: Any, logits: Any, bias: Any, has_bias: Any) -> None:
    if has_bias:
        for place in range(len(out)):
            out[place] = logits[place] + bias[place]
    else:
        for place in range(len(out)):
            out[place] = logits[place]


@exact
def penalise(out: Any, counts: Any, repetition: Any, frequency: Any, presence: Any) -> None:
    for place in range(len(out)):
        out[place] = penalised(out[place], counts[place], repetition, frequency, presence)


@exact
def keep_allowed(out: Any, words: Any) -> None:
    for number in range(len(words)):
        if words[number] == EVERYTHING:
            continue
        own = out[WORD * number : WORD * number + WORD]
        for place in range(len(own)):
            own[place] = own[place] if (words[number] >> np.int32(place)) & BIT else NEG_INF


@cache
def changing() -> Kernel:
    def change(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        vocab_size, num_splits = a.vocab_size, (a.vocab_size + SPLIT - 1) // SPLIT
        changed, logits = floats(a.changed, a.num_rows, vocab_size), floats(a.logits, a.num_rows, a.row_stride)
        # What there is none of is never read.
        biases, penalties = floats(a.bias, a.num_requests, vocab_size), floats(a.penalties, a.num_requests, 3)
        said = carray(pointer(a.said), (a.num_requests, vocab_size), np.int32)
        forbidden = integers(a.forbidden, a.num_rows * a.num_forbidden)
        bitmask = carray(pointer(a.bitmask), (a.num_rows, a.num_words), np.int32)
        ancestors = integers(a.ancestors, a.num_rows * a.depth)
        for own in range(part, a.num_rows * num_splits, num_parts):
            row, start = own // num_splits, own % num_splits * SPLIT
            request, end = row // (a.num_rows // a.num_requests), min(start + SPLIT, vocab_size)
            out, given, bias = changed[row, start:end], logits[row, start:end], biases[request, start:end]
            put_biased(out, given, bias, a.bias != 0)
            if a.said != 0:
                counts, values = said[request, start:end], penalties[request]
                repetition, frequency, presence = values[0], values[1], values[2]
                penalise(out, counts, repetition, frequency, presence)
                for place in range(row * a.depth, (row + 1) * a.depth if a.ancestors else row * a.depth):
                    draft = ancestors[place] - start
                    if 0 <= draft < end - start:
                        count = counts[draft]
                        for other in range(row * a.depth, (row + 1) * a.depth):
                            count += np.int32(ancestors[other] == ancestors[place])
                        put_biased(
                            out[draft : draft + 1], given[draft : draft + 1], bias[draft : draft + 1], a.bias != 0
                        )
                        out[draft] = penalised(out[draft], count, repetition, frequency, presence)
            # No penalty moves what is masked.
            if a.bitmask != 0:
                keep_allowed(out, bitmask[row, start // WORD : (end + WORD - 1) // WORD])
            for place in range(row * a.num_forbidden, (row + 1) * a.num_forbidden):
                if start <= forbidden[place] < end:
                    out[forbidden[place] - start] = NEG_INF

    return Kernel(change, Arguments)


def mask_and_penalise(
    logits: Tensor,  # [num_requests * n, vocab] float32, rows any distance apart
    *,
    bias: Tensor | None = None,  # [num_requests, vocab] float32
    forbidden: Tensor | None = None,  # [num_requests * n, most] int64
    bitmask: Tensor | None = None,  # [num_requests * n, ceil(vocab / 32)] int32
    said: Tensor | None = None,  # [num_requests, vocab] int32
    penalties: Tensor | None = None,  # [num_requests, 3] float32
    ancestors: Tensor | None = None,  # [num_requests * n, depth] int64
) -> Tensor:
    tables = (bias, forbidden, bitmask, said, penalties, ancestors)
    assert all(table is None or table.is_contiguous() for table in tables)
    assert logits.dtype == torch.float32 and (logits.stride(1) == 1 or logits.shape[1] == 1)
    num_rows, vocab_size = logits.shape
    changed = empty(num_rows, vocab_size)
    if num_rows:
        changing()(
            *(changed.data_ptr(), logits.data_ptr()),
            *(0 if table is None else table.data_ptr() for table in tables),
            *(num_rows, len(next((table for table in (bias, said) if table is not None), logits))),
            *(0 if table is None else table.shape[1] for table in (forbidden, bitmask, ancestors)),
            *(logits.stride(0), vocab_size),
            parts=parts_of(num_rows * vocab_size, PART_TOKENS, num_rows * -(-vocab_size // SPLIT)),
        )
    return changed
