"""A CPU's matrix unit: its kernels compile wherever LLVM knows x86, and one row takes the way of many.

That products and attention are right and keep a row's bits is told in tests/test_row_invariance.py and
tests/test_cpu_kernels.py, which run on the unit where there is one, and without it everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import linear_amx
from kernels.cpu.amx import has_amx
from kernels.cpu.huge_pages import HUGE_PAGE, in_huge_pages
from kernels.cpu.linear import linear
from kernels.cpu.panels import has_feature, pack
from tests.seeded import randn

needs_amx = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX for bfloat16")
CROSS_COMPILE = """
import numpy as np
from numba import types
from kernels.cpu.attend import attention
from kernels.cpu.compiled import compiled_for_c
from kernels.cpu.linear_amx import products
names = ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease")
attends = attention(np.uint16, 2, 4, True, True), (*names, "prefetcht1")
for kernel, wanted in ((products(4), names), (products(1), names), attends):
    compiled = compiled_for_c(kernel._function, (types.voidptr, *[types.int64] * 3))
    code = compiled._library.get_asm_str()
    print(all(name in code for name in wanted))
"""


@pytest.mark.skipif(not has_feature("avx512f"), reason="numba runs some of what it compiles, for this target AVX-512")
def test_kernels_of_the_matrix_unit_compile_where_there_is_none(tmp_path: Path) -> None:
    features = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+fma,+amx-tile,+amx-bf16"
    target = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_DISABLE_PERFORMANCE_WARNINGS": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),  # what an earlier run compiled has no assembly to be read
    }
    said = subprocess.run(
        [sys.executable, "-c", CROSS_COMPILE], env=os.environ | target, capture_output=True, text=True, check=False
    )
    assert said.stdout.split() == ["True"] * 3, said.stderr


@needs_amx
def test_one_row_and_many_are_computed_by_the_same_instruction() -> None:
    """Numbers whose sum tells the order: large ones that cancel, and small ones that are lost beside them."""
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).mul(1e4).bfloat16()
    x[:, 1::2] = -x[:, ::2]
    x[:, ::5] = 1e-3
    panels = pack(torch.ones(80, 256, dtype=torch.bfloat16))
    assert linear_amx.multiplies_tiles(panels)
    together = linear(x, panels, out_dtype=torch.float32)
    assert together.isfinite().all() and together.unique().numel() > 1
    for first in range(40):
        for count in (1, 3, 17):
            rows = slice(first, first + count)
            assert torch.equal(linear(x[rows], panels, out_dtype=torch.float32), together[rows])


@needs_amx
def test_a_width_that_tiles_do_not_divide_is_computed_in_vector_lanes() -> None:
    assert not linear_amx.multiplies_tiles(pack(randn(80, 50, dtype=torch.bfloat16)))
    assert not linear_amx.multiplies_tiles(pack(randn(80, 64, dtype=torch.float32)))


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no huge pages to ask for")
def test_large_weights_ask_for_huge_pages() -> None:
    small, large = torch.empty(HUGE_PAGE // 2, dtype=torch.uint8), torch.empty(8 * HUGE_PAGE, dtype=torch.uint8)
    assert in_huge_pages(small) is small and in_huge_pages(large) is large
    assert "hg" in flags_of(large.data_ptr() + HUGE_PAGE)
    panels = pack(torch.ones(2048, 1024))
    assert "hg" in flags_of(panels.numbers.data_ptr() + HUGE_PAGE)


def flags_of(address: int) -> list[str]:
    """Of the mapping that an address is in, as Linux says them."""
    is_own = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                is_own = begin <= address < end
            elif is_own and first == "VmFlags:":
                return rest
    raise AssertionError("the address is mapped")
