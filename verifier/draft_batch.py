"""The drafts of one step as index tensors: which logits row checks which draft, and which rows draw at random.

A ragged batch stays flat where the vocabulary is involved; what is one number a draft is laid out [num_requests, K],
K the longest draft. All counts that shape a tensor are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.sampling import softmax
from runner.engine.request import DraftTokens
from runner.engine.sampling import SamplingRows, rows_at
from runner.engine.upload import index_or_all, to_device


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """Draft d is checked by logits row row_idx[d]; trailing ids of -1 are slots without a draft."""

    token_ids: Tensor  # [num_drafts] int64
    probs: Tensor | None  # [num_drafts, vocab]: q of each draft; None = one-hot
    request_idx: Tensor  # [num_drafts] int64
    draft_idx: Tensor  # [num_drafts] int64: place within the request's draft
    row_idx: Tensor  # [num_drafts] int64
    first_row_idx: Tensor  # [num_requests] int64
    first_draft_idx: Tensor  # [num_requests] int64
    random_draft_idx: Tensor | None  # drafts of requests that are not greedy; None = all
    random_request_idx: Tensor | None  # requests that are not greedy; None = all
    num_slots: list[int]  # draft slots of each request, on the host

    @classmethod
    def build(cls, drafts: DraftTokens, rows: SamplingRows) -> DraftBatch:
        device = rows.seeds.device
        cu, num_slots = drafts.cu_num_draft_tokens, drafts.num_draft_tokens
        assert rows.num_rows == cu[-1] + len(num_slots), (
            "verification takes one row for each draft and one for the bonus"
        )
        request_idx = [b for b, count in enumerate(num_slots) for _ in range(count)]
        # Rows of request b follow b bonus rows of earlier requests, so draft d sits at row d + b.
        per_draft = [request_idx, [i for n in num_slots for i in range(n)], [d + b for d, b in enumerate(request_idx)]]
        first_row_idx = drafts.first_logits_rows
        per_request = to_device([first_row_idx, cu[:-1]], torch.int64, device)
        flat = to_device(per_draft, torch.int64, device)
        random_requests = [b for b, row in enumerate(first_row_idx) if not rows.is_greedy[row]]
        random_drafts = [d for d, b in enumerate(request_idx) if not rows.is_greedy[first_row_idx[b]]]
        return cls(
            token_ids=drafts.token_ids,
            probs=drafts.probs,
            request_idx=flat[0],
            draft_idx=flat[1],
            row_idx=flat[2],
            first_row_idx=per_request[0],
            first_draft_idx=per_request[1],
            random_draft_idx=index_or_all(random_drafts, len(request_idx), device),
            random_request_idx=index_or_all(random_requests, len(num_slots), device),
            num_slots=num_slots,
        )

    @classmethod
    def of_equal(cls, token_ids: Tensor, probs: Tensor | None, num_requests: int) -> DraftBatch:
        """Of as many slots for each request, none of them greedy; on the device alone.

        token_ids: [num_requests * slots] int64; probs: as many rows.
        """
        num_slots = len(token_ids) // num_requests
        drafts = torch.arange(len(token_ids), device=token_ids.device)
        requests = torch.arange(num_requests, device=token_ids.device)
        request_idx = drafts // num_slots
        return cls(
            token_ids=token_ids,
            probs=probs,
            request_idx=request_idx,
            draft_idx=drafts % num_slots,
            row_idx=drafts + request_idx,
            first_row_idx=requests * (num_slots + 1),
            first_draft_idx=requests * num_slots,
            random_draft_idx=None,
            random_request_idx=None,
            num_slots=[num_slots] * num_requests,
        )

    @property
    def longest(self) -> int:
        return max(self.num_slots, default=0)

    def num_draft_tokens(self) -> Tensor:
        """Drafts of each request before its first -1, [num_requests] int64."""
        return ops.count_accepted(self.padded(self.token_ids >= 0))

    def padded(self, values: Tensor) -> Tensor:
        """One value a draft as [num_requests, longest], zero where a request has fewer drafts."""
        if min(self.num_slots, default=0) == self.longest:
            return values.view(len(self.num_slots), self.longest)
        padded = torch.zeros(len(self.num_slots), self.longest, dtype=values.dtype, device=values.device)
        padded[self.request_idx, self.draft_idx] = values
        return padded

    def padded_random(self, values: Tensor) -> Tensor:
        """`padded` of values that only the drafts of requests that are not greedy have; zero for the others."""
        random = self.random_draft_idx
        if random is None:
            return self.padded(values)
        everyone = torch.zeros(self.token_ids.shape[0], dtype=values.dtype, device=values.device)
        return self.padded(everyone.index_copy_(0, random, values))

    def target_probs(self, processed: Tensor) -> Tensor:
        """p of every draft of a request that is not greedy, [num_random, vocab]."""
        return softmax(processed.index_select(0, rows_at(self.row_idx, self.random_draft_idx)))

    def assemble(self, num_accepted: Tensor, last_token_ids: Tensor) -> Tensor:
        """[num_requests, longest + 1] int64: accepted tokens, then the recovered or bonus token, then -1."""
        return ops.assemble_tokens(self.padded(self.token_ids), last_token_ids, num_accepted)

    def of_drafts(self, probs: Tensor) -> Tensor:
        """Each draft's own entry of probs [num_random, vocab], 0 for a draft of -1; [num_random]."""
        token_ids = rows_at(self.token_ids, self.random_draft_idx)
        return probs.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1) * (token_ids >= 0)
