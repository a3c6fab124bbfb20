"""Operations of draft heads alone, computed as a decoder's are (runner/engine/operations.py)."""

from __future__ import annotations

import torch

from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.block_conv import block_conv as block_conv_in_torch
from kernels.reference.candidate_logits import candidate_logits as candidate_logits_in_torch
from kernels.reference.cluster_logits import cluster_logits as cluster_logits_in_torch
from kernels.reference.partial_sums import PartialSums
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.operations import Rows


def cluster_logits(
    states: torch.Tensor,  # [num_rows, hidden]; rows may be strided
    table: torch.Tensor,  # [num_clusters, cluster_size, hidden]
    token_ids: torch.Tensor,  # [num_clusters, cluster_size] int64
    chosen: torch.Tensor,  # [num_rows, num_chosen] int64
) -> torch.Tensor:  # [num_rows, vocab] float32
    """Logits of the tokens of some clusters (kernels/reference/cluster_logits.py)."""
    if is_compiled(states):
        from kernels.cpu.cluster_logits import cluster_logits as on_cpu

        return on_cpu(states, table, token_ids, chosen)
    if not runs_kernels(states):
        return cluster_logits_in_torch(states, table, token_ids, chosen)
    from kernels.cluster_logits import cluster_logits as kernel

    return kernel(states, table, token_ids, chosen)


def candidate_logits(
    unary: torch.Tensor,  # [num_owners, num_candidates] float32; rows may be strided, as the next two's, and tokens
    candidates: torch.Tensor,  # [num_owners, num_candidates] int64
    hidden: torch.Tensor,  # [num_owners, rank]
    predecessors: torch.Tensor,  # [vocab, rank]
    successors: torch.Tensor,  # [vocab, rank]
    token_ids: torch.Tensor,  # [num_rows] int64, owner by owner, equally many of each
) -> torch.Tensor:  # [num_rows, vocab] float32
    """Logits of candidates behind the tokens before them (kernels/reference/candidate_logits.py)."""
    arguments = (unary, candidates, hidden, predecessors, successors, token_ids)
    if is_compiled(hidden):
        from kernels.cpu.candidate_logits import candidate_logits as on_cpu

        return on_cpu(*arguments)
    if not runs_kernels(hidden):
        return candidate_logits_in_torch(*arguments)
    from kernels.candidate_logits import candidate_logits as kernel

    return kernel(*arguments)


def block_conv(
    x: Rows,  # [num_rows, width]
    deltas: torch.Tensor,  # [num_rows, taps * num_groups]; rows may be strided
    base: torch.Tensor,  # [taps, width]
    segments: RecurrentSegments,
) -> torch.Tensor:  # [num_rows, width]
    """A short convolution within each request's rows (kernels/reference/block_conv.py)."""
    if not isinstance(x, PartialSums):
        if is_compiled(x):
            from kernels.cpu.block_conv import block_conv as on_cpu

            return on_cpu(x, deltas, base, segments)
        if not runs_kernels(x):
            return block_conv_in_torch(x, deltas, base, segments)
    from kernels.block_conv import block_conv as kernel

    return kernel(x, deltas, base, segments)
