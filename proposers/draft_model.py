"""A small model drafts token by token (Leviathan et al., arXiv 2211.17192; Chen, 2302.01318).

The draft keeps KV of its own under the target's block table. It computes prompts in the chunks the target does,
and catches up on committed tokens when it next proposes: after full acceptance it lacks the last draft token too.
A draft of another vocabulary says the tokens that both have (proposers.vocabularies, arXiv 2502.05202); everything
here is in the target's ids, the request's processors and the laws too.
"""

from __future__ import annotations

import torch

from proposers.base import Proposer, ProposerContext
from proposers.vocabularies.spelling import Spelling
from proposers.vocabularies.translation import translate
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.launch import Part
from runner.engine.loader import load_model
from runner.engine.model_runner import ModelRunner
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.scheduler import Schedule

MAX_CATCH_UP_TOKENS = 512  # of a request in one pass


class DraftModelProposer(Proposer):
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
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.draft_sample_method = draft_sample_method
        loaded = load_model(
            source,
            device=context.device,
            dtype=context.dtype,
            max_model_len=max_model_len,
            longest_useful_len=context.max_model_len,
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
        self.runner = ModelRunner(
            loaded.model,
            block_size=context.block_size,
            device=context.device,
            dtype=context.dtype,
            batch_invariant=context.batch_invariant,
            token_map=None if self._translation is None else self._translation.reading,
        )
        self._num_computed: dict[str, int] = {}  # request_id -> tokens whose KV is in the draft's cache

    @property
    def cache_bytes_per_block(self) -> int:
        return self.runner.cache_bytes_per_block

    def allocate_cache(self, num_blocks: int) -> None:
        self.runner.allocate_cache(num_blocks)

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        decoding = schedule.decoding
        counts = [max(0, min(item.max_draft_tokens, self.max_model_len - item.request.num_tokens)) for item in decoding]
        cu_num_draft_tokens = [0]
        for count in counts:
            cu_num_draft_tokens.append(cu_num_draft_tokens[-1] + count)
        if not any(counts):
            return DraftTokens.empty(len(decoding), self.context.device)

        device = self.context.device
        widest = max(counts)
        # Greedy drafts have no law but the one-hot one, which is told by giving none.
        keeps_laws = (
            self.context.needs_draft_probs
            and self.draft_sample_method != "greedy"
            and any(not item.request.sampling_params.is_greedy for item in decoding)
        )
        ids = torch.full((len(decoding), widest), -1, dtype=torch.int64, device=device)
        probs: list[torch.Tensor] = []  # a step's laws, [active, vocab]
        active = [index for index, count in enumerate(counts) if count > 0]
        walk = self.context.grammars.walk([item.request.request_id for item in decoding])
        logits = self._catch_up([decoding[index].request for index in active])
        for step in range(widest):
            if step > 0:
                active = [index for index, count in enumerate(counts) if count > step]
                fed = ids[:, step - 1] if len(active) == len(ids) else ids[_index(active, device), step - 1]
                logits = self._feed([decoding[index].request for index in active], step - 1, fed)
            ancestors = ids if len(active) == len(ids) else ids[_index(active, device)]
            drafted, law = self._sample(
                logits, [decoding[index].request for index in active], step, ancestors, walk.bitmask(active)
            )
            if step + 1 < widest:
                walk.advance(active, drafted)
            ids[slice(None) if len(active) == len(ids) else _index(active, device), step] = drafted
            if (
                keeps_laws
            ):  # every draft has its row, so that rows and drafts stay aligned; a greedy one's is never read
                probs.append(torch.zeros_like(logits) if law is None else law)
        for item, count in zip(decoding, counts, strict=True):
            if count > 0:
                self._num_computed[item.request.request_id] = item.request.num_tokens + count - 1
        flat = [row * widest + step for row, count in enumerate(counts) for step in range(count)]
        return DraftTokens(
            token_ids=ids.flatten().index_select(0, _index(flat, device)),
            cu_num_draft_tokens=cu_num_draft_tokens,
            probs=_by_request(probs, counts) if probs else None,
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
            elif item.start < self.max_model_len and self._may_draft(
                request
            ):  # the draft follows the target through prompts, chunk by chunk
                parts.append(self._part(request, min(item.start + item.num_new_tokens, self.max_model_len)))
        if parts:
            self.runner.run(parts)

    def release(self, request_id: str) -> None:
        self._num_computed.pop(request_id, None)

    def _may_draft(self, request: Request) -> bool:
        return self.num_speculative_tokens > 0 and request.sampling_params.max_draft_tokens != 0

    def _catch_up(self, requests: list[Request]) -> torch.Tensor:
        """Compute every committed token the draft has not seen; logits [len(requests), vocab] after the last."""
        for request in requests:  # after a time without drafts there may be more of them than a pass should take
            while request.num_tokens - (known := self._num_computed.get(request.request_id, 0)) > MAX_CATCH_UP_TOKENS:
                self.runner.run([self._part(request, known + MAX_CATCH_UP_TOKENS)])
        return self._in_target_ids(
            self.runner.run([self._part(request, request.num_tokens, num_logits=1) for request in requests])
        )

    def _part(self, request: Request, end: int, num_logits: int = 0) -> Part:
        start = self._num_computed.get(request.request_id, 0)
        self._num_computed[request.request_id] = end
        return Part(request=request, start=start, end=end, num_logits=num_logits)

    def _feed(self, requests: list[Request], ancestor: int, drafted: torch.Tensor) -> torch.Tensor:
        """Compute one drafted token a request; logits [len(requests), vocab] after it."""
        parts = []
        for request in requests:
            position = request.num_tokens + ancestor
            parts.append(Part(request=request, start=position, end=position, num_draft_tokens=1, num_logits=1))
        return self._in_target_ids(self.runner.run(parts, drafted))

    def _in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._translation is None else self._translation.to_target(logits)

    def _sample(
        self,
        logits: torch.Tensor,
        requests: list[Request],
        step: int,
        ancestors: torch.Tensor,
        bitmask: BitmaskRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = SamplingRows.build(
            requests,
            list(range(len(requests))),
            [step] * len(requests),
            ancestors if step > 0 else None,
            vocab_size=self.context.vocab_size,
            eos_token_ids=self.context.eos_token_ids,
            device=self.context.device,
            bitmask=bitmask,
        )
        processed = process_logits(logits, rows)
        if self._translation is not None:
            processed = self._translation.fill_empty(processed)
        return draft_tokens(
            processed,
            rows,
            self.draft_sample_method,
            need_probs=self.context.needs_draft_probs,
            draft_step=rows.positions - step if self.context.keys_by_draft_step else 0,
        )


def _index(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _by_request(probs: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Laws drawn step by step, [active, vocab] each, as rows [num_draft_tokens, vocab] request by request."""
    order: list[list[int]] = [[] for _ in counts]
    row = 0
    for step in range(len(probs)):
        for index, count in enumerate(counts):
            if count > step:
                order[index].append(row)
                row += 1
    stacked = torch.cat(probs)
    return stacked.index_select(0, _index([row for rows in order for row in rows], stacked.device))
