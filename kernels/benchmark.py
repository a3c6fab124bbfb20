"""python -m kernels.benchmark: every kernel against its torch reference first, then against the clock.

Times are of one call in a CUDA graph of many, at Llama-3-8B's shapes in bfloat16. Calls take turns on copies of what
comes from memory, which together fill the second-level cache eight times; what is too small for that is found in the
cache, and the table says so. GB/s counts the bytes that a call must move at least; the share is of what a large copy on
the same device in the same run moves, read and written, which reads alone may exceed. What was measured, and the goals,
are in kernels/benchmarks.md.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernels.whole_file import replacing

if TYPE_CHECKING:  # --help answers without them
    from kernels.benchmarks.case import Call, Case, Setting
    from kernels.benchmarks.timing import Timing

OPS = (  # modules of kernels.benchmarks
    "linear",
    "experts",
    "heads_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "latent_rows",
    "partial_sums",
    "mask_and_penalise",
    "sampling",
    "perturb",
    "uniforms",
    "top_candidates",
    "top_logprobs",
    "truncation",
    "rejection",
    "probabilistic_rejection",
    "ngram_match",
    "move_kv",
    "chain_rows",
    "fit_drafts",
    "follow_verified",
    "tree_rows",
    "likeliest_tree",
    "walk_tree",
    "match_in_tree",
    "remember_candidates",
    "sum_of_ranks",
    "gated_delta",
    "short_conv",
    "gate",
    "cluster_logits",
    "block_conv",
    "candidate_logits",
)
INTERRUPTED = 130  # what a shell makes of Ctrl-C
BROKEN_PIPE = 141  # and of a reader that left


class Timer(Protocol):
    def __call__(self, *contenders: Sequence[Call]) -> list[Timing]: ...

    def copy_gb_per_second(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row of the table. Without a timer, and where the check failed, there are no times."""

    op: str
    case: str
    dtype: str
    checks: list[str]  # those that passed
    failure: str | None = None
    num_bytes: int | None = None
    comes_from: str | None = None
    timing: Timing | None = None
    gb_per_second: float | None = None
    share_of_copy: float | None = None
    torch_timing: Timing | None = None
    ratio_to_torch: float | None = None  # our time by torch's
    goal_us: float | None = None


def measure(case: Case, timer: Timer | None, copy_gb_per_second: float | None) -> Result:
    """Checks a case and, if it is right and there is a timer, times it."""
    from triton.errors import TritonError

    from kernels.benchmarks.case import CheckFailed

    named: dict[str, Any] = {"op": case.op, "case": case.label, "dtype": case.dtype}
    try:
        work = case.prepare()
        checks = work.check()
        if timer is None or copy_gb_per_second is None:
            return Result(**named, checks=checks)
        timing, *others = timer(work.calls, *([work.torch_calls] if work.torch_calls else []))
    except CheckFailed as error:
        return Result(**named, checks=[], failure=str(error))
    except (TritonError, RuntimeError) as error:  # does not compile, does not fit, or what the device said
        message = next(iter(str(error).splitlines()), "")
        return Result(**named, checks=[], failure=f"{type(error).__name__}: {message}")
    gb_per_second = work.num_bytes / timing.median_us / 1e3
    return Result(
        **named,
        checks=checks,
        num_bytes=work.num_bytes,
        comes_from=work.comes_from,
        timing=timing,
        gb_per_second=gb_per_second,
        share_of_copy=gb_per_second / copy_gb_per_second,
        torch_timing=others[0] if others else None,
        ratio_to_torch=timing.median_us / others[0].median_us if others else None,
        goal_us=work.goal_us,
    )


def heading(*, has_times: bool) -> str:
    times = f" {'us':>9} {'p20':>9} {'p80':>9} {'GB/s':>6} {'of copy':>7} {'/ torch':>7}  from" if has_times else ""
    return f"{'op':<24}{'case':<40}{'dtype':<9} {'checked':<16}{times}"


def line(result: Result) -> str:
    text = f"{result.op:<24}{result.case:<40}{result.dtype:<9} "
    if result.failure is not None:
        return f"{text}FAILED: {result.failure}"
    text += f"{', '.join(result.checks):<16}"
    if result.timing is None:
        return text
    timing, ratio = result.timing, result.ratio_to_torch
    text += f" {timing.median_us:>9.2f} {timing.p20_us:>9.2f} {timing.p80_us:>9.2f} {result.gb_per_second:>6.0f}"
    text += f" {result.share_of_copy:>7.1%} {'' if ratio is None else format(ratio, '.2f'):>7}  {result.comes_from}"
    return text if result.goal_us is None else f"{text}, goal {result.goal_us:g} us"


def run(
    ops: Sequence[str], settings: Sequence[Setting], timer: Timer | None, report: dict[str, Any], json_path: Path | None
) -> int:
    """Prints the table row by row and fills in the report; the exit status."""
    modules = [importlib.import_module(f"kernels.benchmarks.{op}") for op in ops]
    cases: list[Case] = [case for module in modules for setting in settings for case in module.cases(setting)]
    # Ops that know one dtype have the same cases in each setting.
    cases = list({(case.op, case.label, case.dtype): case for case in cases}.values())
    results: list[Result] = []
    report |= {"is_complete": False, "copy_gb_per_second": None}
    try:
        copy = None
        if timer is not None:
            copy = report["copy_gb_per_second"] = timer.copy_gb_per_second()
            print(f"A copy on the device moves {copy:.0f} GB/s, read and written.\n")
        print(heading(has_times=timer is not None), flush=True)
        for case in _with_progress(cases):
            result = measure(case, timer, copy)
            results.append(result)
            _clear_progress()
            print(line(result).rstrip(), flush=True)
        report["is_complete"] = True
    except KeyboardInterrupt:
        _clear_progress()
        print(f"Interrupted after {len(results)} of {len(cases)} cases.", file=sys.stderr)
    finally:  # also of a run that the device has ended
        report["cases"] = [asdict(result) for result in results]
        if json_path is not None:
            write_json(json_path, report)
    num_failed = sum(result.failure is not None for result in results)
    if num_failed:
        print(f"{num_failed} of {len(results)} checks failed.", file=sys.stderr)
        return 1
    if not report["is_complete"]:
        return INTERRUPTED
    print(f"\nAll {len(results)} cases are right.")
    return 0


def _with_progress(cases: Sequence[Case]) -> Iterator[Case]:
    ending = "" if sys.stderr.isatty() else "\n"
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.op}: {case.label}, {case.dtype}", end=ending, file=sys.stderr, flush=True)
        yield case


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """All of it or what was there before: a reader never finds a half."""
    import json

    text = json.dumps(report, indent=2) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def _op(name: str) -> str:
    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise argparse.ArgumentTypeError(f"no op is called {name!r}: {guess}Ops are {', '.join(OPS)}")
    return name


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"ops: {', '.join(OPS)}\n\nexit status: 0, 1 when a check failed, 2 without a GPU or for a wrong "
        "argument, 130 after Ctrl-C, 141 behind a reader that left\n\nexamples:\n"
        "  python -m kernels.benchmark linear paged_attention --json h200.json\n"
        "  TRITON_INTERPRET=1 python -m kernels.benchmark --check     # without a GPU",
    )
    parser.add_argument("ops", nargs="*", type=_op, metavar="OP", help="ops to run; default: all of them")
    parser.add_argument("--check", action="store_true", help="no times: the checks alone, at small shapes")
    parser.add_argument("--repetitions", type=_positive, default=50, metavar="N", help="samples of a time; default 50")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions, checks and times to this file too")
    return parser


def main(argv: Iterable[str] | None = None) -> int:
    try:
        status = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: whoever reads has seen enough, and so Python's last flush is for nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _main(argv: Iterable[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(None if argv is None else list(argv))
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: {args.json.absolute().parent} is no directory: make it first")
    import torch

    from kernels.benchmarks.case import Setting
    from kernels.benchmarks.conditions import conditions

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if args.check and is_interpreted:
        device, timer = torch.device("cpu"), None
        # The interpreter is silently wrong in bfloat16.
        settings = [Setting(device=device, dtype=dtype, is_small=True) for dtype in (torch.float32, torch.float16)]
    elif is_interpreted or not torch.cuda.is_available():
        why = "TRITON_INTERPRET=1 keeps kernels off the GPU" if is_interpreted else "torch finds no CUDA GPU"
        remedy = "TRITON_INTERPRET=1 python -m kernels.benchmark --check runs the checks on the CPU"
        print(f"kernels.benchmark needs a CUDA GPU, and {why}; {remedy}.", file=sys.stderr)
        return 2
    else:
        from kernels.benchmarks.timing import GraphTimer

        device = torch.device("cuda", torch.cuda.current_device())
        cache_bytes = 0 if args.check else torch.cuda.get_device_properties(device).L2_cache_size
        settings = [Setting(device=device, dtype=torch.bfloat16, is_small=args.check, cache_bytes=cache_bytes)]
        timer = None if args.check else GraphTimer(device, args.repetitions)
    report = conditions(device) | {"repetitions": None if timer is None else args.repetitions}
    print(", ".join(f"{name} {value}" for name, value in report.items() if value is not None))
    return run(list(dict.fromkeys(args.ops)) or OPS, settings, timer, report, args.json)


if __name__ == "__main__":
    sys.exit(main())
