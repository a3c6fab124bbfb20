"""JSON objects in files that others judge: what is broken reads as empty, and whoever needs more says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object; empty where there is none or it is broken."""
    return as_object(file.read_bytes()) if file.is_file() else {}


def as_object(text: bytes) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
