"""Gated delta nets at Qwen3.5-9B's heads: plain steps, verification behind accepted drafts, and a prompt.

And the state spaces of Granite 4's hybrids, at the heads of its small one, and Kimi Linear's delta attention.

What a call must move are the memories, read and written once. A call begins by setting the states back to where they
were, so that all do the same; of a prompt's rows all are certain, of a verification's the first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import gated_delta as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference import gated_delta as reference
from kernels.reference.gated_delta import DeltaHeads, DeltaRows, DeltaStates, DeltaWeights

HEADS = DeltaHeads(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, taps=4)
SMALL_HEADS = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=8, taps=4)
STATE_SPACE = DeltaHeads(num_key_heads=1, num_value_heads=128, key_dim=128, value_dim=64, taps=4, is_state_space=True)
SMALL_STATE_SPACE = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=8, taps=4, is_state_space=True)
KIMI = DeltaHeads(num_key_heads=32, num_value_heads=32, key_dim=128, value_dim=128, taps=4, forgets_by_channel=True)
SMALL_KIMI = DeltaHeads(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=8, taps=4, forgets_by_channel=True)
CONTEXT = 12  # tokens that the states hold, accepted drafts aside
# what -> requests, rows of each, drafts that the step before had accepted, and whether all rows are certain
SHAPES = {
    "1 request, 1 row": (1, 1, 0, False),
    "1 request, 8 rows behind 3 drafts": (1, 8, 3, False),
    "64 requests, 1 row": (64, 1, 0, False),
    "64 requests, 4 rows behind 2 drafts": (64, 4, 2, False),
    "1 request, a prompt of 512": (1, 512, 0, True),
}
SMALL_SHAPES = {"2 requests, 3 rows behind 2 drafts": (2, 3, 2, False)}


def cases(setting: Setting) -> list[Case]:
    shapes = SMALL_SHAPES if setting.is_small else SHAPES
    heads = (SMALL_HEADS, SMALL_STATE_SPACE, SMALL_KIMI) if setting.is_small else (HEADS, STATE_SPACE, KIMI)
    return [
        Case(
            op="gated_delta",
            label=f"{what}{label}",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, own, *shape),
        )
        for what, own in zip(("", "a state space, ", "by channel, "), heads, strict=True)
        for label, shape in shapes.items()
    ]


def _weights(setting: Setting, heads: DeltaHeads) -> DeltaWeights:
    normal = partial(setting.normal, dtype=torch.float32)
    return DeltaWeights(
        convolution=setting.normal(heads.taps, heads.convolved, seed=10),
        a_log=normal(heads.num_value_heads, seed=11),
        dt_bias=normal(heads.num_value_heads * heads.forgotten, seed=12),
        **_of_state_space(setting, heads) if heads.is_state_space else _of_results(setting, heads),
    )


def _of_results(setting: Setting, heads: DeltaHeads) -> dict[str, Tensor]:
    norm = 1 + 0.1 * setting.normal(heads.value_dim, seed=13, dtype=torch.float32)
    return {"norm": norm, "eps": torch.tensor(1e-6, device=setting.device)}


def _of_state_space(setting: Setting, heads: DeltaHeads) -> dict[str, Tensor]:
    skip = setting.normal(heads.num_value_heads, seed=13, dtype=torch.float32)
    return {"bias": setting.normal(heads.convolved, seed=14), "skip": skip}


def _rows(setting: Setting, heads: DeltaHeads, count: int, seed: int) -> DeltaRows:
    return DeltaRows(
        mixed=setting.normal(count, heads.convolved, seed=seed),
        gate=setting.normal(count, heads.values, seed=seed + 1),
        forgotten=setting.normal(count, heads.num_value_heads * heads.forgotten, seed=seed + 2),
        written=None if heads.is_state_space else setting.normal(count, heads.num_value_heads, seed=seed + 3),
    )


def _changed(rows: DeltaRows, change: Callable[[Tensor], Tensor]) -> DeltaRows:
    """What the change makes of each kind of numbers."""
    return DeltaRows(**{name: change(own) for name, own in vars(rows).items() if own is not None})


def _prepare(
    setting: Setting, heads: DeltaHeads, num_requests: int, num_rows: int, num_accepted: int, all_certain: bool
) -> Work:
    weights, start = _weights(setting, heads), CONTEXT + num_accepted
    rows = _rows(setting, heads, num_requests * num_rows, seed=0)
    context = _rows(setting, heads, num_requests * start, seed=4)
    num_uncertain = max(num_accepted, 0 if all_certain else num_rows - 1)

    def numbers(value: int) -> Tensor:
        return torch.full((num_requests,), value, dtype=torch.int64, device=setting.device)

    def segments(first: int, count: int, end: int) -> RecurrentSegments:
        slots = torch.arange(1, num_requests + 1, device=setting.device)
        return RecurrentSegments(starts=numbers(first), ends=numbers(end), slots=slots, num_rows=count)

    def begun(op: Callable[..., Tensor], dtype: torch.dtype) -> DeltaStates:
        """The context is in the states, its last tokens as drafts that were accepted since."""
        states = DeltaStates.empty(heads, num_requests + 1, num_uncertain, dtype, setting.device)
        op(_changed(context, as_type(dtype)), segments(0, start, CONTEXT), states, own(dtype), heads)
        return states

    def own(dtype: torch.dtype) -> DeltaWeights:
        wide = torch.promote_types(dtype, torch.float32)
        present = {name: tensor for name, tensor in vars(weights).items() if tensor is not None}
        of_rows = ("convolution", "bias")
        return DeltaWeights(**{name: own.to(dtype if name in of_rows else wide) for name, own in present.items()})

    def as_type(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda numbers: numbers.to(dtype)

    launched = segments(start, num_rows, start + (num_rows if all_certain else 1))

    def computed(op: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        states = begun(op, dtype)
        return op(_changed(rows, as_type(dtype)), launched, states, own(dtype), heads)

    def check() -> list[str]:
        found = computed(kernel.gated_delta, setting.dtype)
        by_torch, exact = (computed(reference.gated_delta, dtype) for dtype in (setting.dtype, torch.float64))
        passed = [check_error(found, by_torch, exact)]
        states = begun(kernel.gated_delta, setting.dtype)
        for row in range(min(num_rows, 8)):
            one = _changed(rows, operator.itemgetter(slice(row, None, num_rows)))
            alone = kernel.gated_delta(one, segments(start + row, 1, start + row + 1), states, weights, heads)
            check_equal(f"row {row} alone", alone, found[row::num_rows])
        return [*passed, "row bits"]

    before = begun(kernel.gated_delta, setting.dtype)
    memory_bytes = 2 * num_requests * before.memory[0].nbytes
    # Results are as wide as what gates them.
    num_bytes = memory_bytes + rows.gate.nbytes + sum(own.nbytes for own in vars(rows).values() if own is not None)
    copies = setting.copies(num_bytes, before.memory, before.recent, before.reached)

    def call(memory: Tensor, recent: Tensor, reached: Tensor) -> None:
        reached.fill_(CONTEXT)
        states = DeltaStates(memory=memory, recent=recent, reached=reached)
        kernel.gated_delta(rows, launched, states, weights, heads)

    return Work(
        check=check,
        calls=[partial(call, *tensors) for tensors in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
