"""What the command line calls a key, as the Python API has it: `hardware.device=cuda` is `device='cuda'` of an LLM.

Texts, problems and errors in, the same under these names out. Nothing else of them changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from runner.config.hardware import HardwareConfig
from runner.config.method_union import FIELDS
from runner.config.model import ModelConfig
from runner.config.problem import Problem
from runner.engine.errors import UserError

_PREFIXES = {"model": "", "hardware": "", "method": "speculative_config."}
_KEYS = {*ModelConfig.model_fields, *HardwareConfig.model_fields, *(key for keys in FIELDS.values() for key in keys)}
# The option model=hf says that the next one is somebody's own; a value is a word that nothing goes on behind, for what
# a person gave, such as an id, stays as it was given.
_WRITTEN = re.compile(
    rf"(?<![\w./-])(?:model=hf )?({'|'.join(_PREFIXES)})\.({'|'.join(sorted(_KEYS))})\b(?:=([a-z]\w*)(?![\w./:-]))?"
)
_ELSEWHERE = re.compile(r", or use workload=\w+")  # a way out that is the command line's alone
_WORDS = {"true": "True", "false": "False", "null": "None"}


def in_python(text: str) -> str:
    """A message's text with keys, and values that are words, as arguments of an LLM."""

    def argument(found: re.Match[str]) -> str:
        node, key, value = found.groups()
        return f"{_PREFIXES[node]}{key}" + ("" if value is None else f"={_WORDS.get(value, repr(value))}")

    return _WRITTEN.sub(argument, _ELSEWHERE.sub("", text))


@contextmanager
def python_names() -> Iterator[None]:
    """Errors come out of it under the names of arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(in_python(str(error))) from error.__cause__


def as_argument(problem: Problem) -> Problem:
    """A problem under the name of the Python argument: the node's name is not written there, and no shell quotes."""
    node, _, rest = problem.name.partition(".")
    name = rest if node in ("model", "hardware") and rest else problem.name
    remedy = "" if "on the command line" in problem.remedy else in_python(problem.remedy)
    return replace(problem, name=name, rule=in_python(problem.rule), remedy=remedy)
