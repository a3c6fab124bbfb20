"""python -m runner.benchmarks.generate: this engine against transformers' generate, on one machine, in one run.

Same weights, threads, dtype, prompts and output lengths (eos ignored on both sides); the contestants take turns, so
that a machine whose speed drifts is unfair to none, and ratios are taken round by round. Says first how many
texts are transformers' own (near-ties may fall either way, in bfloat16 soon). --model compares plain decoding of
another model that both run, whose weights transformers draws once for both where its directory has none: two copies
in memory then, and one in a temporary directory. Weights in 8 bits are held so here, which is said, and transformers
expands them. Prints a table, and writes JSON when asked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from runner.benchmarks.compared_model import (
    add_model_options,
    check_model,
    compared_prompts,
    has_weights,
    model_directory,
)
from runner.benchmarks.drawn_weights import draw_weights
from runner.benchmarks.turns import PLAIN, ratios, take_turns, turns_parser
from runner.cli.program import exit_status
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.machine import describe_machine
from runner.metrics import MetricsCollector
from runner.metrics.rates import SPREAD, percentiles
from runner.prompts import make_requests
from runner.results import write_metrics
from runner.target import hide_kernels_client
from runner.tiny import DRAFT_DIR, TARGET_NAME

SINGLE, BATCH = 1, 16
CONDITIONS = ("dtype", "threads", "prompt_len", "output_len", "rounds")
METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "draft_model": {"method": "draft_model", "model": str(DRAFT_DIR), "num_speculative_tokens": 4},
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return exit_status(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    hide_kernels_client()
    with ExitStack() as until_done:
        directory = _weights(options, until_done)
        engines = {name: _engine(METHODS[name], directory, options) for name in _methods(options)}
        rounds = take_turns(_contestants(options, directory, engines), options.rounds)
    held = engines[PLAIN].engine.target_info.held or "dense"
    _print_table(rounds, options, held)
    if options.json is not None:
        write_metrics(options.json, _as_json(rounds, options, held))


def _weights(options: argparse.Namespace, until_done: ExitStack) -> Path:
    """A directory with weights that both sides read; where the model has none, transformers draws them."""
    directory = model_directory(options.model)
    if has_weights(directory):
        return directory
    drawn = Path(until_done.enter_context(tempfile.TemporaryDirectory()))
    draw_weights(directory, getattr(torch, options.dtype), drawn)
    return drawn


def _contestants(
    options: argparse.Namespace, directory: Path, engines: Mapping[str, LLM]
) -> dict[str, Callable[[], float]]:
    """Name -> a function that generates and returns tokens/s. One prompt, or BATCH of them."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, options.dtype))
    # No eos, and no penalties that a checkpoint states.
    reference.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    prompts = compared_prompts(options.model, BATCH, options.prompt_len)

    def transformers(batches: list[list[list[int]]]) -> list[list[int]]:
        texts: list[list[int]] = []
        for batch in batches:
            out = reference.generate(
                torch.tensor(batch),
                attention_mask=torch.ones(len(batch), options.prompt_len, dtype=torch.int64),
                max_new_tokens=options.output_len,
                do_sample=False,
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


def _engine(method: dict[str, Any] | None, directory: Path, options: argparse.Namespace) -> LLM:
    try:
        return LLM(
            str(directory),
            tokenizer=TARGET_NAME,  # prompts and answers are token ids: another model needs none
            speculative_config=method,
            device="cpu",
            dtype=options.dtype,
            num_threads=options.threads,
            max_model_len=options.prompt_len + options.output_len,
        )
    except UserError as error:  # which names what was drawn, where it lies
        raise UserError(str(error).replace(str(directory), str(model_directory(options.model)))) from error


def _methods(options: argparse.Namespace) -> list[str]:
    """Of another model plain decoding alone: what random tokens go on with cannot be guessed as texts can."""
    return list(METHODS) if options.model is None else [PLAIN]


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
    return {f"{name} / {base}": ratios(rounds, name, base) for name, base in _COMPARISONS if name in rounds}


def _print_table(rounds: dict[str, list[float]], options: argparse.Namespace, held: str) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{options.model or 'tiny'}, {options.dtype}, {held} weights, {options.threads} threads, "
        f"prompt {options.prompt_len}, output {options.output_len}, {options.rounds} rounds"
    )
    table = Table("", *SPREAD, title=title)
    for name, values in rounds.items():
        table.add_row(f"{name} (tokens/s)", *(f"{percentiles(values)[key]:,.0f}" for key in SPREAD))
    table.add_section()
    for name, values in _ratios(rounds).items():
        table.add_row(name, *(f"{percentiles(values)[key]:.2f}x" for key in SPREAD))
    Console(width=100).print(table)


def _as_json(rounds: dict[str, list[float]], options: argparse.Namespace, held: str) -> dict[str, Any]:
    conditions = {"model": str(options.model or "tiny"), "weights": held}
    return {
        **describe_machine("torch", "transformers"),
        "conditions": conditions | {key: getattr(options, key) for key in CONDITIONS},
        "tokens_per_second": {name: percentiles(values) for name, values in rounds.items()},
        "ratios": {name: percentiles(values) for name, values in _ratios(rounds).items()},
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = turns_parser("python -m runner.benchmarks.generate", __doc__)
    add_model_options(parser, "float32")
    options = parser.parse_args(argv)
    check_model(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
