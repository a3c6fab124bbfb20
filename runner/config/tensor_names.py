"""The names of a checkpoint's tensors, from headers and indices alone: no tensor is loaded, and no pickle is run."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.engine.json_object import as_object, read_json

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


def tensor_names(directory: Path) -> set[str]:
    """Of a split checkpoint as its index has them, else of its safetensors files, else of pytorch_model.bin.

    A pickle's are found among all its strings, so a set may hold some that name no tensor.
    """
    weight_map = read_json(directory / "model.safetensors.index.json").get("weight_map")
    if isinstance(weight_map, Mapping):
        return set(map(str, weight_map))
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.is_file()]  # or a link to nothing
    return {name for file in files for name in _header(file)} or _strings(directory / "pytorch_model.bin")


def _header(file: Path) -> Mapping[str, Any]:
    """The JSON that a safetensors file begins with, after its length in eight bytes."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        return as_object(stream.read(length)) if length <= _MAX_HEADER_BYTES else {}


def _strings(file: Path) -> set[str]:
    """All strings in the pickle of an archive that torch.save wrote (since torch 1.6 a zip), read as data."""
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return {value for _, value, _ in pickletools.genops(archive.read(name)) if isinstance(value, str)}
    except (OSError, StopIteration, ValueError, zipfile.BadZipFile):
        return set()
