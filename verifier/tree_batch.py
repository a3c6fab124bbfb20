"""The draft trees of one step as index tensors: each draft's parent, and the logits row that judges it.

Request b's logits rows are the pending token's and then each draft's own, in the order of the drafts; a draft is
judged by its parent's row. All counts that shape a tensor are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.engine.draft_trees import NUM_REMEMBERED_SHAPES, TreeShape
from runner.engine.request import DraftTokens
from runner.engine.sampling import SamplingRows
from runner.engine.upload import index_or_all, to_device, upload

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    token_ids: Tensor  # [num_drafts] int64
    probs: Tensor | None  # [num_drafts, vocab]: q of each draft given its earlier siblings; None = nobody reads them
    request_idx: Tensor  # [num_drafts] int64
    row_idx: Tensor  # [num_drafts] int64: the draft's own row
    parent_row_idx: Tensor  # [num_drafts] int64: the row that judges it
    children: Tensor  # [num_rows, most children] int64: the drafts that a row judges, in their order; then -1
    paths: Tensor  # [num_rows, deepest] int64: the drafts on the way to a row, itself included; then -1
    first_row_idx: Tensor  # [num_requests] int64
    first_draft_idx: Tensor  # [num_requests] int64
    place_in_level: Tensor  # [num_drafts] int64: place among the request's drafts of the same depth
    widths: list[int]  # [deepest]: the most children of any row at each depth, on the host
    is_greedy: list[bool]  # [num_requests], on the host
    shapes: list[TreeShape]  # [num_requests], on the host
    first_rows: list[int]  # [num_requests]: first_row_idx on the host
    widest_level: int  # drafts of one depth and request

    @classmethod
    def build(cls, drafts: DraftTokens, rows: SamplingRows) -> TreeBatch:
        device = rows.seeds.device
        shapes, cu = drafts.shapes, drafts.cu_num_draft_tokens
        assert rows.num_rows == cu[-1] + len(shapes), "verification takes one row for each draft and one for the bonus"
        first_row_idx = drafts.first_logits_rows
        request_idx = [b for b, shape in enumerate(shapes) for _ in shape.parents]
        parent_row_idx = [first_row_idx[b] + 1 + parent for b, s in enumerate(shapes) for parent in s.parents]
        in_level = list(chain.from_iterable(shape.places_in_level for shape in shapes))
        widths = [0] * max(shape.depth for shape in shapes)
        for shape in set(shapes):
            for depth, own in zip((0, *shape.depths), shape.children, strict=True):
                if own:
                    widths[depth] = max(widths[depth], len(own))
        # Rows of request b follow b rows of earlier pending tokens and its own, so draft d has row d + b + 1.
        per_draft = to_device(
            [request_idx, [d + b + 1 for d, b in enumerate(request_idx)], parent_row_idx, in_level],
            torch.int64,
            device,
        )
        per_request = to_device([first_row_idx, cu[:-1]], torch.int64, device)
        return cls(
            token_ids=drafts.token_ids,
            probs=drafts.probs,
            request_idx=per_draft[0],
            row_idx=per_draft[1],
            parent_row_idx=per_draft[2],
            children=_drafts_of(drafts, _children, max(widths), device),
            paths=draft_paths(drafts, device),
            first_row_idx=per_request[0],
            first_draft_idx=per_request[1],
            place_in_level=per_draft[3],
            widths=widths,
            is_greedy=[rows.is_greedy[row] for row in first_row_idx],
            shapes=shapes,
            first_rows=first_row_idx,
            widest_level=max(in_level) + 1,
        )

    @cached_property
    def random_request_idx(self) -> Tensor | None:
        """[num_random] int64: the requests that are not greedy; None = all."""
        random = [b for b, greedy in enumerate(self.is_greedy) if not greedy]
        return index_or_all(random, len(self.is_greedy), self.token_ids.device)

    def tokens_on(self, paths: Tensor) -> Tensor:
        """Token ids of drafts on paths of any shape; -1 stays -1."""
        return torch.where(paths >= 0, self.token_ids[paths.clamp(min=0)], -1)

    def rows_behind(self, drafts: Tensor, rows: Tensor) -> Tensor:
        """Each draft's own row; `rows` where it is -1."""
        return torch.where(drafts >= 0, self.row_idx[drafts.clamp(min=0)], rows)


def draft_paths(drafts: DraftTokens, device: torch.device) -> Tensor:
    """The drafts on the way to every logits row, [num_drafts + num_requests, deepest] int64, then -1."""
    return _drafts_of(drafts, _paths, max(drafts.depths), device)


@lru_cache(maxsize=NUM_REMEMBERED_SHAPES)
def _paths(shape: TreeShape, width: int) -> IntArray:
    """The nodes on the way to each of the request's rows, [num_nodes + 1, width], then -1."""
    return _filled(((), *shape.paths), width)


@lru_cache(maxsize=NUM_REMEMBERED_SHAPES)
def _children(shape: TreeShape, width: int) -> IntArray:
    """The nodes that each of the request's rows judges, [num_nodes + 1, width], then -1."""
    return _filled(shape.children, width)


def _filled(lists: Sequence[Sequence[int]], width: int) -> IntArray:
    return np.array([[*own, *[-1] * (width - len(own))] for own in lists], dtype=np.int64)


def _drafts_of(
    drafts: DraftTokens, nodes_of: Callable[[TreeShape, int], IntArray], width: int, device: torch.device
) -> Tensor:
    """Each row's nodes as drafts of the step, [num_drafts + num_requests, width] int64, then -1."""
    nodes = [nodes_of(shape, width) for shape in drafts.shapes]
    numbers = np.concatenate(nodes)
    starts = np.repeat(drafts.cu_num_draft_tokens[:-1], [len(own) for own in nodes])
    return upload(torch.from_numpy(np.where(numbers < 0, -1, numbers + starts[:, None])), device)
