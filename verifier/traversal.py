"""Traversal verification: block verification of draft trees, from the leaves up (arXiv 2505.12398).

The pending token's chance is 1. On the way down a node's chance is min(P * r(x) / q(x), 1), where P is its parent's
chance and r what the siblings before it have left of the parent's distribution. A leaf is kept with its chance, and all
of its path with it. A leaf that is not kept is removed: with S = sum(max(P * r - q, 0)) its parent's distribution
becomes max(P * r - q, 0) / S, and its parent's chance S / (S + 1 - P). Then the next sibling's leaves are tried; a
parent without a next child is a leaf itself.
One child at every depth is block verification (arXiv 2403.10444), bit for bit.

What a node leaves of its parent's distribution does not depend on the fate of the node's own children. So all chances
are computed first, from the top down, and each distribution once; the walk is then a search for the first node that is
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.philox import Stream
from kernels.reference.sampling import softmax
from runner.engine.sampling import SamplingRows, sample_last
from runner.engine.step_operations import uniforms
from runner.engine.upload import to_device
from verifier.tree_batch import TreeBatch

MOST_ENTRIES = 1 << 24  # of the distributions that are worked on at the same time


@dataclass(frozen=True, kw_only=True)
class _Families:
    """Rows of one depth with the drafts that they judge, those with the most drafts first."""

    rows: Tensor  # [num_families] int64
    children: tuple[Tensor, ...]  # of each rank, the children of the families that have so many; int64


@dataclass(frozen=True, kw_only=True)
class _Chances:
    """Fractions, so that a test needs no division."""

    top: Tensor  # [num_rows] float64: of a row's node, after all of its children
    bottom: Tensor  # [num_rows] float64
    at_turn: Tensor  # [num_drafts] float64: of a draft's parent, after the siblings before it


def traverse(processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """(last row, token behind it), both [num_random] int64, of the requests that are not greedy."""
    assert tree.probs is not None, "candidates that were not drawn follow the target's own tokens"
    chances = _chances(processed, tree, tree.probs)
    # It looks at drafts beyond the cut: no step may meet the noise of an earlier one.
    steps = rows.positions[tree.first_row_idx[tree.request_idx]]
    judges = tree.parent_row_idx
    keys = (rows.seeds[judges], rows.positions[judges], steps)
    u = uniforms(*keys, stream=Stream.ACCEPT, num_entries=tree.widest_level)
    u = u.gather(1, tree.place_in_level.unsqueeze(1)).squeeze(1)  # [num_drafts]
    is_kept = torch.ones_like(chances.top, dtype=torch.bool)  # the pending token always is
    is_kept[tree.row_idx] = u * chances.bottom[tree.row_idx] < chances.top[tree.row_idx]
    last = _first_kept(is_kept, tree)
    probs, is_reduced = _left(processed, tree, tree.probs, chances, last)
    logits = torch.where(is_reduced.unsqueeze(1), probs.log(), processed.index_select(0, last))
    return last, sample_last(logits, is_reduced, rows.seeds[last], rows.positions[last], None)


def _chances(processed: Tensor, tree: TreeBatch, draft_probs: Tensor) -> _Chances:
    top = torch.ones(len(processed), dtype=torch.float64, device=processed.device)
    found = _Chances(top=top, bottom=torch.ones_like(top), at_turn=torch.ones_like(top[: len(tree.token_ids)]))
    for families in _by_depth(tree, processed.shape[1]):
        probs = softmax(processed.index_select(0, families.rows))
        own_top, own_bottom = top[families.rows], found.bottom[families.rows]
        for rank, drafts in enumerate(families.children):
            count = len(drafts)  # those without such a child have come to their end
            probs = ops.normalised(probs[:count]) if rank else probs
            token_ids = tree.token_ids[drafts].unsqueeze(1)
            q = draft_probs.index_select(0, drafts)
            chance = own_top[:count] / own_bottom[:count]
            found.at_turn[drafts] = chance
            p_draft, q_draft = (of_node.gather(1, token_ids).squeeze(1) for of_node in (probs, q))
            top[tree.row_idx[drafts]] = ops.following_chance(chance, p_draft, q_draft)
            mass = ops.residual_mass(probs, q, chance)
            is_certain = chance >= 1.0
            own_top[:count] = torch.where(is_certain, 1.0, mass)
            own_bottom[:count] = torch.where(is_certain, 1.0, mass + 1.0 - chance)
            if rank + 1 < len(families.children):
                probs = ops.residual(probs, q, chance)
        top[families.rows], found.bottom[families.rows] = own_top, own_bottom
    return found


def _by_depth(tree: TreeBatch, vocab_size: int) -> Iterator[_Families]:
    """The families of requests that are not greedy from the top down, in batches of bounded size."""
    most = max(1, MOST_ENTRIES // vocab_size)
    levels: list[list[tuple[int, list[int]]]] = [[] for _ in tree.widths]
    for b, shape in enumerate(tree.shapes):
        if tree.is_greedy[b]:
            continue
        first_row = tree.first_rows[b]
        for place, (depth, nodes) in enumerate(zip((0, *shape.depths), shape.children, strict=True)):
            if nodes:
                levels[depth].append((first_row + place, [first_row - b + node for node in nodes]))
    for level in levels:
        level.sort(key=lambda family: -len(family[1]))
        for start in range(0, len(level), most):
            batch = level[start : start + most]
            ranks = [[own[rank] for _, own in batch if len(own) > rank] for rank in range(len(batch[0][1]))]
            lists = [[row for row, _ in batch], *ranks]
            flat = to_device([index for own in lists for index in own], torch.int64, tree.token_ids.device)
            rows, *children = flat.split_with_sizes([len(own) for own in lists])
            yield _Families(rows=rows, children=tuple(children))


def _first_kept(is_kept: Tensor, tree: TreeBatch) -> Tensor:
    """Of each request that is not greedy, the first row of the walk that is kept; [num_random] int64.

    is_kept: [num_rows] bool.
    """
    random = [b for b, is_greedy in enumerate(tree.is_greedy) if not is_greedy]
    walks = [
        (place, tree.first_rows[b] + 1 + node)
        for place, b in enumerate(random)
        for node in tree.shapes[b].children_first
    ]
    owner_idx, row_idx = to_device(list(zip(*walks, strict=True)), torch.int64, is_kept.device)
    turn = torch.arange(len(walks), device=is_kept.device)
    turn = torch.where(is_kept[row_idx], turn, len(walks))
    first = torch.full_like(turn[: len(random)], len(walks)).scatter_reduce(0, owner_idx, turn, "amin")
    last: Tensor = row_idx[first]
    return last


def _left(
    processed: Tensor, tree: TreeBatch, draft_probs: Tensor, chances: _Chances, last: Tensor
) -> tuple[Tensor, Tensor]:
    """What the drafts behind the last rows left of p there, [num_random, vocab], and whether there were any drafts."""
    probs = softmax(processed.index_select(0, last))
    for rank, drafts in enumerate(tree.children[last].unbind(1)):
        known = drafts.clamp(min=0)
        before = ops.normalised(probs) if rank else probs
        reduced = ops.residual(before, draft_probs.index_select(0, known), chances.at_turn[known])
        probs = torch.where((drafts >= 0).unsqueeze(1), reduced, probs)
    return probs, tree.children[last, 0] >= 0
