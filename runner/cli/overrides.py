"""Overrides as people write them, in Hydra's grammar: for every program that takes them."""

from __future__ import annotations

from runner.cli.method_options import add_method_options
from runner.cli.speculative_config import quote_json


def in_hydras_grammar(argv: list[str]) -> list[str]:
    """Arguments that Hydra can read: bare JSON quoted, options of a user's own class added.

    Raises:
        ConfigError: the options are no mapping.
    """
    return add_method_options(quote_json(argv))
