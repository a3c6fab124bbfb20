"""Calls between interpreted Triton functions, without the milliseconds that each spends on patching the language.

Triton's interpreter replaces the builtins of triton.language when a kernel is launched, and again whenever that kernel
calls another jitted function, tl.sum among them: most of what such a call costs. A launch's replacements hold until it
ends, and what a call replaces beyond them (in tl.core) stays for good, so that once is enough for each function.
"""

from __future__ import annotations

from typing import Any

import pytest


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """A jitted function that another calls patches the language in its first call alone."""
    from triton.runtime.interpreter import InterpretedFunction

    first_call = InterpretedFunction.__call__
    prepared = set[Any]()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn in prepared:
            return function.rewrite()(*args, **kwargs)
        prepared.add(function.fn)
        return first_call(function, *args, **kwargs)

    patch.setattr(InterpretedFunction, "__call__", call)
