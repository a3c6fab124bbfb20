"""Modules that a quantization_config excludes from what it says of all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from runner.engine.architecture import are_names
from runner.engine.errors import UserError

# The list, as compressed-tensors and newer ModelOpt call it, older ModelOpt, transformers (FP8, AWQ), and vLLM's FP8.
_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
_REGEX = "re:"  # of compressed-tensors


def is_unquantized(module: str, stated: Mapping[str, Any], of: str) -> bool:
    """Whether a module is in such a list, or one that it is a part of.

    Entries are regular expressions, globs (ModelOpt's) or names, whole ones or their last parts (AWQ's mlp.gate).

    Args:
        module: as a language model alone names it, where entries may be of a checkpoint of more than text.
        of: the checkpoint, for errors.

    Raises:
        UserError: an entry that is no regular expression.
    """
    lists = (stated.get(key, ()) for key in _KEYS)
    entries = [entry for own in lists if are_names(own) for entry in own]
    names = (module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}")
    return any(_matches(name, entry, of) for name in names for entry in entries)


def _matches(name: str, entry: str, of: str) -> bool:
    if not entry.startswith(_REGEX):
        return fnmatchcase(f".{name}.", f"*.{entry}.*")
    try:
        return re.match(entry.removeprefix(_REGEX), name) is not None
    except re.error as error:
        raise UserError(
            f"quantization_config of {of} must name modules by regular expressions behind {_REGEX!r}, got {entry!r} "
            f"({error}); mend its config"
        ) from error
