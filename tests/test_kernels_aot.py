"""Every Triton kernel compiles for sm_80 and sm_90, GPU or none. Whether it is right is told elsewhere."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from tests.compile_kernels import COMPUTE_CAPABILITIES, KERNELS

pytest.importorskip("triton")


def test_the_table_holds_every_kernel() -> None:
    """Kernels are the functions of kernels/*.py whose name ends in _kernel."""
    found = {
        (module, name)
        for module in (f"kernels.{entry.name}" for entry in pkgutil.iter_modules(kernels.__path__))
        for name in vars(importlib.import_module(module))
        if name.endswith("_kernel")
    }
    assert found and found == {(kernel.module, kernel.name) for kernel in KERNELS}


def test_every_kernel_compiles_and_keeps_to_its_shared_memory(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(inspect.getfile(kernels)).parent.parent
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        cwd=root,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    shared = json.loads(result.stdout)
    assert len(shared) == len(KERNELS) * len(COMPUTE_CAPABILITIES)
    for kernel in KERNELS:
        for capability in COMPUTE_CAPABILITIES:
            assert shared[f"{kernel} sm_{capability}"] <= kernel.max_shared, str(kernel)
