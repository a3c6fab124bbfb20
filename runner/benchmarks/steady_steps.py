"""Decoding on a clock: a batch that stays full, drafts that no request's end cuts short, prompts outside the time.

Drives the engine's own step. The clock starts when every request has its first token and stops when the first one has
as many as were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.request_loop import released_in_the_end
from runner.step_loop import StepLoop
from runner.trace import RequestTraces


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    seconds: float  # to the host's knowledge of its tokens, from that of the step before
    num_draft_tokens: int  # of all requests
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SteadyRun:
    batch_size: int
    seconds: float  # of all steps, to the host's knowledge of the last one's tokens
    steps: tuple[TimedStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)


def longest_output(num_new_tokens: int, num_speculative_tokens: int) -> int:
    """max_tokens of a request that is timed to its num_new_tokens-th token: room for two full drafts behind it."""
    return num_new_tokens + 2 * (num_speculative_tokens + 1)


def decode_steadily(llm: LLM, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, seed: int) -> SteadyRun:
    """Greedy decoding of token-id prompts, all at once, with the engine's proposer; the seed keys synthetic acceptance.

    The cache must hold all of them to their longest_output.

    Raises:
        UserError: the first request had all its tokens before the last one's prompt was computed.
    """
    engine, proposer = llm.engine, llm.engine.proposer
    max_tokens = longest_output(num_new_tokens, proposer.num_speculative_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = make_requests(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], [params] * len(prompts), engine.tokenizer, seed
    )
    scheduler = llm.scheduler_for(proposer)
    loop = StepLoop(engine, scheduler, proposer, MetricsCollector(), RequestTraces(lambda *_: "", {}))
    steps: list[TimedStep] = []
    with released_in_the_end(loop, requests):
        for request in requests:
            scheduler.add(request)
        while not all(request.output_token_ids for request in requests):
            loop.step()
        synchronize(engine.device)
        started = before = time.perf_counter()
        while max(len(request.output_token_ids) for request in requests) < num_new_tokens:
            committed = loop.step()
            now = time.perf_counter()
            steps.append(
                TimedStep(
                    seconds=now - before,
                    num_draft_tokens=sum(gain.num_draft_tokens for gain in committed),
                    num_tokens=sum(len(gain.token_ids) for gain in committed),
                )
            )
            before = now
        seconds = before - started
    if not steps:
        raise UserError(
            f"--new-tokens must outlast the prompts, got {num_new_tokens}: a request had as many before the last of "
            f"{len(requests)} prompts was computed; raise it, or lower --prompt-tokens"
        )
    assert all(request.num_preemptions == 0 for request in requests), "the cache holds all of them"
    return SteadyRun(batch_size=len(requests), seconds=seconds, steps=tuple(steps))


def compute_prompts(llm: LLM, prompts: Sequence[Sequence[int]], *, seed: int) -> SteadyRun:
    """Token-id prompts one after another, a step each, to their first token."""
    engine, proposer = llm.engine, llm.engine.proposer
    requests = make_requests(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)] * len(prompts),
        engine.tokenizer,
        seed,
    )
    scheduler, steps = llm.scheduler_for(proposer), list[TimedStep]()
    loop = StepLoop(engine, scheduler, proposer, MetricsCollector(), RequestTraces(lambda *_: "", {}))
    with released_in_the_end(loop, requests):
        for request in requests:
            scheduler.max_num_batched_tokens = request.num_prompt_tokens
            scheduler.add(request)
            synchronize(engine.device)
            started = time.perf_counter()
            loop.step()
            seconds = time.perf_counter() - started
            steps.append(TimedStep(seconds=seconds, num_draft_tokens=0, num_tokens=request.num_prompt_tokens))
    return SteadyRun(batch_size=1, seconds=sum(step.seconds for step in steps), steps=tuple(steps))


def synchronize(device: torch.device) -> None:
    """Wait for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
