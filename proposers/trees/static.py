"""Trees that are the same in every step, written as Medusa writes its choices (arXiv 2401.10774).

A choice is a path of ranks: [0] the likeliest next token, [1] the second, [0, 2] the third behind the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence

from proposers.trees.rank_tree import RankTree
from runner.engine.errors import UserError

KEY = "method.speculative_token_tree"


def static_tree(choices: Sequence[Sequence[int]], *, max_depth: int | None = None) -> RankTree:
    """The tree of these choices, in any order.

    max_depth: tokens ahead that the method can guess, such as Medusa's heads; None = any.

    Raises:
        UserError: no choice, one that is no path of ranks, too deep, there twice, or without its beginning.
    """
    if not choices:
        raise UserError(f"{KEY} must hold a path of ranks at least, got none; leave it null for chains")
    paths = [tuple(choice) for choice in choices]
    known = set(paths)
    for path in paths:
        if not path or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
            raise UserError(f"{KEY} must hold non-empty paths of ranks >= 0, got {list(path)}; mend or remove it")
        if max_depth is not None and len(path) > max_depth:
            raise UserError(f"{KEY} must be at most {max_depth} deep for this method, got {list(path)}; shorten it")
        if len(path) > 1 and path[:-1] not in known:
            raise UserError(f"{KEY} must hold the beginning of each of its paths, got {list(path)} without "
                            f"{list(path[:-1])}; add that")  # fmt: skip
    if len(known) < len(paths):
        twice = next(path for place, path in enumerate(paths) if path in paths[:place])
        raise UserError(f"{KEY} must hold each path once, got {list(twice)} twice; remove one")
    return RankTree.of_paths(paths)
