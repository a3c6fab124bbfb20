"""`python -m runner.tiny`: trains the tiny family offline from the standard library's sources.

Parses the command line, draws the progress bar and hands over to `runner.tiny.recipe`; torch is imported only after the
arguments have been read, or to ask for the GPU that they name.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from runner.cli.arguments import directory_to_fill
from runner.tiny import HEAD_DIRS, MANIFEST

STAGES = ("target", "draft", *HEAD_DIRS)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runner.tiny",
        description="Train the tiny model family (tokenizer, target, draft, draft heads) offline from a fixed seed.",
        epilog="The committed family is in runner/tiny; compare manifest.json of a new run with the one there.",
    )
    parser.add_argument(
        "--output", type=directory_to_fill, default="tiny-family", help="directory to fill (default: %(default)s)"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=list(STAGES),
        help="'target' also trains the tokenizer; the others distil from the target already in the output directory",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: a GPU, if any)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; part of the result's bits (default: 2)")
    arguments = parser.parse_args(argv)
    for needed, by in (("target", STAGES[1:]), ("draft", ("pard",))):
        stages = [stage for stage in by if stage in arguments.stages]
        if stages and needed not in arguments.stages and not (arguments.output / needed / "config.json").exists():
            parser.error(
                f"--stages {' '.join(stages)} needs a {needed} in {arguments.output}/{needed}, none found: "
                f"run --stages {needed} first"
            )
    if arguments.threads < 1:
        parser.error(f"--threads must be >= 1, got {arguments.threads}")
    if arguments.device == "cuda" and not _has_gpu():
        parser.error("--device cuda needs a CUDA GPU that torch can use, and none was found; take --device cpu")
    return arguments


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> None:
    # Threads that spin while they wait for each other crawl once another program wants a core; asleep, they share.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = parse_arguments(argv)

    import torch
    from transformers.utils import logging as transformers_logging

    from runner.tiny.head_recipe import train_heads
    from runner.tiny.manifest import read_manifest
    from runner.tiny.recipe import Recipe, train_draft, train_target
    from runner.train.progress import stage_bars

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # one bar is enough
    torch.set_num_threads(arguments.threads)
    automatic = "cuda" if _has_gpu() else "cpu"
    device = torch.device(automatic if arguments.device == "auto" else arguments.device)
    recipe = Recipe(seed=arguments.seed)
    started = time.perf_counter()
    with stage_bars() as report_of:
        if "target" in arguments.stages:
            train_target(recipe, arguments.output, device=device, report=report_of("target"))
        if "draft" in arguments.stages:
            train_draft(recipe, arguments.output, device=device, report=report_of("draft"))
        heads = [stage for stage in HEAD_DIRS if stage in arguments.stages]
        if heads:
            train_heads(recipe, arguments.output, heads, device=device, report=report_of)
    print(f"{arguments.output}: {time.perf_counter() - started:.0f} s")
    for model, record in read_manifest(arguments.output / MANIFEST)["models"].items():
        if model in HEAD_DIRS:
            print(f"  {model}: {record['held_out_acceptance_length']:.3f} tokens per step on greedy held-out text")
        else:
            loss, bits = record["held_out_loss"], record["held_out_bits_per_byte"]
            print(f"  {model}: {loss:.3f} nats/token, {bits:.3f} bits/byte held out")


if __name__ == "__main__":
    main()
