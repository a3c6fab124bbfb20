"""Where numba keeps what it compiled of a function: a file for each signature, named after all that it depends on.

numba's own index numbers the files of a function. Processes that compile for different signatures at once, as the
ranks of a model or parallel tests do at their first start, take the same number, and from then on every start finds
one signature's code under the other's. Here there is nothing to agree on.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile


class CompiledFiles(IndexDataCacheFile):
    """In place of numba's; its key is a signature, the CPU and digests of the function's bytecode and closure."""

    def __init__(self, cache_path: str, filename_base: str, source_stamp: str) -> None:
        """source_stamp: hexadecimal; files with another, of sources that have changed, are removed."""
        super().__init__(cache_path, filename_base, source_stamp)
        self._name = f"{filename_base}.{source_stamp[:16]}"
        self._names_of_all = f"{filename_base}.*"

    def save(self, key: Any, data: Any) -> None:
        folder = Path(self._cache_path)
        for path in folder.glob(self._names_of_all):
            is_written = path.suffix in (".nbi", ".nbc")  # the former were numba's
            if is_written and not path.name.startswith(f"{self._name}-"):
                path.unlink(missing_ok=True)
        self._save_data(self._name_of(key), (self._version, key, data))

    def load(self, key: Any) -> Any:
        """What was saved under this key; None: nothing was."""
        with suppress(FileNotFoundError):
            version, found, data = self._load_data(self._name_of(key))
            return data if (version, found) == (self._version, key) else None
        return None

    def _name_of(self, key: Any) -> str:
        return f"{self._name}-{hashlib.sha256(repr((self._version, key)).encode()).hexdigest()[:32]}.nbc"
