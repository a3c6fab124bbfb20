"""Trees that are the same in every step, written as Medusa writes its choices (arXiv 2401.10774).

A choice is a path of ranks: [0] the likeliest next token, [1] the second, [0, 2] the third behind the likeliest. The
configuration has checked that every path is there once, behind its beginning (runner/config/drafter_methods.py).
"""

from __future__ import annotations

from functools import lru_cache

from proposers.trees.rank_tree import RankTree
from runner.engine.errors import UserError

Choices = tuple[tuple[int, ...], ...]  # paths of ranks, the most useful first


def check_depth(choices: Choices, *, max_depth: int) -> None:
    """Raises UserError when a choice is deeper than the method can guess ahead, such as Medusa's number of heads."""
    for path in choices:
        if len(path) > max_depth:
            raise UserError(
                f"method.speculative_token_tree must be at most {max_depth} deep with this drafter, got {list(path)}; "
                "remove the paths that are longer"
            )


def check_ranks(choices: Choices, vocab_size: int) -> None:
    """Raises UserError when a choice asks for more candidates than there are tokens."""
    if (rank := max(map(max, choices))) >= vocab_size:
        raise UserError(
            f"method.speculative_token_tree must hold ranks below {vocab_size}, the vocabulary's size, got {rank}; "
            "remove the paths with higher ones"
        )


@lru_cache(maxsize=256)
def static_tree(choices: Choices, num_nodes: int | None = None) -> RankTree:
    """The tree of the first num_nodes choices; None = all. Which are first does not depend on what is drawn."""
    return RankTree.of_paths(choices[:num_nodes])
