"""`method.options.NAME=VALUE` on the command line: names that no YAML lists, which Hydra wants to be told with `++`."""

from __future__ import annotations

import re


def add_method_options(argv: list[str]) -> list[str]:
    """Arguments in which options of a user's own class are added where the configuration has none of their name."""
    return [re.sub(r"^(?=method\.options\.[^=]+=)", "++", argument) for argument in argv]
