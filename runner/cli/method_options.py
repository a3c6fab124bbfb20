"""`method.options.NAME=VALUE` and `method.options={...}`: Hydra adds names that no YAML lists only with `++`."""

from __future__ import annotations

import re

from runner.config.problem import ConfigError, Problem


def add_method_options(argv: list[str]) -> list[str]:
    """Arguments in which options of a user's own class are added where the configuration has none of their name.

    Raises:
        ConfigError: a list in place of the mapping, of which Hydra would say that `++` cannot be merged.
    """
    for argument in argv:
        if listed := re.match(r"\+*method\.options=(\[.*)", argument):
            rule, remedy = "must be a mapping", "write method.options.NAME=VALUE for each"
            raise ConfigError([Problem(name="method.options", rule=rule, value=listed[1], remedy=remedy)])
    return [re.sub(r"^(?=method\.options[.=])", "++", argument) for argument in argv]
