"""Whole steps: one replay, of a CUDA graph or a CPU's program, drafts, runs target and rule, and moves the requests on.

While the same requests decode, a step reads what the step before it left on the device. So with a GPU the host launches
the next one before it knows the last one's tokens, and its own work hides behind the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.reference.top_logprobs import num_columns
from proposers.base import Proposer
from proposers.captured.drafter import CapturedDrafter, GoingOn
from runner.engine.backend import runs_kernels
from runner.engine.bucket import bucket
from runner.engine.device_batch import DeviceBatch
from runner.engine.device_requests import DeviceRequests
from runner.engine.download import Download
from runner.engine.draft_trees import tree_shape
from runner.engine.errors import UserError
from runner.engine.grammar_store import GrammarStore
from runner.engine.logprobs import TokenLogprobs, unpack
from runner.engine.model_runner import ModelRunner
from runner.engine.programs import step_graph_store
from runner.engine.request import DraftTokens, Request, StepOutcome
from runner.engine.sampling_flags import SamplingFlags
from runner.engine.schedule import CommittedTokens, Schedule, ScheduledRequest
from runner.engine.scheduler import Scheduler
from runner.engine.step_operations import follow_verified, top_logprobs
from runner.engine.transformers_model import TransformersModel
from runner.metrics import InParts
from runner.step_conditions import EmptyRows, StepConditions
from verifier.captured import CapturedVerifier, captured_verifier
from verifier.rules import Rule

SMALLEST_SHARE = 0.75  # of a batch's places must hold a request; computing the empty places is wasted


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that is launched and not read yet."""

    schedule: Schedule
    places: list[int]  # of the scheduled requests in the batch; all other places are empty
    depth: int  # of the drafts
    draft_sources: list[str | None]  # of each scheduled request: the proposer that drafts for it
    seconds_to_find: float  # drafts on the host, before it was launched
    # [count, width] int64: depth + 3 as kernels/follow_verified.py has them; the parents of trees; the bits of logprobs
    packed: Download
    num_top_logprobs: int | None  # that are told beside each token's own; None: none are

    @property
    def requests(self) -> list[Request]:
        return [item.request for item in self.schedule.scheduled]

    def read(self) -> StepOutcome:
        """Waits for the step."""
        packed, width, num_top = self.packed.read(), self.depth + 1, self.num_top_logprobs
        num_told = 0 if num_top is None else width * num_columns(num_top)
        all_rows = packed[:, : packed.shape[1] - num_told].tolist()
        rows = [all_rows[place] for place in self.places]
        num_drafts = [row[width + 1] for row in rows]
        trees = [row[width + 2 : width + 2 + count] for row, count in zip(rows, num_drafts, strict=True)]
        return StepOutcome(
            token_ids=rows,
            num_accepted_tokens=[row[width] for row in rows],
            num_draft_tokens=num_drafts,
            draft_depths=[tree_shape(parents).depth for parents in trees] if any(trees) else num_drafts,
            draft_sources=[
                source if count else None for source, count in zip(self.draft_sources, num_drafts, strict=True)
            ],
            logprobs={} if num_top is None else self._logprobs(packed[:, -num_told:], rows, num_top),
        )

    def _logprobs(
        self, bits: Tensor, rows: list[list[int]], num_top: int
    ) -> dict[str, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
        """Of the tokens that requests gain, by request; rows: of each scheduled request."""
        width = self.depth + 1
        told = bits.contiguous().view(torch.float64).view(len(bits), width, -1).tolist()
        return {
            request.request_id: ([], [unpack(line, min(asked, num_top)) for line in told[place][: row[width] + 1]])
            for place, row, request in zip(self.places, rows, self.requests, strict=True)
            if (asked := request.sampling_params.logprobs) is not None
        }


class WholeSteps:
    """The captured steps of one proposer, with as many drafts as one load allows."""

    def __init__(
        self,
        *,
        target: ModelRunner,
        drafter: CapturedDrafter,
        verifier: CapturedVerifier,
        on_device: DeviceRequests,
        max_draft_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarStore,
    ) -> None:
        """
        Args:
            on_device: the engine's: of all its whole steps one kind at a time is under way, and loads it at its start.
            max_draft_tokens: that the load allows; a static tree may have fewer nodes.
            max_model_len: tokens of a request that the target can see.
        """
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.max_draft_tokens = max_draft_tokens
        self.conditions = StepConditions(
            drafter=drafter,
            greedy_only=verifier.greedy_only,
            max_model_len=max_model_len,
            max_drafted_len=min(max_model_len, drafter.max_model_len or max_model_len),
            empty_rows=EmptyRows.on(target.device, target.products_per_row),
        )
        self.eos_token_ids, self.grammars = eos_token_ids, grammars
        assert target.graph_memory is not None, "its passes are captured"
        self._graphs = step_graph_store(target.device, target.graph_memory)
        self._on_device = on_device
        # Of the steps under way:
        self._sampling_flags = SamplingFlags.of([], ())
        self._count = 0  # places in the batch

    @classmethod
    def of(
        cls,
        proposer: Proposer,
        *,
        target: ModelRunner,
        rule: Rule,
        on_device: Callable[[], DeviceRequests],  # made when first asked for
        max_draft_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> WholeSteps | InParts:
        """Or why the engine's steps need the host, whatever the requests are."""
        if not target.is_paged:
            # With hardware.enforce_eager nothing is captured, whose code it may be.
            is_wanted = proposer.context.graph_memory is not None
            is_foreign = isinstance(target.model, TransformersModel)
            return InParts.TRANSFORMERS if is_wanted and is_foreign else InParts.UNCAPTURED
        drafter = proposer.captured_drafter(max_draft_tokens)
        if drafter is None:
            return InParts.HOST_DRAFTS
        if target.is_recurrent and drafter.drafts_trees:
            raise UserError(
                f"{proposer.name}.captured_drafter must draft chains, for the states of the target's layers follow "
                "one path of tokens; mend the proposer"
            )
        verifier = captured_verifier(
            target,
            rule,
            num_tokens=drafter.num_tokens,
            max_num_seqs=max_num_seqs,
            tree_depth=drafter.depth if drafter.drafts_trees else None,
            are_drawn=drafter.draws,
        )
        if verifier is None:
            return InParts.SYNTHETIC_TREES
        return cls(
            target=target,
            drafter=drafter,
            verifier=verifier,
            on_device=on_device(),
            max_draft_tokens=max_draft_tokens,
            max_model_len=max_model_len,
            eos_token_ids=proposer.context.eos_token_ids,
            grammars=proposer.context.grammars,
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched before the one before it is read.

        On a CPU a step is done when it is launched, so the next one waits until it is known who goes on; where the host
        drafts or follows grammars, until it is known what follows.
        """
        return runs_kernels(self.target.device) and not self._needs_text

    @property
    def _needs_text(self) -> bool:
        return self.drafter.reads_text or self._sampling_flags.grammars

    @property
    def _num_top_logprobs(self) -> int | None:
        """That are told beside each token's own; None: none are."""
        most = self._sampling_flags.num_top_logprobs
        return None if most is None else min(most, self.target.model.vocab_size)

    def start(self, schedule: Schedule) -> LaunchedStep:
        """Take a schedule's requests to the device, and launch their step."""
        requests = [item.request for item in schedule.scheduled]
        self._sampling_flags = SamplingFlags.of(requests, self.eos_token_ids)
        self._count = min(bucket(len(requests)), self._on_device.capacity)
        self._on_device.load(requests, self._sampling_flags)
        self.drafter.start(requests)
        longest = max(request.num_tokens for request in requests)
        return self._launch(schedule, list(range(len(requests))), longest=longest)

    def go_on(self, launched: LaunchedStep, scheduler: Scheduler) -> LaunchedStep | None:
        """Launch the next step; None where the requests have to be looked at anew.

        launched: the step before it, which is read and committed already unless steps run ahead.
        """
        staying = [
            (place, item)
            for place, item in zip(launched.places, launched.schedule.scheduled, strict=True)
            if not item.request.is_finished
        ]
        requests = [item.request for _, item in staying]
        most = self.drafter.depth + 1 if self.runs_ahead else 0  # tokens that the step under way may bring
        longest = max((request.num_tokens for request in requests), default=0) + most
        if (
            not requests
            or requests != scheduler.running
            or scheduler.may_admit
            or len(requests) < SMALLEST_SHARE * self._count  # better to begin again with a smaller batch
            or scheduler.max_draft_tokens != self.max_draft_tokens
            or longest + self.drafter.reach > self.conditions.max_drafted_len
            # The step under way brings each request at least one token.
            or (self.runs_ahead and all(len(r.output_token_ids) + 1 >= r.sampling_params.max_tokens for r in requests))
            or not scheduler.reserve_ahead(most + self.drafter.num_tokens)
        ):
            return None
        places = [place for place, _ in staying]
        if len(places) < len(launched.places):
            self._on_device.remove([place for place in launched.places if place not in places])
        self._on_device.extend_tables(places, requests)
        items = [item for _, item in staying]
        if self._needs_text:
            items = [self._as_it_is_now(item, scheduler) for item in items]
        schedule = replace(launched.schedule, scheduled=items, preempted=[])
        return self._launch(schedule, places, longest=longest)

    def _as_it_is_now(self, item: ScheduledRequest, scheduler: Scheduler) -> ScheduledRequest:
        """For the host to draft by."""
        limit = min(self.drafter.num_tokens, scheduler.draft_room(item.request))
        return replace(item, start=item.request.num_computed_tokens, max_draft_tokens=limit)

    def stop(self, launched: LaunchedStep, committed: Sequence[CommittedTokens]) -> None:
        """End the whole steps: `launched` was the last one, and committed these tokens."""
        places = {request.request_id: place for place, request in zip(launched.places, launched.requests, strict=True)}
        self.drafter.stop(
            [
                GoingOn(places[gain.request.request_id], gain.request, len(gain.token_ids))
                for gain in committed
                if not gain.request.is_finished and gain.request.sampling_params.speculates
            ]
        )

    @torch.inference_mode()
    def _launch(self, schedule: Schedule, places: list[int], *, longest: int) -> LaunchedStep:
        shape = self.target.paged_shape
        # Up to one split, contexts of any length are launched alike.
        max_context = shape.context_bucket(max(longest + self.drafter.reach, shape.split_keys or 0))
        on_device, began = self._on_device, time.perf_counter()
        num_tokens, draft_sources = self._find(schedule, places)
        seconds_to_find = time.perf_counter() - began
        layout = (self._count, self._sampling_flags, max_context, num_tokens, self.drafter.form)
        on_device.fill_rows(num_tokens + 1)

        def compute() -> tuple[Tensor]:
            return (self._step(on_device.batch(self._count, self._sampling_flags, max_context, num_tokens + 1)),)

        (packed,) = self._graphs(layout, compute)
        return LaunchedStep(
            schedule=schedule,
            places=places,
            packed=Download(packed),
            depth=self.drafter.depth if self.drafter.drafts_trees else num_tokens,
            num_top_logprobs=self._num_top_logprobs,
            draft_sources=draft_sources,
            seconds_to_find=seconds_to_find,
        )

    def _find(self, schedule: Schedule, places: list[int]) -> tuple[int, list[str | None]]:
        """What the host does before a step: drafts, and what grammars make of them.

        Returns how many drafts have a place, and whose those of each request are.
        """
        drafts = self.drafter.find(schedule)
        if not self._sampling_flags.grammars:
            if drafts is None:
                return self.drafter.num_tokens, [None] * len(places)
            sources = [source or self.drafter.source for source in drafts.draft_sources]
            return self.drafter.place(drafts, places), sources
        found = DraftTokens.empty(len(places), self.target.device) if drafts is None else drafts
        found, bitmask = self.grammars.constrain(schedule, found)
        num_tokens = self.drafter.place(found, places)
        self._on_device.processors.put_bitmask(bitmask, found.num_draft_tokens, places, num_tokens + 1)
        return num_tokens, found.draft_sources

    def _step(self, batch: DeviceBatch) -> Tensor:
        drafted = self.drafter.draft(batch)
        verified, logits, draft_token_ids, draft_logits, taps = self.verifier(
            batch, drafted.token_ids, drafted.probs, drafted.parents, self.drafter.tap_layers
        )
        self.drafter.learn(batch, taps, verified.token_ids)
        self.drafter.learn_logits(batch, draft_token_ids, draft_logits)
        processors, num_top = batch.processors, self._num_top_logprobs
        if processors is not None and processors.bad_words is not None:
            processors.bad_words.follow(verified)
        said = None if processors is None else processors.said
        packed = [follow_verified(batch.lengths, batch.last_token_ids, verified, said)]
        if drafted.parents is not None:
            packed.append(drafted.parents)
        if num_top is not None:
            told = top_logprobs(logits, verified.token_ids.flatten().clamp(min=0), num_top)
            packed.append(told.view(torch.int64).view(batch.count, -1))
        return packed[0] if len(packed) == 1 else torch.cat(packed, dim=1)
