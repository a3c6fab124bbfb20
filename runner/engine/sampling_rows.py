"""Sampling parameters of a batch as tensors: whose row it is, which position it predicts, what was said before it.

SamplingRows.build reads the requests, leaves with each the tensors that its next step needs again, and uploads what is
new, and no more: a processor that no row uses is None. Draft ancestors are counted on the device, so nothing is read
back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.philox import seed_to_int64
from runner.engine.bad_words import BadWordRows
from runner.engine.penalty_rows import PenaltyRows
from runner.engine.request import Request
from runner.engine.request_tensors import RequestTensors
from runner.engine.row_sampling import RowSampling
from runner.engine.sampling_params import SamplingParams
from runner.engine.upload import index_or_all, to_device


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Flat (row, token) pairs, each with a value where the processor needs one."""

    row_idx: Tensor  # [num_pairs] int64
    token_ids: Tensor  # [num_pairs] int64
    values: Tensor | None = None  # [num_pairs] float32


@dataclass(frozen=True, kw_only=True)
class ValueRows:
    """The rows that use a processor, and its value for each."""

    row_idx: Tensor | None  # [num_used] int64; None = all rows
    values: Tensor  # [num_used], or [num_used, vocab] where it has one for each token


@dataclass(frozen=True, kw_only=True)
class BitmaskRows:
    """The rows whose requests follow a grammar, and the tokens it allows in each."""

    row_idx: Tensor | None  # [num_used] int64; None = all rows
    words: Tensor  # [num_used, ceil(vocab / 32)] int32: bit v % 32 of word v // 32 is token v


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Parameters of num_rows logits rows; a processor that no row uses is None."""

    vocab_size: int
    is_greedy: tuple[bool, ...]  # [num_rows], on the host: shapes depend on it
    seeds: Tensor  # [num_rows] int64 bit patterns
    positions: Tensor  # [num_rows] int64: the absolute position that the row predicts
    random_row_idx: Tensor | None  # [num_random] int64: rows that are not greedy; None = all rows
    allowed: ValueRows | None = None  # bool
    bad_words: BadWordRows | None = None
    logit_bias: TokenRows | None = None
    forbidden: TokenRows | None = None  # eos and stop tokens before min_tokens
    bitmask: BitmaskRows | None = None  # what a grammar allows
    penalties: PenaltyRows | None = None
    temperatures: Tensor | None = None  # [num_rows] float32, 1 in greedy rows
    min_p: ValueRows | None = None
    top_k: ValueRows | None = None
    top_p: ValueRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.is_greedy)

    @property
    def all_greedy(self) -> bool:
        return all(self.is_greedy)

    @property
    def has_cuts(self) -> bool:
        return self.min_p is not None or self.top_k is not None or self.top_p is not None

    def of_every_row(self) -> RowSampling:
        """What the kernels take."""
        return RowSampling(
            seeds=self.seeds,
            positions=self.positions,
            all_greedy=self.all_greedy,
            is_greedy=None if self.all_greedy else greedy_mask(self.random_row_idx, self.seeds),
            temperatures=self.temperatures,
            min_p=self._of_every_row(self.min_p, 0.0),
            top_k=self._of_every_row(self.top_k, 0),
            top_p=self._of_every_row(self.top_p, 1.0),
        )

    def _of_every_row(self, used: ValueRows | None, off: float) -> Tensor | None:
        if used is None or used.row_idx is None:
            return None if used is None else used.values
        return torch.full_like(self.seeds, off, dtype=used.values.dtype).index_copy_(0, used.row_idx, used.values)

    @classmethod
    def build(
        cls,
        requests: Sequence[Request],
        request_idx: list[int],
        num_ancestors: list[int],
        draft_token_ids: Tensor | None,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        bitmask: BitmaskRows | None = None,
        path_idx: list[int] | None = None,
    ) -> SamplingRows:
        """Row r belongs to requests[request_idx[r]] and predicts the token after its first num_ancestors[r] drafts.

        draft_token_ids: [num_requests, K] int64 on the device, -1 padded; None when no row has an ancestor.
        bitmask: of the rows whose requests follow a grammar; it has seen the rows' draft ancestors.
        path_idx: the row of draft_token_ids that begins with row r's ancestors, where requests have draft trees;
            None = request_idx.
        """
        device = torch.device(device)
        path_idx = request_idx if path_idx is None else path_idx
        owners = [requests[b] for b in request_idx]
        params = [owner.sampling_params for owner in owners]
        is_greedy = tuple(p.is_greedy for p in params)
        positions = [owner.num_tokens + n for owner, n in zip(owners, num_ancestors, strict=True)]
        keys = to_device([[seed_to_int64(owner.seed) for owner in owners], positions], torch.int64, device)
        random_rows = [r for r, greedy in enumerate(is_greedy) if not greedy]
        random_row_idx = index_or_all(random_rows, len(params), device)
        if all(p.takes_the_argmax for p in params):
            return cls(
                vocab_size=vocab_size,
                is_greedy=is_greedy,
                seeds=keys[0],
                positions=keys[1],
                random_row_idx=random_row_idx,
            )
        by_request = [request.tensors_on(device, vocab_size, eos_token_ids) for request in requests]
        tensors = [by_request[b] for b in request_idx]
        top_k = _value_rows(params, lambda p: 0 < p.top_k < vocab_size, lambda p: p.top_k, torch.int64, device)
        return cls(
            vocab_size=vocab_size,
            is_greedy=is_greedy,
            seeds=keys[0],
            positions=keys[1],
            random_row_idx=random_row_idx,
            allowed=_allowed(owners, tensors, device),
            bad_words=BadWordRows.build(
                requests, request_idx, tensors, num_ancestors, draft_token_ids, path_idx, device
            ),
            logit_bias=_logit_bias(owners, tensors, device),
            forbidden=_forbidden(owners, tensors, num_ancestors, device),
            bitmask=bitmask,
            penalties=PenaltyRows.build(owners, tensors, num_ancestors, draft_token_ids, path_idx, device),
            temperatures=_temperatures(params, device),
            min_p=_value_rows(params, lambda p: p.min_p > 0.0, lambda p: p.min_p, torch.float32, device),
            top_k=top_k,
            top_p=_value_rows(params, lambda p: p.top_p < 1.0, lambda p: p.top_p, torch.float64, device),
        )


def greedy_mask(random_row_idx: Tensor | None, seeds: Tensor) -> Tensor | None:
    """[num_rows] bool of the rows of seeds [num_rows] that are not random; None where every row is random."""
    if random_row_idx is None:
        return None
    return torch.ones_like(seeds, dtype=torch.bool).index_fill_(0, random_row_idx, False)


def _value_rows(
    params: list[SamplingParams],
    is_used: Callable[[SamplingParams], bool],
    value: Callable[[SamplingParams], float],
    dtype: torch.dtype,
    device: torch.device,
) -> ValueRows | None:
    """The sampled rows that use a cut-off; greedy rows have none, for it cannot move their argmax."""
    used = [r for r, p in enumerate(params) if not p.is_greedy and is_used(p)]
    if not used:
        return None
    values = to_device([value(params[r]) for r in used], dtype, device)
    return ValueRows(row_idx=index_or_all(used, len(params), device), values=values)


def _temperatures(params: list[SamplingParams], device: torch.device) -> Tensor | None:
    values = [1.0 if p.is_greedy else p.temperature for p in params]
    return to_device(values, torch.float32, device) if any(value != 1.0 for value in values) else None


def _logit_bias(owners: list[Request], tensors: list[RequestTensors], device: torch.device) -> TokenRows | None:
    used = [r for r, owner in enumerate(owners) if owner.sampling_params.logit_bias]
    if not used:
        return None
    token_ids, values = zip(*(tensors[r].logit_bias for r in used), strict=True)
    return TokenRows(
        row_idx=_repeated(used, token_ids, device), token_ids=torch.cat(token_ids), values=torch.cat(values)
    )


def _forbidden(
    owners: list[Request], tensors: list[RequestTensors], num_ancestors: list[int], device: torch.device
) -> TokenRows | None:
    """eos and stop tokens of the rows that predict one of a request's first min_tokens output tokens."""
    used = [
        r
        for r, (owner, n) in enumerate(zip(owners, num_ancestors, strict=True))
        if len(owner.output_token_ids) + n < owner.sampling_params.min_tokens
    ]
    if not used:
        return None
    token_ids = [tensors[r].ending_token_ids for r in used]
    return TokenRows(row_idx=_repeated(used, token_ids, device), token_ids=torch.cat(token_ids))


def _repeated(rows: list[int], token_ids: Sequence[Tensor], device: torch.device) -> Tensor:
    """rows[i] for each of token_ids[i], [num_pairs] int64."""
    counts = [len(ids) for ids in token_ids]
    index = to_device([rows, counts], torch.int64, device)
    return torch.repeat_interleave(index[0], index[1], output_size=sum(counts))


def _allowed(owners: list[Request], tensors: list[RequestTensors], device: torch.device) -> ValueRows | None:
    used = [r for r, owner in enumerate(owners) if owner.sampling_params.allowed_token_ids is not None]
    if not used:
        return None
    values = torch.stack([tensors[r].is_allowed for r in used])
    return ValueRows(row_idx=index_or_all(used, len(owners), device), values=values)
