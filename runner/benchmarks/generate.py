"""python -m runner.benchmarks.generate: this engine against transformers' generate, on one machine, in one run.

Same weights, threads, dtype, prompts and output lengths (eos ignored on both sides); the contestants take turns, so
that a machine whose speed drifts is unfair to none, and ratios are taken round by round. Says first how many
texts are transformers' own (float32 near-ties may fall either way). Prints a table, and writes JSON when asked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner.benchmarks.demo_prompts import demo_prompts
from runner.benchmarks.turns import ratios, take_turns, turns_parser
from runner.cli.program import exit_status
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.machine import describe_machine
from runner.metrics import MetricsCollector
from runner.metrics.rates import percentiles
from runner.prompts import make_requests
from runner.results import write_metrics
from runner.target import hide_kernels_client
from runner.tiny import TARGET_DIR

SINGLE, BATCH = 1, 16
SPREAD = ("median", "p20", "p80")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return exit_status(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    rounds = take_turns(_contestants(options), options.rounds)
    _print_table(rounds, options)
    if options.json is not None:
        write_metrics(options.json, _as_json(rounds, options))


def _contestants(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Name -> a function that generates and returns tokens/s. One prompt, or BATCH of them."""
    hide_kernels_client()
    from transformers import AutoModelForCausalLM

    directory = TARGET_DIR
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engines = {
        "none": _engine(None, options),
        "ngram": _engine({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, options),
        "draft_model": _engine({"method": "draft_model", "num_speculative_tokens": 4}, options),
    }
    prompts = demo_prompts(engines["none"].engine.tokenizer, BATCH, options.prompt_len)

    def transformers(batches: list[list[list[int]]]) -> list[list[int]]:
        texts: list[list[int]] = []
        for batch in batches:
            out = reference.generate(
                torch.tensor(batch),
                attention_mask=torch.ones(len(batch), options.prompt_len, dtype=torch.int64),
                max_new_tokens=options.output_len,
                min_new_tokens=options.output_len,
                do_sample=False,
                pad_token_id=0,
            )
            texts += out[:, options.prompt_len :].tolist()
        return texts

    def ours(method: str, batch: list[list[int]]) -> list[list[int]]:
        llm = engines[method]
        params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
        requests = make_requests(
            [{"prompt_token_ids": prompt} for prompt in batch], [params] * len(batch), llm.engine.tokenizer, 0
        )
        llm.run(requests, llm.engine.proposer, MetricsCollector())
        return [request.output_token_ids for request in requests]

    expected = transformers([[prompt] for prompt in prompts])
    for method in engines:
        same = sum(a == b for a, b in zip(ours(method, prompts), expected, strict=True))
        print(f"{method}: {same} of {len(prompts)} texts equal transformers'", file=sys.stderr)

    def timed(generate: Callable[[], list[list[int]]]) -> Callable[[], float]:
        def take_turn() -> float:
            started = time.perf_counter()
            num_tokens = sum(map(len, generate()))
            return num_tokens / (time.perf_counter() - started)

        return take_turn

    alone = prompts[:SINGLE]
    contestants = {
        "transformers, batch 1": timed(lambda: transformers([alone])),
        f"transformers, {BATCH} one by one": timed(lambda: transformers([[prompt] for prompt in prompts])),
        f"transformers, padded batch of {BATCH}": timed(lambda: transformers([prompts])),
    }
    for method in engines:
        contestants[f"{method}, batch 1"] = timed(lambda method=method: ours(method, alone))  # type: ignore[misc]
        contestants[f"{method}, {BATCH} concurrent"] = timed(lambda method=method: ours(method, prompts))  # type: ignore[misc]
    return contestants


def _engine(method: dict[str, Any] | None, options: argparse.Namespace) -> LLM:
    return LLM("tiny", speculative_config=method, device="cpu", dtype="float32", num_threads=options.threads)


_COMPARISONS = (
    ("none, batch 1", "transformers, batch 1"),
    (f"none, {BATCH} concurrent", f"transformers, {BATCH} one by one"),
    (f"none, {BATCH} concurrent", f"transformers, padded batch of {BATCH}"),
    ("ngram, batch 1", "none, batch 1"),
    ("draft_model, batch 1", "none, batch 1"),
    (f"ngram, {BATCH} concurrent", f"none, {BATCH} concurrent"),
    (f"draft_model, {BATCH} concurrent", f"none, {BATCH} concurrent"),
)


def _ratios(rounds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {f"{name} / {base}": ratios(rounds, name, base) for name, base in _COMPARISONS}


def _print_table(rounds: dict[str, list[float]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"tiny, float32, {options.threads} threads, prompt {options.prompt_len}, output {options.output_len}, "
        f"{options.rounds} rounds"
    )
    table = Table("", *SPREAD, title=title)
    for name, values in rounds.items():
        table.add_row(f"{name} (tokens/s)", *(f"{percentiles(values)[key]:,.0f}" for key in SPREAD))
    table.add_section()
    for name, values in _ratios(rounds).items():
        table.add_row(name, *(f"{percentiles(values)[key]:.2f}x" for key in SPREAD))
    Console(width=100).print(table)


def _as_json(rounds: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        **describe_machine("torch", "transformers"),
        "conditions": {key: getattr(options, key) for key in ("threads", "prompt_len", "output_len", "rounds")},
        "tokens_per_second": {name: percentiles(values) for name, values in rounds.items()},
        "ratios": {name: percentiles(values) for name, values in _ratios(rounds).items()},
    }


def _parser() -> argparse.ArgumentParser:
    return turns_parser("python -m runner.benchmarks.generate", __doc__.split("\n\n")[0])


if __name__ == "__main__":
    sys.exit(main())
