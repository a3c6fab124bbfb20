"""Products: dense and quantized, of experts and of heads, and the routing to experts."""

from __future__ import annotations

from kernels.linear_plan import LinearPlan, plan_linear, stages_of_short_sums
from tests.aot.kernel import NO_FUSION, SHARED_MEMORY, Kernel

BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}  # of a weight's numbers


def weight_pointers(held: str, *, has_zeros: bool) -> list[str]:
    """Of a weight, and of its scales, zero points and block scales, so far as it has them."""
    if held == "bf16":
        return ["*bf16:16"]
    return ["*i32:16", "*fp32:16", *["*i8:16"] * has_zeros, *["*u8:16"] * (held == "fp4")]


def absent_parts(held: str, *, has_zeros: bool) -> list[str]:
    """The others of them."""
    has = {"scales_ptr": held != "bf16", "zeros_ptr": has_zeros, "block_scales_ptr": held == "fp4"}
    return [name for name, is_there in has.items() if not is_there]


def tiles_of(plan: LinearPlan, in_features: int) -> dict[str, int]:
    return {
        "SPLITS": plan.splits,
        "EVEN_K": in_features % plan.block_k == 0,
        "TOKENS": plan.tokens,
        "FEATURES": plan.features,
        "BLOCK_K": plan.block_k,
    }


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
    adds_up = plan.is_spread and not leaves
    pointers = [f"*{rows}:16", *weight_pointers(held, has_zeros=has_zeros), f"*{'fp32' if leaves else out}:16"]
    pointers += ["*fp32:16", "*i32:16"] * adds_up
    absent = ["bias_ptr", *absent_parts(held, has_zeros=has_zeros), *["partials_ptr", "arrivals_ptr"] * (not adds_up)]
    return Kernel(
        module="kernels.linear",
        name="linear_kernel",
        signature=" ".join([*pointers, "i32", *["i32:16"] * 7, "i32"]),
        constants={
            **dict.fromkeys(absent),
            **tiles_of(plan, in_features),
            "IS_SPREAD": plan.is_spread,
            "LEAVES": leaves,
            "GATED": gated,
            "ACTIVATION": activation,
            "MOST": None,
            "SOFTCAP": softcap,
            "STEP_GROUPS": plan.step_groups,
            "READING": "dense" if held == "bf16" else held,
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
    most: float | None = None,  # of what is gated
    has_bias: bool = False,
    of_rows: bool = False,  # what gated ones are of anyway
) -> Kernel:
    """A bfloat16 product of experts as kernels/experts_linear.py launches it."""
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
    of_rows = of_rows or gated
    pointers = ["*bf16:16", *["*i64:16"] * of_rows, "*i64:16", *weight_pointers(held, has_zeros=has_zeros)]
    pointers += [*["*bf16:16"] * has_bias, "*bf16:16"]
    absent = [*["rows_ptr"] * (not of_rows), *absent_parts(held, has_zeros=has_zeros), *["bias_ptr"] * (not has_bias)]
    return Kernel(
        module="kernels.experts_linear",
        name="linear_of_experts_kernel",
        signature=" ".join([*pointers, "i32", *["i32:16"] * 10, "i32"]),
        constants={
            **dict.fromkeys(absent),
            **tiles_of(plan, in_features),
            "NUM_EXPERTS": num_experts,
            "EXPERTS": num_experts,
            "GATED": gated,
            "ACTIVATION": activation,
            "MOST": most,
            "STEP_GROUPS": plan.step_groups,
            "READING": "dense" if held == "bf16" else held,
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
        constants=tiles_of(plan, in_features),
        options={"num_warps": plan.num_warps, "num_stages": stages_of_short_sums(plan)},
        max_shared=SHARED_MEMORY[capability],
        compute_capabilities=(capability,),
    )


PRODUCTS = [
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
            num_rows, 4096, 4096, gated=gated, out="fp32", capability=90, held=held, group_size=group_size, rows="fp32"
        )
        for held, group_size in (("fp4", None), ("int4", 128), ("fp8", None))
        for num_rows, gated in ((1, False), (64, True))
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
        | {"ACTIVATION": "silu", "MOST": None, "SOFTCAP": 0.0},
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
    linear_of_experts_kernel(8, 768, 2560, gated=True, capability=90, num_experts=512, most=4.0),  # Ling 3 Flash's last
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
]
