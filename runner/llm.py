"""LLM: prompts in, completions out, in the shape people know from vLLM.

Holds one assembled engine. `generate` runs the configured method; `run` takes a proposer, so that plain decoding is
measured on the same engine, by the same lines.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tqdm import tqdm

from proposers.base import Proposer
from runner.assembly import assemble
from runner.config import SpeculativeConfig
from runner.config.from_vllm import without_switches
from runner.config.python_names import in_python, python_names
from runner.draft_budgets import DraftBudgets
from runner.engine.errors import UserError
from runner.engine.known_arguments import known_arguments
from runner.engine.loader import LoadedModel
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.scheduler import Scheduler
from runner.engine.stopping import StopRules
from runner.engine.structured_outputs import StructuredOutputsParams
from runner.frozen_heap import frozen_heap
from runner.metrics import MetricsCollector
from runner.metrics.totals import RequestTotals
from runner.model_files import model_path
from runner.outputs import Counter, RequestOutput, Vector, collect_outputs
from runner.prompt_forms import Prompt
from runner.prompts import list_params, list_prompts, make_requests
from runner.ranks.ranks import Build, Call, Forget, Ranks, Run
from runner.ranks.start import start_ranks
from runner.request_loop import Observer, RequestLoop
from runner.step_loop import StepLoop
from runner.tiny import DRAFTER_KEYS, TARGET_NAME
from runner.trace import RequestTraces

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]

# Of a second thread, or an observer: blocks and proposers know requests by their ids.
ONE_AT_A_TIME = (
    "an LLM must run one generate() at a time, and this one is running; give all prompts to one call, or build a "
    "second LLM"
)


class LLM:
    """An offline engine.

    Args:
        model: directory, hub id, or a name of the tiny family (`tiny`).
        speculative_config: vLLM's, or keys of the `method` group; None is plain decoding. What is read otherwise than
            it was written, or changes nothing, is said by a UserWarning.
        engine_args: keys of the `model` and `hardware` groups (dtype, max_num_seqs, load_format, ...), and `seed`;
            switches of vLLM's that change nothing here are read with a warning.

    Raises:
        UserError: an argument or a checkpoint cannot be used; the message says which, why and what to do.
    """

    def __init__(self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **engine_args: Any) -> None:
        if model == TARGET_NAME:
            engine_args = {**DRAFTER_KEYS, **engine_args}
        engine_args, switches = without_switches(engine_args)
        config = SpeculativeConfig.from_engine_args(model, speculative_config, **engine_args)
        for note in [*switches, *config.notes()]:  # a run from the command line has them in its summary
            warnings.warn(in_python(note), stacklevel=2)
        self._names: Callable[[], AbstractContextManager[None]] = python_names  # by which errors speak of keys
        with self._names():
            self._start(config)

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, target_info: LoadedModel | None = None, ranks: Ranks | None = None
    ) -> LLM:
        """An engine of its own.

        Args:
            target_info: weights that it shares with others, as in `assemble`; of several ranks, those of their last
                engine.
            ranks: whose part it is; None: as many as the configuration wants, of which this process is the first.
        """
        llm = cls.__new__(cls)
        llm._names = nullcontext  # the command line's
        llm._start(config, target_info, ranks)
        return llm

    def _start(
        self, config: SpeculativeConfig, target_info: LoadedModel | None = None, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.ranks = ranks or start_ranks(config)
        with self.ranks.together(Build(config=config, shares_target=target_info is not None)):
            self.engine = assemble(config, target_info, self.ranks.shard)
        self._budgets = DraftBudgets(config.method, self.engine.proposer)
        self.metrics = MetricsCollector()  # of the generate() that runs, or ran last
        self._totals = RequestTotals()  # of those before it
        self._cached_for = self.engine.proposer  # whose requests left in the KV cache what is known there
        self._to_abort: set[str] = set()  # prompts of the generate() that runs
        self._running = threading.Lock()

    @known_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        observer: Observer | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in order.

        Args:
            prompts: a string, token ids, chat messages or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: one for all prompts or one each; None: SamplingParams().
            use_tqdm: show a progress bar on stderr; None: where that is a terminal.
            observer: called after every step with the metrics of this call so far.

        Raises:
            UserError: a prompt or a parameter cannot be used with this engine.
        """
        return self._complete(prompts, sampling_params, use_tqdm=use_tqdm, observer=observer)

    def abort(self, request_id: str) -> None:
        """End a prompt's requests before the next step of the generate() that runs them, also from another thread.

        They keep what they have said and finish with reason "abort". request_id is a RequestOutput's, the prompt's
        place in the call; an observer is the place to call this from.
        """
        self._to_abort.add(str(request_id))

    def reset_prefix_cache(self) -> None:
        """Forget what earlier calls left in the KV cache, so that prompts are computed anew; under vLLM's name."""
        with self._one_at_a_time(), self.ranks.together(Forget()):
            self.follow(Forget())

    def close(self) -> None:
        """End the processes of the other ranks, where there are any (tensor_parallel_size); then no call can follow.

        Comes by itself when nothing refers to the LLM any more.
        """
        self.ranks.close()

    @known_arguments
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one conversation, or a list of them, through the tokenizer's chat template."""
        return self._complete(messages, sampling_params, use_tqdm=use_tqdm)

    def get_metrics(self) -> list[Counter | Vector]:
        """Totals of every generate() since the start, under vLLM's names so that its scripts read them."""
        totals = copy.deepcopy(self._totals)
        totals.add(self.metrics.records)
        at = totals.num_accepted_at
        num_positions = max(len(at), self.engine.proposer.num_speculative_tokens)
        return [
            Counter(name="vllm:spec_decode_num_drafts", value=totals.num_drafts),
            Counter(name="vllm:spec_decode_num_draft_tokens", value=totals.num_draft_tokens),
            Counter(name="vllm:spec_decode_num_accepted_tokens", value=totals.num_accepted_tokens),
            Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=at + [0] * (num_positions - len(at))),
            Counter(name="vllm:prefix_cache_queries", value=totals.prefix_cache_queries),
            Counter(name="vllm:prefix_cache_hits", value=totals.prefix_cache_hits),
        ]

    def run(
        self,
        requests: Sequence[Request],
        proposer: Proposer,
        metrics: MetricsCollector,
        *,
        max_concurrency: int | None = None,  # requests in flight at most; None: no bound
        max_draft_tokens: int | None = None,  # of a request in a step, at most; None: as the configuration says
        arrivals: Sequence[float] | None = None,  # s after the start, ascending; None: as soon as there is room
        restarts: bool = False,  # the proposer begins with what it knew when it was built
        categories: Mapping[str, str] | None = None,  # request_id -> category, for the breakdown
        observer: Observer | None = None,
    ) -> RequestTraces:
        """Bring requests to their end with one proposer; a request that cannot run fails and the rest go on.

        Finds nothing in the cache that earlier calls left there, so that every call does the same work.
        """
        if max_concurrency is not None and max_concurrency < 1:  # no request would ever arrive
            raise UserError(f"max_concurrency must be >= 1, got {max_concurrency}; leave it out for no bound")
        if self.ranks.shard.size > 1 and proposer not in (self.engine.proposer, self.engine.plain_proposer):
            raise UserError("with hardware.tensor_parallel_size > 1 the proposer must be one of the engine's own")
        most = self.engine.proposer.num_speculative_tokens
        if self.engine.target.is_recurrent and proposer.num_speculative_tokens > most:
            raise UserError(
                f"num_speculative_tokens of a proposer must be <= {most}, the engine's own, which its layers' "
                f"states are made for, got {proposer.num_speculative_tokens}; build the engine with as many"
            )
        call = Run(
            requests=requests,
            is_plain=proposer is self.engine.plain_proposer,
            max_concurrency=max_concurrency,
            max_draft_tokens=max_draft_tokens,
            arrivals=arrivals,
            restarts=restarts,
        )
        with self._one_at_a_time(), self.ranks.together(call):
            return self._run(call, metrics, proposer, categories=categories, observer=observer)

    def follow(self, call: Call) -> None:
        """Make a call that all ranks make; what it gives is the first rank's to tell."""
        assert not isinstance(call, Build), "it makes another LLM"
        if isinstance(call, Forget):
            self.engine.block_manager.forget()
        else:
            self._run(call, MetricsCollector())

    def _complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool | None,
        observer: Observer | None = None,
    ) -> list[RequestOutput]:
        """As generate says; those who call it stand right below the user's call, which warnings name."""
        with self._names(), self._one_at_a_time():
            listed = list_prompts(prompts)
            params = list_params(sampling_params, len(listed))
            for parameters in params:
                self._check_speculative_model(parameters.speculative_model)
            requests = make_requests(listed, params, self.engine.tokenizer, self.config.seed)
            self._totals.add(self.metrics.records)
            self.metrics = MetricsCollector()
            with tqdm(total=len(requests), desc="requests", disable=None if use_tqdm is None else not use_tqdm) as bar:

                def observe(metrics: MetricsCollector) -> None:
                    bar.update(len(metrics.records) - bar.n)
                    if observer is not None:
                        observer(metrics)

                call = Run(requests=requests, keeps_cache=True)
                with self.ranks.together(call):
                    traces = self._run(call, self.metrics, observer=observe)
        if traces.errors:  # an empty text alone would pass for an answer
            request_id, reason = next(iter(traces.errors.items()))
            warnings.warn(
                f"{len(traces.errors)} of {len(requests)} requests failed; request {request_id}: {reason}",
                stacklevel=4,  # generate or chat, and known_arguments, stand between
            )
        return collect_outputs(requests, traces.errors, self.engine.tokenizer.decode_token)

    def _run(
        self,
        call: Run,
        metrics: MetricsCollector,
        proposer: Proposer | None = None,  # None: the engine's
        *,
        categories: Mapping[str, str] | None = None,
        observer: Observer | None = None,
    ) -> RequestTraces:
        if proposer is None:
            proposer = self.engine.plain_proposer if call.is_plain else self.engine.proposer
        if not call.keeps_cache:
            self.engine.block_manager.forget()
        if call.restarts:
            proposer.restart()
        traces = RequestTraces(self.engine.tokenizer.decode, categories or {})
        steps = StepLoop(self.engine, self.scheduler_for(proposer, call.max_draft_tokens), proposer, metrics, traces)
        loop = RequestLoop(steps, self._to_abort, self.ranks)
        with frozen_heap():
            return loop.run(
                call.requests, max_concurrency=call.max_concurrency, arrivals=call.arrivals, observer=observer
            )

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise UserError(ONE_AT_A_TIME)
        try:
            self._to_abort.clear()
            yield
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{self.engine.device} ran out of memory in a step; lower hardware.gpu_memory_utilization (now "
                f"{self.config.hardware.gpu_memory_utilization}), which leaves less to the KV cache and more to steps, "
                "or hardware.max_num_seqs or hardware.max_num_batched_tokens, which make steps smaller"
            ) from error
        finally:  # also when interrupted: the engine stays usable
            self._running.release()

    def refusals(self, requests: Sequence[Request]) -> list[str | None]:
        """Why each of these requests could never run here; None where it can."""
        scheduler = self.scheduler_for(self._cached_for)
        reasons = []
        for request in requests:
            reasons.append(scheduler.refusal(request) or self.engine.grammars.open(request))
            self.engine.grammars.close(request.request_id)
        return reasons

    def scheduler_for(self, proposer: Proposer, max_draft_tokens: int | None = None) -> Scheduler:
        """An empty schedule over the engine's cache; for those who drive a StepLoop themselves, in every rank alike."""
        engine, hardware = self.engine, self.config.hardware
        if proposer is not self._cached_for:  # the one before may have left out what this one keeps in blocks
            engine.block_manager.forget()
            self._cached_for = proposer
        return Scheduler(
            block_manager=engine.block_manager,
            stop_rules=StopRules(
                eos_token_ids=frozenset(engine.eos_token_ids),
                max_model_len=engine.target_info.max_model_len,
                decode=engine.tokenizer.decode if engine.tokenizer.is_available else None,
                special_token_ids=engine.tokenizer.special_token_ids,
            ),
            vocab_size=engine.target.model.vocab_size,
            max_num_seqs=hardware.max_num_seqs,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            enable_chunked_prefill=hardware.enable_chunked_prefill,
            draft_budget=self._budgets.budget(proposer, max_draft_tokens),
            # A state is of the text up to one place, and prompts end at others.
            fills_blocks=proposer.fills_blocks
            if hardware.enable_prefix_caching and not engine.target.is_recurrent
            else None,
        )

    def _check_speculative_model(self, name: str | None) -> None:
        """Raises UserError unless it is the draft that was loaded: a request cannot bring one along."""
        draft = self.config.draft_model_config()
        loaded = None if draft is None else draft.model
        if name is not None and (loaded is None or model_path(name) != model_path(loaded)):
            raise UserError(
                f"speculative_model must be the draft that the engine was started with ({loaded or 'none'}), got "
                f"{name!r}; give it to the engine: LLM(..., speculative_config={{'method': 'draft_model', 'model': "
                f"{name!r}}})"
            )
