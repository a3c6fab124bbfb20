"""Contestants that take turns: a machine whose speed drifts is unfair to none, and ratios are taken round by round."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import torch

from runner.cli.arguments import at_least, file_to_write

PLAIN = "none"  # the method whose turns the others' are measured by


def take_turns(contestants: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Name -> what each of its turns returned, tokens/s say; a round before those counted warms everybody up."""
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(num_rounds + 1):
        for name, take_turn in contestants.items():
            found = take_turn()
            if index > 0:
                rounds[name].append(found)
        print(f"round {index}/{num_rounds}", file=sys.stderr)
    return rounds


def ratios(rounds: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """How many times base's number the other's is, in each round."""
    return [a / b for a, b in zip(rounds[name], rounds[base], strict=True)]


def turns_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that all such comparisons have: threads, lengths, rounds and the file for the numbers."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=torch.get_num_threads(),
        help="CPU threads of both sides (default here: %(default)s)",
    )
    parser.add_argument(
        "--prompt-len", type=at_least(1), default=64, help="tokens of every prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--output-len", type=at_least(1), default=128, help="tokens generated for every prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="timed rounds, after one that warms up (default: %(default)s)"
    )
    parser.add_argument("--json", type=file_to_write, help="also write the numbers to this file")
    return parser
