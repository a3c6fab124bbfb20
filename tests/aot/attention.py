"""Attention over pages and the merging of its splits, of models whose heads differ in kind."""

from __future__ import annotations

from tests.aot.kernel import NO_FUSION, Kernel

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

ATTENTION = [
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
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
            signature=f"{pointers} {' '.join(['*i32'] * 8)} fp32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
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
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
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
        signature=f"{' '.join(['*fp32'] * 5)} {' '.join(['*i32'] * 8)} fp32 fp32 i32 i32 i32 i32 i32 i32 i32",
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
            signature=f"{pointers} {tiles} *i32 *i32 *i32 *i32 fp32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
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
    # Over keys and values in 8 bits: of Llama-3-8B, over splits and whole; of heads of 256 and 512; of latents, whose
    # addresses of queries for one matrix instruction after another have no registers.
    *(
        Kernel(
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"*bf16 *i16 {pointers} {' '.join(['*i32'] * 8)} fp32 fp32 i32:16 i32:16 i32 i32 i32 i32 i32",
            constants={**ATTEND, **constants, **NOTHING_SHARED},
            options={"num_warps": num_warps, "num_stages": 4, "enable_fp_fusion": False},
            max_shared=max_kilobytes * 1024,
            spilled=spilled,
            compute_capabilities=capabilities,
            sm_90_instruction="wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"
            if "HEAD_DIM" in constants
            else "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        )
        for pointers, constants, num_warps, max_kilobytes, spilled, capabilities in (
            ("*fp32 *fp32 *fp32", {"SPLIT_KEYS": 512}, 4, 88, 0, (80, 90)),
            ("*bf16", WHOLE, 4, 88, 0, (90,)),
            (
                "*fp32 *fp32 *fp32",
                {"SPLIT_KEYS": 512, "BLOCK_N": 32}
                | {f"{of}_{what}": 256 for of in ("HEAD", "VALUE") for what in ("DIM", "BLOCK")},
                *(4, 100, 0, (90,)),
            ),
            ("*fp32 *fp32 *fp32", WIDE, 4, 116, 0, (90,)),
            ("*fp32 *fp32 *fp32", {**LATENT, "GROUP": 64, "SHARES": 2}, 8, 162, 360, (80, 90)),
        )
    ),
    *(
        Kernel(  # in float32, as the tiny family runs: what a thread cannot hold takes memory for all that there may be
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{' '.join(['*fp32'] * 5)} {' '.join(['*i32'] * 8)} fp32 fp32 i32 i32 i32 i32 i32 i32 i32",
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
        signature="*fp32 *fp32 *fp32 *bf16 fp32 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "SPLIT_KEYS": 512, "MERGED_SPLITS": 16, "sinks_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
    Kernel(  # of latents, and of heads of 512
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 fp32 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "VALUE_DIM": 512, "VALUE_BLOCK": 512}
        | {"SPLIT_KEYS": 512, "MERGED_SPLITS": 16, "sinks_ptr": None},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=4096,
    ),
    *(
        Kernel(  # gpt-oss's attention, whose heads have sinks, over splits and whole
            module="kernels.paged_attention",
            name="attend_kernel",
            signature=f"{pointers} {' '.join(['*i32'] * 8)} fp32 fp32 i32 i32 i32 i32 i32 i32 i32",
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
        signature=f"*bf16 *bf16 *bf16 {' '.join(['*i32'] * 8)} fp32 fp32 i32 i32 i32 i32 i32 i32 i32",
        constants={**ATTEND, "GROUP": 5, "WINDOW": -8192, **WHOLE, **NOTHING_SHARED},
        options={**NO_FUSION, "num_stages": 3},
        max_shared=113 * 1024,
    ),
    Kernel(
        module="kernels.merge_splits",
        name="merge_kernel",
        signature="*fp32 *fp32 *fp32 *bf16 *fp32 fp32 *i32 *i32 *i32 *i32 i32",
        constants={**SEEN, "VALUE_DIM": 64, "VALUE_BLOCK": 64, "SPLIT_KEYS": 512, "MERGED_SPLITS": 16},
        options={**NO_FUSION, "maxnreg": 128},
        max_shared=2048,
    ),
]
