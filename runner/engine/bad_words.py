"""Sequences of tokens that an output may not hold: the last token of one is masked where all others stand before it.

What stands before a row ends with its draft ancestors, which only the device knows, so words are compared there:
all of a request's words with all of its rows at once. The prompt does not count, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sampling import ends_with
from runner.engine.request import Request
from runner.engine.request_tensors import RequestTensors
from runner.engine.upload import to_device

NO_TOKEN = -2  # before the output's first token: equal to nothing


@dataclass(frozen=True, kw_only=True)
class BadWordRows:
    """Flat (row, token) pairs: a row, a bad word's last token, and whether the word's other tokens stand before it."""

    row_idx: Tensor  # [num_pairs] int64
    token_ids: Tensor  # [num_pairs] int64
    applies: Tensor  # [num_pairs] bool

    @classmethod
    def build(
        cls,
        requests: Sequence[Request],
        request_idx: list[int],
        tensors: list[RequestTensors],
        num_ancestors: list[int],
        draft_token_ids: Tensor | None,
        path_idx: list[int],
        device: torch.device,
    ) -> BadWordRows | None:
        """The arguments of SamplingRows.build, and each row's request's tensors; None when no request has bad words."""
        groups: dict[int, list[int]] = {}  # rows by their list of words, which requests of one call share
        for r, b in enumerate(request_idx):
            if requests[b].bad_words_token_ids:
                groups.setdefault(id(requests[b].bad_words_token_ids), []).append(r)
        if not groups:
            return None
        found = [
            _compare(requests, request_idx, tensors, num_ancestors, draft_token_ids, path_idx, rows, device)
            for rows in groups.values()
        ]
        row_idx, token_ids, applies = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cls(row_idx=row_idx, token_ids=token_ids, applies=applies)


def _compare(
    requests: Sequence[Request],
    request_idx: list[int],
    tensors: list[RequestTensors],
    num_ancestors: list[int],
    draft_token_ids: Tensor | None,
    path_idx: list[int],
    rows: list[int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """(row_idx, token_ids, applies) of rows that share their words: a pair for each row and word."""
    beginnings, last_token_ids = tensors[rows[0]].bad_words
    num_words, length = beginnings.shape
    slots = {b: slot for slot, b in enumerate(dict.fromkeys(request_idx[r] for r in rows))}
    histories = to_device([tail_of(requests[b].output_token_ids, length) for b in slots], torch.int64, device)
    index = to_device(
        [[slots[request_idx[r]] for r in rows], [num_ancestors[r] for r in rows], [path_idx[r] for r in rows], rows],
        torch.int64,
        device,
    )
    said = histories[index[0]]
    if any(num_ancestors[r] for r in rows):
        assert draft_token_ids is not None, "rows with ancestors need draft_token_ids"
        said = torch.cat((said, draft_token_ids[index[2]]), dim=1)
    columns = index[1].unsqueeze(1) + torch.arange(length, device=device)  # n ancestors move the window by n
    applies = ends_with(said.gather(1, columns), beginnings)
    row_idx = index[3].unsqueeze(1).expand(-1, num_words).flatten()
    return row_idx, last_token_ids.repeat(len(rows)), applies.flatten()


def tail_of(token_ids: list[int], length: int) -> list[int]:
    """The last tokens, NO_TOKEN in front where there are fewer."""
    tail = token_ids[max(0, len(token_ids) - length) :]
    return [NO_TOKEN] * (length - len(tail)) + tail
