"""The loop of proposers/drafting/token_by_token.py for a whole batch at once: every request drafts the same number."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kernels.reference.philox import Stream
from kernels.reference.top_candidates import Candidates
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, no_drafts
from proposers.vocabularies.partial import KnownTokens, over_target_vocabulary
from runner.engine.device_requests import DeviceBatch
from runner.engine.row_sampling import RowSampling


class CapturedChains(CapturedDrafter):
    known_tokens: KnownTokens | None = None  # of the columns of its logits; None: all of the target's

    def __init__(
        self,
        *,
        num_tokens: int,
        draft_sample_method: str,
        needs_draft_probs: bool,
        keys_by_draft_step: bool,
        max_model_len: int,
        device: torch.device,
        num_scratch_rows: int = 0,
        tree_depth: int | None = None,
    ) -> None:
        super().__init__(num_tokens, max_model_len, num_scratch_rows, tree_depth=tree_depth)
        self.draft_sample_method, self.needs_draft_probs = draft_sample_method, needs_draft_probs
        self.keys_by_draft_step = keys_by_draft_step
        self.steps = torch.arange(num_tokens, device=device).unsqueeze(1)  # [num_tokens, 1]: places of the drafts

    @abstractmethod
    def first_logits(self, batch: DeviceBatch) -> Tensor:
        """Compute what the drafter has not seen; logits [count, known] float32 after each request's last token."""

    @abstractmethod
    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        """Compute token_ids [count], which lie at the positions lengths + step - 1; the logits after them."""

    def follow(self, batch: DeviceBatch) -> None:
        """Compute what the drafter has not seen, where the load allows no drafts."""

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if self.num_tokens == 0:
            self.follow(batch)
            return no_drafts(batch)
        drafted, probs = list[Tensor](), list[Tensor]()
        positions = batch.lengths + self.steps  # [num_tokens, count]
        logits = self.first_logits(batch)
        for step in range(self.num_tokens):
            if step > 0:
                logits = self.next_logits(batch, step, drafted[-1])
            token_ids, step_probs = self._draw(logits, batch.sampling(positions[step]), batch.lengths)
            drafted.append(token_ids)
            if step_probs is not None:
                probs.append(step_probs)
        flat = torch.stack(probs, dim=1).flatten(0, 1) if probs else None
        return CapturedDrafts(torch.stack(drafted, dim=1), flat)

    def _draw(self, logits: Tensor, rows: RowSampling, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """runner.engine.sampling.draft_tokens, where nothing masks or penalises.

        lengths: [count] int64, the committed tokens: the step's key, where the rule asks for one.
        """
        if self.draft_sample_method == "greedy" or rows.all_greedy:
            return rows.argmax(logits, self._known_ids), None
        is_coupled = self.draft_sample_method == "coupled"
        stream = Stream.TARGET if is_coupled else Stream.DRAFT
        draft_steps = lengths if self.keys_by_draft_step and not is_coupled else None
        if not self.needs_draft_probs:
            return rows.draw(logits, stream, self._known_ids, draft_steps), None
        logits = over_target_vocabulary(logits, self.known_tokens)
        return rows.draw(logits, stream, draft_steps=draft_steps), rows.processed(logits).softmax(dim=-1)

    def candidates(self, logits: Tensor, rows: RowSampling, width: int) -> Candidates:
        """What trees grow by: the tokens that come first behind each row of logits, as draft_sample_method says.

        logits: [len(rows) * n, known], n rows of each request; candidates are `width`, or all there are.
        """
        stream = {"greedy": None, "probabilistic": Stream.DRAFT, "coupled": Stream.TARGET}[self.draft_sample_method]
        return rows.candidates(logits, min(width, logits.shape[1]), stream, self._known_ids)

    @property
    def _known_ids(self) -> Tensor | None:
        return None if self.known_tokens is None else self.known_tokens.ids
