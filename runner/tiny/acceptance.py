"""`python -m runner.tiny.acceptance`: how often each method's guesses are right for the tiny family, into its manifest.

Runs the demo workload at temperature 0 through the engine. Tokens do not depend on the batch, so neither do the counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.config import DemoWorkload
from runner.llm import LLM, SamplingParams
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.tiny import TINY_DIR
from runner.tiny.manifest import read_manifest, write_manifest
from runner.workload import read_workload

NUM_SPECULATIVE_TOKENS = 4
MAX_TOKENS = 128
KEPT = ("acceptance_rate", "mean_acceptance_length", "acceptance_per_position", "num_drafts", "num_output_tokens")


def measure_acceptance(family: Path, limit: int | None = None) -> dict[str, dict[str, Any]]:
    """Acceptance of draft_model and ngram on the demo workload (its first `limit` prompts), by method."""
    methods: dict[str, dict[str, Any]] = {
        "draft_model": {"model": str(family / "draft")},
        "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 5},
    }
    items = read_workload(DemoWorkload(limit=limit))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    measured = {}
    for method, keys in methods.items():
        speculative_config = {"method": method, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS, **keys}
        llm = LLM(str(family / "target"), speculative_config=speculative_config, device="cpu", dtype="float32")
        requests = make_requests([item.prompt for item in items], [params] * len(items), llm.engine.tokenizer, 0)
        metrics = MetricsCollector()
        llm.run(requests, llm.engine.proposer, metrics)
        summary = metrics.summary(method=method, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
        measured[method] = {key: summary[key] for key in KEPT}
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m runner.tiny.acceptance",
        description="Measure acceptance of the tiny family on the demo workload, and write it into its manifest.",
    )
    parser.add_argument("--family", type=Path, default=TINY_DIR, help="directory of target, draft and manifest.json")
    family = parser.parse_args(argv).family
    measured = measure_acceptance(family)
    manifest = read_manifest(family / "manifest.json")
    conditions = {"temperature": 0, "max_tokens": MAX_TOKENS, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS}
    write_manifest(family / "manifest.json", {**manifest, "acceptance": {"conditions": conditions, **measured}})
    for method, numbers in measured.items():
        print(f"{method}: mean acceptance length {numbers['mean_acceptance_length']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
