"""A program of a Triton kernel, as a launch asks for it: what tests/compile_kernels.py compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels.shared_memory import HOPPERS

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: HOPPERS}  # bytes of a program
OVERLAPS = "OVERLAPS"  # the constant of kernels that may begin while the launch before runs: on Hopper
NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    module: str
    name: str
    signature: str  # Triton's types of the arguments that are not constants, in order; ":16" promises a multiple of 16
    # The constexpr arguments, and absent ones: None.
    constants: Mapping[str, int | float | str | None] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)  # of the compiler, as the op launches it
    max_shared: int = 0  # bytes of shared memory a program may take
    spilled: int = 0  # bytes of a thread that Hopper's program may keep in memory: of addresses alone
    compute_capabilities: tuple[int, ...] = ()  # none: 90, and 80 where no kernel of this name and head size was before
    sm_90_instruction: str = ""  # what Hopper's program must hold

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({self.signature}, {dict(self.constants)}, {dict(self.options)})"
