"""The one screen that an error a user can mend gets, on stderr: every problem with its rule, value and remedy."""

from __future__ import annotations

import sys

from runner.cli.termination import INTERRUPT_STATUS
from runner.config.problem import NO_VALUE, ConfigError, Problem
from runner.engine.errors import UserError

USER_ERROR_STATUS = 2
BUG_STATUS = 1  # Python's own, behind a traceback


def error_lines(error: UserError) -> list[str]:
    """The screen's plain text; its first line says what is wrong, the rest what to do."""
    if not isinstance(error, ConfigError):
        return [f"error: {error}"]
    count = len(error.problems)
    lines = [f"error: {count} problem{'s' if count > 1 else ''} in the configuration; nothing was run", ""]
    return lines + problem_lines(error.problems)


def problem_lines(problems: tuple[Problem, ...]) -> list[str]:
    lines = []
    for problem in problems:
        value = "" if problem.value is NO_VALUE else f", got {problem.value!r}"
        lines.append(f"  {problem.name} {problem.rule}{value}")
        if problem.remedy:
            lines.append(f"      {problem.remedy}")
    return lines


def show_error(error: UserError) -> int:
    """Print the screen and return the exit status that goes with it."""
    lines = error_lines(error)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False)
        console.print(Text(lines[0], style="bold red"))
        for line in lines[1:]:
            console.print(Text(line, style="cyan" if line.startswith("      ") else ""), soft_wrap=True)
    else:
        print("\n".join(lines), file=sys.stderr)
    return USER_ERROR_STATUS


def show_interrupt(kept: str | None = None) -> int:
    print("interrupted" if kept is None else f"interrupted; {kept}", file=sys.stderr)
    return INTERRUPT_STATUS
