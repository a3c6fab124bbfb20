"""The draft trees of one step as index tensors: each draft's parent, and the logits row that judges it.

Request b's logits rows are the pending token's and then each draft's own, in the order of the drafts; a draft is
judged by its parent's row. All counts that shape a tensor are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from runner.engine.draft_trees import TreeShape
from runner.engine.request import DraftTokens
from runner.engine.sampling import SamplingRows
from runner.engine.upload import index_or_all, to_device


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    token_ids: Tensor  # [num_drafts] int64
    probs: Tensor | None  # [num_drafts, vocab]: q of each draft given its earlier siblings; None = candidate sets
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
        children = [[cu[b] + node for node in own] for b, shape in enumerate(shapes) for own in shape.children]
        widths = [0] * max(shape.depth for shape in shapes)
        for shape in shapes:
            for depth, own in zip((0, *shape.depths), shape.children, strict=True):
                if own:
                    widths[depth] = max(widths[depth], len(own))
        in_level = [s.depths[:node].count(depth) for s in shapes for node, depth in enumerate(s.depths)]
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
            children=to_device(_filled(children, max(widths)), torch.int64, device),
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
    def is_judged(self) -> list[bool]:
        """[num_requests]: drafts with probs, or a chain, and not greedy; the others follow the target's own tokens."""
        return [
            not greedy and (shape.is_chain or self.probs is not None)
            for greedy, shape in zip(self.is_greedy, self.shapes, strict=True)
        ]

    @cached_property
    def judged(self) -> Tensor | None:
        """[num_judged] int64: the requests that are judged; None = all."""
        used = [b for b, is_judged in enumerate(self.is_judged) if is_judged]
        return index_or_all(used, len(self.shapes), self.token_ids.device)

    def tokens_on(self, paths: Tensor) -> Tensor:
        """Token ids of drafts on paths of any shape; -1 stays -1."""
        return torch.where(paths >= 0, self.token_ids[paths.clamp(min=0)], -1)

    def rows_behind(self, drafts: Tensor, rows: Tensor) -> Tensor:
        """Each draft's own row; `rows` where it is -1."""
        return torch.where(drafts >= 0, self.row_idx[drafts.clamp(min=0)], rows)


def draft_paths(drafts: DraftTokens, device: torch.device) -> Tensor:
    """The drafts on the way to every logits row, [num_drafts + num_requests, deepest] int64, then -1."""
    paths = [
        [start + node for node in path]
        for start, shape in zip(drafts.cu_num_draft_tokens, drafts.shapes, strict=False)
        for path in ((), *shape.paths)
    ]
    return to_device(_filled(paths, max(drafts.depths)), torch.int64, device)


def _filled(lists: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[*own, *[-1] * (width - len(own))] for own in lists]
