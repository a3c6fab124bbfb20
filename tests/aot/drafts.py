"""What finds drafts, lays out their rows, and follows those that were verified."""

from __future__ import annotations

from tests.aot.kernel import Kernel

DRAFTS = [
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
        for dtype in ("i16", "u8")
    ),
    Kernel(
        module="kernels.remember_candidates",
        name="remember_candidates_kernel",
        signature="*i64 *fp32 *i64 *i64 *fp32 i32 i32",
        constants={"CHUNK": 128, "WIDTH": 8},
        max_shared=1024,
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
    *(
        Kernel(
            module="kernels.candidate_logits",
            name="candidate_logits_kernel",
            signature=f"*fp32:16 *i64:16 *{dtype}:16 *{dtype}:16 *{dtype}:16 *i64:16 *fp32:16 i32:16 i32:16 i32:16 i32 "
            "i32 i32",
            constants={"NUM_CANDIDATES": 16, "RANK": 256, "CANDIDATES": 16, "COLUMNS": 128},
            max_shared=4096,
        )
        for dtype in ("i16", "u8")
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
]
