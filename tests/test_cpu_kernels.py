"""Kernels compiled for a CPU: against definitions in float64, and a row's bits against the company it keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import attend, threads
from kernels.cpu import compiled as compilation
from kernels.cpu import paged_attention as on_cpu
from kernels.cpu.act_and_mul import act_and_mul as act_and_mul_on_cpu
from kernels.cpu.compiled import compiled, exact, vectorized
from kernels.cpu.elements import ELEMENTS, narrow, widen
from kernels.cpu.exp2 import exp2, tanh
from kernels.cpu.kernel import Kernel
from kernels.cpu.key_panels import KEYS
from kernels.cpu.rms_norm import add_normed, norm_in_place, sum_beside_rms_norm
from kernels.cpu.rms_norm import add_rms_norm as add_rms_norm_on_cpu
from kernels.cpu.rms_norm import rms_norm as rms_norm_on_cpu
from kernels.cpu.rope import rope_and_write, rotate
from kernels.cpu.rows import cap_in_place, scale
from kernels.cpu.sampling import greedy
from kernels.cpu.tree_rows import tree_rows as tree_rows_on_cpu
from kernels.paged_segments import PagedSegments
from kernels.reference.act_and_mul import ACTIVATIONS, Activation, LimitedSilu, act_and_mul
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rope import RopeTable, apply_rope
from kernels.reference.softcap import softcap
from tests.test_paged_attention_kernel import (
    BLOCK_SIZE,
    COMPANIES,
    LONG,
    OTHER,
    PLAIN,
    RAGGED,
    Model,
    Rows,
    assert_close,
    dense,
    filled_cache,
    in_order,
    launch,
    random_queries,
)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
MODELS = {
    "three heads a group": PLAIN,
    "heads of 96": Model(num_heads=4, num_kv_heads=2, head_dim=96, value_dim=96),
    "five heads of 32 a group": Model(num_heads=10, num_kv_heads=2, head_dim=32, value_dim=32),
    "heads of 64, window": Model(head_dim=64, value_dim=64, options={"sliding_window": 21}),
    "heads of 32, not causal, window": Model(
        head_dim=32, value_dim=32, options={"is_causal": False, "sliding_window": 9}
    ),
    "heads of 10": Model(num_heads=2, num_kv_heads=2, head_dim=10, value_dim=10),
    "window": Model(options={"sliding_window": 21}),
    "chunks": Model(options={"attention_chunk": 21}),
    "not causal": Model(options={"is_causal": False}),
    "not causal, window": Model(options={"is_causal": False, "sliding_window": 9}),
    "values narrower than keys": Model(num_heads=2, num_kv_heads=2, head_dim=96, value_dim=64),
    "values wider than keys": Model(num_heads=4, num_kv_heads=2, head_dim=32, value_dim=96),
    "values of 24, keys of 40": Model(num_heads=4, num_kv_heads=2, head_dim=40, value_dim=24),
    "sinks": Model(num_heads=10, num_kv_heads=2, head_dim=64, value_dim=64, has_sinks=True),
    "sinks, window": Model(has_sinks=True, options={"sliding_window": 21}),
    "softcap": Model(options={"softcap": 2.0}),
    "softcap far away, heads of 32": Model(head_dim=32, value_dim=32, options={"softcap": 50.0}),
}


@pytest.fixture(params=[*DTYPES, "bfloat16 in vector lanes", "bfloat16 in float32"], ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """bfloat16 as this machine attends to it, on its matrix unit if it has one, and as others do."""
    if isinstance(request.param, torch.dtype):
        return request.param
    monkeypatch.setattr(on_cpu, "has_amx", lambda: False)
    if request.param == "bfloat16 in float32":
        monkeypatch.setattr(attend, "multiplies_pairs", lambda: False)
    return torch.bfloat16


def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all threads, however little it is."""
    for name in ("PART_PRODUCTS", "AMX_PRODUCTS"):
        monkeypatch.setattr(on_cpu, name, 1)


def whoever_shares(compute: Callable[[], Tensor]) -> Tensor:
    """What is computed by one thread, which has the same bits of three, and where torch has no OpenMP to share with."""
    alone, before = compute(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "has_openmp", lambda: False)
        assert torch.equal(compute(), alone)
    with pytest.MonkeyPatch.context() as patch:
        share_all(patch)
        torch.set_num_threads(3)
        try:
            shared = compute()
        finally:
            torch.set_num_threads(before)
    assert torch.equal(shared, alone)
    return alone


def attention(
    model: Model,
    rows: Sequence[Rows],
    queries: Tensor,
    cache: Tensor,
    num_padding: int = 0,
    **how: int,
) -> Tensor:
    longest = max(own.end for own in rows)
    context, per_tile = how.get("max_context", longest), how.get("rows_per_tile")
    segments = launch(model, rows, context, torch.device("cpu"), num_padding, per_tile)
    qkv = torch.cat(
        (queries.flatten(1), queries.new_full((len(queries), 48), torch.nan)), dim=1
    )  # as the engine has them
    return on_cpu.paged_attention(qkv[:, :-48].view(queries.shape), cache, segments, **model.keys())


@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_launch_is_what_the_definition_says(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    queries = random_queries(model, sum(own.size for own in RAGGED), dtype)
    cache = filled_cache(model, RAGGED, dtype)
    found = whoever_shares(lambda: attention(model, RAGGED, queries, cache, num_padding=2))
    exact, plain = (dense(model, RAGGED, queries, cache, kind) for kind in (torch.float64, torch.float32))
    # Two in float32: how near plain torch comes to the truth is up to the machine's BLAS.
    assert_close(found, exact, plain, ulps=2 if dtype == torch.float32 else 1)


@pytest.mark.parametrize(
    "name",
    [
        *("three heads a group", "window", "chunks", "five heads of 32 a group", "heads of 64, window"),
        *("values narrower than keys", "sinks", "softcap"),
    ],
)
def test_a_row_keeps_its_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    cache = filled_cache(model, [Rows(start=0, size=100, slots=slots) for slots in (LONG, OTHER)], dtype)
    query = random_queries(model, 1, dtype, seed=7)
    alone = attention(model, [Rows(start=70, size=1, slots=LONG)], query, cache)[0]
    assert alone.isfinite().all()
    for company, (rows, place, how) in COMPANIES.items():
        queries = random_queries(model, sum(own.size for own in rows), dtype, seed=8) * 3
        queries[place] = query[0]
        found = whoever_shares(partial(attention, model, rows, queries, cache, **how))
        assert torch.equal(found[place], alone), company


@pytest.mark.parametrize("rows", [RAGGED, RAGGED[2:3]], ids=["more KV heads than threads", "fewer"])
def test_any_number_of_threads_gives_the_same_bits(
    dtype: torch.dtype, rows: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["heads of 96"]
    queries, cache = random_queries(model, sum(own.size for own in rows), dtype), filled_cache(model, rows, dtype)
    alone, before = attention(model, rows, queries, cache), torch.get_num_threads()
    share_all(monkeypatch)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        shared = attention(model, rows, queries, cache)
        torch.set_num_threads(before)
        assert torch.equal(shared, alone), count
    assert threads.has_openmp(), "Linux has it"
    monkeypatch.setattr(threads, "has_openmp", lambda: False)
    assert torch.equal(attention(model, rows, queries, cache), alone)


@pytest.mark.parametrize("name", ["three heads a group", "five heads of 32 a group", "heads of 96"])
def test_any_thread_computes_a_prompts_tile(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug told here: rooms of odd sizes, behind the first thread's, did not begin where vectors may be read whole."""
    model = replace(MODELS[name], num_heads=3 * MODELS[name].num_kv_heads)
    before, call = torch.get_num_threads(), Kernel.__call__

    def by_the_last_thread(kernel: Kernel, *numbers: int, parts: int = 1) -> None:
        call(kernel, *numbers, parts=parts)  # compiles it
        arguments, (_, run_part) = kernel._type(*numbers), kernel._compiled
        for part in range(parts):
            run_part(ctypes.addressof(arguments), part, parts, torch.get_num_threads() - 1)

    torch.set_num_threads(3)
    try:
        for size in (33, 45, 51, 63):
            rows = [Rows(start=0, size=size, slots=in_order(size))]
            queries, cache = random_queries(model, size, dtype), filled_cache(model, rows, dtype)
            expected = attention(model, rows, queries, cache)
            with monkeypatch.context() as patch:
                patch.setattr(Kernel, "__call__", by_the_last_thread)
                assert torch.equal(attention(model, rows, queries, cache, rows_per_tile=64), expected)
    finally:
        torch.set_num_threads(before)


def test_a_value_that_is_no_number_is_seen_in_the_result(dtype: torch.dtype) -> None:
    rows = [Rows(start=40, size=1, slots=in_order(41))]
    for name in ("three heads a group", "heads of 96"):
        model = MODELS[name]
        cache = filled_cache(model, rows, dtype)
        cache.view(-1, model.width)[rows[0].slots[7]] = torch.nan
        assert attention(model, rows, random_queries(model, 1, dtype), cache).isnan().all()


def test_a_branch_of_a_tree_has_the_bits_of_a_chain(dtype: torch.dtype) -> None:
    """Two paths over one prefix; keys of the second lie behind those of the first, out of order."""
    chain = in_order(70, 0)
    tree = [
        Rows(start=60, size=5, slots=chain, branch_start=60),
        Rows(start=62, size=3, slots=[*chain[:62], 74, 68, 75], branch_start=62),
    ]
    model = MODELS["five heads of 32 a group"]
    content = torch.randn(80, model.width, generator=torch.Generator().manual_seed(5)).to(dtype)
    queries = random_queries(model, 8, dtype)
    found = whoever_shares(lambda: attention(model, tree, queries, content.view(-1, BLOCK_SIZE, model.width)))
    for path, rows in zip(tree, (slice(0, 5), slice(5, 8)), strict=True):
        laid_out = torch.full_like(content, torch.nan)
        laid_out[: path.end] = content[list(path.slots[: path.end])]
        straight = Rows(start=path.start, size=path.size, slots=chain)
        cache = laid_out.view(-1, BLOCK_SIZE, model.width)
        expected = attention(model, [straight], queries[rows], cache)
        assert torch.equal(found[rows], expected)


def trees(model: Model, first: int) -> tuple[Any, Tensor, PagedSegments, torch.Generator]:
    """(rows, blocks, their launch, what draws more): trees without the first of their nodes.

    They begin within, at and just before the border of the keys taken in together, one of them absent, have more rows
    than take keys in together, and paths that end in one such part of the context or the next.
    """
    num_nodes, depth = attend.TREE_ROWS + 6, 9
    lengths = torch.tensor([40, 0, KEYS, 2 * KEYS - 3, 1])
    generator = torch.Generator().manual_seed(2)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6] + [-1] * (num_nodes - 8)] * len(lengths))
    for node in range(8, num_nodes):
        parents[:, node] = torch.randint(-1, 7, (len(lengths),), generator=generator)
    width = -(-(2 * KEYS + num_nodes) // BLOCK_SIZE)
    blocks = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    places = (lengths.unsqueeze(1) - 1 + torch.arange(num_nodes + 1)).clamp(min=0)
    slots = blocks.gather(1, places // BLOCK_SIZE) * BLOCK_SIZE + places % BLOCK_SIZE
    rows = tree_rows_on_cpu(
        lengths, slots, parents, first=first, offset=-1, depth=depth, rows_per_tile=8, split_keys=None
    )
    arrays = {key: value for key, value in rows._asdict().items() if key not in ("positions", "slots", "predicted")}
    segments = PagedSegments(
        **arrays,
        block_tables=blocks,
        max_context=int(lengths.max()) + depth,
        max_tile_size=1,
        segments_per_table=num_nodes + 1 - first,
    )
    return rows, blocks, segments, generator


@pytest.mark.parametrize("first", [0, 3], ids=["the whole tree", "without its first nodes"])
@pytest.mark.parametrize(
    "name", ["five heads of 32 a group", "heads of 64, window", "values narrower than keys", "sinks"]
)
def test_a_trees_rows_in_one_launch_have_the_bits_of_chains(name: str, first: int, dtype: torch.dtype) -> None:
    model, num_nodes = MODELS[name], attend.TREE_ROWS + 6
    rows, blocks, segments, generator = trees(model, first)
    queries = random_queries(model, len(rows.positions), dtype)
    cache = torch.randn(blocks.numel(), BLOCK_SIZE, model.width, generator=generator).to(dtype)
    found = whoever_shares(lambda: on_cpu.paged_attention(queries, cache, segments, **model.keys()))
    chains = []
    for row, (position, start) in enumerate(zip(rows.positions.tolist(), rows.branch_starts.tolist(), strict=True)):
        request = row // (num_nodes + 1 - first)
        table = [int(block) * BLOCK_SIZE + place for block in blocks[request] for place in range(BLOCK_SIZE)]
        path = [*table[:start], *rows.branch_slots[row].tolist()][: position + 1]
        chains.append(Rows(start=position, size=1, slots=path, branch_start=start))
    assert torch.equal(found, attention(model, chains, queries, cache))


def test_a_lone_row_may_have_any_stride() -> None:
    """Nobody needs the stride of one row, and torch leaves in it what was there when there were more."""
    rows = [Rows(start=9, size=1, slots=in_order(10))]
    segments = launch(PLAIN, rows, 10, torch.device("cpu"))
    cache, queries = filled_cache(PLAIN, rows, torch.float32), random_queries(PLAIN, 1)
    keys = PLAIN.keys()
    heads, head_dim = queries.shape[1:]
    expected = on_cpu.paged_attention(queries, cache, segments, **keys)
    for stride in (1, head_dim, 5 * heads * head_dim):
        odd = queries.as_strided(queries.shape, (stride, head_dim, 1))
        assert torch.equal(on_cpu.paged_attention(odd, cache, segments, **keys), expected)


def test_rows_of_no_tile_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded row's keys go to the null block, which others may read: they must be numbers."""
    rows = [Rows(start=4, size=1, slots=in_order(5))]
    segments = launch(PLAIN, rows, 5, torch.device("cpu"))
    cache, keys = filled_cache(PLAIN, rows, torch.float32), PLAIN.keys()
    new_empty = Tensor.new_empty  # unwritten memory may hold anything, and not only by chance zeros
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))
    assert not on_cpu.paged_attention(random_queries(PLAIN, 3), cache, segments, **keys)[1:].any()


@pytest.mark.parametrize(
    ("can_write", "hits", "said"),
    [(True, 0, ["later starts find them"]), (False, 0, ["set NUMBA_CACHE_DIR"]), (True, 1, [])],
)
def test_a_first_start_says_once_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, can_write: bool, hits: int, said: list[str]
) -> None:
    class Callback:
        cache_hits = hits

        def __init__(self, *_: Any, **how: Any) -> None: ...

        def enable_caching(self) -> None:
            if not can_write:
                raise RuntimeError("cannot cache function: no locator available")

        def compile(self) -> None: ...

    monkeypatch.setattr(compilation, "CFunc", Callback)
    monkeypatch.setattr(compilation, "cached_on_disk", lambda callback, function: None)
    compilation._say_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            compilation.compiled_for_c(round_all, ())
    assert [text in message for text, message in zip(said, caplog.messages, strict=True)] == [True] * len(said)


@compiled
def round_all(values: Any, rounded: Any) -> None:
    for index in range(len(values)):
        rounded[index] = narrow(values[index], rounded[index])


@compiled
def widen_all(numbers: Any, values: Any) -> None:
    for index in range(len(values)):
        values[index] = widen(numbers[index])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype, numbers: list[float]) -> None:
    """Ties, infinities and what is no number included; and they are read back as they are."""
    values = torch.tensor(numbers)
    bits = np.zeros(len(values), ELEMENTS[dtype])
    round_all(values.numpy(), bits)
    found = torch.from_numpy(bits.view(np.int16)).view(dtype)
    torch.testing.assert_close(found, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    read = torch.empty(len(values))
    widen_all(bits, read.numpy())
    torch.testing.assert_close(read, found.float(), rtol=0, atol=0, equal_nan=True)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """found, of 16 bits: exact with one rounding, but for what float32 adds to it."""
    eps = torch.finfo(found.dtype).eps
    limit = exact.abs() * eps * 0.51 + torch.finfo(found.dtype).tiny
    assert bool(((found.double() - exact.double()).abs() <= limit).all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_16_bits_results_are_those_of_float32_rounded_and_rows_their_own(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, residual, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 100), (9, 100), (100,)))
    eps = torch.tensor(1e-5)
    normed, total = add_rms_norm_on_cpu(x, residual, weight, eps)
    assert torch.equal(total, x + residual), "a sum has one rounding"
    assert_rounded(normed, rms_norm_on_cpu(total.float(), weight.float(), eps))
    exact_weight = 1.0 + weight.float() / 3  # which 16 bits do not hold
    by_exact = rms_norm_on_cpu(total, exact_weight, eps)
    assert_rounded(by_exact, rms_norm_on_cpu(total.float(), exact_weight, eps))
    gated, scaled = act_and_mul_on_cpu(x), scale(x, torch.tensor(7.7))
    assert_rounded(gated, act_and_mul_on_cpu(x.float()))
    assert torch.equal(scaled, (x.float() * 7.7).to(dtype))
    for row in range(len(x)):
        own = slice(row, row + 1)
        assert torch.equal(rms_norm_on_cpu(total[own], weight, eps), normed[own])
        assert torch.equal(rms_norm_on_cpu(total[own], exact_weight, eps), by_exact[own])
        assert torch.equal(act_and_mul_on_cpu(x[own]), gated[own])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_norm_of_what_another_made_of_the_added_rows_is_both(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = torch.randn(9, 200, generator=generator).to(dtype).chunk(2, dim=1)
    weight, x_weight = torch.randn(2, 100, generator=generator)
    eps = torch.tensor(1e-5)
    for x_eps in (None, torch.tensor(0.25)):
        own_eps = eps if x_eps is None else x_eps
        normed, total = add_rms_norm_on_cpu(x, residual, weight, eps, x_weight, x_eps=x_eps)
        assert torch.equal(total, residual + rms_norm_on_cpu(x, x_weight, own_eps))
        assert torch.equal(normed, rms_norm_on_cpu(total, weight, eps))
        assert torch.equal(add_normed(x, residual, x_weight, own_eps), total)
        both = sum_beside_rms_norm(x, residual, weight, eps, x_weight, x_eps=x_eps)
        assert torch.equal(both, torch.cat((total, normed), dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_sum_is_rounded_scaled_and_rounded_again(dtype: torch.dtype) -> None:
    """Of rows that lie apart; what is normed is the scaled sum, and 1 is as none."""
    generator = torch.Generator().manual_seed(5)
    x, residual = torch.randn(9, 200, generator=generator).to(dtype).chunk(2, dim=1)
    weight, x_weight = torch.randn(2, 100, generator=generator)
    eps, factor, one = torch.tensor(1e-5), torch.tensor(0.7019), torch.tensor(1.0)
    for own in (None, x_weight):
        normed, total = add_rms_norm_on_cpu(x, residual, weight, eps, own)
        scaled_norm, scaled = add_rms_norm_on_cpu(x, residual, weight, eps, own, factor)
        assert torch.equal(scaled, scale(total, factor))
        assert torch.equal(scaled_norm, rms_norm_on_cpu(scaled, weight, eps))
        for as_before, found in zip(
            (normed, total), add_rms_norm_on_cpu(x, residual, weight, eps, own, one), strict=True
        ):
            assert torch.equal(found, as_before)
        if own is None:
            assert torch.equal(scaled, add_rms_norm(x, residual, weight, eps, scale=factor)[1])
        else:
            assert torch.equal(add_normed(x, residual, own, eps, factor), scaled)
        for row in range(len(x)):
            alone = add_rms_norm_on_cpu(x[row : row + 1], residual[row : row + 1], weight, eps, own, factor)
            assert torch.equal(torch.cat(alone), torch.stack((scaled_norm[row], scaled[row])))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rows_that_their_norm_overwrites_may_lie_apart(dtype: torch.dtype) -> None:
    wide = torch.randn(9, 200, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight, eps, own, before = torch.randn(60).to(dtype), torch.tensor(1e-5), wide[:, 100:160], wide.clone()
    normed = rms_norm_on_cpu(own, weight, eps)
    norm_in_place(own, weight, eps)
    assert torch.equal(wide, torch.cat((before[:, :100], normed, before[:, 160:]), dim=1))


def test_capped_logits_are_what_the_definition_says_and_rows_their_own() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(6)) * torch.logspace(-3, 3, 9).unsqueeze(1)
    cap, found = torch.tensor(30.0), logits.clone()
    cap_in_place(found, cap)
    torch.testing.assert_close(found.double(), 30 * (logits.double() / 30).tanh(), rtol=1e-6, atol=0)
    torch.testing.assert_close(softcap(logits, 30.0), found, rtol=1e-6, atol=0)
    for row in range(len(logits)):
        alone = logits[row : row + 1].clone()
        cap_in_place(alone, cap)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_of_16_bits_are_rotated_as_those_of_float32_and_stored_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    rows, table = torch.randn(5, 4 * 16, generator=generator).to(dtype), torch.randn(40, 16, generator=generator)
    positions, slots = torch.tensor([3, 39, 0, 7, 8]), torch.tensor([4, 9, 1, 2, 3])

    def turn(rows: Tensor) -> tuple[Tensor, Tensor]:
        found, cache = rows.clone(), torch.zeros(3, 4, 2 * 16, dtype=rows.dtype)
        at = (table, positions[: len(rows)], slots[: len(rows)])
        rope_and_write(found, *at, cache, num_heads=2, num_kv_heads=1, head_dim=16)
        return found, cache.flatten(0, 1)[slots[: len(rows)]]

    turned, kept = turn(rows)
    exact = turn(rows.double().float())[0]
    # A difference of products may be small beside them.
    torch.testing.assert_close(turned.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(kept, turned[:, 2 * 16 :]) and torch.equal(turn(rows[:1])[0], turned[:1])


@given(st.floats(-126, 127, width=32))
def test_powers_of_two_are_right_to_a_rounding_and_a_half(x: float) -> None:
    assert abs(float(exp2(np.float32(x))) / 2.0**x - 1) < 1.5 * 2.0**-23


@given(st.floats(-100, 100, width=32))
def test_tanh_is_right_to_a_rounding_and_a_half(x: float) -> None:
    assert abs(float(tanh(np.float32(x))) - np.tanh(x)) <= 1.5 * 2.0**-23 * abs(np.tanh(x))


def test_powers_of_two_end_in_the_smallest_normal_number() -> None:
    assert float(exp2(np.float32(-3e38))) == 2.0**-126


@pytest.mark.parametrize("normed", ["neither", "keys", "both", "values, too"])
@pytest.mark.parametrize(("num_heads", "dim"), [(3, 16), (0, 16), (3, 256), (2, 512)])
def test_rows_are_normed_rotated_and_stored_as_the_definitions_say(normed: str, num_heads: int, dim: int) -> None:
    num_kv_heads, count = 2, 5
    generator = torch.Generator().manual_seed(0)
    width = (num_heads + 2 * num_kv_heads) * dim
    rows = torch.randn(count, width, generator=generator)
    half = torch.randn(40, dim // 2, generator=generator)
    cos, sin = half.cos().repeat(1, 2), torch.cat((-half.sin(), half.sin()), dim=1)
    table = RopeTable(cos, sin, num_heads + num_kv_heads, num_kv_heads * dim)
    positions, slots = torch.tensor([3, 39, 0, 7, 8]), torch.tensor([4, 9, 1, 2, 3])
    weights = 1 + torch.rand(3, dim, generator=generator)
    k_norm, v_norm = (None if normed == "neither" else weights[1]), (weights[2] if normed == "values, too" else None)
    q_norm, eps = (weights[0] if normed in ("both", "values, too") else None), torch.tensor(1e-6)
    expected = rows.view(count, -1, dim).clone()
    if q_norm is not None:
        expected[:, :num_heads] = rms_norm(expected[:, :num_heads], q_norm, eps)
    if k_norm is not None:
        keys = slice(num_heads, num_heads + num_kv_heads)
        expected[:, keys] = rms_norm(expected[:, keys], k_norm, eps)
    if v_norm is not None:
        expected[:, num_heads + num_kv_heads :] = rms_norm(expected[:, num_heads + num_kv_heads :], v_norm, eps)
    turned = apply_rope(expected.flatten(1), *table.rows(positions), table.partner)
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": dim}
    cache = torch.zeros(3, 4, 2 * num_kv_heads * dim)

    def write(own: slice) -> Tensor:
        found = rows[own].clone()
        norms = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm, "eps": eps}
        rope_and_write(found, table.compact, positions[own], slots[own], cache, **shape, **norms)
        return found

    found = write(slice(None))
    torch.testing.assert_close(found, turned, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.flatten(0, 1)[slots], found[:, num_heads * dim :])
    assert not cache.flatten(0, 1)[[0, 5, 6, 7, 8, 10, 11]].any()
    for row in range(count):
        assert torch.equal(write(slice(row, row + 1))[0], found[row]), "a row alone"


@pytest.mark.parametrize("is_normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("norm_dtype", [torch.float32, None], ids=["norms of float32", ""])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 256, 512])
def test_queries_alone_have_the_bits_they_have_beside_keys(
    dtype: torch.dtype, norm_dtype: torch.dtype | None, is_normed: bool, dim: int
) -> None:
    generator, num_heads = torch.Generator().manual_seed(0), 3
    rows, table = torch.randn(5, 5 * dim, generator=generator).to(dtype), torch.randn(40, dim, generator=generator)
    positions, slots = torch.tensor([3, 39, 0, 7, 8]), torch.tensor([4, 9, 1, 2, 3])
    weight, eps = torch.rand(dim, generator=generator).to(norm_dtype or dtype), torch.tensor(1e-6)
    norms = {"q_norm": weight, "eps": eps} if is_normed else {}
    cache = torch.zeros(3, 4, 2 * dim, dtype=dtype)
    alone = rows[:, : num_heads * dim].clone()
    heads = {"num_heads": num_heads, "head_dim": dim}
    beside = rope_and_write(
        rows, table, positions, slots, cache, **heads, num_kv_heads=1, **norms, **({"k_norm": weight} if norms else {})
    )
    one = rotate(alone[1:2].clone(), table, positions[1:2], **heads, **norms)
    found = rotate(alone, table, positions, **heads, **norms)
    assert found is alone and torch.equal(found, beside) and torch.equal(one, found[1:2])


@pytest.mark.parametrize("width", [64, 100])
def test_norms_are_what_the_definition_says_and_rows_their_own(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(9, 2 * width, generator=generator).chunk(2, dim=1)  # strided, as EAGLE-3 has them
    weight, eps = torch.randn(width, generator=generator), torch.tensor(1e-5)
    normed, total = add_rms_norm_on_cpu(x, residual, weight, eps)
    assert torch.equal(total, x + residual), "a sum has one rounding"
    sums = total.double()
    exact = sums * (sums.square().mean(dim=1, keepdim=True) + eps.double()).rsqrt() * weight.double()
    torch.testing.assert_close(normed.double(), exact, rtol=1e-6, atol=1e-7)
    assert torch.equal(rms_norm_on_cpu(total, weight, eps), normed)
    both = sum_beside_rms_norm(x, residual, weight, eps)
    assert torch.equal(both, torch.cat((total, normed), dim=1))
    assert torch.equal(rms_norm_on_cpu(both[:, :width], weight, eps), normed), "rows that lie apart"
    more = (weight.flip(0), torch.tensor(0.7019))
    both = sum_beside_rms_norm(x, residual, weight, eps, *more)
    assert torch.equal(both, torch.cat(add_rms_norm_on_cpu(x, residual, weight, eps, *more)[::-1], dim=1))
    for row in range(len(x)):
        own = slice(row, row + 1)
        assert torch.equal(add_rms_norm_on_cpu(x[own], residual[own], weight, eps)[0], normed[own])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, LimitedSilu(0.5)], ids=str)
@pytest.mark.parametrize("width", [64, 100])
def test_gates_are_what_the_definition_says_and_rows_their_own(width: int, activation: Activation) -> None:
    gate_up = torch.randn(9, 2 * width, generator=torch.Generator().manual_seed(2)) * 5
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e20, -1e20])
    found = act_and_mul_on_cpu(gate_up, activation)
    exact = act_and_mul(gate_up.double(), activation)
    # A power of e carries the rounding of its exponent, which is larger than the gate in gelu.
    torch.testing.assert_close(found.double(), exact, rtol=1e-6 if activation == "silu" else 5e-6, atol=1e-12)
    for row in range(len(gate_up)):
        assert torch.equal(act_and_mul_on_cpu(gate_up[row : row + 1], activation), found[row : row + 1])


@exact
def _zero_of(x: Any) -> Any:
    return x + np.float32(0.0)


@vectorized
def _zeros_of(xs: Any) -> None:
    for place in range(len(xs)):
        xs[place] = _zero_of(xs[place])


def test_what_is_exact_stays_so_in_a_caller_that_is_not() -> None:
    """numba gives a function its caller's licence, unless it wants none: -0 + 0 was -0, and no tie of 0."""
    zeros = np.array([-0.0, 0.0], np.float32)
    _zeros_of(zeros)
    assert not np.signbit(zeros).any()
    found = greedy(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), torch.tensor([3]))
    assert found.tolist() == [1]
