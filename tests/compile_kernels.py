"""Compiles every Triton kernel for GPUs that need not be there; run by test_kernels_aot.py in a process of its own.

The interpreter of the other tests is chosen when a kernel is decorated, and what it decorates cannot be compiled.
A new kernel is one line of a table in tests/aot. With "-" it compiles kernels from standard input instead, for sm_90.
"""

from __future__ import annotations

import gc
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.aot.attention import ATTENTION
from tests.aot.drafts import DRAFTS
from tests.aot.kernel import OVERLAPS, Kernel
from tests.aot.products import PRODUCTS
from tests.aot.rows import ROWS
from tests.aot.sampling import SAMPLING
from tests.aot.states import STATES

# Of interest in PTX.
OPCODES = r"(?:wgmma\.mma_async|\bmma)\.sync[\w.]*|cp\.async\.c[ag]|griddepcontrol\.wait|prefetch\.global"
ACCESSES = r"griddepcontrol\.wait|(?:ld|st|atom)(?:\.\w+)?\.global|cp\.async\.c[ag]"  # of memory; to prefetch is none


def with_compute_capabilities(table: list[Kernel]) -> Iterator[Kernel]:
    seen = set[tuple[str, Any]]()
    for kernel in table:
        kind = (kernel.name, kernel.constants.get("HEAD_DIM"))
        yield replace(kernel, compute_capabilities=kernel.compute_capabilities or ((90,) if kind in seen else (80, 90)))
        seen.add(kind)


KERNELS = list(with_compute_capabilities([*PRODUCTS, *ATTENTION, *ROWS, *STATES, *DRAFTS, *SAMPLING]))


# Whose programs for equal rows and for counted ones compute one token after another, and must round alike.
RECURRENT = ("gated_delta_kernel", "short_conv_kernel")
COUNTED = [kernel for kernel in KERNELS if kernel.name in RECURRENT]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    shared: int  # bytes of a program
    stack: int  # bytes of a thread: registers that were spilled
    opcodes: list[str]  # in the order of the PTX
    under_way: int  # copies into shared memory that a wait leaves under way, at most
    first_access: str  # of ACCESSES
    aligned: list[str]  # pointers whose alignment another program would be compiled for
    reductions: list[str]  # how what is added up lies in registers, which decides the order
    additions: int  # of float32, which are fused with no product
    # Of COUNTED for sm_90, as it takes a second: how many float32 are added, multiplied, and both at once.
    arithmetic: dict[str, int]


def compile_kernel(kernel: Kernel, compute_capability: int) -> Compiled:
    """Raises whatever Triton or ptxas raise where the kernel is no program for that GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(kernel.module), kernel.name).fn
    constants = dict(kernel.constants)
    if OVERLAPS in function.arg_names:
        constants[OVERLAPS] = compute_capability >= 90
    variables = [name for name in function.arg_names if name not in constants]
    types = dict(zip(variables, kernel.signature.split(), strict=True))
    params = {param.name: param for param in function.params}
    aligned = [  # pointers as torch allocates
        name
        for name in variables
        if (types[name].startswith("*") or types[name].endswith(":16"))
        and not params[name].do_not_specialize_on_alignment
    ]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr").split(":")[0] for name in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", compute_capability, 32)
    compiled = triton.compile(source, target=target, options=dict(kernel.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True)
    assert compute_capability != 90 or kernel.sm_90_instruction in compiled.asm["ptx"], f"{kernel} lacks it"
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    assert stack
    return Compiled(
        shared=compiled.metadata.shared,
        stack=int(stack[1]),
        opcodes=re.findall(OPCODES, compiled.asm["ptx"]),
        under_way=max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])), default=0),
        first_access=next(iter(re.findall(ACCESSES, compiled.asm["ptx"])), ""),
        aligned=[name for name in aligned if types[name].startswith("*")],
        reductions=reductions(compiled.asm["ttgir"]),
        arithmetic=arithmetic(compiled.asm["cubin"]) if compute_capability == 90 and kernel in COUNTED else {},
        additions=len(re.findall(r"\badd(?:\.rn)?\.f32", compiled.asm["ptx"])),
    )


def arithmetic(cubin: bytes) -> dict[str, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        listing = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return dict(Counter(re.findall(r"\b(FADD|FMUL|FFMA)\b", listing)))


def reductions(ttgir: str) -> list[str]:
    """Shapes and layouts of what tt.reduce takes, in the order of the program."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.MULTILINE))
    operands = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(.*?), (#\w+)>', ttgir, re.DOTALL)
    return [f"{shape} {layouts[layout]}" for shape, layout in operands]


if __name__ == "__main__":
    gc.disable()  # it would go over a compiler's objects again and again, nearly all of which stay
    wanted = KERNELS
    if sys.argv[1:] == ["-"]:
        wanted = [Kernel(**{**own, "compute_capabilities": (90,)}) for own in json.load(sys.stdin)]
    found: dict[str, Any] = {
        f"{kernel} sm_{capability}": asdict(compile_kernel(kernel, capability))
        for kernel in wanted
        for capability in kernel.compute_capabilities
    }
    json.dump(found, sys.stdout)
