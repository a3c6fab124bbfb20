"""From logits to tokens: penalties, cuts, noise, and the rules of verification."""

from __future__ import annotations

from tests.aot.kernel import NO_FUSION, Kernel

TRUNCATION = {"num_warps": 8, "enable_fp_fusion": False}
GREEDY_HAS_NO = ("seeds_ptr", "draft_steps_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr")

SAMPLING = [
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
