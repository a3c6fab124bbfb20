"""`method.options.NAME=VALUE` and `method.options={...}`: Hydra adds names that no YAML lists only with `++`."""

from __future__ import annotations

import re


def add_method_options(argv: list[str]) -> list[str]:
    """Arguments in which options of a user's own class are added where the configuration has none of their name."""
    return [re.sub(r"^(?=method\.options[.=])", "++", argument) for argument in argv]
