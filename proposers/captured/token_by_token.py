"""The loop of proposers/drafting/token_by_token.py for a whole batch at once: every request drafts the same number."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kernels.reference.philox import Stream
from kernels.reference.sampling import softmax
from kernels.reference.top_candidates import Candidates
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, no_drafts
from proposers.vocabularies.partial import KnownTokens, over_target_vocabulary
from runner.engine.device_batch import DeviceBatch


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
        self.draws = needs_draft_probs and draft_sample_method != "greedy"
        self.steps = torch.arange(num_tokens, device=device).unsqueeze(1)  # [num_tokens, 1]: places of the drafts

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        """Compute what the drafter has not seen; logits [count, known] float32 after each request's last token.

        Of a drafter that keeps up with what is committed that is the last token alone.
        """
        return self.next_logits(batch, 0, batch.last_token_ids[:, 1].contiguous())

    @abstractmethod
    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        """Compute token_ids [count], which lie at the positions lengths + step - 1; the logits after them."""

    def follow(self, batch: DeviceBatch, drafts: Tensor | None) -> None:
        """Draft nothing, but compute what would have to be computed later.

        drafts: [count, n] int64, -1 where there is none, that others made for this step; None: nobody drafts.
        """

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if self.num_tokens == 0:
            self.follow(batch, None)
            return no_drafts(batch)
        return self.draft_beside(batch, None)

    def draft_beside(self, batch: DeviceBatch, given: Tensor | None) -> CapturedDrafts:
        """given: [count, num_tokens] int64: what others drafted for some of the requests, -1 where there is none; these
        requests get no other drafts. None: nobody did."""
        drafted, probs = list[Tensor](), list[Tensor]()
        positions = batch.lengths + self.steps  # [num_tokens, count]
        logits = self.first_logits(batch)
        for step in range(self.num_tokens):
            if step > 0:
                logits = self.next_logits(batch, step, drafted[-1])
            token_ids, step_probs = self._draw(batch, logits, positions[step], drafted)
            if given is not None:  # it follows them, so that what it stores of those that are accepted is right
                token_ids = torch.where(given[:, step] >= 0, given[:, step], token_ids)
            drafted.append(token_ids)
            if step_probs is not None:
                probs.append(step_probs)
        chains, flat = torch.stack(drafted, dim=1), torch.stack(probs, dim=1) if probs else None
        if given is not None:
            chains, flat = _with_given(chains, flat, given)
        return CapturedDrafts(chains, None if flat is None else flat.flatten(0, 1))

    def _draw(
        self, batch: DeviceBatch, logits: Tensor, positions: Tensor, drafted: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """runner.engine.sampling.draft_tokens, and what process_logits does before it.

        positions: [count] int64. drafted: what was drafted in front of them, [count] int64 each.
        """
        path = torch.stack(drafted, dim=1) if drafted and batch.processors is not None else None
        logits, known = self._changed(batch, logits, positions, path)
        known_ids, rows = None if known is None else known.ids, batch.sampling(positions)
        if self.draft_sample_method == "greedy" or rows.all_greedy:
            return rows.argmax(logits, known_ids), None
        is_coupled = self.draft_sample_method == "coupled"
        stream = Stream.TARGET if is_coupled else Stream.DRAFT
        # The committed tokens: the step's key, where the rule asks for one.
        draft_steps = batch.lengths if self.keys_by_draft_step and not is_coupled else None
        if not self.needs_draft_probs:
            return rows.draw(logits, stream, known_ids, draft_steps), None
        logits = over_target_vocabulary(logits, known)
        return rows.draw(logits, stream, draft_steps=draft_steps), softmax(rows.processed(logits))

    def candidates(
        self, batch: DeviceBatch, logits: Tensor, positions: Tensor, width: int, path: Tensor | None
    ) -> Candidates:
        """What trees grow by: the tokens that come first behind each row of logits, as draft_sample_method says.

        Args:
            logits: [count * n, known], n rows of each request; candidates are `width`, or all there are.
            positions: [count] int64, of the candidates.
            path: [count * n, depth] int64: the drafts in front of them; None: none, or nobody asks.
        """
        logits, known = self._changed(batch, logits, positions, path)
        stream = {"greedy": None, "probabilistic": Stream.DRAFT, "coupled": Stream.TARGET}[self.draft_sample_method]
        known_ids, rows = None if known is None else known.ids, batch.sampling(positions)
        return rows.candidates(logits, min(width, logits.shape[1]), stream, known_ids)

    def _changed(
        self, batch: DeviceBatch, logits: Tensor, positions: Tensor, path: Tensor | None
    ) -> tuple[Tensor, KnownTokens | None]:
        """Masked and penalised as requests ask; and the tokens of the columns, as known_tokens has them."""
        if batch.processors is None:
            return logits, self.known_tokens
        logits = over_target_vocabulary(logits, self.known_tokens)
        return batch.processors.apply(logits, positions, path), None


def _with_given(chains: Tensor, probs: Tensor | None, given: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drafts [count, num_tokens] in which the requests of `given` have what is given and nothing behind it.

    probs: [count, num_tokens, vocab], changed in place; that of a given draft is one-hot.
    """
    is_given = given[:, :1] >= 0
    chains = torch.where(is_given, given, chains)
    if probs is None:
        return chains, None
    places, probs = given.clamp(min=0).unsqueeze(2), probs.masked_fill_(is_given.unsqueeze(2), 0.0)
    own = probs.gather(2, places).masked_fill_(is_given.unsqueeze(2), 1.0)
    return chains, probs.scatter_(2, places, own)
