"""kernels/reference/perturb.py, compiled; rows of one owner share its noise."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.sampling import CHUNK, PART_COLUMNS, add_noise, add_noise_of
from kernels.cpu.threads import parts_of

Arguments = arguments_of(
    *("perturbed", "logits", "seeds", "positions", "draft_steps", "token_ids", "is_greedy"),  # 0: there is none
    *("room", "words", "num_rows", "num_owners", "row_stride", "vocab_size", "stream"),
)


@cache
def perturbing() -> Kernel:
    def add(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_chunks = (a.vocab_size + CHUNK - 1) // CHUNK
        perturbed = floats(a.perturbed, a.num_rows, a.vocab_size)
        seeds, positions = integers(a.seeds, a.num_owners), integers(a.positions, a.num_owners)
        draft_steps, token_ids = integers(a.draft_steps, a.num_owners), integers(a.token_ids, a.vocab_size)
        is_greedy = carray(pointer(a.is_greedy), (a.num_owners,), np.uint8)
        scores = floats(a.room + thread * 4 * CHUNK, 1, CHUNK)[0]
        words = carray(pointer(a.words + thread * 8 * CHUNK), (CHUNK,), np.uint64)
        for own in range(part, a.num_rows * num_chunks, num_parts):
            row, first = own // num_chunks, own % num_chunks * CHUNK
            owner = row // (a.num_rows // a.num_owners)
            count = min(CHUNK, a.vocab_size - first)
            own_logits = floats(a.logits + 4 * (row * a.row_stride + first), 1, count)[0]  # as in sampling.py
            to = perturbed[row, first : first + count]
            for place in range(count):
                scores[place] = own_logits[place]
            seed, position, stream = np.uint64(seeds[owner]), np.uint64(positions[owner]), np.uint64(a.stream)
            draft_step = np.uint64(draft_steps[owner] if a.draft_steps else 0)
            is_drawn = not (a.is_greedy != 0 and is_greedy[owner] != 0)
            if is_drawn and a.token_ids:
                add_noise_of(scores, words, token_ids[first:], count, position, stream, draft_step, seed)
            elif is_drawn:
                add_noise(scores, words, first, count, position, stream, draft_step, seed)
            for place in range(count):
                to[place] = scores[place]

    return Kernel(add, Arguments)


def perturb(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    seeds: Tensor,  # [num_owners] int64, as the next two; rows are owner by owner, equally many of each
    positions: Tensor,
    draft_steps: Tensor | None = None,  # None = 0
    *,
    stream: int,
    token_ids: Tensor | None = None,  # [vocab] int64: the token of each column; None: its number
    is_greedy: Tensor | None = None,  # [num_owners] bool: as they are; None = no row
) -> Tensor:
    """logits [num_rows, vocab] + gumbel(seed, position, stream, draft step) of each token."""
    values = (seeds, positions, draft_steps, token_ids, is_greedy)
    assert all(value is None or value.is_contiguous() for value in values)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    perturbed, room_size = empty(num_rows, vocab_size), torch.get_num_threads() * CHUNK
    room, words = empty(room_size), empty(room_size, dtype=torch.int64)
    perturbing()(
        *(perturbed.data_ptr(), logits.data_ptr()),
        *(0 if value is None else value.data_ptr() for value in values),
        *(room.data_ptr(), words.data_ptr(), num_rows, len(seeds), logits.stride(0), vocab_size, int(stream)),
        parts=parts_of(num_rows * vocab_size, PART_COLUMNS, num_rows * -(-vocab_size // CHUNK)),
    )
    return perturbed
