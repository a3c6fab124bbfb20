"""Checks a step's drafts: one target pass over everything scheduled, then the rule.

Plain decoding is the case of zero drafts and runs the same lines.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from runner.engine.hidden_states import HiddenStates
from runner.engine.launch import Part
from runner.engine.model_runner import ModelRunner
from runner.engine.request import DraftTokens, JudgedTokens, VerifyOutput
from runner.engine.sampling import SamplingRows
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device
from verifier.accepted_path import row_order, slot_moves
from verifier.logprobs import LogprobGatherer, scored_from, wants_logprobs
from verifier.rejection_sampler import RejectionSampler
from verifier.tree_batch import draft_paths


class Verifier:
    def __init__(
        self, *, target: ModelRunner, rejection_sampler: RejectionSampler, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.target, self.rejection_sampler, self.eos_token_ids = target, rejection_sampler, eos_token_ids

    @torch.inference_mode()
    def verify(
        self,
        schedule: Schedule,
        drafts: DraftTokens,
        bitmask: BitmaskRows | None = None,
        tap_layers: tuple[int, ...] = (),
        *,
        taps_every_token: bool = True,
        keeps_logits: bool = False,
    ) -> VerifyOutput:
        """Compute the step's tokens and drafts; judge the drafts.

        bitmask: what grammars allow, of the requests that yield a token, a row for each draft and one behind them.
        tap_layers: the hidden states that the proposer reads.
        taps_every_token: it reads those of all prompt tokens; otherwise of a chunk the last one's alone.
        keeps_logits: it reads the logits too.
        Returns a row for every scheduled request that yields a token, in the order of the schedule.
        """
        drafts = _cover(drafts, len(schedule.scheduled))
        counts, depths = drafts.num_draft_tokens, drafts.depths
        device, vocab_size = self.target.device, self.target.model.vocab_size
        gatherer = None
        if wants_logprobs(schedule):
            gatherer = LogprobGatherer(schedule, counts, depths, vocab_size=vocab_size, device=device)
        parts = [
            Part(
                request=item.request,
                start=item.start,
                end=item.start + item.num_new_tokens,
                num_draft_tokens=count,
                parent_indices=parents if drafts.has_branches else None,
                num_logits=count + 1 if item.yields_token else 0,
                scored_from=None if gatherer is None else scored_from(item),
            )
            for item, count, parents in zip(schedule.scheduled, counts, drafts.parents, strict=True)
        ]
        take_prompt_logits = None if gatherer is None else gatherer.take_prompt_logits
        passed = self.target.forward(
            parts, drafts.token_ids, take_prompt_logits, tap_layers, taps_every_token=taps_every_token
        )
        logits, hidden_states = passed.logits, None
        if passed.hidden_states is not None:
            num_rows = [part.end - part.start + part.num_draft_tokens for part in parts]
            first_rows = [0, *accumulate(num_rows)][:-1]
            hidden_states = HiddenStates(states=passed.hidden_states, first_rows=first_rows)
        yielding = [index for index, item in enumerate(schedule.scheduled) if item.yields_token]
        if not yielding:  # prompts only, none of them done
            nothing = torch.empty(0, 1, dtype=torch.int64, device=device)
            output = VerifyOutput(token_ids=nothing, num_accepted_tokens=nothing[:, 0], hidden_states=hidden_states)
            return output if gatherer is None else replace(output, logprobs=gatherer.finish(logits, nothing))
        # Requests without a token to yield have no drafts, so those of the ones that do are all there are.
        drafts = replace(drafts, cu_num_draft_tokens=[0, *accumulate(counts[index] for index in yielding)])
        requests = [schedule.scheduled[index].request for index in yielding]
        rows = SamplingRows.build(
            requests,
            [row for row, count in enumerate(drafts.num_draft_tokens) for _ in range(count + 1)],
            [ancestors for shape in drafts.shapes for ancestors in (0, *shape.depths)],
            _ancestors(drafts, device),
            vocab_size=vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=device,
            bitmask=bitmask,
            path_idx=list(range(len(logits))) if drafts.has_branches else None,
        )
        output, logits_order = self.rejection_sampler(logits, drafts, rows), None
        if output.path is not None:
            assert self.target.cache is not None
            self.target.cache.move(*slot_moves(output.path, drafts, requests, self.target.block_size))
            logits_order = row_order(output.path, drafts.first_logits_rows, len(logits))
            if hidden_states is not None:
                # A request with drafts computes one committed token, the pending one, in its first row.
                first_rows = [hidden_states.first_rows[index] for index in yielding]
                hidden_states = hidden_states.reordered(row_order(output.path, first_rows, len(hidden_states.states)))
        logprobs = None if gatherer is None else gatherer.finish(logits, output.token_ids, logits_order)
        judged = _judged(schedule, drafts, logits) if keeps_logits else None
        return replace(output, hidden_states=hidden_states, logprobs=logprobs, judged=judged)


def _cover(drafts: DraftTokens, num_requests: int) -> DraftTokens:
    """The same drafts over all num_requests requests of the step; whoever computes a prompt has none."""
    cu = drafts.cu_num_draft_tokens
    cu = (cu + cu[-1:] * (num_requests + 1 - len(cu)))[: num_requests + 1]
    return replace(drafts, cu_num_draft_tokens=cu)


def _judged(schedule: Schedule, drafts: DraftTokens, logits: torch.Tensor) -> JudgedTokens:
    """What the logits stand behind; drafts: of the requests that yield a token."""
    device, counts = drafts.token_ids.device, drafts.num_draft_tokens
    pending = [item.request.last_token_id for item in schedule.scheduled if item.yields_token]
    of_requests = [place for place, count in enumerate(counts) for _ in range(count + 1)]
    if len(of_requests) == len(pending):
        return JudgedTokens(to_device(pending, torch.int64, device), logits, of_requests)
    firsts = drafts.first_logits_rows
    behind = [first + draft for first, count in zip(firsts, counts, strict=True) for draft in range(1, count + 1)]
    token_ids = torch.empty(len(of_requests), dtype=torch.int64, device=device)
    token_ids[to_device(firsts, torch.int64, device)] = to_device(pending, torch.int64, device)
    token_ids[to_device(behind, torch.int64, device)] = drafts.token_ids
    return JudgedTokens(token_ids, logits, of_requests)


def _ancestors(drafts: DraftTokens, device: torch.device) -> torch.Tensor | None:
    """draft_token_ids of SamplingRows.build: a row a request, or, where there are branches, one for each logits row."""
    if not drafts.has_branches:
        return _padded(drafts.token_ids, drafts.num_draft_tokens)
    paths = draft_paths(drafts, device)
    return torch.where(paths >= 0, drafts.token_ids[paths.clamp(min=0)], -1)


def _padded(token_ids: torch.Tensor, counts: list[int]) -> torch.Tensor | None:
    """Flat drafts as [num_requests, most drafts] int64, -1 where a request has fewer; None when nobody drafted."""
    widest = max(counts)
    if widest == 0:
        return None
    if min(counts) == widest:
        return token_ids.view(len(counts), widest)
    starts = [0, *accumulate(counts)]
    flat = [row * widest + offset for row, (start, end) in enumerate(pairwise(starts)) for offset in range(end - start)]
    padded = torch.full((len(counts) * widest,), -1, dtype=torch.int64, device=token_ids.device)
    padded.index_copy_(0, to_device(flat, torch.int64, token_ids.device), token_ids)
    return padded.view(len(counts), widest)
