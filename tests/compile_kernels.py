"""Compiles every Triton kernel for GPUs that need not be there; run by test_kernels_aot.py in a process of its own.

The interpreter of the other tests is chosen when a kernel is decorated, and what it decorates cannot be compiled.
A new kernel is one line of TABLE. With "-" it compiles kernels from standard input instead, for sm_90.
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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kernels.linear_plan import plan_linear, stages_of_short_sums
from kernels.shared_memory import HOPPERS

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: HOPPERS}  # bytes of a program
OVERLAPS = "OVERLAPS"  # the constant of kernels that may begin while the launch before runs: on Hopper
# Of interest in PTX.
OPCODES = r"(?:wgmma\.mma_async|\bmma)\.sync[\w.]*|cp\.async\.c[ag]|griddepcontrol\.wait|prefetch\.global"
ACCESSES = r"griddepcontrol\.wait|(?:ld|st|atom)(?:\.\w+)?\.global|cp\.async\.c[ag]"  # of memory; to prefetch is none


@dataclass(frozen=True, kw_only=True)
class Kernel:
    module: str
    name: str
    signature: str  # Triton's types of the arguments that are not constants, in order; ":16" promises a multiple of 16
    # The constexpr arguments, and absent ones: None.
    constants: Mapping[str, int | float | str | None] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)  # of the compiler, as the op launches it
    max_shared: int = 0  # bytes of shared memory a program may take
    compute_capabilities: tuple[int, ...] = ()  # none: 90, and 80 where no kernel of this name and head size was before
    sm_90_instruction: str = ""  # what Hopper's program must hold

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({self.signature}, {dict(self.constants)}, {dict(self.options)})"


BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}  # of a weight's numbers


def linear_kernel(
    num_rows: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool,
    out: str,
    capability: int,
    held: str = "bf16",  # or as QuantizedWeight.kind
    has_zeros: bool = False,
    group_size: int | None = None,  # columns that share a scale; None: all do
    activation: str = "silu",
    softcap: float = 0.0,
    leaves: bool = False,  # partial sums to the launch behind it
    rows: str = "bf16",  # or fp32
) -> Kernel:
    """A product as kernels/linear.py launches it, without a bias."""
    is_quantized = held != "bf16"
    plan = plan_linear(
        num_rows,
        out_features,
        in_features,
        element_size=4 if rows == "fp32" else 2,
        gated=gated,
        number_bits=BITS[held],
        group_size=group_size,
        capacity=SHARED_MEMORY[capability],
    )
    element = "i32" if is_quantized else held
    scales = ("*fp32:16" if is_quantized else "") + (" *i8:16" if has_zeros else "")
    scales += " *u8:16" if held == "fp4" else ""
    adds_up = plan.is_spread and not leaves
    workspace = "*fp32:16 *i32:16" if adds_up else ""
    absent = ["bias_ptr", *["scales_ptr"] * (not is_quantized), *["zeros_ptr"] * (not has_zeros)]
    absent += ["block_scales_ptr"] * (held != "fp4") + ["partials_ptr", "arrivals_ptr"] * (not adds_up)
    return Kernel(
        module="kernels.linear",
        name="linear_kernel",
        signature=f"*{rows}:16 *{element}:16 {scales} *{'fp32' if leaves else out}:16 {workspace} i32"
        + " i32:16" * 7
        + " i32",
        constants={
            **dict.fromkeys(absent),
            "SPLITS": plan.splits,
            "IS_SPREAD": plan.is_spread,
            "LEAVES": leaves,
            "GATED": gated,
            "ACTIVATION": activation,
            "SOFTCAP": softcap,
            "EVEN_K": in_features % plan.block_k == 0,
            "TOKENS": plan.tokens,
            "FEATURES": plan.features,
            "BLOCK_K": plan.block_k,
            "STEP_GROUPS": plan.step_groups,
            "READING": held if is_quantized else "dense",
        },
        options={"num_warps": plan.num_warps, "num_stages": plan.num_stages},
        max_shared=SHARED_MEMORY[capability],
        compute_capabilities=(capability,),
    )


def linear_of_experts_kernel(
    num_places: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool,
    capability: int,
    held: str = "bf16",  # as linear_kernel
    has_zeros: bool = False,
    group_size: int | None = None,  # columns that share a scale; None: all do
    num_experts: int = 128,
    activation: str = "silu",
    has_bias: bool = False,
    of_rows: bool = False,  # what gated ones are of anyway
) -> Kernel:
    """A bfloat16 product of experts as kernels/experts_linear.py launches it."""
    is_quantized = held != "bf16"
    plan = plan_linear(
        -(-num_places // num_experts),
        out_features,
        in_features,
        element_size=2,
        gated=gated,
        number_bits=BITS[held],
        group_size=group_size,
        of_experts=True,
        capacity=SHARED_MEMORY[capability],
    )
    element = "i32" if is_quantized else held
    of_rows = of_rows or gated
    pointers = ["*bf16:16", *["*i64:16"] * of_rows, "*i64:16", f"*{element}:16"]
    pointers += [*["*fp32:16"] * is_quantized, *["*i8:16"] * has_zeros, *["*u8:16"] * (held == "fp4")]
    pointers += [*["*bf16:16"] * has_bias, "*bf16:16"]
    absent = [*["rows_ptr"] * (not of_rows), *["scales_ptr"] * (not is_quantized), *["bias_ptr"] * (not has_bias)]
    absent += ["zeros_ptr"] * (not has_zeros) + ["block_scales_ptr"] * (held != "fp4")
    return Kernel(
        module="kernels.experts_linear",
        name="linear_of_experts_kernel",
        signature=" ".join([*pointers, "i32", *["i32:16"] * 10, "i32"]),
        constants={
            **dict.fromkeys(absent),
            "NUM_EXPERTS": num_experts,
            "EXPERTS": num_experts,
            "SPLITS": plan.splits,
            "GATED": gated,
            "ACTIVATION": activation,
            "EVEN_K": in_features % plan.block_k == 0,
            "TOKENS": plan.tokens,
            "FEATURES": plan.features,
            "BLOCK_K": plan.block_k,
            "STEP_GROUPS": plan.step_groups,
            "READING": held if is_quantized else "dense",
        },
        options={"num_warps": plan.num_warps, "num_stages": plan.num_stages},
        max_shared=SHARED_MEMORY[capability],
        compute_capabilities=(capability,),
    )


def linear_of_heads_kernel(
    num_rows: int, out_features: int, in_features: int, *, capability: int, dtype: str = "bf16"
) -> Kernel:
    """A product of heads as kernels/heads_linear.py launches it."""
    plan = plan_linear(
        num_rows,
        out_features,
        in_features,
        element_size=4 if dtype == "fp32" else 2,
        gated=False,
        of_experts=True,
        capacity=SHARED_MEMORY[capability],
    )
    return Kernel(
        module="kernels.heads_linear",
        name="linear_of_heads_kernel",
        signature=" ".join([*[f"*{dtype}:16"] * 3, "i32", *["i32:16"] * 7]),
        constants={
            "SPLITS": plan.splits,
            "EVEN_K": in_features % plan.block_k == 0,
            "TOKENS": plan.tokens,
            "FEATURES": plan.features,
            "BLOCK_K": plan.block_k,
        },
        options={"num_warps": plan.num_warps, "num_stages": stages_of_short_sums(plan)},
        max_shared=SHARED_MEMORY[capability],
        compute_capabilities=(capability,),
    )


# Llama-3-8B's attention in bfloat16.
HEADS = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128}
SEEN = {"WINDOW": 0, "IS_CAUSAL": 1, "VALUE_DIM": 128, "VALUE_BLOCK": 128}
ATTEND = HEADS | SEEN | {"GROUP": 4, "HEAD_BLOCK": 128, "BLOCK_SIZE": 16, "SOFTCAP": 0, "HAS_BRANCHES": 1}
ATTEND |= {"BLOCK_M": 64, "BLOCK_N": 64, "OWN_SPLITS": 2, "sinks_ptr": None}
ATTEND |= {"SHARES": 1, "VALUE_PARTS": 1, "TAIL_BLOCK": 0, "VALUES_IN_KEYS": 0}
LATENT = {"NUM_KV_HEADS": 1, "HEAD_DIM": 576, "VALUE_DIM": 512, "HEAD_BLOCK": 512, "VALUE_BLOCK": 512}
LATENT |= {"TAIL_BLOCK": 64, "VALUES_IN_KEYS": 1, "BLOCK_N": 32, "SPLIT_KEYS": 512}
# Gemma 4 E2B's attention to all of a text.
WIDE = {"NUM_KV_HEADS": 1, "GROUP": 8, "HEAD_DIM": 512, "VALUE_DIM": 512, "HEAD_BLOCK": 512}
WIDE |= {"VALUE_BLOCK": 256, "VALUE_PARTS": 2, "BLOCK_N": 16, "SPLIT_KEYS": 512}
WHOLE = {"SPLIT_KEYS": 0, "maxima_ptr": None, "totals_ptr": None}
NOTHING_SHARED = {"first_keys_ptr": None}
NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}
TRUNCATION = {"num_warps": 8, "enable_fp_fusion": False}

GREEDY_HAS_NO = ("seeds_ptr", "draft_steps_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr")

HEADS_OF_DELTA_NET = {"NUM_KEY_HEADS": 16, "NUM_VALUE_HEADS": 32, "VALUE_DIM": 128, "VALUE_BLOCK": 128, "ROW": 392}
HEADS_OF_DELTA_NET |= {"IS_STATE_SPACE": False, "bias_ptr": None, "skip_ptr": None}
HEADS_OF_STATE_SPACE = {"NUM_KEY_HEADS": 1, "NUM_VALUE_HEADS": 64, "VALUE_DIM": 64, "VALUE_BLOCK": 64, "ROW": 328}
HEADS_OF_STATE_SPACE |= {"IS_STATE_SPACE": True, "norm_ptr": None, "eps_ptr": None}
WHOLE_ROWS = dict.fromkeys(["scales_ptr", "bias_ptr"], None) | {"NUM_PARTS": 0}
TURNED_ROWS = WHOLE_ROWS | {"TURNS_FIRST": False}
# Of Llama-3-8B's rows that are whole and of those left in four partial sums: a row's bits are the same in both.
ADDING_NORMS = {
    f"{dtype}, {'whole' if not num_parts else 'in parts'}{', scaled' * is_scaled}": Kernel(
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature=f"*{'fp32' if num_parts else dtype}:16 *{dtype}:16 *{dtype}:16 *fp32:16 *{dtype}:16 *{dtype}:16"
        + " *fp32:16" * is_scaled
        + " i32:16" * 4,
        constants={"x_weight_ptr": None, "x_eps_ptr": None, "sum_scale_ptr": None, "bias_ptr": None}
        | {"HIDDEN": 4096, "BLOCK": 4096, "NUM_PARTS": num_parts}
        | ({} if is_scaled else {"scales_ptr": None}),
        options={"num_warps": 8, "maxnreg": 128},
        max_shared=1024,
        compute_capabilities=(90,),
    )
    for dtype in ("bf16", "fp32")
    for num_parts, is_scaled in ((0, False), (4, False), (4, True))
}
HEADS_OF_PARTS = {
    f"bf16, {'in parts' if num_parts else 'whole'}": Kernel(
        module="kernels.rope",
        name="rope_kernel",
        signature=f"*{'fp32' if num_parts else 'bf16'}:16 *bf16:16 *fp32:16 *i64 *i64"
        + " *bf16:16" * 3
        + " *fp32:16"
        + " i32:16" * 3,
        constants={**HEADS, **TURNED_ROWS, "NUM_HEADS": 32, "HALF_BLOCK": 64, "BLOCK_SIZE": 16, "HEADS": 16}
        | {"v_norm_ptr": None, "NUM_PARTS": num_parts},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
        compute_capabilities=(90,),
    )
    for num_parts in (0, 2)
}
# Gemma 4's, with keys and normed values, and of layers that read another's. Its large models have more heads, and
# programs the same number of them.
WIDE_HEADS_OF_PARTS = [
    {
        f"{dtype}, {'in parts' if num_parts else 'whole'}": Kernel(
            module="kernels.rope",
            name="rope_kernel",
            signature=f"*{'fp32' if num_parts else dtype}:16 *{dtype}:16 *fp32:16 *i64"
            + (f" *i64 *{dtype}:16" + " *fp32:16" * 2 if num_kv_heads else "")
            + " *fp32:16" * 2
            + " i32:16" * 3,
            constants={**TURNED_ROWS, "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim}
            | {"HALF_BLOCK": head_dim // 2, "HEADS": heads, "BLOCK_SIZE": 16 if num_kv_heads else 0}
            | ({} if num_kv_heads else dict.fromkeys(("slots_ptr", "kv_ptr", "k_norm_ptr", "v_norm_ptr")))
            | {"NUM_PARTS": num_parts},
            options={**NO_FUSION, "maxnreg": 128},
            max_shared=8192,
        )
        for dtype in ("bf16", "fp32")
        for num_parts in (0, 2)
    }
    for num_heads, num_kv_heads, head_dim, heads in (
        *((8, 1, 256, 16), (8, 0, 256, 16)),
        *((8, 1, 512, 4), (8, 0, 512, 4)),
    )
]

TABLE = [
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
        module="kernels.remember_candidates",
        name="remember_candidates_kernel",
        signature="*i64 *fp32 *i64 *i64 *fp32 i32 i32",
        constants={"CHUNK": 128, "WIDTH": 8},
        max_shared=1024,
    ),
    *(
        Kernel(
            module="kernels.sum_of_ranks",
            name="sum_of_ranks_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 i32",
            constants={"NUM_RANKS": num_ranks, "BLOCK": 1024, OVERLAPS: True},
        )
        for dtype, num_ranks in (("bf16", 2), ("fp16", 4), ("fp32", 8))
    ),
    # Gemma 4 E2B's drafter's.
    *(
        Kernel(
            module="kernels.cluster_logits",
            name="cluster_logits_kernel",
            signature=f"*{dtype} *{dtype}:16 *i64:16 *i64:16 *fp32:16 i32:16 i32:16",
            constants={"SIZE": 128, "HIDDEN": 256, "TOKENS": 32, "COLUMNS": 128},
            max_shared=1024,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ),
    # Qwen3.8-27B's DFlash 2 head: in steps of equal rows, as a launch in parts counts them, and behind partial sums.
    *(
        Kernel(
            module="kernels.block_conv",
            name="block_conv_kernel",
            signature=f"*{'fp32' if num_parts else dtype}:16 *{dtype}:16 *{dtype}:16{' *i64' * counted} *{dtype}:16 "
            f"i32:16 {'i64' if num_parts else 'i32'}:16 i32:16 i32 i32",
            constants={
                **dict.fromkeys(("scales_ptr", "bias_ptr", *(() if counted else ("first_rows_ptr",)))),
                "WIDTH": 5120,
                "GROUP": 16,
                "TAPS": 2,
                "BLOCK": 512,
                "SEGMENTS": 64,
                "NUM_PARTS": num_parts,
                OVERLAPS: True,
            },
            max_shared=1024,
        )
        for dtype, counted, num_parts in (
            ("bf16", False, 0),
            ("bf16", True, 4),
            ("fp16", True, 0),
            ("fp32", False, 2),
        )
    ),
    *(
        Kernel(
            module="kernels.candidate_logits",
            name="candidate_logits_kernel",
            signature=f"*fp32:16 *i64:16 *{dtype}:16 *{dtype}:16 *{dtype}:16 *i64:16 *fp32:16 i32:16 i32:16 i32:16 i32 "
            "i32 i32",
            constants={"NUM_CANDIDATES": 16, "RANK": 256, "CANDIDATES": 16, "COLUMNS": 128},
            max_shared=4096,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ),
    # Qwen3.5-9B and Granite 4 H: in steps of equal rows, and as a launch of prompts counts them.
    *(
        Kernel(
            module="kernels.gated_delta",
            name="gated_delta_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 *{dtype}:16{' *i64' * (5 if counted else 3)} "
            f"*fp32:16 *{dtype}:16 *i64:16 *{dtype}:16 *fp32:16 *fp32:16 "
            f"*{dtype if constants['IS_STATE_SPACE'] else 'fp32'}:16 *fp32:16 i32:16 i32:16 i32 i32 i32",
            constants={
                **dict.fromkeys(() if counted else ("first_rows_ptr", "counts_ptr")),
                **constants,
                "KEY_DIM": 128,
                "KEY_BLOCK": 128,
                "TAPS": 4,
                OVERLAPS: True,
            },
            options={"num_warps": constants["VALUE_DIM"] // 16},
            max_shared=16384,
        )
        for constants in (HEADS_OF_DELTA_NET, HEADS_OF_STATE_SPACE)
        for dtype in ("bf16", "fp16", "fp32")
        for counted in (False, True)
    ),
    # LFM2.5-1.2B: in steps of equal rows, and as a launch of prompts counts them.
    *(
        Kernel(
            module="kernels.short_conv",
            name="short_conv_kernel",
            signature=f"*{dtype}:16 *{dtype}:16{' *i64' * (4 if counted else 2)} *{dtype}:16 *{dtype}:16 "
            f"{f'*{dtype}:16 ' if has_bias else ''}i32:16 i32 i32 i32",
            constants={
                **dict.fromkeys(() if counted else ("first_rows_ptr", "counts_ptr")),
                **({} if has_bias else {"bias_ptr": None}),
                "WIDTH": 2048,
                "BLOCK": 64,
                "ROWS": 16,
                "TAPS": 3,
                OVERLAPS: True,
            },
            max_shared=1024,
        )
        for dtype, has_bias in (("bf16", False), ("fp16", True), ("fp32", True))
        for counted in (False, True)
    ),
    *(
        Kernel(
            module="kernels.gate",
            name="gate_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 *{dtype}:16 i32:16 i32{':16' if columns < width else ''}",
            constants={"WIDTH": width, "FUNCTION": function, "COLUMNS": columns, "BLOCK": 1024, OVERLAPS: True},
        )
        for dtype, width, function, columns in (
            ("bf16", 4096, "sigmoid", 1),
            ("bf16", 4096, "sigmoid", 4096),
            ("fp16", 4096, "sigmoid", 1),
            ("fp32", 4096, "sigmoid", 1),
            ("bf16", 256, "gelu_tanh", 1),
            ("bf16", 1856, "relu", 1),
            *((dtype, 64 * 128, "softplus", columns) for dtype in ("bf16", "fp16", "fp32") for columns in (1, 128)),
        )
    ),
    Kernel(
        module="kernels.chain_rows",
        name="chain_rows_kernel",
        signature="*i64 *i32 *i64 *i32 i32 i32 i32",
        constants={"NUM_ROWS": 17, "NUM_TILES": 2, "ROWS": 32, "ROWS_PER_TILE": 16, "BLOCK_SIZE": 16},
        options={"num_warps": 1},
    ),
    Kernel(
        module="kernels.tree_rows",
        name="tree_rows_kernel",
        signature="*i64 *i32 *i32 *i32 *i64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32",
        constants={"ROWS_PER_TILE": 16, "SPLIT_KEYS": 512, "ROWS": 32},
        options={"num_warps": 1},
    ),
    Kernel(
        module="kernels.likeliest_tree",
        name="add_level_kernel",
        signature="*i64 *fp64 *i64 *i64 *i64 *i64 *fp32 i32 i32 i32 i32 i32 i32 i32 i32",
        constants={"BLOCK": 64, "CHUNK": 32},
        max_shared=8192,
    ),
    Kernel(
        module="kernels.likeliest_tree",
        name="likeliest_tree_kernel",
        signature="*i64 *i64 *fp64 *i64 i32 i32",
        constants={"BLOCK": 64, "CHUNK": 32},
        max_shared=8192,
    ),
    Kernel(
        module="kernels.match_in_tree",
        name="match_in_tree_kernel",
        signature="*i64 *i64 *i64 *i64 i32 i32",
        constants={"NODES": 16},
        max_shared=1024,
    ),
    Kernel(
        module="kernels.walk_tree",
        name="walk_tree_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i64 *i64 *i64 *i64 i32 i32",
        constants={"NODES": 16},
        options={"num_warps": 1},
    ),
    Kernel(
        module="kernels.fit_drafts",
        name="fit_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i64 i32 i32",
        constants={"PLACES": 16},
        options={"num_warps": 1},
    ),
    Kernel(
        module="kernels.follow_verified",
        name="follow_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i64 i32 i32",
        constants={"said_ptr": None, "WIDTH": 32},
        options={"num_warps": 1},
    ),
    Kernel(
        module="kernels.follow_verified",
        name="follow_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i64 *i32 i32 i32",
        constants={"WIDTH": 32},
        options={"num_warps": 1},
    ),
    *(
        Kernel(
            module="kernels.mask_and_penalise",
            name="mask_and_penalise_kernel",
            signature=f"*fp32 *fp32 {tables} i32 i32 i32 i32 i32 i32",
            constants={"BLOCK": 1024, **dict.fromkeys(absent)},
            max_shared=8192,
        )
        for tables, absent in (
            ("*fp32 *i64 *i32 *i32 *fp32 *i64", ()),
            ("*i32 *fp32 *i64", ("bias_ptr", "forbidden_ptr", "bitmask_ptr")),
            ("*fp32", ("forbidden_ptr", "bitmask_ptr", "said_ptr", "penalties_ptr", "ancestors_ptr")),
        )
    ),
    # Llama-3-8B's down projection for every tile of tokens, adding up its parts or leaving them; gated ones; its head.
    *(
        linear_kernel(num_rows, 4096, 14336, gated=False, out="bf16", capability=90)
        for num_rows in (1, 32, 64, 128, 256, 1088)
    ),
    *(
        linear_kernel(num_rows, 4096, 14336, gated=False, out="bf16", capability=90, leaves=True)
        for num_rows in (1, 32, 64, 128, 256)
    ),
    *(linear_kernel(num_rows, 14336, 4096, gated=True, out="bf16", capability=90) for num_rows in (8, 256, 1088)),
    linear_kernel(256, 14336, 4096, gated=True, out="bf16", capability=80),
    linear_kernel(256, 4096, 14336, gated=False, out="bf16", capability=80),
    linear_kernel(8, 128256, 4096, gated=False, out="fp32", capability=90),
    # Gemma 2's: an activation and a cap of its own.
    *(
        kernel
        for capability in (80, 90)
        for kernel in (
            linear_kernel(8, 9216, 2304, gated=True, out="bf16", capability=capability, activation="gelu_tanh"),
            linear_kernel(8, 256000, 2304, gated=False, out="fp32", capability=capability, softcap=30.0),
        )
    ),
    linear_kernel(8, 4096, 14336, gated=False, out="bf16", capability=80),
    linear_kernel(1088, 14336, 4096, gated=True, out="bf16", capability=80),
    # The same with weights in 8 bits.
    *(
        linear_kernel(num_rows, *shape, gated=gated, out="bf16", capability=90, held=held, group_size=group_size)
        for num_rows, shape, gated in (
            (1, (4096, 14336), False),
            (64, (4096, 14336), False),
            (1088, (14336, 4096), True),
        )
        for held, group_size in (("fp8", None), ("fp8", 128), ("int8", None), ("int8", 32))
    ),
    *(  # and in 4 bits, with zero points as AWQ's and without
        linear_kernel(
            num_rows,
            *shape,
            gated=gated,
            out="bf16",
            capability=capability,
            held="int4",
            group_size=128,
            has_zeros=has_zeros,
        )
        for num_rows, shape, gated in ((1, (4096, 14336), False), (1088, (14336, 4096), True))
        for capability, has_zeros in ((80, True), (90, True), (90, False))
    ),
    linear_kernel(64, 4096, 14336, gated=False, out="bf16", capability=90, held="int4", group_size=128, leaves=True),
    *(  # with block scales
        linear_kernel(num_rows, *shape, gated=gated, out="bf16", capability=capability, held="fp4")
        for num_rows, shape, gated in ((1, (4096, 14336), False), (1088, (14336, 4096), True))
        for capability in (80, 89, 90)
    ),
    *(
        linear_kernel(
            1, 4096, 4096, gated=False, out="fp32", capability=90, held=held, group_size=group_size, rows="fp32"
        )
        for held, group_size in (("fp4", None), ("int4", 128))
    ),
    linear_kernel(8, 14336, 4096, gated=True, out="bf16", capability=80, held="fp8"),
    linear_kernel(8, 14336, 4096, gated=True, out="bf16", capability=80, held="int8", group_size=128),
    Kernel(
        module="kernels.linear",
        name="linear_kernel",
        signature="*fp32 *fp32 *fp32 *fp32 i32 i32 i32 i32 i32 i32 i32 i32 i32",
        constants=dict.fromkeys(["scales_ptr", "zeros_ptr", "block_scales_ptr", "partials_ptr", "arrivals_ptr"])
        | {"SPLITS": 1, "IS_SPREAD": False, "LEAVES": False, "GATED": False, "EVEN_K": False, "STEP_GROUPS": False}
        | {"TOKENS": 16, "FEATURES": 64, "BLOCK_K": 32, "READING": "dense"}
        | {"ACTIVATION": "silu", "SOFTCAP": 0.0},
        max_shared=96 * 1024,
        compute_capabilities=(90,),
    ),
    # Qwen3-30B-A3B's experts, for every tile of tokens; and its routing.
    *(
        linear_of_experts_kernel(num_places, *shape, gated=gated, capability=90)
        for num_places in (8, 4096, 8192, 16384, 131072)
        for shape, gated in (((768, 2048), True), ((2048, 768), False))
    ),
    # Mixtral's down projections, whose partial sums one program finds.
    *(
        linear_of_experts_kernel(
            256 * num_experts * times, 4096, 14336, gated=False, capability=90, num_experts=num_experts
        )
        for num_experts, times in ((8, 1), (8, 4))
    ),
    *(
        linear_of_experts_kernel(8, *shape, gated=gated, capability=capability, held=held, group_size=group_size)
        for capability in (80, 90)
        for shape, gated in (((768, 2048), True), ((2048, 768), False))
        for held, group_size in (("bf16", None), ("fp8", 128), ("int8", None))
        if (capability, held) != (90, "bf16")
    ),
    *(  # Qwen3-30B-A3B's in AWQ
        linear_of_experts_kernel(
            8, *shape, gated=gated, capability=capability, held="int4", group_size=128, has_zeros=True
        )
        for capability in (80, 90)
        for shape, gated in (((768, 2048), True), ((2048, 768), False))
    ),
    *(  # gpt-oss 20B's, in MXFP4 and dense
        linear_of_experts_kernel(
            num_places,
            2880,
            2880,
            gated=gated,
            capability=capability,
            held=held,
            num_experts=32,
            activation="clamped_swiglu",
            has_bias=True,
        )
        for num_places, capability in ((4, 80), (4, 90), (4096, 90))
        for gated in (False, True)
        for held in ("fp4", "bf16")
    ),
    *(  # Nemotron 3.5 Lightning's in NVFP4, which nothing gates
        linear_of_experts_kernel(6 * num_rows, *shape, gated=False, capability=90, held="fp4", of_rows=of_rows)
        for num_rows in (1, 4096)
        for shape, of_rows in (((1856, 2688), True), ((2688, 1856), False))
    ),
    # Gemma 4 26B-A4B's, whose gates are by gelu.
    *(
        linear_of_experts_kernel(8, 704, 2816, gated=True, capability=capability, activation="gelu_tanh")
        for capability in (80, 90)
    ),
    linear_of_experts_kernel(  # of four ranks, which halve its groups and cut spans: in 8 bits
        4, 2880, 720, gated=False, capability=90, held="int8", group_size=16, num_experts=32, has_bias=True
    ),
    # What turns queries into latents and latents into values, GLM-4.7-Flash's in every tile; and DeepSeek-V3's.
    *(linear_of_heads_kernel(num_rows, 512, 192, capability=90) for num_rows in (1, 17, 33, 65, 513)),
    *(linear_of_heads_kernel(num_rows, 256, 512, capability=90) for num_rows in (1, 513)),
    linear_of_heads_kernel(1, 512, 128, capability=90),
    *(linear_of_heads_kernel(num_rows, 512, 192, capability=80) for num_rows in (1, 513)),
    linear_of_heads_kernel(1, 512, 176, capability=90, dtype="fp32"),
    *(
        Kernel(
            module="kernels.experts",
            name="choose_kernel",
            signature="*fp32:16 *i32:16 *fp32:16 *fp32:16 fp32",
            constants={absent: None}
            | {"NUM_EXPERTS": num_experts, "EXPERTS": block, "NUM_CHOICES": choices, "CHOICES": 8}
            | {"IS_SOFTMAX": is_softmax, "IS_NORMALIZED": is_normalized}
            | {"NUM_GROUPS": num_groups, "GROUPS": num_groups, "KEPT_GROUPS": kept_groups},
            options={"num_warps": 1},
            max_shared=256,
        )
        for absent, num_experts, block, choices, is_softmax, is_normalized, num_groups, kept_groups in (
            ("factors_ptr", 128, 128, 8, False, True, 1, 1),
            ("factors_ptr", 60, 64, 6, True, False, 1, 1),
            ("factors_ptr", 256, 256, 8, False, True, 8, 4),  # DeepSeek-V3's, whose experts lie in groups
            ("corrections_ptr", 128, 128, 8, True, True, 1, 1),  # Gemma 4 26B-A4B's
        )
    ),
    Kernel(
        module="kernels.experts",
        name="place_kernel",
        signature="*i64:16 *i64:16 *i64:16 *i32:16 i32",
        constants={"NUM_CHOICES": 8, "CHUNK": 1024},
        max_shared=8192,
    ),
    *(
        Kernel(
            module="kernels.experts",
            name="sum_of_experts_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 *fp32:16 *i64:16 {f'*{dtype}:16 ' if has_shared else ''}i32:16",
            constants={"NUM_CHOICES": choices, "BLOCK": 1024} | ({} if has_shared else {"shared_ptr": None}),
            options=NO_FUSION,
        )
        for dtype, choices, has_shared in (("bf16", 8, True), ("fp16", 2, False), ("fp32", 1, False))
    ),
    Kernel(
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *bf16:16 i32:16 i32:16 i32:16 i32:16",
        constants={
            **WHOLE_ROWS,
            "residual_ptr": None,
            "x_weight_ptr": None,
            "x_eps_ptr": None,
            "sum_scale_ptr": None,
            "sum_ptr": None,
            "HIDDEN": 128,
            "BLOCK": 128,
        },
        options={"num_warps": 1, "maxnreg": 128},
    ),
    Kernel(  # with the residual added
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *bf16:16 *fp32:16 *bf16:16 *bf16:16 i32:16 i32:16 i32:16 i32:16",
        constants={
            **WHOLE_ROWS,
            "x_weight_ptr": None,
            "x_eps_ptr": None,
            "sum_scale_ptr": None,
            "HIDDEN": 14000,
            "BLOCK": 16384,
        },
        options={"num_warps": 16, "maxnreg": 128},
        max_shared=1024,
        compute_capabilities=(90,),
    ),
    Kernel(  # what is normed added to the residual, and no more (OLMo 2)
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *fp32:16 *bf16:16 i32:16 i32:16 i32:16 i32:16",
        constants={**WHOLE_ROWS, **dict.fromkeys(("weight_ptr", "normed_ptr", "x_eps_ptr", "sum_scale_ptr"))}
        | {"HIDDEN": 4096, "BLOCK": 4096},
        options={"num_warps": 8, "maxnreg": 128},
        max_shared=1024,
        compute_capabilities=(90,),
    ),
    Kernel(  # with a residual to which what is normed is added, and weights of float32 (Gemma)
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *fp32:16 *fp32:16 *bf16:16 *bf16:16 i32:16 i32:16 i32:16 i32:16",
        constants={**WHOLE_ROWS, "x_eps_ptr": None, "sum_scale_ptr": None, "HIDDEN": 5376, "BLOCK": 8192},
        options={"num_warps": 16, "maxnreg": 128},
        max_shared=1024,
    ),
    Kernel(  # likewise, and an eps for each of the norms (Muse Glimmer)
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *fp32:16 *fp32:16 *fp32:16 *bf16:16 *bf16:16" + " i32:16" * 4,
        constants={**WHOLE_ROWS, "sum_scale_ptr": None, "HIDDEN": 6656, "BLOCK": 8192},
        options={"num_warps": 16, "maxnreg": 128},
        max_shared=1024,
    ),
    Kernel(  # whose sum is scaled (Gemma 4)
        module="kernels.rms_norm",
        name="rms_norm_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *fp32:16 *fp32:16 *fp32:16 *bf16:16 *bf16:16" + " i32:16" * 4,
        constants={**WHOLE_ROWS, "x_eps_ptr": None, "HIDDEN": 2560, "BLOCK": 4096},
        options={"num_warps": 8, "maxnreg": 128},
        max_shared=1024,
        compute_capabilities=(90,),
    ),
    *ADDING_NORMS.values(),
    Kernel(
        module="kernels.partial_sums",
        name="add_up_kernel",
        signature="*fp32:16 *bf16:16 *bf16:16 *fp32:16 *bf16:16" + " i32:16" * 4,
        constants={"BLOCK": 1024, "NUM_PARTS": 4},
    ),
    Kernel(
        module="kernels.rms_norm",
        name="rms_norm_pair_kernel",
        signature="*bf16:16 *i64 *bf16:16 *bf16:16 *bf16:16 *fp32:16 *bf16:16 i32:16",
        constants={"STATE_HALF": 1, "HIDDEN": 4096, "BLOCK": 4096},
        options={"num_warps": 8, "maxnreg": 128},
        max_shared=1024,
    ),
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
            constants=ATTEND | constants,
            options={**NO_FUSION, "num_stages": 3},
            max_shared=113 * 1024,  # two programs on a multiprocessor of Hopper, one on sm_80's
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        )
        for pointers, tiles, constants in (
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32", {"SPLIT_KEYS": 512, **NOTHING_SHARED}),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32 *i32", {"SPLIT_KEYS": 512}),
            (
                "*bf16 *bf16 *bf16",
                "*i32 *i32 *i32 *i32",
                {**WHOLE, **NOTHING_SHARED},
            ),
        )
    ),
    *(
        Kernel(  # heads of 256; with half of the keys at a time where memory is short
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {' '.join(['*i32'] * 8)} fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
            constants=ATTEND
            | constants
            | {f"{name}_DIM": 256 for name in ("HEAD", "VALUE")}
            | {f"{name}_BLOCK": 256 for name in ("HEAD", "VALUE")}
            | NOTHING_SHARED,
            options={**NO_FUSION, "num_stages": 3},
            max_shared=130 * 1024,
            compute_capabilities=capabilities,
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16",
        )
        for pointers, constants, capabilities in (
            ("*bf16 *bf16 *fp32 *fp32 *fp32", {"SPLIT_KEYS": 512, "BLOCK_N": 32}, (80, 90)),
            ("*bf16 *bf16 *bf16", {**WHOLE, "BLOCK_N": 32}, (90,)),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", {"SPLIT_KEYS": 512, "BLOCK_N": 16}, (89,)),
        )
    ),
    # Heads of 512, whose values two programs share: over splits, without branches and of a tree's rows, and whole.
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
            constants=ATTEND | WIDE | constants,
            options={**NO_FUSION, "num_stages": 4 if capability != 89 else 2},
            max_shared=160 * 1024,
            compute_capabilities=(capability,),
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16",
        )
        for pointers, tiles, constants, capability in (
            (
                "*bf16 *bf16 *fp32 *fp32 *fp32",
                "*i32 *i32 *i32 *i32",
                {"HAS_BRANCHES": 0, **NOTHING_SHARED},
                90,
            ),
            (  # of a block, as the first
                "*bf16 *bf16 *fp32 *fp32 *fp32",
                "*i32 *i32 *i32 *i32",
                {"HAS_BRANCHES": 0, "IS_CAUSAL": 0, **NOTHING_SHARED},
                90,
            ),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32 *i32", {}, 90),
            ("*bf16 *bf16 *bf16", "*i32 *i32 *i32 *i32", {**WHOLE, **NOTHING_SHARED}, 90),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32", NOTHING_SHARED, 80),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32", NOTHING_SHARED, 89),
        )
    ),
    Kernel(  # the same in float32: nothing is under way, for the queries take most of the memory
        module="kernels.paged_attention",
        name="attend_kernel",
        signature=f"{' '.join(['*fp32'] * 5)} {' '.join(['*i32'] * 8)} fp32 i32 i32 i32 i32 i32 i32 i32",
        constants=ATTEND | WIDE | NOTHING_SHARED,
        options={**NO_FUSION, "num_warps": 16, "num_stages": 1},
        max_shared=160 * 1024,
        compute_capabilities=(80,),
    ),
    # Keys that hold their values: of GLM-4.7-Flash over splits, which a tree's rows share; of DeepSeek-V3, whose heads
    # two programs share; of Moonlight, whole.
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
            constants=ATTEND | LATENT | constants,
            options={"num_warps": 8, "num_stages": 3 if 90 in capabilities else 2, "enable_fp_fusion": False},
            max_shared=180 * 1024,
            compute_capabilities=capabilities,
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        )
        for pointers, tiles, constants, capabilities in (
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32", {"GROUP": 20, **NOTHING_SHARED}, (90,)),
            ("*bf16 *bf16 *fp32 *fp32 *fp32", "*i32 *i32 *i32 *i32 *i32", {"GROUP": 20}, (90,)),
            (
                "*bf16 *bf16 *fp32 *fp32 *fp32",
                "*i32 *i32 *i32 *i32",
                {"GROUP": 64, "SHARES": 2, **NOTHING_SHARED},
                (90,),
            ),
            (
                "*bf16 *bf16 *bf16",
                "*i32 *i32 *i32 *i32",
                {"GROUP": 16, **WHOLE, **NOTHING_SHARED},
                (80, 90),
            ),
            (
                "*bf16 *bf16 *fp32 *fp32 *fp32",
                "*i32 *i32 *i32 *i32",
                {"GROUP": 16, "BLOCK_N": 16, **NOTHING_SHARED},
                (89,),
            ),
        )
    ),
    *(
        Kernel(  # in float32, as the tiny family runs: what a thread cannot hold takes memory for all that there may be
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{' '.join(['*fp32'] * 5)} {' '.join(['*i32'] * 8)} fp32 i32 i32 i32 i32 i32 i32 i32",
            constants=ATTEND
            | {"SPLIT_KEYS": 512, "BLOCK_N": 16, "HEAD_DIM": dim, "VALUE_DIM": dim}
            | {"HEAD_BLOCK": dim, "VALUE_BLOCK": dim}
            | NOTHING_SHARED,
            options={**NO_FUSION, "num_warps": 16, "num_stages": 3},
            max_shared=113 * 1024,
        )
        for dim in (64, 128)
    ),
    Kernel(
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "SPLIT_KEYS": 512, "MERGED_SPLITS": 16, "sinks_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    Kernel(  # of latents, and of heads of 512
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "VALUE_DIM": 512, "VALUE_BLOCK": 512}
        | {"SPLIT_KEYS": 512, "MERGED_SPLITS": 16, "sinks_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=4096,
    ),
    *(
        Kernel(  # gpt-oss's attention, whose heads have sinks, over splits and whole
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {' '.join(['*i32'] * 8)} fp32 i32 i32 i32 i32 i32 i32 i32",
            constants={key: value for key, value in ATTEND.items() if key != "sinks_ptr"}
            | {"GROUP": 8, "HEAD_DIM": 64, "VALUE_DIM": 64, "HEAD_BLOCK": 64, "VALUE_BLOCK": 64, "WINDOW": 128}
            | {**constants, **NOTHING_SHARED},
            options={**NO_FUSION, "num_stages": 3},
            max_shared=70 * 1024,
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        )
        for pointers, constants in (
            ("*bf16 *bf16 *fp32 *fp32 *fp32", {"SPLIT_KEYS": 512, "sinks_ptr": None}),
            ("*bf16 *bf16 *bf16 *fp32", WHOLE),
        )
    ),
    Kernel(  # Llama 4's, of chunks
        module="kernels.paged_attention",
        name="attend_kernel",
        signature=f"*bf16 *bf16 *bf16 {' '.join(['*i32'] * 8)} fp32 i32 i32 i32 i32 i32 i32 i32",
        constants={**ATTEND, "GROUP": 5, "WINDOW": -8192, **WHOLE, **NOTHING_SHARED},
        options={**NO_FUSION, "num_stages": 3},
        max_shared=113 * 1024,
    ),
    Kernel(
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 *fp32 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "VALUE_DIM": 64, "VALUE_BLOCK": 64, "SPLIT_KEYS": 512, "MERGED_SPLITS": 16},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    Kernel(
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16 *bf16 *fp32 *i64 *i64 *bf16 *bf16 *bf16 *fp32 i32 i32 i32",
        constants={**HEADS, **TURNED_ROWS, "NUM_HEADS": 32, "HALF_BLOCK": 64, "BLOCK_SIZE": 16, "HEADS": 16}
        | {"v_norm_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    *HEADS_OF_PARTS.values(),
    replace(  # Hunyuan's, whose norms are of what is turned
        HEADS_OF_PARTS["bf16, in parts"], constants=HEADS_OF_PARTS["bf16, in parts"].constants | {"TURNS_FIRST": True}
    ),
    *(kernel for by_rows in WIDE_HEADS_OF_PARTS for kernel in by_rows.values()),
    *(  # GLM-4.7-Flash's, Moonlight's and, as the tiny family runs, in float32
        Kernel(
            module="kernels.latent_rows",
            name="latent_rows_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 *fp32:16 *i64 *i64 *{dtype}:16 *{dtype}:16 *{dtype}:16 *fp32:16"
            + " i32:16" * 5,
            constants={"NUM_HEADS": num_heads, "UNTURNED": unturned, "TURNED": 64, "HALF_BLOCK": 32}
            | {"RANK": 512, "RANK_BLOCK": 512, "BLOCK_SIZE": 16, "HEADS": 32},
            options={**NO_FUSION, "maxnreg": 128},
            max_shared=2048,
        )
        for dtype, num_heads, unturned in (("bf16", 20, 192), ("bf16", 16, 128), ("fp32", 16, 128))
    ),
    Kernel(  # of a context that goes into blocks of Gemma 4's layers
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *i64 *i64 *bf16:16 *fp32:16 *fp32:16 *fp32:16 i32:16 i32:16 i32:16",
        constants={**TURNED_ROWS, "NUM_HEADS": 0, "NUM_KV_HEADS": 1, "HEAD_DIM": 512, "HALF_BLOCK": 256}
        | {"BLOCK_SIZE": 16, "HEADS": 4, "q_norm_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=8192,
        compute_capabilities=(90,),
    ),
    Kernel(  # keys and values alone, normed
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16 *bf16 *fp32 *i64 *i64 *bf16 *bf16 *fp32 i32 i32 i32",
        constants={
            **HEADS,
            **TURNED_ROWS,
            "NUM_HEADS": 0,
            "HALF_BLOCK": 64,
            "BLOCK_SIZE": 16,
            "HEADS": 16,
            "q_norm_ptr": None,
            "v_norm_ptr": None,
        },
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    Kernel(
        module="kernels.truncation",
        name="best_kernel",
        signature="*i64 *fp32 *i64 i32 i32",
        constants={"BLOCK": 4096},
        options=TRUNCATION,
        max_shared=1024,
    ),
    Kernel(
        module="kernels.truncation",
        name="begin_kernel",
        signature="*i64 *fp32 *fp32 *i64 *i64 *i1 *fp32 *fp32 i32",
        constants={"SPLITS": 32},
        options={"num_warps": 1, "enable_fp_fusion": False},
    ),
    *(
        Kernel(
            module="kernels.cut_search",
            name=name,
            signature=signature,
            constants=constants,
            options=options,
            max_shared=8192,
        )
        for by_mass, wanted, absent in ((0, "*i64", {"totals_ptr": None}), (1, "*fp64 *i64", {}))
        for name, signature, constants, options in (
            (
                "measure_kernel",
                f"*i64 *i64 *fp32 *i64 *i1 *fp32 *fp32 *fp32 {wanted} i32 i32 i32",
                {"BY_MASS": by_mass, "BLOCK": 4096, **absent},
                TRUNCATION,
            ),
            (
                "settle_kernel",
                f"*i64 *i64 *i64 *i1 *fp32 *fp32 {wanted} i32 i32",
                {"BY_MASS": by_mass, **absent},
                {"num_warps": 1, "enable_fp_fusion": False},
            ),
        )
    ),
    Kernel(
        module="kernels.truncation",
        name="mass_kernel",
        signature="*i64 *fp32 *i64 *i1 *fp32 *fp32 *fp32 i32 i32",
        constants={"BLOCK": 4096},
        options=TRUNCATION,
        max_shared=1024,
    ),
    *(
        Kernel(
            module="kernels.sampling",
            name="draw_kernel",
            signature=f"*i64 *i64 *i32 {pointers} i32 i32 i32 i32",
            constants={"BLOCK": block, "SPLITS": 32 * 4096 // block, **dict.fromkeys(absent)},
            options={"num_warps": block // 512},
            max_shared=8192,
        )
        for pointers, block, absent in (
            ("*fp32 *i64 *i64 *i64 *i1 *fp32 *fp32", 4096, ("token_ids_ptr",)),
            ("*fp32 *i64 *i64 *i64 *i1 *fp32 *fp32 *i64", 1024, ()),
            ("*fp32 *i64", 4096, (*GREEDY_HAS_NO, "token_ids_ptr")),
            ("*fp32 *i64 *i64", 1024, GREEDY_HAS_NO),
        )
    ),
    Kernel(
        module="kernels.perturb",
        name="perturb_kernel",
        signature="*fp32 *fp32 *i64 *i64 *i64 i32 i32 i32",
        constants={"BLOCK": 1024},
        max_shared=8192,
    ),
    *(
        Kernel(
            module="kernels.uniforms",
            name="uniforms_kernel",
            signature=f"*fp64 *i64 *i64 {draft_steps} i32 i32",
            constants={"BLOCKS": 2, **dict.fromkeys(absent)},
            options={"num_warps": 1},
        )
        for draft_steps, absent in (("*i64", ()), ("", ("draft_steps_ptr",)))
    ),
    *(
        Kernel(
            module="kernels.top_candidates",
            name="top_candidates_kernel",
            signature=f"*i64 *fp32 *i64 *fp64 *i32 *i32 *fp32 {pointers} i32 i32 i32 i32 i32 i32 i32 i32",
            constants={"BLOCK": 1024, "SPLITS": 128, **dict.fromkeys(absent)},
            options=NO_FUSION,
            max_shared=8192,
        )
        for pointers, absent in (
            ("*i64 *i64 *i1 *fp32 *fp32 *i64", ()),
            ("", ("positions_ptr", "seeds_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr", "token_ids_ptr")),
        )
    ),
    Kernel(
        module="kernels.top_logprobs",
        name="top_logprobs_kernel",
        signature="*fp64 *i64 *i32 *fp64 *i32 *i32 *fp32 *i64 i32 i32 i32 i32 i32",
        constants={"BLOCK": 1024, "SPLITS": 128},
        options=NO_FUSION,
        max_shared=8192,
    ),
    Kernel(
        module="kernels.rejection",
        name="verify_sampled_kernel",
        signature="*i64 *i64 *i64 *i64 *i64 *i32 *i64 *i64 *fp64 i32",
        constants={"PLACES": 32},
        options={"num_warps": 1},
    ),
    *(
        Kernel(
            module="kernels.probabilistic_rejection",
            name="verify_probabilistic_kernel",
            signature=f"*i64 *i64 *i64 *i64 *i32 {pointers} *fp32 *fp32 *i64 i32 i32 i32 i32 i32",
            constants={"BLOCK": 4096, "PLACES": 32, "SPLITS": 32, **dict.fromkeys(absent)},
            options={"num_warps": 8, "enable_fp_fusion": False},
            max_shared=8192,
        )
        for pointers, absent in (
            ("*fp32 *fp32 *i64 *i32 *i64 *i64 *i1 *fp32 *i64", ()),
            ("*fp32 *i64 *i32 *i64 *i64 *fp32 *i64", ("draft_probs_ptr", "is_greedy_ptr")),
        )
    ),
]


def with_compute_capabilities(table: list[Kernel]) -> Iterator[Kernel]:
    seen = set[tuple[str, Any]]()
    for kernel in table:
        kind = (kernel.name, kernel.constants.get("HEAD_DIM"))
        yield replace(kernel, compute_capabilities=kernel.compute_capabilities or ((90,) if kind in seen else (80, 90)))
        seen.add(kind)


KERNELS = list(with_compute_capabilities(TABLE))


# Whose programs for equal rows and for counted ones compute one token after another, and must round alike.
RECURRENT = ("gated_delta_kernel", "short_conv_kernel")


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
    arithmetic: dict[str, int]  # of RECURRENT: how many float32 are added, multiplied, and both at once


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
        arithmetic=arithmetic(compiled.asm["cubin"]) if kernel.name in RECURRENT else {},
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
