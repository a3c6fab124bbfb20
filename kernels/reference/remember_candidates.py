"""A table of what a model last held likely behind each token: rows of it are written anew (token recycling)."""

from __future__ import annotations

import torch
from torch import Tensor


def remember_candidates(
    table_token_ids: Tensor,  # [vocab + 1, width] int64: the candidates behind each token; the last row is nobody's
    table_log_probs: Tensor,  # [vocab + 1, width] float32: of each of them
    token_ids: Tensor,  # [num_rows] int64: whose candidates are told, -1: nobody's
    candidates: Tensor,  # [num_rows, width] int64
    log_probs: Tensor,  # [num_rows, width] float32, descending
) -> None:
    """Where several rows tell of one token, the surest of them counts, by its first candidate, and of equals the first.

    So neither a race nor the order of a tree's nodes decides what is drafted.
    """
    rows = torch.arange(len(token_ids), device=token_ids.device)
    sureness = torch.where(log_probs[:, 0].isnan(), float("-inf"), log_probs[:, 0])
    is_surer = (sureness > sureness.unsqueeze(1)) | ((sureness == sureness.unsqueeze(1)) & (rows < rows.unsqueeze(1)))
    is_told_better = ((token_ids == token_ids.unsqueeze(1)) & is_surer).any(dim=1)
    places = torch.where((token_ids < 0) | is_told_better, len(table_token_ids) - 1, token_ids)
    # What several rows write for nobody is nobody's: every other place is written once.
    table_token_ids.index_copy_(0, places, candidates)
    table_log_probs.index_copy_(0, places, log_probs)
