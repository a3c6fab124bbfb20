"""The one exception family the command line turns into a screen instead of a traceback.

Anything a user can cause and mend raises a UserError; a bug raises anything else and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """An error the user can cause and mend; its message holds name, rule, value and remedy.

    Example: "model.model must be a directory with config.json or a hub id, got 'lama'; check the path".
    """


def first_of(names: list[str]) -> str:
    """What an error says of names that may be many."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
