"""Block tables of what drafts attend to where they leave the middle of a text out: its first blocks and its last ones.

Keys have been turned where they stand in the text, so that attention over such a table is attention over the keys
that it leads to (StreamingLLM, arXiv 2309.17453: the first tokens and a window).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeptBlocks(NamedTuple):
    lengths: Tensor  # [num_requests] int64: without the tokens of the blocks that are left out
    block_tables: Tensor  # [num_requests, num_kept], as the tables themselves


def kept_blocks(
    lengths: Tensor,  # [num_requests] int64: tokens; 0: the request is absent
    block_tables: Tensor,  # [num_requests, max_blocks] integers
    *,
    num_first: int,  # blocks
    num_recent: int,  # tokens before a request's end that are kept, with what else is in the block of the first of them
    num_kept: int,  # columns of a table: num_first and what lies behind, places of drafts included; at most max_blocks
    block_size: int,
) -> KeptBlocks:
    num_left_out = ((lengths - num_recent) // block_size).clamp(min=num_first) - num_first
    columns = torch.arange(num_kept, device=lengths.device)
    # A text's last places may have no block yet.
    places = (columns + num_left_out.unsqueeze(1) * (columns >= num_first)).clamp(max=block_tables.shape[1] - 1)
    return KeptBlocks(lengths - num_left_out * block_size, block_tables.gather(1, places))
