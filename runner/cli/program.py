"""What the programs beside `python -m runner` share that take its overrides: options, ends, and what they advise."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence

from runner.cli.screen import show_error, show_interrupt
from runner.cli.termination import interrupt_on_termination
from runner.endings import printing
from runner.engine.errors import UserError


def program_parser(prog: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """To be used by parse_intermixed_args: an override may stand behind an option."""
    parser = argparse.ArgumentParser(
        prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, description=description, epilog=epilog
    )
    parser.add_argument("overrides", nargs="*", metavar="group=option|key=value", help="as for python -m runner")
    return parser


def exit_status(work: Callable[[], None], kept: Callable[[], str] | None = None) -> int:
    """Does the work; kept: says what an interrupt has left."""
    interrupt_on_termination()

    def status() -> int:
        try:
            work()
        except UserError as error:
            return show_error(error)
        except KeyboardInterrupt:
            return show_interrupt(kept and kept())
        return 0

    return printing(status)


def use_it(overrides: Sequence[str]) -> str:
    """The line that says how to run what was found."""
    return f"use it: python -m runner {shlex.join(overrides)}"
