"""Modules that a quantization_config excludes from what it says of all others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from typing import Any

from runner.engine.architecture import are_names
from runner.engine.errors import UserError

# The list, as compressed-tensors and newer ModelOpt call it, older ModelOpt, transformers (FP8, AWQ), and vLLM's FP8.
_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
_REGEX = "re:"  # of compressed-tensors


class UnquantizedModules:
    """Holds a module that is in such a list, or that is a part of one.

    Entries are regular expressions, globs (ModelOpt's) or names, whole ones or their last parts (AWQ's mlp.gate).
    """

    def __init__(self, stated: Mapping[str, Any], of: str) -> None:
        """
        Args:
            stated: the quantization_config.
            of: the checkpoint, for errors.

        Raises:
            UserError: an entry that is no regular expression.
        """
        lists = (stated.get(key, ()) for key in _KEYS)
        entries = {entry for own in lists if are_names(own) for entry in own}
        regexes = {entry for entry in entries if entry.startswith(_REGEX)}
        globs = {entry for entry in entries - regexes if re.search(r"[*?[]", entry)}
        # There are hundreds of entries, of tens of thousands of modules: names are looked up.
        self._names = entries - regexes - globs
        self._regexes = [_compiled(entry, of) for entry in regexes]
        self._globs = [re.compile(translate(f"*.{entry}.*")) for entry in globs]

    def __contains__(self, module: str) -> bool:
        """module: as a language model alone names it, where entries may be of a checkpoint of more than text."""
        names = (module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}")
        return any(map(self._holds, names))

    def _holds(self, name: str) -> bool:
        return (
            any(part in self._names for part in _parts(name))
            or any(glob.match(f".{name}.") for glob in self._globs)
            or any(regex.match(name) for regex in self._regexes)
        )


def _parts(name: str) -> Iterator[str]:
    """Of a module's name, neighbours together: a.b.c gives a, a.b, a.b.c, b, b.c and c."""
    words = name.split(".")
    for first in range(len(words)):
        for end in range(first, len(words)):
            yield ".".join(words[first : end + 1])


def _compiled(entry: str, of: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix(_REGEX))
    except re.error as error:
        raise UserError(
            f"quantization_config of {of} must name modules by regular expressions behind {_REGEX!r}, got {entry!r} "
            f"({error}); mend its config"
        ) from error
