"""The timed cases of python -m runner.benchmarks.decoding: what decodes, what is read off its steps, and the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from runner.benchmarks.fixed_guesses import FixedGuesses
from runner.benchmarks.shared_target import SharedTarget
from runner.benchmarks.steady_steps import SteadyRun, decode_steadily

BATCH_SIZE = 64
Quantities = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DecodingCase:
    label: str
    quantity: str  # of those that are read off a run, the one that is shown
    goal: float  # on one H200, at the default shape and lengths
    batch_size: int = 1
    method: Mapping[str, Any] | None = None  # keys of the `method` group; None: plain decoding
    is_ratio: bool = False  # of its steps to those of plain decoding, whose run follows at once

    def measure(self, target: SharedTarget, seed: int) -> Quantities:
        run = self._decode(target, self.method, seed)
        return read_ratio(run, self._decode(target, None, seed)) if self.is_ratio else read_speed(run)

    def _decode(self, target: SharedTarget, method: Mapping[str, Any] | None, seed: int) -> SteadyRun:
        llm = target.engine(method, self.batch_size)
        prompts = target.prompts(self.batch_size)
        return decode_steadily(llm, prompts, num_new_tokens=target.new_tokens, seed=seed)


def read_speed(run: SteadyRun) -> Quantities:
    num_steps = len(run.steps)
    return {
        "tokens_per_second": run.num_tokens / run.seconds,
        "ms_per_token": 1000 * run.seconds * run.batch_size / run.num_tokens,  # of one request
        "ms_per_step": 1000 * run.seconds / num_steps,
        "tokens_per_step": run.num_tokens / (num_steps * run.batch_size),  # of one request
    }


def read_ratio(verifying: SteadyRun, plain: SteadyRun) -> Quantities:
    """Of steps that verify drafts to plain ones; medians."""
    verify_s, plain_s = (median(step.seconds for step in run.steps) for run in (verifying, plain))
    return {"ratio": verify_s / plain_s, "verify_step_ms": 1000 * verify_s, "plain_step_ms": 1000 * plain_s}


def free_guesses(num_tokens: int) -> dict[str, Any]:
    path = f"{FixedGuesses.__module__}.{FixedGuesses.__qualname__}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": num_tokens}


def eagle3(num_tokens: int) -> dict[str, Any]:
    return {"method": "eagle3", "num_speculative_tokens": num_tokens}


def _accepting(method: dict[str, Any], length: float) -> dict[str, Any]:
    """The method with drafts accepted at random: random weights guess nothing right."""
    return {**method, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


CASES = {
    "plain": DecodingCase(label="plain decoding, batch 1: ms per token", quantity="ms_per_token", goal=4.2),
    "verify": DecodingCase(
        label="a step that verifies 8 tokens / a plain step, batch 1",
        quantity="ratio",
        goal=1.05,
        method=free_guesses(7),
        is_ratio=True,
    ),
    "free": DecodingCase(
        label="7 free guesses, 3.9 tokens a step, batch 1: tokens/s",
        quantity="tokens_per_second",
        goal=850,
        method=_accepting(free_guesses(7), 3.9),
    ),
    "plain-64": DecodingCase(
        label="plain decoding, batch 64: tokens/s",
        quantity="tokens_per_second",
        goal=10_400,
        batch_size=BATCH_SIZE,
    ),
    "eagle3": DecodingCase(
        label="EAGLE-3, 7 guesses, 3.9 tokens a step, batch 1: tokens/s",
        quantity="tokens_per_second",
        goal=620,
        method=_accepting(eagle3(7), 3.9),
    ),
    "eagle3-64": DecodingCase(
        label="EAGLE-3, 3 guesses, 2.6 tokens a step, batch 64: tokens/s",
        quantity="tokens_per_second",
        goal=15_000,
        batch_size=BATCH_SIZE,
        method=_accepting(eagle3(3), 2.6),
    ),
}
