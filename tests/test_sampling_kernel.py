"""Sampling by Triton kernels: the reference's kept sets to the last token, its masses to the last bit, its tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import sampling as reference
from kernels.reference.philox import Stream

triton_ops = pytest.importorskip("kernels.sampling")
truncation = pytest.importorskip("kernels.truncation")
search_ops = pytest.importorskip("kernels.cut_search")

NEG_INF = float("-inf")

OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
DTYPES = {"temperature": torch.float32, "min_p": torch.float32, "top_k": torch.int64, "top_p": torch.float64}


def processed_by_reference(logits: Tensor, params: list[dict[str, float]]) -> Tensor:
    """Row by row, each with the processors that it uses."""
    rows = []
    for row, own in zip(logits.split(1), params, strict=True):
        own = OFF | own
        row = row / own["temperature"]
        if own["min_p"] > 0:
            row = reference.apply_min_p(row, torch.tensor([own["min_p"]]))
        if 0 < own["top_k"] < row.shape[1]:
            row = reference.apply_top_k(row, torch.tensor([own["top_k"]]), max_top_k=int(own["top_k"]))
        if own["top_p"] < 1:
            row = reference.apply_top_p(row, torch.tensor([own["top_p"]], dtype=torch.float64))
        rows.append(row)
    return torch.cat(rows)


def as_tensors(params: list[dict[str, float]], device: torch.device, *, all_of_them: bool = True) -> dict[str, Tensor]:
    """The arguments of `sample` and `truncate_rows`; without all_of_them, those that some row uses."""
    used = [name for name in OFF if all_of_them or any(name in own for own in params)]
    names = {"temperature": "temperatures"}
    return {
        names.get(name, name): torch.tensor([(OFF | own)[name] for own in params], dtype=DTYPES[name], device=device)
        for name in used
    }


def assert_truncated_as_the_reference(logits: Tensor, params: list[dict[str, float]], device: torch.device) -> None:
    positions = torch.zeros(len(logits), dtype=torch.int64, device=device)
    truncated = truncation.truncate_rows(logits.to(device), positions, **as_tensors(params, device, all_of_them=False))
    wanted = processed_by_reference(logits, params)
    temperatures = torch.tensor([own.get("temperature", 1.0) for own in params]).unsqueeze(1)
    scaled = logits / temperatures
    kept = scaled.masked_fill(scaled < truncated.cuts.cpu().unsqueeze(1), NEG_INF)
    assert torch.equal(kept, wanted), (params, truncated.cuts)
    assert torch.equal(truncated.maxima.cpu(), wanted.amax(dim=1))
    assert torch.equal(truncated.argmax.cpu(), reference.greedy_argmax(logits))
    weights = reference.fixed_point_weights(wanted, wanted.amax(dim=1, keepdim=True))
    assert torch.equal(truncated.masses.cpu(), weights.sum(dim=1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[dict[str, float]]]:
    """Rows of ties (halves), of close values, of masked tokens; any mixture of cuts, off values among them."""
    num_rows, vocab_size = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    value = draw(
        st.sampled_from(
            [
                st.integers(-12, 12).map(lambda x: x / 2),
                st.floats(-30, 30, width=32),
                st.one_of(st.just(NEG_INF), st.integers(-3, 3).map(float)),
            ]
        )
    )
    rows = draw(
        st.lists(st.lists(value, min_size=vocab_size, max_size=vocab_size), min_size=num_rows, max_size=num_rows)
    )
    logits = torch.tensor(rows, dtype=torch.float32)
    logits[:, draw(st.integers(0, vocab_size - 1))] = draw(st.floats(-3, 3, width=32))  # something is allowed
    choices = {
        "temperature": st.floats(0.25, 4, width=32),
        "min_p": st.one_of(st.just(0.0), st.floats(2.0**-10, 1, width=32)),
        "top_k": st.integers(-1, vocab_size + 3),
        "top_p": st.one_of(st.sampled_from([1e-9, 1 - 1e-6, 1.0]), st.floats(0.01, 1)),
    }
    return logits, [draw(st.fixed_dictionaries({}, optional=choices)) for _ in range(num_rows)]


@settings(max_examples=8)
@given(batches())
def test_cuts_keep_what_the_reference_keeps(
    kernel_device: torch.device, batch: tuple[Tensor, list[dict[str, float]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "BLOCK", 32)
        assert_truncated_as_the_reference(*batch, kernel_device)


def test_cuts_find_their_way_in_rows_made_to_mislead_the_search(kernel_device: torch.device) -> None:
    """Signed zeros, one survivor, equal logits, values of every magnitude, neighbours in float32; a tile and a bit."""
    vocab_size = 150
    octaves = 2.0 ** -torch.arange(0.0, vocab_size // 2)
    neighbours = (torch.tensor(1.0).view(torch.int32) + torch.arange(vocab_size, dtype=torch.int32)).view(torch.float32)
    rows = [
        (torch.tensor([-0.0, 0.0] * (vocab_size // 2)), {"top_k": 40, "top_p": 0.5}),
        (torch.cat([torch.tensor([80.0]), torch.zeros(vocab_size - 1)]), {"top_p": 1 - 1e-6}),
        (torch.full((vocab_size,), NEG_INF).index_fill(0, torch.tensor(7), -5.0), {"top_k": 3, "top_p": 0.9}),
        (torch.full((vocab_size,), 2.5), {"top_p": 1e-12}),
        (torch.cat([octaves, -octaves]), {"top_k": 60}),
        (torch.cat([octaves * 1e30, -octaves * 1e30]), {"top_k": 77}),
        (neighbours, {"top_k": 17}),
        (neighbours * 8, {"top_p": 0.37}),
        (torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 20, {"top_p": 1 - 2.0**-40}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "BLOCK", 128)
        assert_truncated_as_the_reference(
            torch.stack([row for row, _ in rows]), [own for _, own in rows], kernel_device
        )


def test_the_passes_of_a_search_leave_one_of_all_values_there_are() -> None:
    widest = 2**32  # images between one that suffices and one that does not
    for _ in range(search_ops.NUM_PASSES):
        widest = -(-widest // (search_ops.NUM_THRESHOLDS.value + 1))
    assert widest == 1


def test_cuts_of_a_long_row_of_near_ties(kernel_device: torch.device) -> None:
    """Where a sum in float32, or in another order, would draw the line elsewhere: tails of about 1e-9 behind a head."""
    tail = math.log(1e-9) - torch.arange(9000) * 2.0**-18
    logits = torch.cat([torch.tensor([math.log(0.9)]), tail])[torch.randperm(9001, generator=torch.Generator())]
    assert_truncated_as_the_reference(logits.unsqueeze(0), [{"top_p": 1 - 5e-6}], kernel_device)


def draw_case(num_rows: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return logits.to(device), seeds.to(device), torch.arange(num_rows, device=device) * 7


def test_tokens_are_the_references_draws(kernel_device: torch.device) -> None:
    """All processors and none, greedy rows between the others; the last split is not full."""
    params: list[dict[str, float]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {},
    ]
    logits, seeds, positions = draw_case(len(params), 331, kernel_device)
    is_greedy = torch.tensor([False] * 6 + [True], device=kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK", 256)
        patch.setattr(truncation, "BLOCK", 512)
        token_ids = triton_ops.sample(
            logits,
            seeds,
            positions,
            stream=Stream.DRAFT,
            draft_steps=positions - 3,
            is_greedy=is_greedy,
            **as_tensors(params, kernel_device),
        )
    keys = (seeds.cpu(), positions.cpu(), Stream.DRAFT, positions.cpu() - 3)
    drawn = reference.gumbel_argmax(processed_by_reference(logits.cpu(), params), *keys)
    wanted = torch.where(is_greedy.cpu(), reference.greedy_argmax(logits.cpu()), drawn)
    assert token_ids.dtype == torch.int64 and torch.equal(token_ids.cpu(), wanted)
    assert int((wanted != reference.greedy_argmax(logits.cpu())).sum()) >= 3  # noise mattered


def test_a_rows_token_depends_on_that_row_alone(kernel_device: torch.device) -> None:
    """Other rows, another place, other processors in the batch, another cut of the vocabulary: the same token."""
    logits, seeds, positions = draw_case(6, 512, kernel_device)
    plain = triton_ops.sample(logits, seeds, positions, stream=Stream.TARGET)
    params: list[dict[str, float]] = [{}, {"top_k": 1}, {}, {"temperature": 0.5}, {}, {"min_p": 0.9}]
    order = torch.tensor([4, 1, 0, 3, 2], device=kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK", 256)
        mixed = triton_ops.sample(
            logits[order],
            seeds[order],
            positions[order],
            stream=Stream.TARGET,
            **as_tensors([params[i] for i in order.tolist()], kernel_device),
        )
    assert mixed[[0, 2, 4]].tolist() == plain[[4, 0, 2]].tolist()
    assert int(mixed[1]) == int(logits[1].argmax())
    alone = triton_ops.sample(logits[5:], seeds[5:], positions[5:], stream=Stream.TARGET)
    assert alone.tolist() == plain[5:].tolist()


def test_a_part_of_the_vocabulary_draws_the_tokens_that_all_of_it_would(kernel_device: torch.device) -> None:
    """Columns in any order; beside them the others have no chance. Ties go to the lowest token, not column."""
    params: list[dict[str, float]] = [{}, {"temperature": 1.4, "top_k": 30, "top_p": 0.9}, {"min_p": 0.01}, {}, {}]
    logits, seeds, positions = draw_case(len(params), 150, kernel_device)
    logits[3, [2, 70, 149]] = 9.0
    token_ids = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:150].to(kernel_device)
    everything = torch.full((len(params), 600), -1000.0, device=kernel_device).index_copy_(1, token_ids, logits)
    arguments: dict[str, Any] = {
        "stream": Stream.TARGET,
        "is_greedy": torch.tensor([False, False, False, True, False], device=kernel_device),
        **as_tensors(params, kernel_device),
    }
    positions[4] = -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK_WITH_IDS", 64)
        drawn = triton_ops.sample(logits, seeds, positions, token_ids=token_ids, **arguments)
        likeliest = triton_ops.greedy(logits, positions, token_ids)
    assert drawn.tolist() == triton_ops.sample(everything, seeds, positions, **arguments).tolist()
    assert likeliest.tolist() == triton_ops.greedy(everything, positions).tolist()
    assert int(drawn[3]) == int(token_ids[[2, 70, 149]].min()) and drawn[:3].tolist() != likeliest[:3].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_ties_go_to_the_lowest_id_and_padding_to_minus_one(
    kernel_device: torch.device, dtype: torch.dtype
) -> None:
    logits = torch.full((7, 70), -1.0, dtype=dtype)
    logits[0, [69, 3, 40]] = 2.0
    logits[1, [66, 67]] = 2.0
    logits[2, 5:] = 0.0
    logits[2, 5] = -0.0  # ties with 0
    logits[3] = NEG_INF
    logits[4, 12:] = NEG_INF
    logits[6, 9] = 65504.0
    logits = logits.to(kernel_device)[:, :69]  # rows with a gap between them
    positions = torch.tensor([0, 9, 1, 1, 1, -1, 2], device=kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK", 32)
        assert triton_ops.greedy(logits, positions).tolist() == [3, 66, 5, 0, 0, -1, 9]
    asked = {"is_greedy": positions >= 0, "temperatures": positions.float()}
    drawn = triton_ops.sample(logits, positions, positions, stream=0, **asked)
    assert drawn.tolist() == [3, 66, 5, 0, 0, -1, 9]


def test_nobody_draws_nothing(kernel_device: torch.device) -> None:
    nobody = torch.empty(0, dtype=torch.int64, device=kernel_device)
    logits = torch.empty(0, 5, device=kernel_device)
    assert triton_ops.sample(logits, nobody, nobody, stream=0, top_k=nobody).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_graph_samples_rows_that_came_later() -> None:
    device = torch.device("cuda")
    params: list[dict[str, float]] = [{"top_p": 0.9}, {"top_k": 50, "temperature": 0.8}, {}, {"min_p": 0.05}]
    held: list[Any] = list(draw_case(4, 128_256, device))
    arguments = as_tensors(params, device)
    triton_ops.sample(*held, stream=0, **arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = triton_ops.sample(*held, stream=0, **arguments)
    for shift in (0, 1):
        held[0].copy_(held[0].roll(shift, 1))
        held[2].add_(shift)
        graph.replay()
        wanted = reference.gumbel_argmax(
            processed_by_reference(held[0].cpu(), params), held[1].cpu(), held[2].cpu(), Stream.TARGET
        )
        assert torch.equal(token_ids.cpu(), wanted)
