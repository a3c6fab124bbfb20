"""What a request gains in a step, by how many tokens it may draft: estimated from the latest steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.engine.schedule import CommittedTokens

MEMORY = 256  # request-steps that an estimate goes by, about: a workload that changes is followed
STALE = 32  # the same for what a trial looks at again
ENOUGH_DRAFTS = 24  # request-steps of a number's own, where drafts are trees


@dataclass
class Mean:
    """Of the latest values: each counts for a little less than the one behind it."""

    memory: int
    value: float = 0.0
    num_values: int = 0

    def add(self, value: float) -> None:
        self.num_values = min(self.num_values + 1, self.memory)
        self.value += (value - self.value) / self.num_values


class TokensPerStep:
    def __init__(self, most: int) -> None:
        """most: tokens that a draft may have."""
        # Of chains, whether draft i was accepted where all before it were; a draft that was not made was not.
        self._accepted = [Mean(MEMORY) for _ in range(most)]
        self._gained: dict[int, Mean] = {}  # of trees: those of one size say little of another's
        self._has_trees = False

    def observe(self, count: int, gains: Sequence[CommittedTokens]) -> None:
        """gains: of requests that might have drafted this many tokens each."""
        for gain in gains:
            self._has_trees |= gain.draft_depth < gain.num_draft_tokens
            self._gained.setdefault(count, Mean(MEMORY)).add(len(gain.token_ids))
            for position in range(min(gain.num_accepted_tokens + 1, count)):
                self._accepted[position].add(position < gain.num_accepted_tokens)

    def expected(self, count: int) -> float:
        if self._has_trees:
            return self._gained[count].value if count in self._gained else 1.0
        tokens = reached = 1.0
        for accepted in self._accepted[:count]:
            reached *= accepted.value
            tokens += reached
        return tokens

    def is_known(self, count: int) -> bool:
        return not self._has_trees or (count in self._gained and self._gained[count].num_values >= ENOUGH_DRAFTS)

    def look_again(self, count: int, in_use: int) -> None:
        """What only steps of this number show, and not those in use, is old: its next values weigh more."""
        for mean in [*self._accepted[in_use:count], *filter(None, [self._gained.get(count)])]:
            mean.num_values = min(mean.num_values, STALE)
