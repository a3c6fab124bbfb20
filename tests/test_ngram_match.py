"""Prompt lookup over rows of tokens: the reference against the definition, the kernels against both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.ngram_match import ngram_match as on_cpu
from kernels.reference.ngram_match import ngram_match as reference
from proposers.lookup.ngram_definition import naive_lookup

triton_ops = pytest.importorskip("kernels.ngram_match")


def rows_of(texts: list[list[int]], width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids and lengths; behind each text lie tokens of the same kinds, as rejected drafts do."""
    token_ids = torch.randint(0, 3, (len(texts), width), generator=torch.Generator().manual_seed(seed))
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
    return token_ids.to(torch.int32), torch.tensor([len(text) for text in texts])


def expected(texts: list[list[int]], slots: list[int], min_n: int, max_n: int, num_tokens: int) -> list[list[int]]:
    found = [naive_lookup(texts[slot], min_n, max_n, num_tokens) if slot >= 0 else [] for slot in slots]
    return [draft or [-1] * num_tokens for draft in found]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    texts = draw(st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4))
    min_n = draw(st.integers(1, 3))
    return {
        "texts": texts,
        "slots": draw(st.lists(st.integers(-1, len(texts) - 1), min_size=1, max_size=5)),
        "width": max(1, *map(len, texts)) + draw(st.integers(0, 5)),
        "min_n": min_n,
        "max_n": min_n + draw(st.integers(0, 3)),
        "num_tokens": draw(st.integers(1, 9)),
    }


@pytest.mark.parametrize("match", [reference, on_cpu])
@settings(max_examples=300)
@given(batch=batches())
def test_it_finds_what_the_definition_finds(match: Any, batch: dict[str, Any]) -> None:
    token_ids, lengths = rows_of(batch["texts"], batch["width"])
    keys = {key: batch[key] for key in ("min_n", "max_n", "num_tokens")}
    drafts = match(token_ids, lengths, torch.tensor(batch["slots"]), **keys)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == expected(batch["texts"], batch["slots"], **keys)


@settings(max_examples=60)
@given(batches(), st.sampled_from([4, 16, 64]))
def test_the_kernels_find_what_the_definition_finds(
    kernel_device: torch.device, batch: dict[str, Any], block: int
) -> None:
    """Blocks are small, so that matches lie in all of them and n-grams across their borders."""
    token_ids, lengths = (tensor.to(kernel_device) for tensor in rows_of(batch["texts"], batch["width"]))
    keys = {key: batch[key] for key in ("min_n", "max_n", "num_tokens")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK", block)
        drafts = triton_ops.ngram_match(token_ids, lengths, torch.tensor(batch["slots"], device=kernel_device), **keys)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == expected(batch["texts"], batch["slots"], **keys)


@pytest.mark.parametrize("num_kinds", [2, 9, 60])
@pytest.mark.parametrize(("min_n", "max_n", "num_tokens"), [(1, 1, 1), (2, 5, 4), (3, 12, 16), (5, 5, 7)])
def test_the_kernels_equal_the_reference_on_long_rows(
    kernel_device: torch.device, num_kinds: int, min_n: int, max_n: int, num_tokens: int
) -> None:
    """Several blocks of the shipped size; lengths at and around their borders, and the whole row."""
    generator = torch.Generator().manual_seed(num_kinds)
    width = 2 * triton_ops.BLOCK + 53
    sizes = [0, 1, 2, 1023, 1024, 1025, 1026, 2048, 2049, width - 1, width]
    token_ids = torch.randint(0, num_kinds, (len(sizes), width + 3), generator=generator, dtype=torch.int32)
    token_ids = token_ids.to(kernel_device)[:, :width]  # rows with a gap between them
    lengths = torch.tensor(sizes, device=kernel_device)
    slots = torch.tensor([9, 3, -1, 0, 10, 1, 2, 4, 5, 6, 7, 8, -1], device=kernel_device)
    keys = {"min_n": min_n, "max_n": max_n, "num_tokens": num_tokens}
    found = triton_ops.ngram_match(token_ids, lengths, slots, **keys)
    assert torch.equal(found, reference(token_ids, lengths, slots, **keys))
    by_cpu = on_cpu(token_ids.cpu(), lengths.cpu(), slots.cpu(), **keys)
    assert torch.equal(found.cpu(), by_cpu)
    if (min_n, num_kinds) == (2, 9):
        assert {True, False} == set((found[:, 0] >= 0).tolist())


@pytest.mark.parametrize("match", [reference, on_cpu, triton_ops.ngram_match])
def test_a_batch_of_nobody_and_a_draft_of_nothing_are_empty(kernel_device: torch.device, match: Any) -> None:
    device = torch.device("cpu") if match is on_cpu else kernel_device
    token_ids, lengths = (tensor.to(device) for tensor in rows_of([[1, 1, 1]], 3))
    nobody, somebody = (torch.tensor(slots, dtype=torch.int64, device=device) for slots in ([], [0]))
    assert match(token_ids, lengths, nobody, min_n=1, max_n=2, num_tokens=4).shape == (0, 4)
    assert match(token_ids, lengths, somebody, min_n=1, max_n=2, num_tokens=0).shape == (1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_graph_drafts_for_texts_that_came_later() -> None:
    first, second = [[1, 2, 3, 1, 2], [7, 8, 9]], [[1, 2, 3, 1], [7, 8, 7, 9, 7, 8]]
    token_ids, lengths = (tensor.cuda() for tensor in rows_of(first, 40))
    slots = torch.tensor([1, 0], device="cuda")
    keys = {"min_n": 1, "max_n": 3, "num_tokens": 3}
    triton_ops.ngram_match(token_ids, lengths, slots, **keys)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = triton_ops.ngram_match(token_ids, lengths, slots, **keys)
    for texts in (first, second):
        for held, tensor in zip((token_ids, lengths), rows_of(texts, 40), strict=True):
            held.copy_(tensor)
        graph.replay()
        assert drafts.tolist() == expected(texts, [1, 0], **keys)
