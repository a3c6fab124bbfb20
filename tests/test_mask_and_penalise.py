"""What requests change in the logits of whole steps: kernels have the definition's bits, which are those of parts.

In steps in parts, processors are applied one after another to the rows that use them (tests/test_sampling.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import mask_and_penalise as compiled
from kernels.reference import sampling as ops
from kernels.reference.mask_and_penalise import PROMPT
from kernels.reference.mask_and_penalise import mask_and_penalise as definition

triton_kernel = pytest.importorskip("kernels.mask_and_penalise")
VOCAB_SIZE = 1100  # two programs a row, the last one not full
SEED = st.integers(0, 2**31)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows apart from each other, tables as they happen to be."""
    generator = torch.Generator().manual_seed(draw(SEED))
    num_requests, rows_of_each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_rows = num_requests * rows_of_each
    logits = torch.randn(num_rows, VOCAB_SIZE + 5, generator=generator)[:, :VOCAB_SIZE].mul_(4)
    logits[:, ::7] = -0.0

    def tokens(width: int) -> torch.Tensor:
        """Some of them the same, some none."""
        drawn = torch.randint(0, VOCAB_SIZE, (num_rows, width), generator=generator)
        drawn[:, ::2] = drawn[:, :1] % 5
        return torch.where(torch.rand(num_rows, width, generator=generator) < 0.3, -1, drawn)

    tables: dict[str, Any] = {}
    if draw(st.booleans()):
        bias = torch.randn(num_requests, VOCAB_SIZE, generator=generator)
        bias[:, ::3], bias[:, 1::3] = -0.0, float("-inf")
        tables["bias"] = bias
    if draw(st.booleans()):
        tables["forbidden"] = tokens(draw(st.integers(1, 5)))
    if draw(st.booleans()):
        bits = (num_rows, -(-VOCAB_SIZE // 32))
        tables["bitmask"] = torch.randint(-(2**31), 2**31, bits, generator=generator).to(torch.int32)
        tables["bitmask"][:, ::3] = -1
    if draw(st.booleans()):
        said = torch.randint(0, 4, (num_requests, VOCAB_SIZE), generator=generator, dtype=torch.int32)
        is_in_prompt = torch.randint(0, 2, said.shape, generator=generator, dtype=torch.int32)
        tables["said"] = said * (said > 1) + is_in_prompt * PROMPT
        values = [draw(st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.0, -0.5), (0.7, 0.4, 1.5)])) for _ in said]
        tables["penalties"] = torch.tensor(values)
        if draw(st.booleans()):
            tables["ancestors"] = tokens(draw(st.integers(1, 5)))
    return logits, tables


@settings(max_examples=60)
@given(cases())
def test_kernels_have_the_definitions_bits(kernel_device: torch.device, case: tuple[torch.Tensor, Any]) -> None:
    logits, tables = case
    expected, before = definition(logits, **tables), logits.clone()
    there = {name: table.to(kernel_device) for name, table in tables.items()}
    by_kernel = triton_kernel.mask_and_penalise(logits.to(kernel_device), **there)
    for found in (by_kernel.cpu(), compiled.mask_and_penalise(logits, **tables)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("grain", [1, compiled.PART_TOKENS])
def test_however_a_cpu_cuts_the_vocabulary(grain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    border, vocab_size = compiled.SPLIT, 2 * compiled.SPLIT + 9
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, vocab_size, generator=generator)
    tables = {
        "forbidden": torch.tensor([[border - 1, border], [-1, vocab_size - 1], [0, 0], [-1, -1]]),
        "said": torch.randint(0, 3, (2, vocab_size), generator=generator, dtype=torch.int32),
        "penalties": torch.tensor([[1.2, 0.1, 0.2], [0.9, 0.0, 0.3]]),
        "ancestors": torch.tensor([[5, 5], [border, -1], [vocab_size - 1, 5], [-1, border - 1]]),
        "bitmask": torch.randint(-(2**31), 2**31, (4, -(-vocab_size // 32)), generator=generator).to(torch.int32),
    }
    monkeypatch.setattr(compiled, "PART_TOKENS", grain)
    assert torch.equal(compiled.mask_and_penalise(logits, **tables), definition(logits, **tables))


def test_it_is_what_the_processors_of_steps_in_parts_do() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, VOCAB_SIZE, generator=generator)
    rows = torch.arange(3)
    bias = torch.full((2, VOCAB_SIZE), -0.0)
    bias[0, 9], bias[1, 9:] = 1.5, float("-inf")
    counts = torch.randint(0, 3, (2, VOCAB_SIZE), generator=generator, dtype=torch.int32)
    is_in_prompt = torch.rand(2, VOCAB_SIZE, generator=generator) < 0.2
    ancestors = torch.tensor([[-1, -1], [4, -1], [4, 4]]).repeat(2, 1)
    values = torch.tensor([[1.3, 0.2, -0.4], [0.8, 0.0, 0.1]])
    found = definition(
        logits,
        bias=bias,
        forbidden=torch.tensor([[3]] * 6),
        said=counts + is_in_prompt * PROMPT,
        penalties=values,
        ancestors=ancestors,
    )
    biased = ops.apply_logit_bias(logits, rows, torch.full((3,), 9), torch.full((3,), 1.5))
    biased[3:] = ops.keep_tokens(biased[3:], torch.arange(VOCAB_SIZE).lt(9).expand(3, -1))
    masked = ops.mask_tokens(biased, torch.arange(6), torch.full((6,), 3))
    own = counts.repeat_interleave(3, dim=0)
    ops.add_ancestor_counts_(own, ancestors, torch.tensor([0, 1, 2] * 2))
    seen = (own > 0) | is_in_prompt.repeat_interleave(3, dim=0)
    expected = ops.apply_penalties(masked, seen, own, *values.repeat_interleave(3, dim=0).unbind(1))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_no_rows_stay_no_rows(kernel_device: torch.device) -> None:
    nothing = torch.empty(0, 7)
    assert compiled.mask_and_penalise(nothing).shape == (0, 7)
    assert triton_kernel.mask_and_penalise(nothing.to(kernel_device)).shape == (0, 7)
