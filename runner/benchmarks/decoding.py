"""python -m runner.benchmarks.decoding: how fast this engine decodes, by itself and with guesses.

On one GPU, or with --device cpu on a CPU. Random weights, so nothing is downloaded and no text means anything: drafts
are accepted at a set rate. Prompts stay outside the times, batches stay full, drafts uncut; cases take turns, so that
drift hits all alike. Says first whether every method gives plain decoding's tokens. Prints a table, and writes JSON
when asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from runner.benchmarks.decoding_cases import BATCH_SIZE, CASES, Quantities
from runner.benchmarks.identical_texts import VARIANTS, count_equal_texts, plain_texts
from runner.benchmarks.shared_target import SharedTarget, StartTimes
from runner.cli.arguments import at_least, file_to_write
from runner.cli.screen import show_error, show_interrupt
from runner.engine.errors import UserError
from runner.machine import describe_machine
from runner.metrics.rates import SPREAD, percentiles
from runner.results import write_metrics

START, IDENTICAL = "start", "identical"
CASE_NAMES = (START, IDENTICAL, *CASES)
DEFAULTS = {"model": "llama8b", "prompt_tokens": 128, "new_tokens": 256}  # what the goals are for
COLD_START_GOAL_S, WARM_START_GOAL_S = 30.0, 10.0
GOAL_GPU = "H200"


@dataclass(kw_only=True)
class Found:
    """What was measured so far."""

    start: StartTimes | None = None
    identical: dict[str, dict[str, int]] = field(default_factory=dict)  # by variant
    rounds: dict[str, list[Quantities]] = field(default_factory=dict)  # by case

    @property
    def is_empty(self) -> bool:
        return self.start is None and not self.identical and not self.rounds


def main(argv: Sequence[str] | None = None) -> int:
    options, found, status = _parse(argv), Found(), 1
    try:
        _require_gpu(options)
        target = SharedTarget(
            options.model,
            device=options.device,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            max_batch_size=BATCH_SIZE,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        _measure(target, options, found)
        status = 0
    except KeyboardInterrupt:
        status = show_interrupt()
    except UserError as error:
        status = show_error(error)
    finally:  # also of a run that the device has ended
        if not found.is_empty:
            has_goals = _has_goals(options)
            _print_table(found, target, options, has_goals)
            if options.json is not None:
                write_metrics(options.json, _as_json(found, target, options, has_goals, is_complete=status == 0))
    return status


def _require_gpu(options: argparse.Namespace) -> None:
    if options.device == "auto" and options.model != "tiny" and not torch.cuda.is_available():
        raise UserError(
            f"--model {options.model} needs a CUDA GPU that torch can use, and none was found; run it where there is "
            "one, take --model tiny, or pass --device cpu to wait for a CPU"
        )


def _measure(target: SharedTarget, options: argparse.Namespace, found: Found) -> None:
    """Fills `found` as it goes, so that an interrupt leaves what there is."""
    timed = [name for name in CASES if name in options.cases]
    variants = VARIANTS if IDENTICAL in options.cases else ()
    methods = [each.method or {} for each in (*(CASES[name] for name in timed), *variants)]
    target.longest_text(max((int(own.get("num_speculative_tokens", 0)) for own in methods), default=0))
    captures = target.device.type == "cuda"
    num_warm_ups = 2 if captures else 1  # a layout is captured when it comes again
    num_runs = len(timed) * (num_warm_ups + options.rounds)
    with tqdm(total=(START in options.cases) + len(variants) + num_runs, desc="decoding") as bar:
        if START in options.cases:  # before anything else has compiled what it would have to
            found.start = target.time_start()
            bar.update()
        if variants:
            plain = plain_texts(target)
        for variant in variants:
            found.identical[variant.label] = count_equal_texts(target, variant, plain)
            bar.update()
        for index in range(-num_warm_ups, options.rounds):
            for name in timed:
                bar.set_postfix_str(f"{name}, {'warm-up' if index < 0 else f'round {index + 1}/{options.rounds}'}")
                quantities = CASES[name].measure(target, seed=index + num_warm_ups)
                if index >= 0:
                    found.rounds.setdefault(name, []).append(quantities)
                bar.update()


def _has_goals(options: argparse.Namespace) -> bool:
    """Whether these are the conditions that the goals are for."""
    if not torch.cuda.is_available() or options.device == "cpu" or GOAL_GPU not in torch.cuda.get_device_name():
        return False
    return (
        options.dtype in (None, "bfloat16")
        and options.quantization is None
        and options.kv_cache_dtype == "auto"
        and all(getattr(options, name) == value for name, value in DEFAULTS.items())
    )


def _print_table(found: Found, target: SharedTarget, options: argparse.Namespace, has_goals: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    device = torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU"
    num_rounds = max(map(len, found.rounds.values()), default=0)  # fewer than asked for after an interrupt
    weights = "random weights" + (f" in {target.weights.held}" if target.weights.held else "")
    kept = "" if target.kv_cache_dtype == "auto" else f" with a KV cache in {target.kv_cache_dtype}"
    title = (
        f"{options.model}, {weights}, {target.dtype}{kept}, {device}, prompt {options.prompt_tokens}, "
        f"output {options.new_tokens}, {num_rounds} rounds"
    )
    table = Table("", *SPREAD, *(["goal"] if has_goals else []), title=title)
    if (start := found.start) is not None:
        table.add_row("engine start after loading: s", _number(start.assemble_s))
        table.add_row("its first steps: s", _number(start.first_steps_s))
        if start.num_compiled_kernels is not None:
            label = f"both, {start.num_compiled_kernels} kernels compiled: s"
            table.add_row(label, _number(start.total_s), "", "", *_goal(_start_goal(start), has_goals))
        table.add_section()
    for name, rounds in found.rounds.items():
        case = CASES[name]
        spread = percentiles([quantities[case.quantity] for quantities in rounds])
        table.add_row(case.label, *(_number(spread[key]) for key in SPREAD), *_goal(case.goal, has_goals))
    table.add_section()
    for label, counts in found.identical.items():
        table.add_row(f"text of plain decoding: {label}", f"{counts['identical']}/{counts['requests']}")
    Console(width=110).print(table)


def _start_goal(start: StartTimes) -> float:
    return COLD_START_GOAL_S if start.num_compiled_kernels else WARM_START_GOAL_S


def _goal(value: float | None, is_shown: bool) -> list[str]:
    return [_number(value)] if is_shown else []


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _as_json(
    found: Found, target: SharedTarget, options: argparse.Namespace, has_goals: bool, *, is_complete: bool
) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    if found.start is not None:
        cases[START] = {
            **asdict(found.start),
            "total_s": found.start.total_s,
            "goal": {"total_s": _start_goal(found.start)} if has_goals else None,
        }
    if found.identical:
        cases[IDENTICAL] = found.identical
    for name, rounds in found.rounds.items():
        case = CASES[name]
        cases[name] = {
            "label": case.label,
            "method": case.method,
            "batch_size": case.batch_size,
            "rounds": len(rounds),
            "goal": {case.quantity: case.goal} if has_goals and case.goal is not None else None,
            **{key: percentiles([quantities[key] for quantities in rounds]) for key in rounds[0]},
        }
    return {
        **describe_machine("torch", "triton"),
        "conditions": {
            "model": options.model,
            "shape": target.model.hf_config,
            "device": target.device.type,
            "dtype": target.dtype,
            "weights": target.weights.held or target.dtype,
            "kv_cache": target.dtype if target.kv_cache_dtype == "auto" else target.kv_cache_dtype,
            "threads": torch.get_num_threads(),
            "max_model_len": target.weights.max_model_len,
            **{key: getattr(options, key) for key in ("prompt_tokens", "new_tokens", "rounds")},
        },
        "is_complete": is_complete,  # false: interrupted, or ended by an error
        "cases": cases,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runner.benchmarks.decoding",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="cases:\n"
        "  start      from weights in memory to an engine, and its first steps; cold with an empty TRITON_CACHE_DIR\n"
        "  identical  how many greedy and seeded texts of other methods and batches are plain decoding's\n"
        + "\n".join(f"  {name:<10} {case.label}" for name, case in CASES.items())
        + "\n\nGoals stand beside the numbers on an H200 at the default model and lengths.",
    )
    parser.add_argument(
        "--model",
        default=DEFAULTS["model"],
        help="shape of the target: an option of conf/model (llama8b, qwen3_8b, ...; tiny to try it on a CPU), a "
        "directory or a hub id, whose config.json is all that is read (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU, if any)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of weights, and of KV (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="keeps keys and values in 8 bits, or in --dtype (default: %(default)s)",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8", "int8", "none"),
        help="holds the weights of the target's layers in 8 bits, or not (default: as the model's option says)",
    )
    parser.add_argument("--cases", nargs="+", choices=CASE_NAMES, default=CASE_NAMES, metavar="CASE", help="see below")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed, after those that warm up (default: 5)")
    for name, what in (("prompt_tokens", "tokens of every prompt"), ("new_tokens", "tokens decoded for every prompt")):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=at_least(1), default=DEFAULTS[name], help=f"{what} (default: %(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the numbers to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
