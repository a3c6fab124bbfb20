"""The timed cases of python -m runner.benchmarks.decoding: what decodes, what is read off its steps, and the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from runner.benchmarks.fixed_guesses import EverySecondStep, FixedGuesses
from runner.benchmarks.shared_target import SharedTarget
from runner.benchmarks.steady_steps import SteadyRun, decode_steadily
from runner.engine.errors import UserError

BATCH_SIZE = 64
Quantities = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DecodingCase:
    label: str
    quantity: str  # of those that are read off a run, the one that is shown
    goal: float  # on one H200, at the default shape and lengths
    batch_size: int = 1
    method: Mapping[str, Any] | None = None  # keys of the `method` group; None: plain decoding
    read: Callable[[SteadyRun], Quantities]

    def measure(self, target: SharedTarget, seed: int) -> Quantities:
        llm = target.engine(self.method, self.batch_size)
        prompts = target.prompts(self.batch_size)
        return self.read(decode_steadily(llm, prompts, num_new_tokens=target.new_tokens, seed=seed))


def read_speed(run: SteadyRun) -> Quantities:
    num_steps = len(run.steps)
    return {
        "tokens_per_second": run.num_tokens / run.seconds,
        "ms_per_token": 1000 * run.seconds * run.batch_size / run.num_tokens,  # of one request
        "ms_per_step": 1000 * run.seconds / num_steps,
        "tokens_per_step": run.num_tokens / (num_steps * run.batch_size),  # of one request
    }


def read_ratio(run: SteadyRun) -> Quantities:
    """Of steps that verify drafts to steps that have none, side by side in one text; medians.

    Raises:
        UserError: the text is too short to have both.
    """
    verifying = [step.seconds for step in run.steps if step.num_draft_tokens > 0]
    plain = [step.seconds for step in run.steps if step.num_draft_tokens == 0]
    if not (verifying and plain):
        raise UserError("--new-tokens must leave room for a plain and a verifying step; raise it")
    ratio = median(verifying) / median(plain)
    return {"ratio": ratio, "verify_step_ms": 1000 * median(verifying), "plain_step_ms": 1000 * median(plain)}


def free_guesses(proposer: type, num_tokens: int) -> dict[str, Any]:
    path = f"{proposer.__module__}.{proposer.__qualname__}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": num_tokens}


def eagle3(num_tokens: int) -> dict[str, Any]:
    return {"method": "eagle3", "num_speculative_tokens": num_tokens}


def _accepting(method: dict[str, Any], length: float) -> dict[str, Any]:
    """The method with drafts accepted at random: random weights guess nothing right."""
    return {**method, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


CASES = {
    "plain": DecodingCase(
        label="plain decoding, batch 1: ms per token", quantity="ms_per_token", goal=4.2, read=read_speed
    ),
    "verify": DecodingCase(
        label="a step that verifies 8 tokens / a plain step, batch 1",
        quantity="ratio",
        goal=1.05,
        method=free_guesses(EverySecondStep, 7),
        read=read_ratio,
    ),
    "free": DecodingCase(
        label="7 free guesses, 3.9 tokens a step, batch 1: tokens/s",
        quantity="tokens_per_second",
        goal=850,
        method=_accepting(free_guesses(FixedGuesses, 7), 3.9),
        read=read_speed,
    ),
    "plain-64": DecodingCase(
        label="plain decoding, batch 64: tokens/s",
        quantity="tokens_per_second",
        goal=10_400,
        batch_size=BATCH_SIZE,
        read=read_speed,
    ),
    "eagle3": DecodingCase(
        label="EAGLE-3, 7 guesses, 3.9 tokens a step, batch 1: tokens/s",
        quantity="tokens_per_second",
        goal=620,
        method=_accepting(eagle3(7), 3.9),
        read=read_speed,
    ),
    "eagle3-64": DecodingCase(
        label="EAGLE-3, 3 guesses, 2.6 tokens a step, batch 64: tokens/s",
        quantity="tokens_per_second",
        goal=15_000,
        batch_size=BATCH_SIZE,
        method=_accepting(eagle3(3), 2.6),
        read=read_speed,
    ),
}
