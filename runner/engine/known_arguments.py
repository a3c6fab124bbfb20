"""Calls of the Python API by names of arguments that there are not: a UserError that tells the nearest ones.

Python has a TypeError for them, as for a bug of ours. Signatures, and what type checkers see, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from runner.engine.errors import UserError
from runner.engine.nearest_names import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def known_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """The method, of which callers name its own arguments."""
    _, *known = signature(method).parameters  # self is not theirs to name
    caller_name = method.__qualname__.removesuffix(".__init__")

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise UserError(
                "\n".join(
                    f"{name} is an unknown argument of {caller_name}, got {kwargs[name]!r}; {did_you_mean(name, known)}"
                    for name in unknown
                )
            )
        return method(*args, **kwargs)

    return checked


def known_fields(record: type[T]) -> type[T]:
    """A dataclass, which is built with the names of its own fields."""
    record.__init__ = known_arguments(record.__init__)  # type: ignore[method-assign]
    return record
