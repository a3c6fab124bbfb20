"""Names that users give, as the keys of metrics and parameters and as a directory hold them."""

from __future__ import annotations

import hashlib
import re

MAX_FOLDER_BYTES = 100  # file systems hold 255
_HASH_LENGTH = 8


def as_key(name: str, max_length: int) -> str:
    """MLflow takes letters, digits and _-.: and space alone, and "." and ".." would be paths to it.

    A name that has to be changed, or cut, ends in a hash of what it was: others become the same.
    """
    key = re.sub(r"[^\w\-.: ]", "_", name, flags=re.ASCII)
    key = key if key.strip(".") else "_" * max(len(key), 1)
    if key == name and len(key) <= max_length:
        return key
    return _marked(key[: max_length - _HASH_LENGTH - 1], name)


def as_folder(name: str) -> str:
    """The same for a directory of files with names of their own, which names that become the same may share."""
    folder = re.sub(r"[^\w\-.]", "_", name)
    folder = folder if folder.strip(".") else "_" * len(folder)
    cut = folder.encode()[:MAX_FOLDER_BYTES].decode(errors="ignore")
    return folder if cut == folder else _marked(cut, name)


def _marked(text: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{text}-{digest[:_HASH_LENGTH]}"
