"""How much memory a device has left, and the error when a model does not fit."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from runner.engine.errors import UserError

GIB = 2**30


def available_memory(device: torch.device) -> int:
    """Bytes that a new allocation may take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_limit())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Bytes that work() held at its peak, on a GPU, beside what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def release_unused() -> None:
    """Frees what nothing refers to any more, and gives a GPU back what torch only keeps at hand."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where no GPU is in use


def as_size(num_bytes: int) -> str:
    """In GiB, or in MiB where that is less than one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def require_memory(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raises UserError, with what is needed and what available, when `needed` bytes do not fit."""
    available = available_memory(device)
    if needed > available:
        raise UserError(f"{what} needs {as_size(needed)} on {device}, available are {as_size(available)}; {remedy}")


@contextmanager
def making_weights(what: str) -> Iterator[None]:
    """Around weights that are made, empty, by the sizes in a config; what: whose they are, for the error.

    Raises:
        UserError: they are larger than memory, or than any tensor may be.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:  # torch's: of memory, or of a size that 64 bits do not hold
        reason = str(error).splitlines()[0]
        if "alloc" not in reason and "verflow" not in reason:
            raise
        raise UserError(
            f"{what}: no weights of the sizes in its config.json can be made ({reason.removesuffix('.')}); mend it, or "
            "choose a device with more memory"
        ) from error


def model_remedy(dtype: torch.dtype, first: str = "") -> str:
    """What a model of this dtype that does not fit leaves to choose from; first: what else there is, with a comma."""
    halved = "hardware.dtype=bfloat16, " if dtype == torch.float32 else ""
    return f"choose {first}a smaller model, {halved}or a device with more memory"


def _cgroup_limit(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still take (cgroup v2); a large number where there is no limit."""
    limit, used = group / "memory.max", group / "memory.current"
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return 2**62
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = int(statistics.get("inactive_file", 0))  # checkpoint pages read before: given back when needed
    return int(limit.read_text()) - int(used.read_text()) + cached
