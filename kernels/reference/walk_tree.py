"""The strict rule over draft trees on the device: down from child to child as long as one is the target's own token.

The result holds what makes a chain of the accepted nodes: their rows, and where their KV belongs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class WalkedTree(NamedTuple):
    token_ids: Tensor  # [num_requests, depth + 1] int64: accepted drafts, the target's token, then -1
    num_accepted_tokens: Tensor  # [num_requests] int64
    num_draft_tokens: Tensor  # [num_requests] int64; 0 for absent requests
    source_slots: Tensor  # [num_requests, depth] int64: of the accepted nodes; then 0
    target_slots: Tensor  # [num_requests, depth] int64: of the places behind the pending token; as far as source_slots
    rows: Tensor  # [num_requests * (depth + 1)] int64: the pending token's, the accepted nodes', then the first again


def walk_tree(
    drawn: Tensor,  # [num_requests * (num_nodes + 1)] int64: the target's token behind each row; -1 in absent requests
    draft_token_ids: Tensor,  # [num_requests, num_nodes] int64, siblings distinct; -1: no draft
    parents: Tensor,  # [num_requests, num_nodes] int64: an earlier node, -1 = the pending token
    slots: Tensor,  # [num_requests, num_nodes + 1] int64: cache slot of the pending token, then of every node
    *,
    depth: int,  # of the deepest node, at most
) -> WalkedTree:
    """A request is absent if drawn is -1 behind its pending token; its tokens are -1, its counts 0."""
    num_requests, num_nodes = parents.shape
    by_row = drawn.view(num_requests, num_nodes + 1)
    own_rows = torch.arange(num_nodes + 1, device=drawn.device)
    is_draft = draft_token_ids >= 0
    last = torch.zeros(num_requests, 1, dtype=torch.int64, device=drawn.device)
    way = [last]
    for _ in range(depth):
        is_next = is_draft & (parents == last - 1) & (draft_token_ids == by_row.gather(1, last))
        way.append(pad(torch.where(is_next, own_rows[1:], 0), (1, 0)).amax(dim=1, keepdim=True))  # there may be no node
        last = torch.where(way[-1] > 0, way[-1], last)
    rows = torch.cat(way, dim=1)
    accepted, is_accepted = rows[:, 1:], rows[:, 1:] > 0
    behind = torch.where(is_accepted, by_row.gather(1, accepted), -1)
    places = torch.arange(1, depth + 1, device=drawn.device).clamp(max=num_nodes)
    return WalkedTree(
        torch.cat((by_row[:, :1], behind), dim=1),
        is_accepted.sum(dim=1),
        torch.where(by_row[:, 0] >= 0, is_draft.sum(dim=1), 0),
        torch.where(is_accepted, slots.gather(1, accepted), 0),
        torch.where(is_accepted, slots[:, places], 0),
        (rows + torch.arange(num_requests, device=drawn.device).unsqueeze(1) * (num_nodes + 1)).flatten(),
    )
