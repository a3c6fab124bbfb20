"""A token for each logits row: the argmax, or the Gumbel-max draw, as kernels/reference/sampling.py defines them.

Every score depends on its row and token alone, and the largest is the largest in any order. A row that threads share is
cut into splits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import bits_of_float, ordered
from kernels.cpu.compiled import exact
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.philox import gumbel_of, random_words
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

SPLIT = 4096  # columns that one thread goes over
CHUNK = 256  # columns whose noise is made at a time
PART_COLUMNS, GREEDY_PART_COLUMNS = 1 << 11, 1 << 14  # drawn in some microseconds

Arguments = arguments_of(
    *("images", "tokens", "logits"),  # the first two [num_rows, num_splits] int64: of the best
    *("positions", "seeds", "draft_steps", "is_greedy", "temperatures", "token_ids"),  # 0: there is none
    *("room", "words", "num_rows", "row_stride", "vocab_size", "stream"),
)
Choosing = arguments_of("drawn", "images", "tokens", "positions", "num_rows", "num_splits")
ZERO, TWO, FOUR = np.uint64(0), np.uint64(2), np.uint64(4)
NOTHING, UNCHANGED = np.float32(0.0), np.float32(1.0)
SIGNLESS, LOWEST = np.int32(0x7FFFFFFF), np.int32(-(2**31))
LAST_TOKEN, NO_TOKEN = np.int64(2**63 - 1), np.int64(-1)


@exact
def add_noise(
    scores: Any,  # [>= count] float32
    words: Any,  # [>= count, in whole blocks of four] uint64: room
    first: Any,  # token, a multiple of four; those behind it follow
    count: Any,
    position: Any,
    stream: Any,
    draft_step: Any,
    seed: Any,
) -> None:
    """In two loops, for only then both fit into vector lanes."""
    for block in range((count + 3) // 4):
        four = random_words(np.uint64(first // 4 + block), position, stream, draft_step, seed)
        words[4 * block], words[4 * block + 1], words[4 * block + 2], words[4 * block + 3] = four
    for place in range(count):
        scores[place] += gumbel_of(words[place])


@exact
def add_noise_of(
    scores: Any, words: Any, tokens: Any, count: Any, position: Any, stream: Any, draft_step: Any, seed: Any
) -> None:
    """`add_noise` of tokens[: count]."""
    for place in range(count):
        token = np.uint64(tokens[place])
        w0, w1, w2, w3 = random_words(token // FOUR, position, stream, draft_step, seed)
        lane = token % FOUR
        words[place] = (w0 if lane == ZERO else w1) if lane < TWO else (w2 if lane == TWO else w3)
    for place in range(count):
        scores[place] += gumbel_of(words[place])


@exact
def image_of(score: Any) -> Any:
    """int32 in the order of float32; -0 as 0, and a NaN above all, whatever its sign."""
    bits = SIGNLESS if np.isnan(score) else bits_of_float(score + NOTHING)
    return ordered(bits)


@exact
def largest_image(scores: Any, count: Any) -> Any:
    largest = LOWEST
    for place in range(count):
        largest = max(largest, image_of(scores[place]))
    return largest


@exact
def token_with(image: Any, scores: Any, count: Any, first: Any, token_ids: Any, has_ids: Any) -> Any:
    """The lowest token of those with this image; columns begin at `first`."""
    lowest = LAST_TOKEN
    for place in range(count):
        if image_of(scores[place]) == image:
            lowest = min(lowest, token_ids[first + place] if has_ids else np.int64(first + place))
    return lowest


@cache
def drawing() -> Kernel:
    """The best token of each split, with its image."""

    def draw(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_splits = (a.vocab_size + SPLIT - 1) // SPLIT
        images = integers(a.images, a.num_rows * num_splits)
        tokens, positions = integers(a.tokens, a.num_rows * num_splits), integers(a.positions, a.num_rows)
        room = floats(a.room + thread * 4 * CHUNK, 1, CHUNK)[0]
        words = carray(pointer(a.words + thread * 8 * CHUNK), (CHUNK,), np.uint64)
        # What there is none of is never read.
        seeds, draft_steps = integers(a.seeds, a.num_rows), integers(a.draft_steps, a.num_rows)
        is_greedy = carray(pointer(a.is_greedy), (a.num_rows,), np.uint8)
        temperatures = floats(a.temperatures, 1, a.num_rows)[0]
        token_ids = integers(a.token_ids, a.vocab_size)
        for own in range(part, a.num_rows * num_splits, num_parts):
            row, start = own // num_splits, own % num_splits * SPLIT
            best, token = LOWEST, LAST_TOKEN
            draws = a.seeds != 0 and not (a.is_greedy != 0 and is_greedy[row] != 0)
            for first in range(start, min(start + SPLIT, a.vocab_size) if positions[row] >= 0 else start, CHUNK):
                count = min(CHUNK, a.vocab_size - first)
                # By its address: a slice of rows that are all one, no distance apart, would be empty.
                own_logits = floats(a.logits + 4 * (row * a.row_stride + first), 1, count)[0]
                if not draws:
                    scores = own_logits
                else:
                    scores, temperature = room, temperatures[row] if a.temperatures else UNCHANGED
                    for place in range(count):
                        scores[place] = own_logits[place] / temperature
                    position, stream = np.uint64(positions[row]), np.uint64(a.stream)
                    seed, draft_step = np.uint64(seeds[row]), np.uint64(draft_steps[row] if a.draft_steps else 0)
                    if a.token_ids:
                        add_noise_of(scores, words, token_ids[first:], count, position, stream, draft_step, seed)
                    else:
                        add_noise(scores, words, first, count, position, stream, draft_step, seed)
                largest = largest_image(scores, count)
                if largest > best:
                    best, token = largest, token_with(largest, scores, count, first, token_ids, a.token_ids != 0)
                elif largest == best and a.token_ids:
                    token = min(token, token_with(largest, scores, count, first, token_ids, True))
            images[own], tokens[own] = best, token

    return Kernel(draw, Arguments)


@cache
def choosing() -> Kernel:
    def choose(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Choosing)[0]
        drawn, positions = integers(a.drawn, a.num_rows), integers(a.positions, a.num_rows)
        images = integers(a.images, a.num_rows * a.num_splits)
        tokens = integers(a.tokens, a.num_rows * a.num_splits)
        for row in range(part, a.num_rows, num_parts):
            place = row * a.num_splits
            for other in range(place + 1, (row + 1) * a.num_splits):
                is_lower = images[other] == images[place] and tokens[other] < tokens[place]
                if images[other] > images[place] or is_lower:
                    place = other
            drawn[row] = tokens[place] if positions[row] >= 0 else NO_TOKEN

    return Kernel(choose, Choosing)


def sample(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    stream: int,
    draft_steps: Tensor | None = None,  # [num_rows] int64; None = 0
    is_greedy: Tensor | None = None,  # [num_rows] bool: argmax of the logits as they are; None = no row
    temperatures: Tensor | None = None,  # [num_rows] float32
    token_ids: Tensor | None = None,  # [vocab] int64, all different: the token of each column
) -> Tensor:
    """Token ids [num_rows] int64, -1 for padding; ties to the lowest. Arguments as kernels/sampling.py has them."""
    return _draw(logits, positions, seeds, draft_steps, is_greedy, temperatures, token_ids, stream)


def greedy(logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """argmax of each row, ties to the lowest id, -1 for padding, [num_rows] int64; arguments as `sample` has them."""
    return _draw(logits, positions, None, None, None, None, token_ids, 0)


def _draw(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    draft_steps: Tensor | None,
    is_greedy: Tensor | None,
    temperatures: Tensor | None,
    token_ids: Tensor | None,
    stream: int,
) -> Tensor:
    values = (positions, seeds, draft_steps, is_greedy, temperatures, token_ids)
    assert all(value is None or value.is_contiguous() for value in values)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and len(positions) == len(logits)
    num_rows, vocab_size = logits.shape
    num_splits = -(-vocab_size // SPLIT)
    images, tokens = empty(num_rows * num_splits, dtype=torch.int64), empty(num_rows * num_splits, dtype=torch.int64)
    drawn = empty(num_rows, dtype=torch.int64)
    room_size = torch.get_num_threads() * CHUNK
    room, words = empty(room_size), empty(room_size, dtype=torch.int64)
    grain = PART_COLUMNS if seeds is not None else GREEDY_PART_COLUMNS
    drawing()(
        *(images.data_ptr(), tokens.data_ptr(), logits.data_ptr()),
        *(0 if value is None else value.data_ptr() for value in values),
        *(room.data_ptr(), words.data_ptr()),
        *(num_rows, logits.stride(0), vocab_size, stream),
        parts=parts_of(num_rows * vocab_size, grain, num_rows * num_splits),
    )
    choosing()(
        *(drawn.data_ptr(), images.data_ptr(), tokens.data_ptr(), positions.data_ptr(), num_rows, num_splits),
    )
    return drawn
