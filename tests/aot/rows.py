"""What happens to rows between products: norms, rotations, gates, and sums of parts and ranks."""

from __future__ import annotations

from dataclasses import replace

from tests.aot.attention import HEADS
from tests.aot.kernel import NO_FUSION, OVERLAPS, Kernel

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
        + " *bf16:16 fp32 fp32 *bf16:16 *bf16:16"
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
            + (f" *i64 *{dtype}:16 fp32 fp32" + " *fp32:16" * 2 if num_kv_heads else " fp32 fp32")
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

ROWS = [
    *(
        Kernel(
            module="kernels.sum_of_ranks",
            name="sum_of_ranks_kernel",
            signature=f"*{dtype}:16 *{dtype}:16 i32",
            constants={"NUM_RANKS": num_ranks, "BLOCK": 1024, OVERLAPS: True},
        )
        for dtype, num_ranks in (("bf16", 2), ("fp16", 4), ("fp32", 8))
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
    Kernel(
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16 *bf16 *fp32 *i64 *i64 *bf16 fp32 fp32 *bf16 *bf16 *fp32 i32 i32 i32",
        constants={**HEADS, **TURNED_ROWS, "NUM_HEADS": 32, "HALF_BLOCK": 64, "BLOCK_SIZE": 16, "HEADS": 16}
        | {"v_norm_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    Kernel(  # into a cache of 8 bits
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *i64 *i64 *u8:16 fp32 fp32 i32:16 i32:16 i32:16",
        constants={**HEADS, **TURNED_ROWS, "NUM_HEADS": 32, "HALF_BLOCK": 64, "BLOCK_SIZE": 16, "HEADS": 16}
        | dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "v_norm_ptr", "eps_ptr")),
        options={**NO_FUSION, "maxnreg": 128},
        compute_capabilities=(80, 90),
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
            signature=f"*{dtype}:16 *{dtype}:16 *fp32:16 *i64 *i64 *{kept}:16 *{dtype}:16 *{dtype}:16 *fp32:16 fp32"
            + " i32:16" * 5,
            constants={"NUM_HEADS": num_heads, "UNTURNED": unturned, "TURNED": 64, "HALF_BLOCK": 32}
            | {"RANK": 512, "RANK_BLOCK": 512, "BLOCK_SIZE": 16, "HEADS": 32},
            options={**NO_FUSION, "maxnreg": 128},
            max_shared=2048,
        )
        for dtype, kept, num_heads, unturned in (
            *(("bf16", "bf16", 20, 192), ("bf16", "bf16", 16, 128), ("fp32", "fp32", 16, 128)),
            ("bf16", "u8", 16, 128),
        )
    ),
    Kernel(  # of a context that goes into blocks of Gemma 4's layers
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16:16 *bf16:16 *fp32:16 *i64 *i64 *bf16:16 fp32 fp32 *fp32:16 *fp32:16 *fp32:16" + " i32:16" * 3,
        constants={**TURNED_ROWS, "NUM_HEADS": 0, "NUM_KV_HEADS": 1, "HEAD_DIM": 512, "HALF_BLOCK": 256}
        | {"BLOCK_SIZE": 16, "HEADS": 4, "q_norm_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=8192,
        compute_capabilities=(90,),
    ),
    Kernel(  # keys and values alone, normed
        module="kernels.rope",
        name="rope_kernel",
        signature="*bf16 *bf16 *fp32 *i64 *i64 *bf16 fp32 fp32 *bf16 *fp32 i32 i32 i32",
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
]
