"""JSON objects in files: a broken one reads as empty where others judge it, and is refused where it is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
        return _object_in(file.read_bytes(), _whole_number)
    except ValueError as error:
        raise UserError(f"{name}: {file} must hold a JSON object ({error}); download it again") from error


def _object_in(text: bytes, parse_int: Callable[[str], int] | None = None) -> dict[str, Any]:
    try:
        values = json.loads(text, parse_int=parse_int)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}")
    return values


def _whole_number(digits: str) -> int:
    """One that tensors can be as large as, or hold; no size or id is larger."""
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError(f"it holds {digits[:20]}..., which 64 bits do not")
    return number
