"""Rows of a launch over draft trees: each row's position, the slot of its KV, and the slots that it sees.

The trees' parents are on the device, so the branches of segments are computed there and not laid out by the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NO_BRANCH = 2**31 - 1  # a position that no request reaches


class TreeRows(NamedTuple):
    """Rows request by request, each a segment of its own.

    All rows of a request see the same keys in the splits that end before its tree begins. Shared tiles attend to these
    keys, rows_per_tile rows at a time, and a tile for each row attends to the rest. Rows of an absent request have
    position 0, are stored in the null block and attend to it, as those of chain_rows do.
    """

    positions: Tensor  # [num_requests * num_rows] int64
    slots: Tensor  # [num_requests * num_rows] int64: block * block_size + offset
    predicted: Tensor  # [num_requests * num_rows] int64: the position that each row predicts; -1 in absent requests
    tile_segments: Tensor  # [num_tiles] int32, as the next five: kernels/paged_segments.py; shared tiles first
    tile_rows: Tensor
    tile_sizes: Tensor
    tile_positions: Tensor
    first_keys: Tensor
    last_keys: Tensor
    branch_starts: Tensor  # [num_requests * num_rows] int32
    branch_slots: Tensor  # [num_requests * num_rows, depth] int32: of the nodes on a row's path, its own last; then 0


def tree_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    slots: Tensor,  # [num_requests, num_nodes + 1] int64: cache slot of the pending token, then of every node
    parents: Tensor,  # [num_requests, num_nodes] int64: an earlier node, -1 = the pending token
    *,
    first: int,  # rows from this one on are wanted: 0 = the pending token's, j + 1 = node j's
    offset: int,  # the pending token stands at lengths + offset
    depth: int,  # of the deepest node, at most
    rows_per_tile: int,
    split_keys: int | None,  # of the attention; None: it is not split, and no tile is shared
) -> TreeRows:
    num_requests, num_nodes = parents.shape
    above = pad(parents + 1, (1, 0))  # the row above each row; above the pending token's is itself
    ways = [torch.arange(first, num_nodes + 1, device=lengths.device).expand(num_requests, -1)]
    for _ in range(depth):
        ways.append(torch.where(ways[-1] > 0, above.gather(1, ways[-1]), 0))
    way = torch.stack(ways, dim=2)  # [num_requests, num_rows, depth + 1]: rows from each row up to the pending token's
    depths = (way > 0).sum(dim=2)
    is_here = (lengths > 0).unsqueeze(1).expand_as(depths)
    pending = (lengths + offset).unsqueeze(1)
    positions = torch.where(is_here, pending + depths, 0)
    # The same paths reversed: from a child of the pending token down to the row.
    steps = depths.unsqueeze(2) - 1 - torch.arange(depth, device=lengths.device)
    is_on_way = is_here.unsqueeze(2) & (steps >= 0)
    on_way = torch.where(is_on_way, way.gather(2, steps.clamp(min=0)), 0)
    own = torch.arange(positions.numel(), device=lengths.device).view_as(positions)
    shared = own[:, ::rows_per_tile] if split_keys is not None else own[:, :0]  # the first rows of shared tiles
    num_shared_keys = torch.where(is_here[:, :1], pending + 1, 0)  # those before the tree, in whole splits
    num_shared_keys = num_shared_keys // (split_keys or 1) * (split_keys or 0)
    shared_sizes = (own[:, -1:] + 1 - shared).clamp(max=rows_per_tile) * (num_shared_keys > 0)
    last_shared = (num_shared_keys - 1).clamp(min=0).expand_as(shared)
    tiles = (
        (shared, own),
        (shared, own),
        (shared_sizes, torch.ones_like(own)),
        (last_shared, positions),
        (torch.zeros_like(shared), num_shared_keys.expand_as(own)),
        (last_shared, positions),
    )
    branch_slots = torch.where(is_on_way, slots.gather(1, on_way.flatten(1)).view_as(on_way), 0)
    return TreeRows._make(
        (
            positions.flatten(),
            torch.where(is_here, slots[:, first:], 0).flatten(),
            torch.where(is_here, positions + 1, -1).flatten(),
            *(torch.cat([part.flatten() for part in parts]).to(torch.int32) for parts in tiles),
            torch.where(is_here, pending + 1, NO_BRANCH).flatten().to(torch.int32),
            branch_slots.flatten(0, 1).to(torch.int32),
        )
    )
