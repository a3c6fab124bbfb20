"""Layers with states, and convolutions of drafts."""

from __future__ import annotations

from tests.aot.kernel import OVERLAPS, Kernel

HEADS_OF_DELTA_NET = {"NUM_KEY_HEADS": 16, "NUM_VALUE_HEADS": 32, "VALUE_DIM": 128, "VALUE_BLOCK": 128, "ROW": 392}
HEADS_OF_DELTA_NET |= {"IS_STATE_SPACE": False, "BY_CHANNEL": False, "bias_ptr": None, "skip_ptr": None}
HEADS_OF_DELTA_NET |= {"KEY_DIM": 128, "KEY_BLOCK": 128, "MOST_FORGOTTEN": None, "WRITES_TWICE": False}
HEADS_OF_KIMI = {**HEADS_OF_DELTA_NET, "NUM_KEY_HEADS": 32, "BY_CHANNEL": True, "ROW": 520}
HEADS_OF_LING = {**HEADS_OF_KIMI, "MOST_FORGOTTEN": 5.0}
HEADS_OF_OLMO = {**HEADS_OF_DELTA_NET, "NUM_KEY_HEADS": 30, "NUM_VALUE_HEADS": 30, "KEY_DIM": 96, "ROW": 392}
HEADS_OF_OLMO |= {"VALUE_DIM": 192, "VALUE_BLOCK": 256, "WRITES_TWICE": True}
HEADS_OF_STATE_SPACE = {"NUM_KEY_HEADS": 1, "NUM_VALUE_HEADS": 64, "VALUE_DIM": 64, "VALUE_BLOCK": 64, "ROW": 328}
HEADS_OF_STATE_SPACE |= {"IS_STATE_SPACE": True, "BY_CHANNEL": False, "KEY_DIM": 128, "KEY_BLOCK": 128}
HEADS_OF_STATE_SPACE |= {"MOST_FORGOTTEN": None, "WRITES_TWICE": False}
HEADS_OF_STATE_SPACE |= dict.fromkeys(("written_ptr", "norm_ptr", "eps_ptr"))

STATES = [
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
    # Of Qwen3.5-9B, Granite 4 H, Kimi Linear, Ling 3, OLMo Hybrid: in steps of equal rows, and as prompts are counted.
    *(
        Kernel(
            module="kernels.gated_delta",
            name="gated_delta_kernel",
            signature=f"{f'*{dtype}:16 ' * (4 if constants['IS_STATE_SPACE'] else 5)}"
            f"{'*i64 ' * (5 if counted else 3)}*fp32:16 *{dtype}:16 *i64:16 *{dtype}:16 *fp32:16 *fp32:16 "
            f"*{dtype if constants['IS_STATE_SPACE'] else 'fp32'}:16 *fp32:16 {'i32:16 ' * 4}i32 i32 i32 i32",
            constants={
                **dict.fromkeys(() if counted else ("first_rows_ptr", "counts_ptr")),
                **constants,
                "TAPS": 4,
                OVERLAPS: True,
            },
            options={"num_warps": min(8, constants["VALUE_BLOCK"] // 16)},
            max_shared=16384,
        )
        for constants, dtypes in (
            (HEADS_OF_DELTA_NET, ("bf16", "fp16", "fp32")),
            (HEADS_OF_STATE_SPACE, ("bf16", "fp16", "fp32")),
            (HEADS_OF_KIMI, ("bf16", "fp32")),
            (HEADS_OF_LING, ("bf16",)),
            (HEADS_OF_OLMO, ("bf16",)),
        )
        for dtype in dtypes
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
]
