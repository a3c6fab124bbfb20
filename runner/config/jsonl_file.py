"""A file of lines that a configuration names, asked for before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from runner.config.problem import ConfigError, Problem


def require_jsonl_file(key: str, text: str) -> Path:
    """The path of the file that a key names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(text).expanduser()
    if os.path.isfile(path):  # Path.is_file raises where a name is too long
        return path
    remedy = "it does not exist: check the path"
    if os.path.isdir(path):
        remedy = "it is a directory: check the path"
    elif os.path.exists(path):  # a pipe or a device: every point of a sweep reads it anew
        remedy = "it is not a regular file: write what comes from it to one"
    raise ConfigError([Problem(name=key, rule="must be a .jsonl file", value=str(path), remedy=remedy)])
