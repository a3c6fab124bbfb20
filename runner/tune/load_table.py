"""From the best number of speculative tokens at some batch sizes to one for every load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

Range = tuple[int, int, int]  # start, end, speculative tokens


def load_table(best: Mapping[int, int], max_num_seqs: int) -> list[Range]:
    """`num_speculative_tokens_per_batch_size`: a batch size that was not measured goes with the nearer one, by ratio.

    Args:
        best: batch size, at most max_num_seqs -> speculative tokens.
        max_num_seqs: where the last range ends.
    """
    sizes = sorted(best)
    starts = [1, *(math.ceil(math.sqrt(small * large)) for small, large in itertools.pairwise(sizes))]
    counts = [best[size] for size in sizes]
    changes = [index for index in range(len(sizes)) if index == 0 or counts[index] != counts[index - 1]]
    ends = [*(starts[index] - 1 for index in changes[1:]), max_num_seqs]
    return [(starts[index], end, counts[index]) for index, end in zip(changes, ends, strict=True)]


def method_keys(table: list[Range]) -> dict[str, object]:
    """What the method is to be told: without a table where one number suits every load."""
    most = max(count for _, _, count in table)
    if len(table) == 1:
        return {"num_speculative_tokens": most}
    return {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": [list(entry) for entry in table]}
