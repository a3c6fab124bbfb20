"""What a launch of recurrent layers goes on from: its rows by request, and whose states they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentSegments:
    """Consecutive tokens of requests, all on the device, int64.

    A token is certain if it stands before its segment's end: it is never taken back. States keep what is certain, and
    the rows of the others beside it, so that the next launch may begin behind any of them: taking drafts back is a
    number here, too. A segment may begin behind its end, with rows that are kept in between.
    """

    starts: Tensor  # [num_segments]: position of the first row, less the offset
    ends: Tensor  # [num_segments]: position behind the last certain token, less its offset
    slots: Tensor  # [num_segments]: of the states; 0: nobody's, whose rows yield zeros and leave nothing behind
    offset: int = 0
    end_offset: int = 0
    num_rows: int | None = None  # of each segment, one segment behind the other; None: as the next two say
    first_rows: Tensor | None = None  # [num_segments], in the launch
    counts: Tensor | None = None  # [num_segments]: rows; 0 = padding

    def rows(self) -> tuple[Tensor, Tensor]:
        """(first_rows, counts), whichever way they are said."""
        if self.first_rows is not None and self.counts is not None:
            return self.first_rows, self.counts
        assert self.num_rows is not None
        indices = torch.arange(len(self.starts), device=self.starts.device)
        return indices * self.num_rows, torch.full_like(indices, self.num_rows)
