"""From the best number of speculative tokens at some batch sizes to one for every load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

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


def method_keys(table: list[Range], synthetic_rates: Sequence[float] | None = None) -> dict[str, object]:
    """What the method is to be told: without a table where one number suits every load.

    Args:
        synthetic_rates: of the most tokens that were tried; a method has as many of them as it has tokens.
    """
    most = max(count for _, _, count in table)
    keys: dict[str, object] = {"num_speculative_tokens": most}
    if len(table) > 1:
        keys["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in table]
    if synthetic_rates is not None:
        keys["synthetic_acceptance_rates"] = list(synthetic_rates[:most])
    return keys
