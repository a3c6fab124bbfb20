"""Finds the accepted path in each request's draft tree, for the rules of verifier/rules.py; vectorised over requests.

A path starts at the pending token and goes down through accepted drafts. Each function returns the logits row of the
path's last token, for all requests of the batch or for some. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.philox import Stream
from kernels.reference.sampling import softmax
from runner.engine.sampling import SamplingRows, rows_at, sample_last
from runner.engine.step_operations import uniforms
from verifier.tree_batch import TreeBatch


def follow_tokens(tree: TreeBatch, target_token_ids: Tensor) -> Tensor:
    """Down to the child that is the target's own token, as long as there is one; the last row, [num_requests] int64.

    Whatever the tree says and wherever its tokens come from, what is committed is the target's own text.

    target_token_ids: [num_rows] int64.
    """
    row = tree.first_row_idx
    for width in tree.widths:
        children = tree.children[row, :width]
        is_target = tree.tokens_on(children) == target_token_ids[row].unsqueeze(1)
        child = torch.where(is_target, children, -1).amax(dim=1)
        row = tree.rows_behind(child, row)
    return row


def reject_recursively(processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Judge siblings one after another; each that is rejected takes its q off the target's distribution.

    Sibling i, drawn from q_i given the ones before it, stays iff u_i * q_i(x_i) < r(x_i), with r = p for the first;
    else r becomes max(r - q_i, 0), normalised. Where no sibling stays the token comes from r, and from p where there
    are none (recursive rejection sampling, arXiv 2402.14160, without replacement as in arXiv 2402.12374). One child
    at every depth is the rule of chains, bit for bit.

    Returns:
        (last row, token behind it), both [num_random] int64, of the requests that are not greedy.
    """
    assert tree.probs is not None, "candidates that were not drawn follow the target's own tokens"
    row = rows_at(tree.first_row_idx, tree.random_request_idx)
    is_open = torch.ones_like(row, dtype=torch.bool)
    is_rejected = ~is_open
    left: Tensor | None = None  # [num_random, vocab]: the residual behind the last row, where its drafts were rejected
    for width in tree.widths:
        p = softmax(processed.index_select(0, row))
        remaining, child = p, torch.full_like(row, -1)
        u = uniforms(rows.seeds[row], rows.positions[row], stream=Stream.ACCEPT, num_entries=width)
        for rank, drafts in enumerate(tree.children[row, :width].unbind(1)):
            known = drafts.clamp(min=0)
            token_ids = tree.token_ids[known]
            q = tree.probs.index_select(0, known)
            r = remaining if rank == 0 else ops.normalised(remaining)
            is_due = is_open & (drafts >= 0) & (child < 0)
            stays = is_due & ops.accept_probabilistic(_at(r, token_ids), _at(q, token_ids), u[:, rank])
            child = torch.where(stays, drafts, child)
            remaining = torch.where((is_due & ~stays).unsqueeze(1), ops.residual(r, q), remaining)
        ends_here = is_open & (child < 0) & (tree.children[row, 0] >= 0)
        is_rejected = is_rejected | ends_here
        left = remaining if left is None else torch.where(ends_here.unsqueeze(1), remaining, left)
        is_open = is_open & (child >= 0)
        row = tree.rows_behind(child, row)
    assert left is not None, "a tree has a draft"
    logits = torch.where(is_rejected.unsqueeze(1), left.log(), processed.index_select(0, row))
    return row, sample_last(logits, is_rejected, rows.seeds[row], rows.positions[row], None)


def longest_accepted(tree: TreeBatch, accepted: Tensor) -> Tensor:
    """To the deepest draft that is accepted with all its ancestors, the first of several; [num_requests] int64.

    accepted: [num_drafts] bool.
    """
    num_rows = tree.paths.shape[0]
    is_reached = torch.zeros(num_rows, dtype=torch.bool, device=accepted.device)
    is_reached = is_reached.index_fill(0, tree.first_row_idx, True)
    for _ in tree.widths:
        is_reached = is_reached.index_copy(0, tree.row_idx, accepted & is_reached[tree.parent_row_idx])
    # One number to compare by: the depth first, then the earlier row.
    rank = (tree.paths >= 0).sum(dim=1) * num_rows + num_rows - 1
    rank = (rank - torch.arange(num_rows, device=rank.device))[tree.row_idx]
    rank = torch.where(is_reached[tree.row_idx], rank, -1)
    best = num_rows - 1 - tree.first_row_idx
    best = best.scatter_reduce(0, tree.request_idx, rank, "amax", include_self=True)
    return num_rows - 1 - best % num_rows


def follow_rates(tree: TreeBatch, rows: SamplingRows, rates: Sequence[float]) -> Tensor:
    """Down the first children, each accepted at the rate of its depth; [num_requests] int64."""
    row = tree.first_row_idx
    is_open = torch.ones_like(row, dtype=torch.bool)
    for rate in rates[: len(tree.widths)]:
        noise = uniforms(rows.seeds[row], rows.positions[row], stream=Stream.ACCEPT).squeeze(1)
        first = tree.children[row, 0]
        is_open = is_open & (noise < rate) & (first >= 0)
        row = tree.rows_behind(torch.where(is_open, first, -1), row)
    return row


def _at(probs: Tensor, token_ids: Tensor) -> Tensor:
    return probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
