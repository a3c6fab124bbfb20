"""Ragged chains of drafts judged by their probabilities, compiled: verifier/rules.py's Probabilistic.

p comes normalised, so what is left to do is a comparison a draft, and a draw a request from max(p - q, 0) or p, whose
noise is that of kernels/cpu/sampling.py. A row that threads share is cut into splits.
"""

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
from kernels.cpu.philox import log, random_words, uniform_of
from kernels.cpu.recording import empty
from kernels.cpu.sampling import (
    CHUNK,
    LAST_TOKEN,
    LOWEST,
    PART_COLUMNS,
    SPLIT,
    add_noise,
    image_of,
    largest_image,
)
from kernels.cpu.threads import parts_of
from kernels.reference.philox import Stream
from kernels.reference.rejection import Verified

Judging = arguments_of(
    *("token_ids", "num_accepted", "num_drafts", "last_rows", "rejected"),
    *("p", "draft_probs", "draft_token_ids", "cu", "seeds", "positions"),  # draft_probs 0: one-hot
    *("is_greedy", "argmax"),  # 0: no row is
    *("num_requests", "num_rows", "width", "vocab_size"),
)
Drawing = arguments_of(
    *("images", "tokens"),  # [num_requests, num_splits] int64: of the best
    *("token_ids", "num_accepted", "last_rows", "rejected"),
    *("processed", "p", "draft_probs", "draft_token_ids", "seeds", "positions"),
    *("room", "words", "num_requests", "num_rows", "width", "vocab_size"),
)
NOTHING, NEG_INF = np.float32(0.0), np.float32("-inf")
TINY = np.float32(2.0**-149)
NOBODY = np.int64(-1)
TARGET, ACCEPT, RESIDUAL = (np.uint64(int(stream)) for stream in (Stream.TARGET, Stream.ACCEPT, Stream.RESIDUAL))
FIRST = np.uint64(0)  # block of a variate, and the draft step


@cache
def judging() -> Kernel:
    """Which drafts stay: u * q(x) < p(x), in float64; in greedy requests the argmax, and what follows them."""

    def judge(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Judging)[0]
        token_ids, cu = integers(a.token_ids, a.num_requests * a.width), integers(a.cu, a.num_requests + 1)
        accepted_counts, draft_counts = integers(a.num_accepted, a.num_requests), integers(a.num_drafts, a.num_requests)
        last_rows, rejected = integers(a.last_rows, a.num_requests), integers(a.rejected, a.num_requests)
        drafts, argmax = integers(a.draft_token_ids, a.num_rows), integers(a.argmax, a.num_rows)
        seeds, positions = integers(a.seeds, a.num_rows), integers(a.positions, a.num_rows)
        is_greedy = carray(pointer(a.is_greedy), (a.num_rows,), np.uint8)
        p, q = floats(a.p, a.num_rows, a.vocab_size), floats(a.draft_probs, a.num_rows, a.vocab_size)
        for request in range(part, a.num_requests, num_parts):
            first, own = cu[request], request * a.width
            row, num_drafts, num_accepted = first + request, 0, 0
            is_here = positions[row] >= 0
            takes_argmax = a.is_greedy != 0 and is_greedy[row] != 0
            while is_here and num_drafts < cu[request + 1] - first and drafts[first + num_drafts] >= 0:
                num_drafts += 1
            while num_accepted < num_drafts:
                draft, place = drafts[first + num_accepted], row + num_accepted
                if takes_argmax:
                    is_accepted = argmax[place] == draft
                else:
                    words = random_words(FIRST, np.uint64(positions[place]), ACCEPT, FIRST, np.uint64(seeds[place]))
                    chance = uniform_of(words[0])
                    if a.draft_probs:
                        chance *= np.float64(q[first + num_accepted, draft])
                    is_accepted = chance < np.float64(p[place, draft])
                if not is_accepted:
                    break
                token_ids[own + num_accepted] = draft
                num_accepted += 1
            for place in range(num_accepted, a.width):
                token_ids[own + place] = NOBODY
            if is_here and takes_argmax:
                token_ids[own + num_accepted] = argmax[row + num_accepted]
            accepted_counts[request], draft_counts[request] = num_accepted, num_drafts
            last_rows[request] = row + num_accepted if is_here and not takes_argmax else NOBODY
            rejected[request] = first + num_accepted if num_accepted < num_drafts else NOBODY

    return Kernel(judge, Judging)


@exact
def put_residual(scores: Any, p: Any, q: Any, first: Any, count: Any) -> None:
    """log(max(p - q, 0)) of the tokens behind `first`."""
    for place in range(count):
        excess = p[first + place] - q[first + place]
        of_excess = np.float32(log(np.float64(max(excess, TINY))))
        scores[place] = of_excess if excess > NOTHING else NEG_INF


@exact
def best_of(scores: Any, words: Any, logits: Any, p: Any, q: Any, draft: Any, start: Any, end: Any, keys: Any) -> Any:
    """The largest image of what is drawn from, with its noise, of the tokens from start to end, and its lowest token.

    draft: -1: from the logits; else from what it leaves of them: all but itself where q is empty, else max(p - q, 0).
    """
    best, token = LOWEST, LAST_TOKEN
    position, stream, seed = keys
    for first in range(start, end, CHUNK):
        count = min(CHUNK, end - first)
        if draft >= 0 and len(q) > 0:
            put_residual(scores, p, q, first, count)
        else:
            for place in range(count):
                scores[place] = logits[first + place]
            if first <= draft < first + count:
                scores[draft - first] = NEG_INF
        add_noise(scores, words, first, count, position, stream, FIRST, seed)
        largest = largest_image(scores, count)
        if largest > best:
            best = largest
            place = 0
            while image_of(scores[place]) != largest:
                place += 1
            token = np.int64(first + place)
    return best, token


@cache
def drawing_last() -> Kernel:
    """Of each split of a request's row, the best token."""

    def draw(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Drawing)[0]
        num_splits = (a.vocab_size + SPLIT - 1) // SPLIT
        images = integers(a.images, a.num_requests * num_splits)
        tokens = integers(a.tokens, a.num_requests * num_splits)
        last_rows, rejected = integers(a.last_rows, a.num_requests), integers(a.rejected, a.num_requests)
        seeds, positions = integers(a.seeds, a.num_rows), integers(a.positions, a.num_rows)
        logits, p = floats(a.processed, a.num_rows, a.vocab_size), floats(a.p, a.num_rows, a.vocab_size)
        q, drafts = floats(a.draft_probs, a.num_rows, a.vocab_size), integers(a.draft_token_ids, a.num_rows)
        scores = floats(a.room + thread * 4 * CHUNK, 1, CHUNK)[0]
        words = carray(pointer(a.words + thread * 8 * CHUNK), (CHUNK,), np.uint64)
        for own in range(part, a.num_requests * num_splits, num_parts):
            request, start = own // num_splits, own % num_splits * SPLIT
            row, slot = last_rows[request], rejected[request]
            if row < 0:
                continue
            end, is_rejected = min(start + SPLIT, a.vocab_size), slot >= 0
            # The recovered token must not reuse noise that the draft or a coupled target draw has used here.
            keys = np.uint64(positions[row]), RESIDUAL if is_rejected else TARGET, np.uint64(seeds[row])
            draft = drafts[slot] if is_rejected else NOBODY
            of_draft = q[slot] if is_rejected and a.draft_probs else q[0, :0]
            images[own], tokens[own] = best_of(scores, words, logits[row], p[row], of_draft, draft, start, end, keys)

    return Kernel(draw, Drawing)


@cache
def choosing_last() -> Kernel:
    """The best token of all splits; where a rejection left nothing of p, one drawn from p."""

    def choose(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Drawing)[0]
        num_splits = (a.vocab_size + SPLIT - 1) // SPLIT
        images = integers(a.images, a.num_requests * num_splits)
        tokens = integers(a.tokens, a.num_requests * num_splits)
        token_ids = integers(a.token_ids, a.num_requests * a.width)
        num_accepted = integers(a.num_accepted, a.num_requests)
        last_rows, rejected = integers(a.last_rows, a.num_requests), integers(a.rejected, a.num_requests)
        seeds, positions = integers(a.seeds, a.num_rows), integers(a.positions, a.num_rows)
        logits, p = floats(a.processed, a.num_rows, a.vocab_size), floats(a.p, a.num_rows, a.vocab_size)
        scores = floats(a.room + thread * 4 * CHUNK, 1, CHUNK)[0]
        words = carray(pointer(a.words + thread * 8 * CHUNK), (CHUNK,), np.uint64)
        for request in range(part, a.num_requests, num_parts):
            row, best = last_rows[request], request * num_splits
            if row < 0:
                continue
            for other in range(best + 1, (request + 1) * num_splits):
                if images[other] > images[best]:  # of equal ones the first, for its tokens are lower
                    best = other
            token = tokens[best]
            if rejected[request] >= 0 and images[best] == image_of(NEG_INF):
                keys = np.uint64(positions[row]), RESIDUAL, np.uint64(seeds[row])
                nobody = p[row, :0]
                _, token = best_of(scores, words, logits[row], p[row], nobody, NOBODY, 0, a.vocab_size, keys)
            token_ids[request * a.width + num_accepted[request]] = token

    return Kernel(choose, Drawing)


def verify_probabilistic(
    processed: Tensor,  # [num_rows, vocab] float32: logits over temperatures, without what is cut off
    p: Tensor,  # [num_rows, vocab] float32: their softmax
    draft_token_ids: Tensor,  # [num_drafts] int64
    draft_probs: Tensor | None,  # [num_drafts, vocab] float32; None = one-hot
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int64
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    max_num_draft_tokens: int,
    is_greedy: Tensor | None = None,  # [num_rows] bool
    argmax: Tensor | None = None,  # [num_rows] int64: of the logits, where there may be greedy rows
) -> Verified:
    """A draft stays iff u * q(x) < p(x); after the first that does not, a token of max(p - q, 0), else one of p."""
    values = (processed, p, draft_token_ids, draft_probs, cu_num_draft_tokens, seeds, positions, is_greedy, argmax)
    assert all(own is None or own.is_contiguous() for own in values)
    assert processed.dtype == p.dtype == torch.float32 and (is_greedy is None) == (argmax is None)
    integers_of = (draft_token_ids, cu_num_draft_tokens, seeds, positions, *([] if argmax is None else [argmax]))
    assert all(own.dtype == torch.int64 for own in integers_of) and processed.shape == p.shape
    (num_rows, vocab_size), num_requests = p.shape, len(cu_num_draft_tokens) - 1
    assert len(seeds) == len(positions) == num_rows == len(draft_token_ids) + num_requests
    assert draft_probs is None or draft_probs.dtype == torch.float32
    assert draft_probs is None or draft_probs.shape == (len(draft_token_ids), vocab_size)
    width, num_splits = max_num_draft_tokens + 1, -(-vocab_size // SPLIT)
    token_ids, counts = empty(num_requests, width, dtype=torch.int64), empty(2, num_requests, dtype=torch.int64)
    verified = Verified(token_ids, counts[0], counts[1])
    last_rows, rejected = empty(num_requests, dtype=torch.int64), empty(num_requests, dtype=torch.int64)
    probs_ptr = 0 if draft_probs is None else draft_probs.data_ptr()
    drafts = (p.data_ptr(), probs_ptr, draft_token_ids.data_ptr())
    judging()(
        *(own.data_ptr() for own in (*verified, last_rows, rejected)),
        *drafts,
        *(own.data_ptr() for own in (cu_num_draft_tokens, seeds, positions)),
        *(0 if own is None else own.data_ptr() for own in (is_greedy, argmax)),
        *(num_requests, num_rows, width, vocab_size),
    )
    images, tokens = (empty(num_requests * num_splits, dtype=torch.int64) for _ in range(2))
    room_size = torch.get_num_threads() * CHUNK
    room, words = empty(room_size), empty(room_size, dtype=torch.int64)
    arguments = (
        *(own.data_ptr() for own in (images, tokens, token_ids, counts[0], last_rows, rejected, processed)),
        *drafts,
        *(own.data_ptr() for own in (seeds, positions, room, words)),
        *(num_requests, num_rows, width, vocab_size),
    )
    drawing_last()(*arguments, parts=parts_of(num_requests * vocab_size, PART_COLUMNS, num_requests * num_splits))
    choosing_last()(*arguments)
    return verified
