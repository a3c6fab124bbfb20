"""Changes to the values of a JSON file that a test has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
