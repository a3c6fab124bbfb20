"""Prompt lookup on the device: `ngram`'s drafts, found without the host knowing a token of the step.

`update` appends what verification accepted, straight from its output; the host uploads a request's tokens once, when it
first decodes and when it comes back from preemption. A request without a match has slots of -1. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from proposers.base import Proposer, ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.ngram import CapturedNgram
from proposers.lookup.token_matrix import NOBODY, TokenMatrix
from runner.engine.backend import runs_kernels
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device


class NgramGpuProposer(Proposer):
    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, prompt_lookup_min: int, prompt_lookup_max: int
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.min_n, self.max_n = prompt_lookup_min, prompt_lookup_max
        self._tokens = TokenMatrix(
            max_num_seqs=context.max_num_seqs, max_model_len=context.max_model_len, device=context.device
        )
        self._match = ngram_match_on(context.device)
        nobody = torch.full((1,), NOBODY, dtype=torch.int64, device=context.device)
        self._drafts(nobody, num_tokens=num_speculative_tokens)  # compiles now, rather than in somebody's first step

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        device, decoding = self.context.device, schedule.decoding
        rows = self._rows_of(schedule)
        counts = [item.max_draft_tokens for item in decoding]
        cu_num_draft_tokens = [0]
        for count in counts:
            cu_num_draft_tokens.append(cu_num_draft_tokens[-1] + count)
        if cu_num_draft_tokens[-1] == 0:
            return DraftTokens.empty(len(decoding), device)
        num_tokens = max(self.num_speculative_tokens, *counts)  # the same in every step: one shape, one kernel
        drafts = self._drafts(rows, num_tokens=num_tokens).flatten()
        if min(counts) < num_tokens:
            kept = [row * num_tokens + place for row, count in enumerate(counts) for place in range(count)]
            drafts = drafts.index_select(0, to_device(kept, torch.int64, device))
        return DraftTokens(token_ids=drafts, cu_num_draft_tokens=cu_num_draft_tokens, is_padded=True)

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        decoding = len(schedule.decoding)  # the first rows of the output: each of them yields a token
        if decoding:
            self._tokens.append(self._rows_of(schedule), output.token_ids[:decoding])

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter:
        return CapturedNgram(
            num_tokens,
            tokens=self._tokens,
            match=lambda rows: self._drafts(rows, num_tokens=num_tokens),
            capacity=self.context.max_num_seqs,
        )

    def release(self, request_id: str) -> None:
        self._tokens.release(request_id)

    def _drafts(self, rows: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """[len(rows), num_tokens] int64."""
        tokens = self._tokens
        return self._match(
            tokens.token_ids, tokens.lengths, rows, min_n=self.min_n, max_n=self.max_n, num_tokens=num_tokens
        )

    def _rows_of(self, schedule: Schedule) -> torch.Tensor:
        rows = self._tokens.rows_of([item.request for item in schedule.decoding])
        return to_device(rows, torch.int64, self.context.device)


def ngram_match_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """The op for tensors on this device: Triton's on a GPU, elsewhere the one that is compiled for a CPU."""
    if runs_kernels(device):
        from kernels.ngram_match import ngram_match
    else:
        from kernels.cpu.ngram_match import ngram_match
    return ngram_match
