"""Rows and tiles of a captured step's launches, worked out on the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels import chain_rows as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal
from kernels.reference.chain_rows import chain_rows as reference

BLOCK_SIZE, MAX_BLOCKS, ROWS_PER_TILE = 16, 512, 16


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 5),) if setting.is_small else ((1, 1), (1, 8), (64, 4), (64, 17))
    return [
        Case(
            op="chain_rows",
            label=f"{num_requests} requests, {num_rows} rows of each",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, num_rows),
        )
        for num_requests, num_rows in sizes
    ]


def _prepare(setting: Setting, num_requests: int, num_rows: int) -> Work:
    lengths = setting.integers(2, MAX_BLOCKS * BLOCK_SIZE - num_rows, num_requests, seed=0)
    tables = setting.integers(1, 10_000, num_requests, MAX_BLOCKS, seed=1).to(torch.int32)
    shape: dict[str, Any] = {
        "offset": -1,
        "num_rows": num_rows,
        "block_size": BLOCK_SIZE,
        "rows_per_tile": ROWS_PER_TILE,
    }

    def check() -> list[str]:
        wanted = reference(lengths, tables, **shape)
        for name, found in kernel.chain_rows(lengths, tables, **shape)._asdict().items():
            check_equal(name, found, getattr(wanted, name))
        return ["equal"]

    num_tiles = -(-num_rows // ROWS_PER_TILE)
    num_bytes = num_requests * (8 + num_rows * 3 * 8 + num_tiles * 5 * 4 + (-(-num_rows // BLOCK_SIZE)) * 4)
    return Work(
        check=check,
        calls=[partial(kernel.chain_rows, lengths, tables, **shape)],
        num_bytes=num_bytes,
        comes_from="L2",
    )
