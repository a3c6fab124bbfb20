"""The rejection sampler: target logits and draft tokens in, the step's tokens out.

strict: a draft token stays iff it is the token the target draws there; the text is plain decoding's, bit for bit.
probabilistic (alias standard): accepted iff u * q(x) < p(x), else recovered from max(p - q, 0); keeps the law.
synthetic: accepts at configured rates whatever the tokens; a benchmark's tool. At temperature 0 the first two agree.
Requests of any kind and draft length, none included, share one batch; no loop over them touches a tensor, and nothing
is read back to the host. All noise is keyed by (seed, position), so a request's result does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import rejection as rules
from kernels.reference.philox import Stream, uniform
from kernels.reference.sampling import greedy_argmax
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, process_logits, put_rows, sample_at, sample_tokens, take_rows
from runner.engine.sampling_rows import index_or_all, to_device

REJECTION_SAMPLE_METHODS = ("strict", "probabilistic", "standard", "synthetic")


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Index tensors of a ragged batch; draft d is checked by logits row row_idx[d]. Ids of -1 are no drafts."""

    token_ids: Tensor  # [num_drafts] int64
    request_idx: Tensor  # [num_drafts] int64
    draft_idx: Tensor  # [num_drafts] int64: place within the request's draft
    row_idx: Tensor  # [num_drafts] int64
    first_row_idx: Tensor  # [num_requests] int64
    first_draft_idx: Tensor  # [num_requests] int64
    num_draft_tokens: Tensor  # [num_requests] int64: without slots of -1
    random_draft_idx: Tensor | None  # drafts of requests that are not greedy; None = all
    random_request_idx: Tensor | None  # requests that are not greedy; None = all
    draft_lengths: list[int]  # draft slots of each request, on the host

    @classmethod
    def build(cls, drafts: DraftTokens, rows: SamplingRows) -> _Batch:
        device = rows.seeds.device
        cu, lengths = drafts.cu_num_draft_tokens, drafts.num_draft_tokens
        assert rows.num_rows == cu[-1] + len(lengths), "verification takes one row for each draft and one for the bonus"
        request_idx = [b for b, length in enumerate(lengths) for _ in range(length)]
        # Rows of request b follow b bonus rows of earlier requests, so draft d sits at row d + b.
        per_draft = [request_idx, [i for n in lengths for i in range(n)], [d + b for d, b in enumerate(request_idx)]]
        first_row_idx = [start + b for b, start in enumerate(cu[:-1])]
        per_request = to_device([first_row_idx, cu[:-1], lengths], torch.int64, device)
        flat = to_device(per_draft, torch.int64, device)
        num_draft_tokens = per_request[2]
        if drafts.is_padded:
            is_draft = (drafts.token_ids >= 0).to(torch.int64)
            num_draft_tokens = torch.zeros_like(num_draft_tokens).index_add_(0, flat[0], is_draft)
        random_requests = [b for b, row in enumerate(first_row_idx) if not rows.is_greedy[row]]
        random_drafts = [d for d, b in enumerate(request_idx) if not rows.is_greedy[first_row_idx[b]]]
        return cls(
            token_ids=drafts.token_ids,
            request_idx=flat[0],
            draft_idx=flat[1],
            row_idx=flat[2],
            first_row_idx=per_request[0],
            first_draft_idx=per_request[1],
            num_draft_tokens=num_draft_tokens,
            random_draft_idx=index_or_all(random_drafts, len(request_idx), device),
            random_request_idx=index_or_all(random_requests, len(lengths), device),
            draft_lengths=lengths,
        )

    def count_accepted(self, accepted: Tensor) -> Tensor:
        return rules.count_accepted(
            accepted,
            self.request_idx,
            self.draft_idx,
            num_requests=len(self.draft_lengths),
            max_num_draft_tokens=max(self.draft_lengths, default=0),
        )


class RejectionSampler:
    """Applies one rule to every batch; holds no state but its configuration."""

    def __init__(
        self, *, rejection_sample_method: str, synthetic_conditional_rates: Sequence[float] | None = None
    ) -> None:
        """synthetic_conditional_rates: for each place in the draft, the rate given that all before it were accepted."""
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method must be one of {', '.join(REJECTION_SAMPLE_METHODS)}, "
                f"got {rejection_sample_method!r}"
            )
        is_synthetic = rejection_sample_method == "synthetic"
        if is_synthetic != (synthetic_conditional_rates is not None):
            raise ValueError(
                "synthetic_conditional_rates must be given for rejection_sample_method 'synthetic' and for no other, "
                f"got {synthetic_conditional_rates!r} with {rejection_sample_method!r}"
            )
        self._rates = list(synthetic_conditional_rates or ())
        if not all(0.0 <= rate <= 1.0 for rate in self._rates):
            raise ValueError(f"synthetic_conditional_rates must be in [0, 1], got {self._rates}")
        self._method = rejection_sample_method

    def __call__(self, logits: Tensor, drafts: DraftTokens, rows: SamplingRows) -> VerifyOutput:
        """Decides one step.

        logits: [num_drafts + num_requests, vocab], any float dtype; request b's rows are its drafts' and then its
            bonus row, row i predicting the token that follows the request's first i drafts.
        """
        if drafts.parent_indices is not None:
            raise ValueError("parent_indices must be None (draft chains): this sampler does not verify trees")
        processed = process_logits(logits, rows)
        if drafts.cu_num_draft_tokens[-1] == 0:  # every rule without a draft is a draw from the target
            token_ids = sample_tokens(processed, rows)
            return VerifyOutput(token_ids=token_ids.unsqueeze(1), num_accepted_tokens=torch.zeros_like(token_ids))
        batch = _Batch.build(drafts, rows)
        if self._method == "synthetic":
            num_accepted, last_token_ids = self._synthetic(processed, batch, rows)
        elif self._method == "strict" or rows.all_greedy:
            num_accepted, last_token_ids = self._strict(processed, batch, rows)
        else:
            num_accepted, last_token_ids = self._probabilistic(processed, batch, rows, drafts.probs)
        token_ids = rules.assemble_tokens(
            batch.token_ids,
            last_token_ids,
            num_accepted,
            batch.request_idx,
            batch.draft_idx,
            max_num_draft_tokens=max(batch.draft_lengths, default=0),
        )
        return VerifyOutput(
            token_ids=token_ids,
            num_accepted_tokens=num_accepted,
            num_draft_tokens=batch.num_draft_tokens if drafts.is_padded else None,
        )

    def _strict(self, processed: Tensor, batch: _Batch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_token_ids = sample_tokens(processed, rows)
        num_accepted = batch.count_accepted(rules.accept_strict(target_token_ids[batch.row_idx], batch.token_ids))
        return num_accepted, target_token_ids[batch.first_row_idx + num_accepted]

    def _synthetic(self, processed: Tensor, batch: _Batch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        longest = max(batch.draft_lengths, default=0)
        if longest > len(self._rates):
            raise ValueError(
                f"synthetic_conditional_rates must have one rate per draft token ({longest}), got {len(self._rates)}"
            )
        rates = [rate for length in batch.draft_lengths for rate in self._rates[:length]]
        uniforms = uniform(rows.seeds[batch.row_idx], rows.positions[batch.row_idx], Stream.ACCEPT)
        accepted = rules.accept_synthetic(to_device(rates, torch.float64, processed.device), uniforms)
        num_accepted = batch.count_accepted(accepted & (batch.token_ids >= 0))
        last_row_idx = batch.first_row_idx + num_accepted
        return num_accepted, sample_at(
            processed.index_select(0, last_row_idx),
            rows.seeds[last_row_idx],
            rows.positions[last_row_idx],
            batch.random_request_idx,
            Stream.TARGET,
        )

    def _probabilistic(
        self, processed: Tensor, batch: _Batch, rows: SamplingRows, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        random = batch.random_draft_idx
        row_idx, draft_ids = take_rows(batch.row_idx, random), take_rows(batch.token_ids, random)
        known_ids = draft_ids.clamp(min=0).unsqueeze(1)
        p_draft = processed.index_select(0, row_idx).softmax(dim=-1).gather(1, known_ids).squeeze(1)
        q_draft = None if probs is None else take_rows(probs, random).gather(1, known_ids).squeeze(1)
        uniforms = uniform(rows.seeds[row_idx], rows.positions[row_idx], Stream.ACCEPT)
        accepted = rules.accept_probabilistic(p_draft, q_draft, uniforms) & (draft_ids >= 0)
        if random is not None:
            greedy_accepted = rules.accept_strict(greedy_argmax(processed)[batch.row_idx], batch.token_ids)
            accepted = greedy_accepted.index_copy_(0, random, accepted)
        num_accepted = batch.count_accepted(accepted)

        last_row_idx = batch.first_row_idx + num_accepted
        last_logits = processed.index_select(0, last_row_idx)  # [num_requests, vocab]
        is_rejected = num_accepted < batch.num_draft_tokens
        last_logits = _residual_logits(last_logits, is_rejected, num_accepted, batch, probs)
        return num_accepted, sample_at(
            last_logits,
            rows.seeds[last_row_idx],
            rows.positions[last_row_idx],
            batch.random_request_idx,
            # The recovered token must not reuse noise that the draft or a coupled target draw has used here.
            torch.where(is_rejected, int(Stream.RESIDUAL), int(Stream.TARGET)),
        )


def _residual_logits(
    last_logits: Tensor, is_rejected: Tensor, num_accepted: Tensor, batch: _Batch, probs: Tensor | None
) -> Tensor:
    """last_logits with the log of max(p - q, 0) in the rejected rows of requests that are not greedy."""
    random = batch.random_request_idx
    # A request without a rejection has no draft at this place; any index will do, as its row is not replaced.
    rejected_idx = take_rows((batch.first_draft_idx + num_accepted).clamp_(max=batch.token_ids.shape[0] - 1), random)
    logits = take_rows(last_logits, random)
    p = logits.softmax(dim=-1)
    if probs is None:
        law = rules.residual_one_hot(p, batch.token_ids[rejected_idx])
    else:
        law = rules.residual(p, probs.index_select(0, rejected_idx))
    replaced = torch.where(take_rows(is_rejected, random).unsqueeze(1), law.log(), logits)
    return put_rows(last_logits, random, replaced)
