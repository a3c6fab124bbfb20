"""Sampling parameters of a batch as tensors: whose row it is, which position it predicts, what was said before it.

SamplingRows.build reads the requests (never writes them) and uploads what the rows' processors need, and no more: a
processor that no row uses is None. Draft ancestors are counted on the device, so nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.philox import seed_to_int64
from kernels.reference.sampling import add_ancestor_counts, token_counts
from runner.engine.bad_words import BadWordRows
from runner.engine.request import Request
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
class PenaltyRows:
    """The rows with penalties, and the tokens said before each of them."""

    row_idx: Tensor | None  # [num_used] int64; None = all rows
    seen: Tensor  # [num_used, vocab] bool: in prompt or output; prompts count only where repetition != 1
    output_counts: Tensor  # [num_used, vocab] int32: output and draft ancestors
    repetition: Tensor  # [num_used] float32
    frequency: Tensor  # [num_used] float32
    presence: Tensor  # [num_used] float32


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
    max_top_k: int = 0
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

        Raises:
            ValueError: a request names a token outside the vocabulary.
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
        top_k = _value_rows(params, lambda p: 0 < p.top_k < vocab_size, lambda p: p.top_k, torch.int64, device)
        return cls(
            vocab_size=vocab_size,
            is_greedy=is_greedy,
            seeds=keys[0],
            positions=keys[1],
            random_row_idx=random_row_idx,
            allowed=_allowed(requests, request_idx, vocab_size, device),
            bad_words=BadWordRows.build(requests, request_idx, num_ancestors, draft_token_ids, path_idx, device),
            logit_bias=_logit_bias(params, vocab_size, device),
            forbidden=_forbidden(owners, num_ancestors, vocab_size, eos_token_ids, device),
            bitmask=bitmask,
            penalties=_penalties(requests, request_idx, num_ancestors, draft_token_ids, path_idx, vocab_size, device),
            temperatures=_temperatures(params, device),
            min_p=_value_rows(params, lambda p: p.min_p > 0.0, lambda p: p.min_p, torch.float32, device),
            top_k=top_k,
            max_top_k=max((params[r].top_k for r in random_rows if params[r].top_k < vocab_size), default=0),
            top_p=_value_rows(params, lambda p: p.top_p < 1.0, lambda p: p.top_p, torch.float64, device),
        )


def greedy_mask(random_row_idx: Tensor | None, seeds: Tensor) -> Tensor | None:
    """[num_rows] bool of the rows of seeds [num_rows] that are not random; None where all are."""
    if random_row_idx is None:
        return None
    return torch.ones_like(seeds, dtype=torch.bool).index_fill_(0, random_row_idx, False)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if a parameter names a token outside the vocabulary; for use on admission."""
    named = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} must name tokens in [0, {vocab_size - 1}] (the vocabulary), got {token_id}")


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


def _logit_bias(params: list[SamplingParams], vocab_size: int, device: torch.device) -> TokenRows | None:
    pairs = [(r, token_id, bias) for r, p in enumerate(params) for token_id, bias in p.logit_bias.items()]
    if not pairs:
        return None
    for p in params:
        check_token_ids(p, vocab_size)
    row_idx, token_ids, values = zip(*pairs, strict=True)
    index = to_device([row_idx, token_ids], torch.int64, device)
    return TokenRows(row_idx=index[0], token_ids=index[1], values=to_device(values, torch.float32, device))


def _forbidden(
    owners: list[Request],
    num_ancestors: list[int],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    device: torch.device,
) -> TokenRows | None:
    """eos and stop tokens of the rows that predict one of a request's first min_tokens output tokens."""
    pairs: list[tuple[int, int]] = []
    for r, (owner, n) in enumerate(zip(owners, num_ancestors, strict=True)):
        if len(owner.output_token_ids) + n < owner.sampling_params.min_tokens:
            check_token_ids(owner.sampling_params, vocab_size)
            pairs += ((r, token_id) for token_id in {*eos_token_ids, *owner.sampling_params.stop_token_ids})
    if not pairs:
        return None
    index = to_device(list(zip(*pairs, strict=True)), torch.int64, device)
    return TokenRows(row_idx=index[0], token_ids=index[1])


def _allowed(
    requests: Sequence[Request], request_idx: list[int], vocab_size: int, device: torch.device
) -> ValueRows | None:
    used = [r for r, b in enumerate(request_idx) if requests[b].sampling_params.allowed_token_ids is not None]
    if not used:
        return None
    slots = {b: slot for slot, b in enumerate(dict.fromkeys(request_idx[r] for r in used))}
    for b in slots:
        check_token_ids(requests[b].sampling_params, vocab_size)
    pairs = [(s, token) for b, s in slots.items() for token in requests[b].sampling_params.allowed_token_ids or ()]
    flat = to_device(list(zip(*pairs, strict=True)), torch.int64, device)
    is_allowed = token_counts(flat[0], flat[1], num_slots=len(slots), vocab_size=vocab_size) > 0
    slot_of_row = to_device([slots[request_idx[r]] for r in used], torch.int64, device)
    return ValueRows(row_idx=index_or_all(used, len(request_idx), device), values=is_allowed[slot_of_row])


def _penalties(
    requests: Sequence[Request],
    request_idx: list[int],
    num_ancestors: list[int],
    draft_token_ids: Tensor | None,
    path_idx: list[int],
    vocab_size: int,
    device: torch.device,
) -> PenaltyRows | None:
    used = [r for r, b in enumerate(request_idx) if requests[b].sampling_params.has_penalties]
    if not used:
        return None
    slots = {b: slot for slot, b in enumerate(dict.fromkeys(request_idx[r] for r in used))}
    params = [requests[request_idx[r]].sampling_params for r in used]

    def history_counts(histories: list[list[int]]) -> Tensor:  # one history a slot -> [num_slots, vocab]
        slot_idx = [slot for slot, token_ids in enumerate(histories) for _ in token_ids]
        flat = to_device([slot_idx, [t for token_ids in histories for t in token_ids]], torch.int64, device)
        return token_counts(flat[0], flat[1], num_slots=len(slots), vocab_size=vocab_size)

    slot_of_row = to_device([slots[request_idx[r]] for r in used], torch.int64, device)
    output_counts = history_counts([requests[b].output_token_ids for b in slots])[slot_of_row]
    if any(num_ancestors[r] for r in used):
        assert draft_token_ids is not None, "rows with ancestors need draft_token_ids"
        paths = draft_token_ids[to_device([path_idx[r] for r in used], torch.int64, device)]
        depths = to_device([num_ancestors[r] for r in used], torch.int64, device)
        output_counts = add_ancestor_counts(output_counts, paths, depths)
    # Without a repetition penalty the prompt has no say, and the long list stays on the host.
    owners = [requests[b] for b in slots]
    prompts = [o.prompt_token_ids if o.sampling_params.repetition_penalty != 1.0 else [] for o in owners]
    values = to_device(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], torch.float32, device
    )
    return PenaltyRows(
        row_idx=index_or_all(used, len(request_idx), device),
        seen=(history_counts(prompts)[slot_of_row] > 0) | (output_counts > 0),
        output_counts=output_counts,
        repetition=values[:, 0],
        frequency=values[:, 1],
        presence=values[:, 2],
    )
