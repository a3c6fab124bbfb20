"""Traversal verification: block verification of draft trees, from the leaves up (arXiv 2505.12398).

On the way down a node's chance is min(P * r(x) / q(x), 1), with P its parent's and r what the siblings before it have
left of the parent's law. A leaf is kept with its chance, all of its path with it. One that is not kept is taken out:
with S = sum(max(P * r - q, 0)) its parent's law becomes max(P * r - q, 0) / S and its chance S / (S + 1 - P), the next
sibling's leaves have their turn, and a parent without any is a leaf itself. The pending token's chance is 1.
One child at every depth is block verification (arXiv 2403.10444), bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.philox import Stream, uniforms
from runner.engine.sampling import SamplingRows, sample_at, take_rows
from verifier.tree_batch import TreeBatch


@dataclass(kw_only=True)
class _Way:
    """The way of each request from its pending token to where it is; entries behind its depth mean nothing."""

    depth: Tensor  # [num_judged] int64
    drafts: Tensor  # [num_judged, deepest + 1] int64; -1 at depth 0
    rows: Tensor  # [num_judged, deepest + 1] int64
    next_child: Tensor  # [num_judged, deepest + 1] int64: rank of the child whose turn it is
    chance: Tensor  # [2, num_judged, deepest + 1] float64: numerator and denominator
    laws: Tensor  # [num_judged, deepest + 1, vocab]: what is left of p, unnormalised where something was taken
    is_reduced: Tensor  # [num_judged, deepest + 1] bool: something was taken

    def enter(self, at: Tensor, where: Tensor, draft: Tensor, row: Tensor, chance: Tensor, law: Tensor) -> None:
        """Come to a draft at depth `at`, for the requests `where`."""
        own = torch.arange(len(at), device=at.device)
        one, zero = torch.ones_like(chance), torch.zeros_like(at)
        news = (
            (self.drafts, draft),
            (self.rows, row),
            (self.next_child, zero),
            (self.chance[0], chance),
            (self.chance[1], one),
            (self.is_reduced, zero.bool()),
        )
        for entries, new in news:
            entries[own, at] = torch.where(where, new, entries[own, at])
        self.laws[own, at] = torch.where(where.unsqueeze(1), law, self.laws[own, at])


def traverse(processed: Tensor, tree: TreeBatch, rows: SamplingRows, requests: Tensor | None) -> tuple[Tensor, Tensor]:
    """(last row, token behind it), both [num_judged] int64.

    Args:
        requests: [num_judged] int64, those to judge, none of them greedy; None = all. Without laws they are chains.
    """
    first_rows = take_rows(tree.first_row_idx, requests)
    way = _start(processed, tree, first_rows)
    own = torch.arange(len(first_rows), device=first_rows.device)
    # It looks at drafts beyond the cut: no step may meet the noise of an earlier one.
    steps = rows.positions[tree.first_row_idx[tree.request_idx]]
    judges = tree.parent_row_idx
    u = uniforms(rows.seeds[judges], rows.positions[judges], Stream.ACCEPT, steps, num_entries=tree.widest_level)
    u = u.gather(1, tree.place_in_level.unsqueeze(1)).squeeze(1)  # [num_drafts]
    is_done = torch.zeros_like(first_rows, dtype=torch.bool)
    most_children = tree.children.shape[1]
    for _ in range(2 * tree.most_drafts + 1):  # each draft is come to once and judged once
        depth = way.depth
        row, draft, rank = way.rows[own, depth], way.drafts[own, depth], way.next_child[own, depth]
        children = tree.children[row]
        child = children.gather(1, rank.clamp(max=most_children - 1).unsqueeze(1)).squeeze(1)
        child = torch.where(rank < most_children, child, -1)
        goes_down = ~is_done & (child >= 0)
        top, bottom = way.chance[0][own, depth], way.chance[1][own, depth]
        is_kept = (depth == 0) | (u[draft.clamp(min=0)] * bottom < top)
        is_done = is_done | ((child < 0) & is_kept)
        goes_up = ~is_done & ~goes_down
        _go_up(way, tree, own, goes_up)
        _go_down(way, processed, tree, own, goes_down, child)
        way.depth = depth + goes_down.to(torch.int64) - goes_up.to(torch.int64)
    last, is_reduced = way.rows[own, way.depth], way.is_reduced[own, way.depth]
    logits = torch.where(is_reduced.unsqueeze(1), way.laws[own, way.depth].log(), processed.index_select(0, last))
    stream = torch.where(is_reduced, int(Stream.RESIDUAL), int(Stream.TARGET))
    return last, sample_at(logits, rows.seeds[last], rows.positions[last], None, stream)


def _start(processed: Tensor, tree: TreeBatch, first_rows: Tensor) -> _Way:
    shape = (len(first_rows), len(tree.widths) + 1)
    way = _Way(
        depth=torch.zeros_like(first_rows),
        drafts=torch.full(shape, -1, dtype=torch.int64, device=first_rows.device),
        rows=first_rows.unsqueeze(1).repeat(1, shape[1]),
        next_child=torch.zeros(shape, dtype=torch.int64, device=first_rows.device),
        chance=torch.ones(2, *shape, dtype=torch.float64, device=first_rows.device),
        laws=processed.new_zeros(*shape, processed.shape[1]),
        is_reduced=torch.zeros(shape, dtype=torch.bool, device=first_rows.device),
    )
    way.laws[:, 0] = processed.index_select(0, first_rows).softmax(dim=-1)
    return way


def _left(way: _Way, own: Tensor, depth: Tensor) -> Tensor:
    """What is left of the law at a depth, normalised; p itself where nothing was taken."""
    law = way.laws[own, depth]
    return torch.where(way.is_reduced[own, depth].unsqueeze(1), ops.normalised(law), law)


def _go_down(way: _Way, processed: Tensor, tree: TreeBatch, own: Tensor, where: Tensor, child: Tensor) -> None:
    known = child.clamp(min=0)
    token_ids = tree.token_ids[known].unsqueeze(1)
    q = None if tree.probs is None else tree.probs[known].gather(1, token_ids).squeeze(1)
    p = _left(way, own, way.depth).gather(1, token_ids).squeeze(1)
    top, bottom = way.chance[0][own, way.depth], way.chance[1][own, way.depth]
    chance = ops.following_chance(top / bottom, p, q)
    row = tree.row_idx[known]
    deepest = way.rows.shape[1] - 1
    law = processed.index_select(0, row).softmax(dim=-1)
    way.enter((way.depth + 1).clamp(max=deepest), where, child, row, chance, law)


def _go_up(way: _Way, tree: TreeBatch, own: Tensor, where: Tensor) -> None:
    """Take the draft at each request's depth out of its parent's law and chance."""
    parent = (way.depth - 1).clamp(min=0)
    known = way.drafts[own, way.depth].clamp(min=0)
    token_ids = tree.token_ids[known]
    law = _left(way, own, parent)
    chance = way.chance[0][own, parent] / way.chance[1][own, parent]
    if tree.probs is None:
        mass = ops.residual_mass_one_hot(law.gather(1, token_ids.unsqueeze(1)).squeeze(1), chance)
        reduced = ops.residual_one_hot(law, token_ids)
    else:
        q = tree.probs.index_select(0, known)
        mass, reduced = ops.residual_mass(law, q, chance), ops.residual(law, q, chance)
    is_certain = chance >= 1.0
    news = (
        (way.chance[0], torch.where(is_certain, 1.0, mass)),
        (way.chance[1], torch.where(is_certain, 1.0, mass + 1.0 - chance)),
        (way.next_child, way.next_child[own, parent] + 1),
        (way.is_reduced, torch.ones_like(where)),
    )
    for entries, new in news:
        entries[own, parent] = torch.where(where, new, entries[own, parent])
    way.laws[own, parent] = torch.where(where.unsqueeze(1), reduced, way.laws[own, parent])
