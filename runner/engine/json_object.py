"""JSON objects in files: a broken one reads as empty where others judge it, and is refused where it is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.engine.errors import UserError


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object; empty where there is none or it is broken."""
    return as_object(file.read_bytes()) if file.is_file() else {}


def as_object(text: bytes) -> Mapping[str, Any]:
    try:
        return _object_in(text)
    except ValueError:
        return {}


def require_json(file: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; raises UserError where it holds none. name: the option to name in errors."""
    try:
        return _object_in(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{name}: {file} must hold a JSON object ({error}); download it again") from error


def _object_in(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}")
    return values
