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
    constants: Mapping[str, int | None] = field(default_factory=dict)  # the constexpr arguments, and absent ones: None
    options: Mapping[str, int] = field(default_factory=dict)  # of the compiler, as the op launches it
    max_shared: int = 0  # bytes of shared memory a program may take
    sm_90_instruction: str = ""  # what Hopper's program must hold

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({self.signature}, {dict(self.constants)})"


# Llama-3-8B's attention in bfloat16.
HEADS = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128}
SEEN = {"WINDOW": 0, "IS_CAUSAL": 1, "VALUE_DIM": 128, "VALUE_BLOCK": 128}
ATTEND = HEADS | SEEN | {"GROUP": 4, "HEAD_BLOCK": 128, "BLOCK_SIZE": 16, "SOFTCAP": 0, "HAS_BRANCHES": 1}
ATTEND |= {"BLOCK_M": 64, "BLOCK_N": 64, "sinks_ptr": None}
NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}

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
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 fp32 i32 i32 i32 i32 i32",
            constants=ATTEND | constants,
            options={**NO_FUSION, "num_stages": 3},
            max_shared=113 * 1024,  # two programs on a multiprocessor of Hopper, one on sm_80's
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        )
        for pointers, constants in (
            ("*bf16 *bf16 *fp32 *fp32 *fp32", {"SPLIT_KEYS": 512}),
            ("*bf16 *bf16 *bf16", {"SPLIT_KEYS": 0, "maxima_ptr": None, "sums_ptr": None}),
        )
    ),
    Kernel(
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "SPLIT_KEYS": 512, "MERGED_SPLITS": 16, "sinks_ptr": None},
        options=NO_FUSION,
        max_shared=2048,
    ),
    Kernel(
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16 *fp32 *i64 *i64 *bf16 *bf16 *bf16 *fp32 i32",
        constants={**HEADS, "NUM_HEADS": 32, "HALF_BLOCK": 64, "HEADS": 16},
        options=NO_FUSION,
        max_shared=2048,
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
    types = dict(zip(variables, kernel.signature.split(), strict=True))
    pointers = [index for index, name in enumerate(function.arg_names) if types.get(name, "").startswith("*")]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in pointers},  # as torch allocates
    )
    target = GPUTarget("cuda", compute_capability, 32)
    compiled = triton.compile(source, target=target, options=dict(kernel.options))
    assert compiled.asm["cubin"]
    if compute_capability == 90:
        assert kernel.sm_90_instruction in compiled.asm["ptx"], f"{kernel} lacks {kernel.sm_90_instruction}"
    return int(compiled.metadata.shared)


if __name__ == "__main__":
    shared = {
        f"{kernel} sm_{capability}": compile_kernel(kernel, capability)
        for kernel in KERNELS
        for capability in COMPUTE_CAPABILITIES
    }
    json.dump(shared, sys.stdout)
