"""Compiles every Triton kernel for GPUs that need not be there; run by test_kernels_aot.py in a process of its own.

The interpreter of the other tests is chosen when a kernel is decorated, and what it decorates cannot be compiled.
A new kernel is one line of KERNELS.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

COMPUTE_CAPABILITIES = (80, 90)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    module: str
    name: str
    signature: str  # Triton's types of the arguments that are not constants, in order
    constants: Mapping[str, int | None] = field(default_factory=dict)  # constexpr arguments, and pointers that are None
    num_warps: int = 4
    max_shared: int = 0  # bytes of shared memory a program may take

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({self.signature}, {dict(self.constants)})"


GREEDY_HAS_NO = ("seeds_ptr", "draft_steps_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr")
KERNELS = [
    Kernel(
        module="kernels.ngram_match",
        name="scan_kernel",
        signature="*i32 *i64 *i64 *i64 i32 i32",
        constants={"MIN_N": 2, "MAX_N": 5, "BLOCK": 1024},
        max_shared=1024,
    ),
    Kernel(
        module="kernels.ngram_match",
        name="finalize_kernel",
        signature="*i32 *i64 *i64 *i64 *i64 i32 i32 i32",
        constants={"BLOCKS": 32, "TOKENS": 4},
        max_shared=1024,
    ),
    *(
        Kernel(
            module="kernels.move_kv",
            name="move_kernel",
            signature=f"*{dtype} *i64 *i64 *i64 *i64 i32",
            constants={"BLOCK": 1024},
        )
        for dtype in ("bf16", "fp16", "fp32")
    ),
    Kernel(
        module="kernels.row_laws",
        name="row_laws_kernel",
        signature="*i64 *fp32 *fp32 *i64 *fp32 *i64 *i1 *fp32 *fp32 *i64 *fp64 i32 i32",
        constants={"BLOCK": 2048},
        num_warps=16,
        max_shared=8192,
    ),
    *(
        Kernel(
            module="kernels.sampling",
            name="draw_kernel",
            signature=signature,
            constants={"BLOCK": 4096, **dict.fromkeys(absent)},
            num_warps=8,
            max_shared=8192,
        )
        for signature, absent in (
            ("*i64 *fp32 *i64 *i64 *i64 *i1 *fp32 *fp32 i32 i32 i32", ()),
            ("*i64 *fp32 *i64 i32 i32 i32", GREEDY_HAS_NO),
        )
    ),
    Kernel(
        module="kernels.sampling",
        name="best_token_kernel",
        signature="*i64 *i64 *i64 i32",
        constants={"SPLITS": 32},
        max_shared=1024,
    ),
    Kernel(
        module="kernels.rejection",
        name="verify_sampled_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i32 *i64 *i64 *fp64 i32",
        constants={"PLACES": 32},
        num_warps=1,
    ),
    Kernel(
        module="kernels.probabilistic_rejection",
        name="judge_kernel",
        signature="*i64 *i64 *i64 *fp32 *fp32 *i64 *i32 *i64 *i64 *i1 *fp32 *i64 *fp32 *fp32 *i64 i32 i32 i32",
        constants={"PLACES": 32},
        num_warps=1,
    ),
    Kernel(
        module="kernels.probabilistic_rejection",
        name="recover_kernel",
        signature="*i64 *fp32 *fp32 *i64 *i32 *i64 *i64 *i64 *i64 *i1 *fp32 *fp32 *fp32 *i64 i32 i32 i32",
        constants={"BLOCK": 4096},
        num_warps=8,
        max_shared=8192,
    ),
    Kernel(
        module="kernels.probabilistic_rejection",
        name="recovered_token_kernel",
        signature="*i64 *i64 *i32 *i64 *i64 *i1 i32 i32",
        constants={"SPLITS": 32},
        num_warps=1,
    ),
]


def compile_kernel(kernel: Kernel, compute_capability: int) -> int:
    """Shared memory of a program, in bytes.

    Raises whatever Triton or ptxas raise where the kernel is no program for that GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(kernel.module), kernel.name)
    variables = [name for name in function.arg_names if name not in kernel.constants]
    source = ASTSource(
        fn=function,
        signature=dict.fromkeys(function.arg_names, "constexpr")
        | dict(zip(variables, kernel.signature.split(), strict=True)),
        constexprs={(function.arg_names.index(name),): value for name, value in kernel.constants.items()},
    )
    options = {"num_warps": kernel.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


if __name__ == "__main__":
    shared = {
        f"{kernel} sm_{capability}": compile_kernel(kernel, capability)
        for kernel in KERNELS
        for capability in COMPUTE_CAPABILITIES
    }
    json.dump(shared, sys.stdout)
