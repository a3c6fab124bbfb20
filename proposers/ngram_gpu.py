"""Prompt lookup on the device: `ngram`'s drafts, found without the host knowing a token of the step.

Holds the committed tokens of all running requests as a matrix on the device. `update` appends what verification
accepted, straight from its output; the host uploads a request's tokens once, when it first decodes and when it comes
back from preemption. A request without a match has slots of -1. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from proposers.base import Proposer, ProposerContext
from runner.engine.backend import runs_kernels
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.scheduler import Schedule
from runner.engine.upload import to_device


class NgramGpuProposer(Proposer):
    """4 bytes a token for max_num_seqs requests of max_model_len tokens, taken at the start."""

    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, prompt_lookup_min: int, prompt_lookup_max: int
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.min_n, self.max_n = prompt_lookup_min, prompt_lookup_max
        width = context.max_model_len + 1  # the last column takes what `update` writes behind the longest text
        self._token_ids = torch.zeros(context.max_num_seqs, width, dtype=torch.int32, device=context.device)
        self._lengths = torch.zeros(context.max_num_seqs, dtype=torch.int64, device=context.device)
        self._slots: dict[str, int] = {}  # request_id -> its row
        self._free_slots = list(range(context.max_num_seqs - 1, -1, -1))
        self._match = ngram_match_on(context.device)
        nobody = torch.full((1,), -1, dtype=torch.int64, device=context.device)
        self._drafts(nobody, num_tokens=num_speculative_tokens)  # compiles now, rather than in somebody's first step

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        device, decoding = self.context.device, schedule.decoding
        for item in decoding:
            if item.request.request_id not in self._slots:
                self._upload(item.request)
        counts = [item.max_draft_tokens for item in decoding]
        cu_num_draft_tokens = [0]
        for count in counts:
            cu_num_draft_tokens.append(cu_num_draft_tokens[-1] + count)
        if cu_num_draft_tokens[-1] == 0:
            return DraftTokens.empty(len(decoding), device)
        num_tokens = max(self.num_speculative_tokens, *counts)  # the same in every step: one shape, one kernel
        drafts = self._drafts(self._slots_of([item.request for item in decoding]), num_tokens=num_tokens).flatten()
        if min(counts) < num_tokens:
            kept = [row * num_tokens + place for row, count in enumerate(counts) for place in range(count)]
            drafts = drafts.index_select(0, to_device(kept, torch.int64, device))
        return DraftTokens(token_ids=drafts, cu_num_draft_tokens=cu_num_draft_tokens, is_padded=True)

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        decoding = schedule.decoding  # the first rows of the output: each of them yields a token
        if not decoding:
            return
        slots = self._slots_of([item.request for item in decoding])
        token_ids = output.token_ids[: len(decoding)]
        lengths = self._lengths[slots]
        places = lengths.unsqueeze(1) + torch.arange(token_ids.shape[1], device=slots.device)
        places.clamp_(max=self._token_ids.shape[1] - 1)
        # What lies behind the accepted tokens lies behind the new length too, where nobody looks.
        self._token_ids.index_put_((slots.unsqueeze(1), places), token_ids.to(torch.int32))
        self._lengths.index_copy_(0, slots, lengths + output.num_accepted_tokens[: len(decoding)] + 1)

    def release(self, request_id: str) -> None:
        if request_id in self._slots:
            self._free_slots.append(self._slots.pop(request_id))

    def _drafts(self, slots: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """[len(slots), num_tokens] int64."""
        return self._match(
            self._token_ids, self._lengths, slots, min_n=self.min_n, max_n=self.max_n, num_tokens=num_tokens
        )

    def _upload(self, request: Request) -> None:
        slot = self._slots[request.request_id] = self._free_slots.pop()
        token_ids = to_device(request.tokens_between(0, request.num_tokens), torch.int32, self.context.device)
        self._token_ids[slot, : len(token_ids)] = token_ids
        self._lengths[slot].fill_(len(token_ids))

    def _slots_of(self, requests: list[Request]) -> torch.Tensor:
        return to_device([self._slots[request.request_id] for request in requests], torch.int64, self.context.device)


def ngram_match_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """The op for tensors on this device: Triton's on a GPU, elsewhere the reference."""
    if runs_kernels(device):
        from kernels.ngram_match import ngram_match
    else:
        from kernels.reference.ngram_match import ngram_match
    return ngram_match
