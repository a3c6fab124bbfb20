"""Counter-based noise: Philox4x32-10 words, and the uniform and Gumbel variates made of them.

Every random number is a pure function of (seed, position, stream, draft step, vocabulary entry): nothing here holds
state or reads a global generator, so a row's noise does not depend on its place in the batch.
Key = the request's 64-bit seed; counter = (entry // 4, position, stream, draft step); entry v takes lane v % 4.
Seeds travel as int64 bit patterns. The words are exact in int64 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011); floats are computed in float64 and rounded once.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_NUM_BROADCAST_ROUNDS = 4  # after four rounds every word depends on every word of counter and key
# Philox blocks worked on at once on the CPU: the buffers stay in the L2 cache, and 4 words each stay below the 32768
# elements from which torch wakes its thread pool, which costs more than an operation of this size.
_SLAB_BLOCKS = 7 << 10


class Stream(enum.IntEnum):
    """The third counter word: draws of different purpose at one position never share noise."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    FOLD = 4


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of broadcastable int64 tensors that hold uint32 values; returns four words of the broadcast shape.

    A product may wrap in int64: its low 64 bits are right, and what `>>` sign-extends is masked away after the xor.
    """
    rounds = torch.arange(_NUM_ROUNDS, device=k0.device)
    keys0 = ((k0.unsqueeze(-1) + rounds * _WEYL_0) & _MASK).unbind(-1)
    keys1 = ((k1.unsqueeze(-1) + rounds * _WEYL_1) & _MASK).unbind(-1)
    for key0, key1 in zip(keys0[:_NUM_BROADCAST_ROUNDS], keys1[:_NUM_BROADCAST_ROUNDS], strict=True):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product1 >> 32) ^ c1 ^ key0) & _MASK,
            product1,
            ((product0 >> 32) ^ c3 ^ key1) & _MASK,
            product0,
        )
    # From here on all four words have the full shape and own their memory: the last rounds run in place.
    high = torch.empty_like(c0)
    for key0, key1 in zip(keys0[_NUM_BROADCAST_ROUNDS:], keys1[_NUM_BROADCAST_ROUNDS:], strict=True):
        c0.mul_(_MULTIPLIER_0)
        c2.mul_(_MULTIPLIER_1)
        torch.bitwise_right_shift(c2, 32, out=high)
        c1.bitwise_xor_(high).bitwise_xor_(key0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(c0, 32, out=high)
        c3.bitwise_xor_(high).bitwise_xor_(key1).bitwise_and_(_MASK)
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def row_slabs(num_rows: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Row ranges to work on one after another; one range on an accelerator. Has no influence on any value."""
    if device.type != "cpu":
        return [slice(0, num_rows)]
    step = max(1, _SLAB_BLOCKS // -(-vocab_size // 4))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def random_words(
    seeds: Tensor, positions: Tensor, stream: int | Tensor, draft_step: int | Tensor = 0, *, num_blocks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four lanes [num_rows, num_blocks] int64 of each row's words; seeds, positions: [num_rows] int64."""

    def column(word: int | Tensor) -> Tensor:
        # full_like fills on the device, where uploading a Python number would wait for it.
        tensor = word if isinstance(word, Tensor) else torch.full_like(seeds, word)
        return (tensor & _MASK).unsqueeze(1)

    blocks = torch.arange(num_blocks, device=seeds.device).unsqueeze(0)
    return philox4x32(blocks, column(positions), column(stream), column(draft_step), column(seeds), column(seeds >> 32))


def words_to_uniform(words: Tensor) -> Tensor:
    """uint32 words -> float64 in the open interval (0, 1): (x + 0.5) * 2**-32, exact."""
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def words_to_gumbel(words: Tensor) -> Tensor:
    """uint32 words -> float64 standard Gumbel variates -log(-log1p(-w)), in [-3.14, 22.88], always finite."""
    return words_to_uniform(words).neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, stream: int | Tensor, draft_step: int | Tensor = 0) -> Tensor:
    """One float64 in (0, 1) for each row, [num_rows]: the variate of vocabulary entry 0."""
    return uniforms(seeds, positions, stream, draft_step, num_entries=1).squeeze(1)


def uniforms(
    seeds: Tensor, positions: Tensor, stream: int | Tensor, draft_step: int | Tensor = 0, *, num_entries: int
) -> Tensor:
    """Independent float64 in (0, 1), [num_rows, num_entries]: the variates of the first vocabulary entries."""
    lanes = random_words(seeds, positions, stream, draft_step, num_blocks=-(-num_entries // 4))
    return words_to_uniform(torch.stack(lanes, dim=-1).flatten(1)[:, :num_entries])


def gumbel(
    seeds: Tensor, positions: Tensor, stream: int | Tensor, draft_step: int | Tensor = 0, *, vocab_size: int
) -> Tensor:
    """Standard Gumbel noise [num_rows, vocab_size] float32, for all rows at once: callers with many use row_slabs."""
    lanes = random_words(seeds, positions, stream, draft_step, num_blocks=-(-vocab_size // 4))
    noise = words_to_gumbel(torch.stack(lanes, dim=-1)).to(torch.float32)
    return noise.flatten(1)[:, :vocab_size]


def seed_to_int64(seed: int) -> int:
    """The int64 bit pattern of a seed in [0, 2**64): the form in which tensors hold seeds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def fold_seeds(seeds: Tensor, indices: Tensor) -> Tensor:
    """A new seed for each (seed, index); int64 bit patterns, any broadcastable shapes."""
    zero = torch.zeros_like(seeds)
    low, high, _, _ = philox4x32(
        indices & _MASK, (indices >> 32) & _MASK, zero + int(Stream.FOLD), zero, seeds & _MASK, (seeds >> 32) & _MASK
    )
    return high << 32 | low


def seeds_of(seed: int, count: int) -> list[int]:
    """New seeds in [0, 2**64), one for each index below count: of the requests of a run, of a request's siblings."""
    folded = fold_seeds(torch.tensor(seed_to_int64(seed)), torch.arange(count))
    return [own % (1 << 64) for own in folded.tolist()]
