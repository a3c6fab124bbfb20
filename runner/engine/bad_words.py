"""Sequences of tokens that an output may not hold: the last token of one is masked where all others stand before it.

The host knows what is committed, the device what is drafted: the host finds the words that the output has begun, and
what is left to compare with a row's draft ancestors is compared on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sampling import drafts_end_with
from runner.engine.request import Request
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class BegunBadWord:
    """A bad word that a row would complete, as far as the host can tell."""

    row: int
    last_token_id: int
    in_drafts: tuple[int, ...]  # the tokens before the last that the row's nearest draft ancestors would have to be


def begun_bad_words(owner: Request, row: int, num_ancestors: int) -> Iterator[BegunBadWord]:
    """Bad words whose beginning, as far as it lies before the drafts, is what the output ends with.

    The prompt does not count (as in vLLM), so a word does not begin in it.
    """
    output = owner.output_token_ids
    for word in owner.bad_words_token_ids:
        num_said = max(0, len(word) - 1 - num_ancestors)
        if num_said <= len(output) and word[:num_said] == tuple(output[len(output) - num_said :]):
            yield BegunBadWord(row=row, last_token_id=word[-1], in_drafts=word[num_said:-1])


@dataclass(frozen=True, kw_only=True)
class BadWordRows:
    """Flat (row, token) pairs: a bad word's last token, where the rest of it may end with the row's draft ancestors."""

    row_idx: Tensor  # [num_pairs] int64
    token_ids: Tensor  # [num_pairs] int64
    applies: Tensor  # [num_pairs] bool

    @classmethod
    def build(
        cls,
        bad_words: list[BegunBadWord],
        request_idx: list[int],
        num_ancestors: list[int],
        draft_token_ids: Tensor | None,
        device: torch.device,
    ) -> BadWordRows | None:
        words = [word for word in bad_words if word.in_drafts]
        if not words:
            return None
        assert draft_token_ids is not None, "rows with ancestors need draft_token_ids"
        longest = max(len(word.in_drafts) for word in words)
        suffix = to_device(
            [[-1] * (longest - len(word.in_drafts)) + list(word.in_drafts) for word in words], torch.int64, device
        )
        flat = to_device(
            [
                [word.row for word in words],
                [word.last_token_id for word in words],
                [request_idx[word.row] for word in words],
                [num_ancestors[word.row] for word in words],
            ],
            torch.int64,
            device,
        )
        applies = drafts_end_with(draft_token_ids[flat[2]], flat[3], suffix)
        return cls(row_idx=flat[0], token_ids=flat[1], applies=applies)
