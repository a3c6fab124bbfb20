"""Compiled functions on disk: whoever saves at the same time, each finds its own again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile

from kernels.cpu.compiled import compiled
from kernels.cpu.compiled_files import CompiledFiles

Key = tuple[object, ...]
KEYS: list[Key] = [
    ((types.Array(types.float32, dim, "C"), types.int64), ("x86_64", "zen4", "+avx2")) for dim in range(1, 25)
]
FIRST, SECOND = ("0" * 64, "1" * 64)  # digests of sources


def save_at_once(files_of: Callable[[], CompiledFiles]) -> list[object]:
    """What is found under each of KEYS after two have saved half of them each, in step."""
    barrier = Barrier(2)

    def save(keys: list[Key]) -> None:
        files = files_of()
        for key in keys:
            barrier.wait()
            files.save(key, repr(key))

    with ThreadPoolExecutor(2) as both:
        list(both.map(save, (KEYS[::2], KEYS[1::2])))
    return [files_of().load(key) for key in KEYS]


def test_what_two_save_at_once_is_found_by_its_key(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = save_at_once(lambda: CompiledFiles(str(tmp_path), "kernel", FIRST))
    finally:
        sys.setswitchinterval(interval)
    assert found == [repr(key) for key in KEYS]


def test_files_of_changed_sources_are_not_found_and_do_not_pile_up(tmp_path: Path) -> None:
    before = CompiledFiles(str(tmp_path), "kernel", FIRST)
    IndexDataCacheFile(str(tmp_path), "kernel", FIRST).save(KEYS[0], "numba's own")
    for key in KEYS:
        before.save(key, "old")
    CompiledFiles(str(tmp_path), "kernel_of_another_name", FIRST).save(KEYS[0], "another's")
    after = CompiledFiles(str(tmp_path), "kernel", SECOND)
    assert after.load(KEYS[0]) is None
    after.save(KEYS[1], "new")
    assert after.load(KEYS[1]) == "new" and before.load(KEYS[1]) is None
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["kernel", "kernel_of_another_name"]


def test_a_compiled_function_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "double.py"
    source.write_text("def double(number):\n    return 2 * number\n")
    monkeypatch.syspath_prepend(tmp_path)
    from double import double  # type: ignore[import-not-found]

    for hits in (0, 1):
        function = compiled(double)
        assert [function(2), function(0.5)] == [4, 1.0]
        assert sum(function.stats.cache_hits.values()) == 2 * hits
