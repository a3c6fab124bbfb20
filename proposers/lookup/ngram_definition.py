"""What prompt lookup must find: the definition in the plainest words, and a compiled search of the whole text.

The index and the kernels are held to the first, and timed against the second, which is what others run every step.
"""

from __future__ import annotations

import numba

from proposers.lookup.ngram_table import Int32Array


def naive_lookup(token_ids: list[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """What followed the last n tokens where they last occurred, for the largest n in min_n..max_n that did occur."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[len(token_ids) - n :]:
                copied = list(token_ids)
                for place in range(end, end + num_tokens):  # runs into what it copies, as LZ77 does
                    copied.append(copied[place])
                return copied[len(token_ids) :]
    return []


@numba.njit(cache=True)
def search_from_the_end(held: Int32Array, length: int, min_n: int, max_n: int, drafts: Int32Array) -> None:
    """`naive_lookup` of each row of held, its first length tokens, into drafts [B, num_tokens]; -1 where none is found.

    A row's search ends at the first match of max_n tokens, which no other can beat.
    """
    for row in range(len(held)):
        text = held[row]
        longest, found = min_n - 1, 0
        for end in range(length - 1, 0, -1):
            run = 0
            while run < min(max_n, end) and text[end - 1 - run] == text[length - 1 - run]:
                run += 1
            if run > longest:
                longest, found = run, end
                if run == max_n:
                    break
        for place in range(drafts.shape[1]):
            drafts[row, place] = text[found + place % (length - found)] if found > 0 else -1
