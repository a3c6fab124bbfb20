"""`python -m runner.tiny.acceptance`: how often each method's guesses are right for the tiny family.

Runs the demo workload at temperature 0 through the engine. Tokens do not depend on the batch, so neither do the counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli.program import exit_status
from runner.config import DemoWorkload
from runner.llm import LLM, SamplingParams
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.tiny import MANIFEST, NUM_SPECULATIVE_TOKENS, TINY_DIR
from runner.tiny.manifest import read_manifest, write_manifest
from runner.workload import read_workload

MAX_TOKENS = 128
KEPT = ("acceptance_rate", "mean_acceptance_length", "acceptance_per_position", "num_drafts", "num_output_tokens")


def measure_acceptance(family: Path, method: str) -> dict[str, Any]:
    """What of a method's guesses is accepted on the demo workload."""
    items, guesses = read_workload(DemoWorkload()), NUM_SPECULATIVE_TOKENS[method]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    speculative_config = {"method": method, "num_speculative_tokens": guesses, **method_keys(family, method)}
    llm = LLM(str(family / "target"), speculative_config=speculative_config, device="cpu", dtype="float32")
    requests = make_requests([item.prompt for item in items], [params] * len(items), llm.engine.tokenizer, 0)
    metrics = MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics)
    summary = metrics.summary(method=method, num_speculative_tokens=guesses)
    return {"num_speculative_tokens": guesses, **{key: summary[key] for key in KEPT}}


def method_keys(family: Path, method: str) -> dict[str, Any]:
    if method == "ngram":
        return {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {"model": str(family / ("draft" if method == "draft_model" else method))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m runner.tiny.acceptance",
        description="Measure acceptance of the tiny family on the demo workload.",
    )
    parser.add_argument("--family", type=Path, default=TINY_DIR, help="directory of target, draft and manifest.json")
    parser.add_argument(
        "--methods", nargs="+", choices=list(NUM_SPECULATIVE_TOKENS), default=list(NUM_SPECULATIVE_TOKENS)
    )
    parser.add_argument("--write", action="store_true", help="enter what was measured into the family's manifest.json")
    arguments = parser.parse_args(argv)
    path = arguments.family / MANIFEST
    if not path.is_file():
        parser.error(f"--family must be a directory that runner.tiny has filled, got {arguments.family}")
    return exit_status(lambda: _measure(arguments, path))


def _measure(arguments: argparse.Namespace, path: Path) -> None:
    measured: dict[str, dict[str, Any]] = {}
    for method in arguments.methods:
        found = measured[method] = measure_acceptance(arguments.family, method)
        by_position = ", ".join(f"{100 * rate:.0f}" for rate in found["acceptance_per_position"])
        length = f"{found['mean_acceptance_length']:.3f}"
        print(f"{method}: mean acceptance length {length} ({by_position} % by position)", flush=True)
    if arguments.write:
        manifest = read_manifest(path)
        conditions = {"temperature": 0, "max_tokens": MAX_TOKENS}
        acceptance = {**manifest.get("acceptance", {}), "conditions": conditions, **measured}
        write_manifest(path, {**manifest, "acceptance": acceptance})


if __name__ == "__main__":
    sys.exit(main())
