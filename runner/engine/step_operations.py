"""A whole step's operations, beside its models': Triton kernels on a GPU, or compiled for a CPU.

None reads anything back to the host, so that all of them can be captured or recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.reference.append_tokens import append_tokens as append_tokens_in_torch
from kernels.reference.chain_rows import ChainRows
from kernels.reference.kept_blocks import KeptBlocks
from kernels.reference.kept_blocks import kept_blocks as kept_blocks_in_torch
from kernels.reference.likeliest_tree import NextRows, Tree, TreeCandidates
from kernels.reference.rejection import Verified
from kernels.reference.tree_rows import TreeRows
from kernels.reference.walk_tree import WalkedTree
from runner.engine.backend import runs_kernels


def place_dtype(device: torch.device) -> torch.dtype:
    """Of block tables and what else attention reads."""
    return torch.int32 if runs_kernels(device) else torch.int64


def chain_rows(lengths: Tensor, block_tables: Tensor, **shape: int) -> ChainRows:
    """kernels/reference/chain_rows.py, its tiles of place_dtype."""
    if runs_kernels(lengths):
        from kernels.chain_rows import chain_rows as kernel

        return kernel(lengths, block_tables, **shape)
    from kernels.cpu.chain_rows import chain_rows as on_cpu

    return on_cpu(lengths, block_tables, **shape)


def kept_blocks(lengths: Tensor, block_tables: Tensor, **kept: int) -> KeptBlocks:
    """kernels/reference/kept_blocks.py, which a GPU computes as it is."""
    if runs_kernels(lengths):
        return kept_blocks_in_torch(lengths, block_tables, **kept)
    from kernels.cpu.kept_blocks import kept_blocks as on_cpu

    return on_cpu(lengths, block_tables, **kept)


def tree_rows(lengths: Tensor, slots: Tensor, parents: Tensor, **shape: Any) -> TreeRows:
    """kernels/reference/tree_rows.py, its tiles and branches of place_dtype."""
    if runs_kernels(lengths):
        from kernels.tree_rows import tree_rows as kernel

        return kernel(lengths, slots, parents, **shape)
    from kernels.cpu.tree_rows import tree_rows as on_cpu

    return on_cpu(lengths, slots, parents, **shape)


def fit_drafts(
    draft_token_ids: Tensor, last_token_ids: Tensor, lengths: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """kernels/reference/fit_drafts.py."""
    if runs_kernels(lengths):
        from kernels.fit_drafts import fit_drafts as kernel

        return kernel(draft_token_ids, last_token_ids, lengths, limits)
    from kernels.cpu.fit_drafts import fit_drafts as on_cpu

    return on_cpu(draft_token_ids, last_token_ids, lengths, limits)


def mask_and_penalise(logits: Tensor, **tables: Tensor | None) -> Tensor:
    """kernels/reference/mask_and_penalise.py."""
    if runs_kernels(logits):
        from kernels.mask_and_penalise import mask_and_penalise as kernel

        return kernel(logits, **tables)
    from kernels.cpu.mask_and_penalise import mask_and_penalise as on_cpu

    return on_cpu(logits, **tables)


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """kernels/reference/top_logprobs.py."""
    if runs_kernels(logits):
        from kernels.top_logprobs import top_logprobs as kernel

        return kernel(logits, token_ids, num_top)
    from kernels.cpu.top_logprobs import top_logprobs as on_cpu

    return on_cpu(logits, token_ids, num_top)


def follow_verified(lengths: Tensor, last_token_ids: Tensor, verified: Verified, said: Tensor | None) -> Tensor:
    """kernels/reference/follow_verified.py."""
    if runs_kernels(lengths):
        from kernels.follow_verified import follow_verified as kernel

        return kernel(lengths, last_token_ids, *verified, said)
    from kernels.cpu.follow_verified import follow_verified as on_cpu

    return on_cpu(lengths, last_token_ids, *verified, said)


def uniforms(
    seeds: Tensor, positions: Tensor, draft_steps: Tensor | None = None, *, stream: int, num_entries: int = 1
) -> Tensor:
    """Float64 in (0, 1), [num_rows, num_entries]; kernels/reference/philox.py, bit for bit."""
    keys = (seeds, positions, draft_steps)
    if runs_kernels(seeds):
        from kernels.uniforms import uniforms as kernel

        return kernel(*keys, stream=stream, num_entries=num_entries)
    from kernels.cpu.uniforms import uniforms as on_cpu

    return on_cpu(*keys, stream=stream, num_entries=num_entries)


def verify_strict(drawn: Tensor, draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, *, longest: int) -> Verified:
    """drawn: [num_drafts + num_requests] int64; the others as kernels/rejection.py has them."""
    if runs_kernels(drawn):
        from kernels.rejection import verify_strict as kernel

        return kernel(drawn, draft_token_ids, cu_num_draft_tokens, max_num_draft_tokens=longest)
    from kernels.cpu.rejection import verify_strict as on_cpu

    return on_cpu(drawn, draft_token_ids, cu_num_draft_tokens, max_num_draft_tokens=longest)


def verify_synthetic(
    drawn: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rates: Tensor,
    *,
    longest: int,
) -> Verified:
    """drawn: [num_drafts + num_requests] int64; the others as kernels/rejection.py has them."""
    keys = (draft_token_ids, cu_num_draft_tokens, seeds, positions, rates)
    if runs_kernels(drawn):
        from kernels.rejection import verify_synthetic as kernel

        return kernel(drawn, *keys, max_num_draft_tokens=longest)
    from kernels.cpu.rejection import verify_synthetic as on_cpu

    return on_cpu(drawn, *keys, max_num_draft_tokens=longest)


def walk_tree(drawn: Tensor, draft_token_ids: Tensor, parents: Tensor, slots: Tensor, *, depth: int) -> WalkedTree:
    """kernels/reference/walk_tree.py."""
    if runs_kernels(drawn):
        from kernels.walk_tree import walk_tree as kernel

        return kernel(drawn, draft_token_ids, parents, slots, depth=depth)
    from kernels.cpu.walk_tree import walk_tree as on_cpu

    return on_cpu(drawn, draft_token_ids, parents, slots, depth=depth)


def add_level(
    tree: TreeCandidates, level: int, token_ids: Tensor, log_probs: Tensor, *, num_rows: int, num_next: int = 0
) -> NextRows:
    """kernels/reference/likeliest_tree.py."""
    if runs_kernels(token_ids):
        from kernels.likeliest_tree import add_level as kernel

        return kernel(tree, level, token_ids, log_probs, num_rows=num_rows, num_next=num_next)
    from kernels.cpu.likeliest_tree import add_level as on_cpu

    return on_cpu(tree, level, token_ids, log_probs, num_rows=num_rows, num_next=num_next)


def likeliest_tree(candidates: TreeCandidates, num_nodes: int) -> Tree:
    """kernels/reference/likeliest_tree.py."""
    if runs_kernels(candidates.token_ids):
        from kernels.likeliest_tree import likeliest_tree as kernel

        return kernel(candidates, num_nodes)
    from kernels.cpu.likeliest_tree import likeliest_tree as on_cpu

    return on_cpu(candidates, num_nodes)


def match_in_tree(match: Tensor, tree: Tree, *, depth: int) -> Tree:
    """kernels/reference/match_in_tree.py."""
    if runs_kernels(match):
        from kernels.match_in_tree import match_in_tree as kernel

        return kernel(match, tree, depth=depth)
    from kernels.cpu.match_in_tree import match_in_tree as on_cpu

    return on_cpu(match, tree, depth=depth)


def remember_candidates(
    table_token_ids: Tensor, table_log_probs: Tensor, token_ids: Tensor, candidates: Tensor, log_probs: Tensor
) -> None:
    """kernels/reference/remember_candidates.py."""
    told = (token_ids, candidates, log_probs)
    if runs_kernels(token_ids):
        from kernels.remember_candidates import remember_candidates as kernel

        kernel(table_token_ids, table_log_probs, *told)
        return
    from kernels.cpu.remember_candidates import remember_candidates as on_cpu

    on_cpu(table_token_ids, table_log_probs, *told)


def append_tokens(token_ids: Tensor, lengths: Tensor, slots: Tensor, new_token_ids: Tensor) -> None:
    """kernels/reference/append_tokens.py, which a GPU computes as it is."""
    if runs_kernels(token_ids):
        append_tokens_in_torch(token_ids, lengths, slots, new_token_ids)
        return
    from kernels.cpu.append_tokens import append_tokens as on_cpu

    on_cpu(token_ids, lengths, slots, new_token_ids)
