"""The committed tokens of all running requests as a matrix on the device, which moves on without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.request import Request
from runner.engine.step_operations import append_tokens
from runner.engine.upload import to_device

NOBODY = -1  # in place of a row


class TokenMatrix:
    """4 bytes a token for max_num_seqs requests of max_model_len tokens, taken at the start."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.device = device
        width = max_model_len + 1  # the last column takes what is written behind the longest text
        # The last row takes what is written for nobody.
        self.token_ids = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._rows: dict[str, int] = {}  # by request_id
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def rows_of(self, requests: Sequence[Request]) -> list[int]:
        """Their rows; who has none yet gets one, and the only upload of its tokens."""
        for request in requests:
            if request.request_id not in self._rows:
                row = self._rows[request.request_id] = self._free_rows.pop()
                token_ids = to_device(request.tokens_between(0, request.num_tokens), torch.int32, self.device)
                self.token_ids[row, : len(token_ids)] = token_ids
                self.lengths[row].fill_(len(token_ids))
        return [self._rows[request.request_id] for request in requests]

    def append(self, rows: Tensor, token_ids: Tensor) -> None:
        """Put token_ids [num_rows, width], of which -1 and what lies behind it is none, behind the rows [num_rows]."""
        append_tokens(self.token_ids, self.lengths, rows, token_ids)

    def release(self, request_id: str) -> None:
        if request_id in self._rows:
            self._free_rows.append(self._rows.pop(request_id))
