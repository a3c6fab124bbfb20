"""A small model drafts token by token (Leviathan et al., arXiv 2211.17192; Chen, 2302.01318).

The draft keeps KV of its own under the target's block table. It computes prompts in the chunks the target does,
and catches up on committed tokens when it next proposes: after full acceptance it lacks the last draft token too.
States of layers that have some go back over drafts and the last committed tokens, and are in no block: where the target
begins behind tokens that were found in the cache, such a draft computes them.
A draft model of another vocabulary drafts the tokens that both have (proposers.vocabularies, arXiv 2502.05202).
Everything here is in the target's ids, the request's processors and the probabilities too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.reference.fp8_rows import FP8
from proposers.base import ProposerContext
from proposers.captured.draft_model import NUM_COMPUTED_AGAIN, CapturedDraftModel
from proposers.captured.drafter import CapturedDrafter, NoDrafts
from proposers.drafting.own_cache import OwnCacheProposer
from proposers.vocabularies.spelling import Spelling
from proposers.vocabularies.translation import translate
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.launch import Part
from runner.engine.loader import LoadedModel, load_model
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request, VerifyOutput
from runner.engine.schedule import Schedule

MAX_CATCH_UP_TOKENS = 512  # of a request in one pass


class DraftModelProposer(OwnCacheProposer):
    runner: ModelRunner

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
        vocabularies: tuple[Spelling, Spelling] | None = None,
    ) -> None:
        """vocabularies: the target's and the draft's, where they may differ (use_heterogeneous_vocab)."""
        super().__init__(
            num_speculative_tokens=num_speculative_tokens, context=context, draft_sample_method=draft_sample_method
        )
        loaded = load_model(
            source,
            device=context.device,
            dtype=context.dtype,
            max_model_len=max_model_len,
            longest_useful_len=context.max_model_len,
            reads_kv_scales=context.kv_dtype == FP8,
        )
        self._translation = None
        if vocabularies is not None:
            self._translation = translate(
                vocabularies,
                vocab_sizes=(context.vocab_size, loaded.model.vocab_size),
                model=source.model,
                device=context.device,
            )
        elif loaded.model.vocab_size != context.vocab_size:
            raise UserError(
                f"method.model={source.model} must have the target's vocabulary ({context.vocab_size} entries), "
                f"got {loaded.model.vocab_size}; choose a draft of the same family as the target, or set "
                "method.use_heterogeneous_vocab=true"
            )
        self.max_model_len = min(loaded.max_model_len, context.max_model_len)
        self.runner = self.make_runner(
            loaded,
            block_size=context.block_size,
            device=context.device,
            dtype=context.dtype,
            batch_invariant=context.batch_invariant,
            kv_dtype=context.kv_dtype,
            graph_memory=context.graph_memory,
            token_map=None if self._translation is None else self._translation.reading,
        )
        self._num_computed: dict[str, int] = {}  # request_id -> tokens whose KV is in the draft's cache

    @property
    def max_uncertain(self) -> int:
        """Tokens of a request that a pass may compute and later ones may take back or compute again, at most."""
        return self.most_drafts(self.num_speculative_tokens) + NUM_COMPUTED_AGAIN

    @property
    def state_bytes(self) -> int:
        return self.runner.num_state_bytes(self.context.max_num_seqs, self.max_uncertain)

    def allocate_cache(self, num_blocks: int) -> None:
        self.runner.allocate_cache(num_blocks, max_num_seqs=self.context.max_num_seqs, num_uncertain=self.max_uncertain)

    def make_runner(self, loaded: LoadedModel, **options: Any) -> ModelRunner:
        """What runs the draft; options: of ModelRunner."""
        return ModelRunner(loaded.model, **options)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if num_tokens == 0:
            return NoDrafts()  # `propose` catches up
        if not self.runner.is_paged:
            return None
        return CapturedDraftModel(
            runner=self.runner,
            translation=self._translation,
            num_computed=self._num_computed,
            max_model_len=self.max_model_len,
            **self.captured_arguments(num_tokens),
        )

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        parts = []
        for item in schedule.scheduled:
            request = item.request
            if request.is_finished:
                continue
            if item.is_decoding:
                # KV of rejected drafts is void; what was committed of them is what the target has computed.
                known = self._num_computed.get(request.request_id, 0)
                self._num_computed[request.request_id] = min(known, request.num_computed_tokens)
            elif item.start < self.max_model_len and self.may_draft(request):
                # The draft follows its target through prompts, chunk by chunk, from where the first one starts; states
                # that have not come there do when it first drafts.
                known = self._num_computed.setdefault(request.request_id, 0 if self.runner.is_recurrent else item.start)
                if known == item.start:
                    parts.append(self._part(request, min(item.start + item.num_new_tokens, self.max_model_len)))
        if parts:
            self.runner.run(parts)

    @torch.inference_mode()
    def keep_up(self, requests: Sequence[Request]) -> None:
        following = [r for r in requests if self.may_draft(r) and r.num_tokens <= self.max_model_len]
        self._catch_up(following, num_left=1)

    def release(self, request_id: str) -> None:
        self._num_computed.pop(request_id, None)

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        self._catch_up(requests)
        return self._in_target_ids(
            self.runner.run([self._part(request, request.num_tokens, num_logits=1) for request in requests])
        )

    def _catch_up(self, requests: Sequence[Request], num_left: int = NUM_COMPUTED_AGAIN) -> None:
        """Compute what lacks of each request's tokens but the last num_left.

        After a time without drafts, or behind what the target found in the cache, that may be more than a pass has
        memory for.
        """
        while parts := self._next_parts(requests, num_left):
            self.runner.run(parts)

    def _next_parts(self, requests: Sequence[Request], num_left: int) -> list[Part]:
        """No more tokens than a step of prompts has."""
        parts, room = list[Part](), self.context.max_num_batched_tokens
        for request in requests:
            known = self._num_computed.get(request.request_id, 0)
            end = min(request.num_tokens - num_left, known + min(room, MAX_CATCH_UP_TOKENS))
            if known < end:
                parts.append(self._part(request, end))
                room -= end - known
        return parts

    def _part(self, request: Request, end: int, *, num_draft_tokens: int = 0, num_logits: int = 0) -> Part:
        """The committed tokens up to `end` that the draft lacks, and drafts behind them; they count as computed."""
        start = self._num_computed.get(request.request_id, 0)
        self._num_computed[request.request_id] = end
        return Part(
            request=request,
            start=start,
            end=end,
            num_draft_tokens=num_draft_tokens,
            num_logits=num_logits,
            certain=_certain(request),
        )

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        parts = []
        for request in requests:
            position = request.num_tokens + step - 1
            self._num_computed[request.request_id] = position + 1
            certain = _certain(request)
            part = Part(
                request=request, start=position, end=position, num_draft_tokens=1, num_logits=1, certain=certain
            )
            parts.append(part)
        return self._in_target_ids(self.runner.run(parts, token_ids))

    def _in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._translation is None else self._translation.to_target(logits)


def _certain(request: Request) -> int:
    return request.num_tokens - NUM_COMPUTED_AGAIN
