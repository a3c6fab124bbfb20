"""`speculative_config=` on the command line: a mapping in Hydra's grammar, a JSON object as vLLM takes it, or a file.

Gives the mapping that was meant; what its keys mean is the schema's business.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from runner.config.method_union import METHODS
from runner.config.problem import ConfigError, Problem

KEY = "speculative_config"
EXAMPLE = """write speculative_config='{"method": "ngram", "num_speculative_tokens": 4}' or the path of such a file"""


def quote_json(argv: list[str]) -> list[str]:
    """Arguments with bare JSON quoted: Hydra's grammar knows mappings, but no quoted keys.

    Several objects, separated by commas, stay several values of a sweep.
    """
    return [_quoted(argument) for argument in argv]


def read_speculative_config(value: Any, directory: Path) -> dict[str, Any]:
    """The mapping that was given, as one, as JSON, or as the path of a JSON file from `directory` on.

    Raises:
        ConfigError: the file is not there, or what it holds is no JSON object.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str) or not value.strip():  # an empty path would be the directory
        raise ConfigError([Problem(name=KEY, rule="must be a JSON object", value=value, remedy=EXAMPLE)])
    text = value.strip()
    if text.startswith(("{", "[")):
        return _parse(text, "")
    path = directory / Path(text).expanduser()
    try:
        return _parse(path.read_text(encoding="utf-8-sig"), f"{value}, ")
    except OSError as error:
        rule = f"must be a JSON object or the path of a file with one ({error.strerror})"
        raise ConfigError([Problem(name=KEY, rule=rule, value=value, remedy=_remedy(text, path))]) from error
    except UnicodeDecodeError as error:
        rule = "must be the path of a JSON file in UTF-8"
        raise ConfigError([Problem(name=KEY, rule=rule, value=value, remedy=EXAMPLE)]) from error


def _remedy(text: str, path: Path) -> str:
    if text in METHODS:
        return f"for the method alone write method={text}"
    siblings = [entry.name for entry in path.parent.glob("*.json")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.8)
    return f"did you mean {os.path.join(os.path.dirname(text), close[0])!r}?" if close else EXAMPLE


def _quoted(argument: str) -> str:
    override = re.fullmatch(rf'(\+{{0,2}}{KEY}=)\s*(\{{\s*".*)', argument, re.DOTALL)
    if override is None:
        return argument
    key, text = override.groups()
    decoder, values, position = json.JSONDecoder(), [], 0
    while position < len(text):
        try:
            _, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:  # quoted as one, it is refused with the place of the mistake
            return key + _as_hydra_string(text)
        values.append(_as_hydra_string(text[position:end]))
        gap = re.compile(r"\s*(,\s*|$)").match(text, end)
        if gap is None:
            return key + _as_hydra_string(text)
        position = gap.end()
    return key + ",".join(values)


def _as_hydra_string(text: str) -> str:
    return str(QuotedString(text=text, quote=Quote.single).with_quotes())


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        rule = f"must be valid JSON: {place}line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError([Problem(name=KEY, rule=rule, remedy=EXAMPLE)]) from error
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a number or a truth value")
        raise ConfigError([Problem(name=KEY, rule=f"must be a JSON object: {place}found {kind}", remedy=EXAMPLE)])
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError([Problem(name=f"{KEY}.{twice}", rule="is there twice", remedy="keep one of the two")])
    return values
