"""The timed cases of python -m runner.benchmarks.decoding: what decodes, what is read off its steps, and the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from runner.benchmarks.fixed_guesses import FixedGuesses
from runner.benchmarks.shared_target import SharedTarget
from runner.benchmarks.steady_steps import SteadyRun, compute_prompts, decode_steadily

BATCH_SIZE = 64
NUM_PROMPTS = 3
Quantities = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DecodingCase:
    label: str
    quantity: str  # of those that are read off a run, the one that is shown
    goal: float | None = None  # on one H200, at the default shape and lengths
    batch_size: int = 1
    method: Mapping[str, Any] | None = None  # keys of the `method` group; None: plain decoding
    batch_invariant: bool = True
    compared_with: DecodingCase | None = None  # whose run follows at once: a ratio of steps is read off both

    def measure(self, target: SharedTarget, seed: int) -> Quantities:
        run = self.run(target, seed)
        return read_speed(run) if self.compared_with is None else read_ratio(run, self.compared_with.run(target, seed))

    def run(self, target: SharedTarget, seed: int) -> SteadyRun:
        llm = target.engine(self.method, self.batch_size, batch_invariant=self.batch_invariant)
        prompts = target.prompts(self.batch_size)
        return decode_steadily(llm, prompts, num_new_tokens=target.new_tokens, seed=seed)


@dataclass(frozen=True, kw_only=True)
class PromptCase(DecodingCase):
    """Prompts instead of decoding, one a step."""

    def run(self, target: SharedTarget, seed: int) -> SteadyRun:
        llm = target.engine(self.method, self.batch_size, batch_invariant=self.batch_invariant)
        return compute_prompts(llm, target.prompts(NUM_PROMPTS, target.longest_prompt), seed=seed)


def read_speed(run: SteadyRun) -> Quantities:
    num_steps = len(run.steps)
    return {
        "tokens_per_second": run.num_tokens / run.seconds,
        "ms_per_token": 1000 * run.seconds * run.batch_size / run.num_tokens,  # of one request
        "ms_per_step": 1000 * run.seconds / num_steps,
        "tokens_per_step": run.num_tokens / (num_steps * run.batch_size),  # of one request
    }


def read_ratio(run: SteadyRun, other: SteadyRun) -> Quantities:
    """Of their steps; medians."""
    seconds, of_other = (median(step.seconds for step in each.steps) for each in (run, other))
    return {"ratio": seconds / of_other, "ms_per_step": 1000 * seconds, "ms_per_step_of_other": 1000 * of_other}


def free_guesses(num_tokens: int) -> dict[str, Any]:
    path = f"{FixedGuesses.__module__}.{FixedGuesses.__qualname__}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": num_tokens}


def eagle3(num_tokens: int) -> dict[str, Any]:
    return {"method": "eagle3", "num_speculative_tokens": num_tokens}


def _accepting(method: dict[str, Any], length: float) -> dict[str, Any]:
    """The method with drafts accepted at random: random weights guess nothing right."""
    return {**method, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


PLAIN = DecodingCase(label="plain decoding, batch 1: ms per token", quantity="ms_per_token", goal=4.2)
CASES = {
    "plain": PLAIN,
    "verify": DecodingCase(
        label="a step that verifies 8 tokens / a plain step, batch 1",
        quantity="ratio",
        goal=1.05,
        method=free_guesses(7),
        compared_with=PLAIN,
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
    "tree": DecodingCase(
        label="a step with an EAGLE-3 tree of 16 nodes / a plain step, batch 1",
        quantity="ratio",
        method={**eagle3(16), "speculative_token_tree": "dynamic"},
        compared_with=PLAIN,
    ),
    "sparse-8": DecodingCase(  # behind a long prompt; below the acceptance length it pays
        label="a step with 4 drafts of sparse_kv / a plain step, batch 8",
        quantity="ratio",
        batch_size=8,
        method={"method": "sparse_kv", "num_speculative_tokens": 4},
        compared_with=replace(PLAIN, batch_size=8),
    ),
    "invariant": DecodingCase(
        label="batch_invariant on / off, a plain step, batch 1",
        quantity="ratio",
        goal=1.05,
        compared_with=replace(PLAIN, batch_invariant=False),
    ),
    "invariant-prompt": PromptCase(
        label="batch_invariant on / off, a prompt as long as the texts",
        quantity="ratio",
        goal=1.15,
        compared_with=PromptCase(label="", quantity="ratio", batch_invariant=False),
    ),
}
