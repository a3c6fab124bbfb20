"""How kernels/linear.py cuts a product into steps, partial sums, tiles and programs.

Up to 128 rows of a dense weight two programs share an SM and wait for memory; of more rows arithmetic takes the time,
and a program owns more. These numbers were compared with others on an H200 at an 8B model's shapes, those of quantized
weights and experts were not (kernels/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kernels.shared_memory import HOPPERS

LINE = 128  # bytes of a row of tokens that a step reads, a cache line
LONG = 128  # columns of a step of quantized weights, for 16 bits and Hopper's registers: at most a line of a weight row
FEATURES = 64  # weight rows of a tile: the M of wgmma
PROGRAMS = 192  # a weight with fewer tiles is cut along in_features, until it has as many programs
MIN_STEPS = 8  # steps of a partial sum, at least

# Of more rows a program has an SM to itself, and owns more of the product: first of a dense weight, second of a
# quantized one and of experts, whose partial sums have no programs of their own and would not fit beside MOST_TOKENS.
WIDE_ROWS, LATE_WIDE_ROWS = 128, 512
MOST_TOKENS = 256  # of a tile: up to as many rows read one dense weight once
WIDE_PROGRAMS = 128  # tiles of that kind that are programs enough

# Bytes of shared memory of a program, so far as the GPU has them: two to an SM, one, and one with the largest steps.
SHARED, WIDE_SHARED, WIDEST_SHARED = 96 * 1024, 160 * 1024, 200 * 1024
MAX_STAGES = 8
MOST_ROWS = 8192  # of a launch, so far as rows_of_each_kind looks


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """The first four decide the bits of a product; the others only who computes what."""

    block_k: int  # columns of a step
    step_groups: bool  # its sums take a group's scales; else all columns share one
    splits: int  # partial sums
    split_width: int  # columns of a partial sum
    is_spread: bool  # each partial sum of a tile has a program
    tokens: int  # of a tile
    features: int
    num_tiles: int
    num_warps: int
    num_stages: int  # steps whose loads are in flight


def plan_linear(
    num_rows: int,
    out_features: int,
    in_features: int,
    *,
    element_size: int,  # of a row's numbers
    gated: bool,
    number_bits: int | None = None,  # of the weight; None: as a row's
    group_size: int | None = None,  # columns that share a scale; None: all do
    of_experts: bool = False,  # kernels/experts_linear.py; rows are those of an expert
    capacity: int = HOPPERS,  # bytes of shared memory that a program may have
) -> LinearPlan:
    """For [num_rows, in_features] by [out_features, in_features], or twice as many weight rows if gated."""
    has_tensor_cores = element_size == 2  # float32 sums by plain multiply-adds, and would run out of registers
    is_quantized = number_bits is not None and number_bits <= 8
    is_long = is_quantized and has_tensor_cores and capacity >= HOPPERS
    block_k = LONG if is_long else LINE // element_size
    block_k = gcd(block_k, group_size or block_k)
    steps, splits = -(-in_features // block_k), 1
    while not gated and -(-out_features // FEATURES) * splits < PROGRAMS and steps >= 2 * splits * MIN_STEPS:
        splits *= 2
    # Of two weights with scales along the sum a large tile's sums, and those of a step, do not fit registers; nor do
    # the factors of two quantized weights, which older GPUs' instructions hold there all at once.
    is_crowded = gated and (group_size is not None or (is_quantized and not is_long))
    row_bits = 8 * element_size
    grows_late = of_experts or (number_bits or row_bits) < row_bits
    is_wide = has_tensor_cores and not is_crowded and num_rows > (LATE_WIDE_ROWS if grows_late else WIDE_ROWS)
    features = FEATURES * (1 + is_wide)
    most_tokens = 128 if has_tensor_cores and not is_crowded and (is_wide or not is_long) else 64
    if gated and is_quantized and not has_tensor_cores:  # factors in float32, of two weights
        most_tokens = 32 if group_size is None else 16
    tokens = min(max(1 << (num_rows - 1).bit_length(), 16), most_tokens)
    is_widest = is_wide and not grows_late and num_rows <= MOST_TOKENS
    if is_widest:
        tokens, features = MOST_TOKENS, FEATURES if gated else features
    shared = WIDEST_SHARED if is_widest or (is_wide and gated and is_long) else WIDE_SHARED if is_wide else SHARED
    num_tiles = -(-out_features // features) * -(-num_rows // tokens)
    weight_bits = 4.5 if number_bits == 4 else number_bits or row_bits  # with an fp4's block scales
    step_bytes = int(block_k * (features * (1 + gated) * weight_bits + tokens * row_bits)) // 8
    return LinearPlan(
        block_k=block_k,
        step_groups=group_size is not None,
        splits=splits,
        split_width=-(-steps // splits) * block_k,
        is_spread=splits > 1 and num_tiles < (WIDE_PROGRAMS if is_wide else PROGRAMS),
        tokens=tokens,
        features=features,
        num_tiles=num_tiles,
        num_warps=4 * (1 + is_wide),
        num_stages=min(min(shared, capacity) // step_bytes, MAX_STAGES),
    )


def stages_of_short_sums(plan: LinearPlan) -> int:
    """As planned, or as many as so few steps need: then more programs share a multiprocessor."""
    return min(plan.num_stages, max(plan.split_width // plan.block_k, 2) + 1)


def rows_of_each_kind(
    out_features: int,
    in_features: int,
    *,
    element_size: int,
    gated: bool,
    number_bits: int | None = None,
    group_size: int | None = None,
    of_experts: bool = False,
    capacity: int = HOPPERS,
) -> set[int]:
    """Numbers of rows that have such a product computed by every kind of program there is for it.

    With every number of tokens in a tile, with one or two feature tiles, with partial sums that have programs of their
    own or not: bits must be the same in all of them, which only the machine can tell.
    """
    kinds: dict[tuple[int, bool, int], int] = {}
    for num_rows in (2, 17, 33, *range(65, MOST_ROWS, 64)):  # one token more than fits a tile, or the tiles before
        plan = plan_linear(
            num_rows,
            out_features,
            in_features,
            element_size=element_size,
            gated=gated,
            number_bits=number_bits,
            group_size=group_size,
            of_experts=of_experts,
            capacity=capacity,
        )
        kinds.setdefault((plan.tokens, plan.is_spread, plan.features), num_rows)
    return set(kinds.values())
