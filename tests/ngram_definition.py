"""What prompt lookup must find, in the plainest words: the definition that the index and the kernels are held to."""

from __future__ import annotations


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
