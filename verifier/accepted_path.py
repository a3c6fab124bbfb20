"""Turns the accepted path of a draft tree into a chain, as if its tokens had been drafted as one.

Drafts are stored and computed in the order of the tree. Here the accepted ones come to the front, rows and cached keys
alike, so that no code behind the verifier sees that there was a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.request import DraftTokens, Request
from runner.engine.upload import to_device


def row_order(path: Tensor, first_rows: Sequence[int], num_rows: int) -> Tensor:
    """[num_rows] int64: rows with each request's accepted path in front; behind it they mean nothing.

    path: [num_requests, deepest] int64, as in VerifyOutput. first_rows: each request's pending token's, on the host.
    """
    first = to_device(first_rows, torch.int64, path.device).unsqueeze(1)
    depths = torch.arange(1, path.shape[1] + 1, device=path.device)
    order = torch.arange(num_rows + 1, device=path.device)  # the last entry takes what is behind a path
    order[torch.where(path >= 0, first + depths, num_rows)] = first + 1 + path
    return order[:num_rows]


def slot_moves(
    path: Tensor, drafts: DraftTokens, requests: Sequence[Request], block_size: int
) -> tuple[Tensor, Tensor]:
    """(source, target) cache slots that bring every accepted draft to its position, [num_requests, deepest] int64 each.

    Draft j of a request lies behind its committed tokens and j drafts; slot 0 to 0 where there is nothing to move.
    """
    slots = []
    for request, count in zip(requests, drafts.num_draft_tokens, strict=True):
        places = range(request.num_tokens, request.num_tokens + count)
        slots += [request.block_table[p // block_size] * block_size + p % block_size for p in places]
    of_drafts = to_device(slots, torch.int64, path.device)
    first = to_device(drafts.cu_num_draft_tokens[:-1], torch.int64, path.device).unsqueeze(1)
    depths = torch.arange(path.shape[1], device=path.device)
    is_accepted = path >= 0
    source, target = (torch.where(is_accepted, first + places, 0) for places in (path, depths))
    return torch.where(is_accepted, of_drafts[source], 0), torch.where(is_accepted, of_drafts[target], 0)
