"""python -m runner.tune: finds how many tokens a method should guess at every load, by measuring.

Takes the groups and keys of `python -m runner` (model=, method=, workload=, sampler=, hardware=, seed=). Runs the
workload at several batch sizes, in place of workload.max_concurrency, with several numbers of speculative tokens, in
turns on one engine. Prints the speed-ups over plain decoding, and the overrides that give every load its best number
(method.num_speculative_tokens_per_batch_size; if that is auto, what the engine chooses while it runs is measured too).
Where the rule keeps plain decoding's tokens, the texts of all passes must be the same, and the report counts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from runner.cli.arguments import at_least, new_directory
from runner.cli.compose import Composer
from runner.cli.overrides import in_hydras_grammar
from runner.cli.program import exit_status, program_parser, use_it
from runner.config import SpeculativeConfig
from runner.config.problem import ConfigError, Problem
from runner.endings import reader_may_leave
from runner.engine.errors import UserError
from runner.tune.load_table import load_table, method_keys

if TYPE_CHECKING:  # --help answers without torch
    from runner.llm import LLM
    from runner.tune.grid import Grid
    from runner.workload import WorkloadItem

RESULT_FILE, PICTURE_FILE = "tuning.json", "tuning.png"
# Keys of a method, and what they may say all the same: the engine's own choice is measured beside what is tried.
TUNED = {"num_speculative_tokens_per_batch_size": ("null", "auto"), "disable_by_batch_size": ("null",)}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    written: list[Path] = []  # files

    def kept() -> str:
        if not written:
            return "no repeat was complete; nothing was saved"
        return f"the repeats that were complete are in {options.output}"

    return exit_status(lambda: _run(options, written), kept)


def _run(options: argparse.Namespace, written: list[Path]) -> None:
    config = _read_config(options)
    from runner.loading import load
    from runner.recording import check_record, open_run
    from runner.tune.grid import Grid

    check_record(config)
    llm, items = load(config)
    batch_sizes = _batch_sizes(options, config.hardware.max_num_seqs, _check_requests(llm, items))
    numbers = _numbers_of_tokens(options, llm.engine.proposer.num_speculative_tokens)
    has_auto = config.method.num_speculative_tokens_per_batch_size == "auto"
    grid = Grid(batch_sizes=batch_sizes, num_speculative_tokens=numbers, has_auto=has_auto)
    is_new = not options.output.exists()
    options.output.mkdir(parents=True, exist_ok=True)
    run_name = config.run_name or f"{Path(config.model.model).name}-{config.method.method}-tuning"
    with open_run(config, llm.engine, items, run_name=run_name) as tracker:
        tracker.log_params(config.model_dump(mode="json"))
        try:
            _measure(grid, llm, items, options.repeats)
        finally:  # an interrupt leaves the repeats that were complete
            if grid.num_repeats:
                result, files = _report(grid, llm, items, options)
                tracker.log_summary(result)
                tracker.log_artifacts(files)
                written.extend(files)
            elif is_new:
                with suppress(OSError):  # somebody else has put something there
                    options.output.rmdir()
    if tracker.location is not None:
        print(f"tracked: {tracker.location}")


def _read_config(options: argparse.Namespace) -> SpeculativeConfig:
    """The run that is tuned, with as many speculative tokens as the most that are tried.

    Raises:
        UserError: there is nothing to tune, or what is to be found is given already.
    """
    overrides = in_hydras_grammar(options.overrides)
    with Composer() as composer:
        composer.compose_by_group(overrides, "to be tuned")
        if options.num_speculative_tokens:
            overrides.append(f"method.num_speculative_tokens={max(options.num_speculative_tokens)}")
        config = composer.config(overrides)
    method, workload, problems = config.method, config.workload, list[Problem]()
    if method.method == "none" or method.num_speculative_tokens == 0:
        remedy = "add method=ngram, say, or raise method.num_speculative_tokens"
        problems.append(Problem(name="method", rule="must guess tokens", value=method.method, remedy=remedy))
    if (rule := method.rejection_sample_method) == "synthetic" and method.synthetic_acceptance_rates is None:
        problem = Problem(
            name="method.rejection_sample_method",
            rule="must judge tokens, or accept them at synthetic_acceptance_rates: what else it takes is set for one "
            "number of them",
            value=rule,
            remedy="choose strict",
        )
        problems.append(problem)
    remedy = "leave it out: it is what is looked for"
    problems += [
        Problem(name=f"method.{key}", rule=f"must be {' or '.join(allowed)}", value=value, remedy=remedy)
        for key, allowed in TUNED.items()
        if (value := getattr(method, key)) is not None and value not in allowed
    ]
    if (rate := workload.request_rate) is not None:
        remedy = "leave it out: a batch has to stay full to be measured"
        problems.append(Problem(name="workload.request_rate", rule="must be null", value=rate, remedy=remedy))
    if config.repeats != 1:
        remedy = f"say --repeats {config.repeats}"
        problems.append(Problem(name="repeats", rule="must be left out", value=config.repeats, remedy=remedy))
    if problems:
        raise ConfigError(problems)
    return config


def _check_requests(llm: LLM, items: Sequence[WorkloadItem]) -> int:
    """Their number; raises UserError if one of them could not run, before anything is recorded."""
    from runner.passes import workload_requests

    requests = workload_requests(llm, items, llm.config.sampler.to_sampling_params())
    for request, reason in zip(requests, llm.refusals(requests), strict=True):
        if reason is not None:
            raise UserError(f"every request of the workload must run; request {request.request_id}: {reason}")
    return len(requests)


def _batch_sizes(options: argparse.Namespace, max_num_seqs: int, num_requests: int) -> list[int]:
    usual = [2**power for power in range(0, 9, 2) if 2**power <= max_num_seqs and 2 * 2**power <= num_requests]
    sizes = sorted(set(options.batch_sizes or usual or [1]))
    if sizes[-1] > (most := min(max_num_seqs, num_requests)):
        raise UserError(
            f"--batch-sizes must be <= {most}, the smaller of hardware.max_num_seqs and the workload's {num_requests} "
            f"requests, got {sizes[-1]}; raise them, or leave this size out"
        )
    return sizes


def _numbers_of_tokens(options: argparse.Namespace, most: int) -> list[int]:
    """With 0, plain decoding, which the others are compared with; most: that the proposer drafts."""
    from runner.engine.online_budget import usual_counts

    if (asked := max(options.num_speculative_tokens or [0])) > most:
        raise UserError(
            f"--num-speculative-tokens must be <= {most}, which is what this drafter drafts at most, got {asked}; "
            "leave it out"
        )
    return sorted({0, *(options.num_speculative_tokens or usual_counts(most))})


def _measure(grid: Grid, llm: LLM, items: Sequence[WorkloadItem], repeats: int) -> None:
    num_requests = len(items) * llm.config.sampler.n
    total, seconds = (repeats + 1) * len(grid.cells) * num_requests, 0.2 if sys.stderr.isatty() else 30.0
    with tqdm(total=total, unit="request", mininterval=seconds) as bar:

        def report(title: str, num_ended: int) -> None:
            bar.set_description(title, refresh=False)
            bar.update(num_ended)

        grid.measure(llm, items, repeats=repeats, report=report)


def _report(
    grid: Grid, llm: LLM, items: Sequence[WorkloadItem], options: argparse.Namespace
) -> tuple[dict[str, Any], list[Path]]:
    """Writes the files and prints what was found; returns what a tracker records, and the paths."""
    from runner.machine import describe_run
    from runner.metrics import core_wait_notes
    from runner.promise import kept_by_rule, kept_by_run, promise_notes
    from runner.results import write_metrics
    from runner.tune.report import draw_grid, grid_as_json
    from runner.workload import unread_note

    config, engine = llm.config, llm.engine
    keeps_tokens = kept_by_rule(config, items) == "tokens"
    share = max(grid.core_wait_shares, default=None)
    table = load_table({size: grid.best(size) for size in grid.batch_sizes}, config.hardware.max_num_seqs)
    keys = method_keys(table, config.method.synthetic_acceptance_rates)
    result = {
        "method": config.method.method,
        "lossless": kept_by_run(config, engine, items),
        "repeats": grid.num_repeats,
        "is_complete": grid.num_repeats == options.repeats,  # false: interrupted
        "grid": grid_as_json(grid),
        "mean_acceptance_length": {str(n): grid.mean_acceptance_length(n) for n in grid.columns},
        "auto_choices": {str(size): dict(sorted(steps.items())) for size, steps in grid.choices.items()},
        "identical": grid.identical if keeps_tokens else None,
        "core_wait_share": share,
        "best": keys,
        "machine": describe_run(engine),
        "notes": [
            *config.notes(),
            *promise_notes(config, engine, items),
            *unread_note(items),
            *core_wait_notes(share, num_threads=config.hardware.num_threads),
        ],
    }
    lossy = ", lossy" if result["lossless"] is False else ""
    title = (
        f"{config.model.model}, method={config.method.method}{lossy}: tokens/s of full batches over plain decoding's"
    )
    files = [options.output / RESULT_FILE]
    write_metrics(files[0], {**result, "config": config.model_dump(mode="json")})
    if draw_grid(picture := options.output / PICTURE_FILE, grid, title=title):
        files.append(picture)
    with reader_may_leave():
        _print_result(grid, result, title, max_num_seqs=config.hardware.max_num_seqs)
        print(_advice(options.overrides, keys))
        print("\n".join(f"file: {path}" for path in files))
    return result, files


def _print_result(grid: Grid, result: dict[str, Any], title: str, *, max_num_seqs: int) -> None:
    from runner.report import open_console
    from runner.tune.report import print_grid

    console = open_console()
    print_grid(grid, title=title, identical_texts=result["identical"], console=console)
    for note in result["notes"]:
        console.print(f" note: {note}", style="yellow", highlight=False, soft_wrap=True)
    if (largest := grid.batch_sizes[-1]) < max_num_seqs:
        print(f"batch sizes above {largest} were not measured, and go with it: hardware.max_num_seqs allows more")


def _advice(overrides: Sequence[str], keys: dict[str, Any]) -> str:
    if keys["num_speculative_tokens"] == 0:
        return "no number of speculative tokens pays at these batch sizes: method=none"
    replaced = {f"method.{key}" for key in (*TUNED, *keys)}
    kept = [each for each in overrides if each.lstrip("+~").partition("=")[0] not in replaced]
    found = [f"method.{key}={value}".replace(" ", "") for key, value in keys.items()]
    return use_it([*kept, *found])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program_parser(
        "python -m runner.tune",
        __doc__,
        epilog="example:\n"
        "  python -m runner.tune method=ngram --num-speculative-tokens 2,4,8 --batch-sizes 1,4,16\n\n"
        "A pass runs the whole workload; there are (repeats + 1) x batch sizes x (numbers of tokens + 1) of them;\n"
        "auto is one more number.",
    )
    parser.add_argument(
        "--batch-sizes",
        type=_numbers(1),
        metavar="N,...",
        help="requests at once (default: 1, 4, 16, 64, 256, up to hardware.max_num_seqs and half of the workload)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_numbers(1),
        metavar="K,...",
        help="numbers to try, beside plain decoding (default: powers of two, and method.num_speculative_tokens)",
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, metavar="N", help="timed passes of each (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=new_directory,
        default=datetime.now().strftime("runs/%Y-%m-%d/%H-%M-%S-%f-tuning"),
        metavar="DIR",
        help=f"a new directory for {RESULT_FILE} and {PICTURE_FILE} (default: one in runs/)",
    )
    return parser.parse_intermixed_args(argv)


def _numbers(minimum: int) -> Callable[[str], list[int]]:
    """An argparse type: integers from the minimum on, between commas."""
    number = at_least(minimum)
    return lambda text: [number(each) for each in text.split(",")]
