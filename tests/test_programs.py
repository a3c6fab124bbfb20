"""Recorded passes of a CPU: what replays compute is what the calls would have, whatever they are given."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.act_and_mul import act_and_mul
from kernels.cpu.linear import linear
from kernels.cpu.panels import can_pack, pack
from kernels.cpu.recording import Pool, Program, empty, recording
from kernels.cpu.rms_norm import add_rms_norm, rms_norm
from kernels.cpu.rows import take_rows
from kernels.cpu.under_way import current
from runner.engine.graphs import GraphMemory, Tensors
from runner.engine.programs import graph_store, record_prepared, record_program
from runner.engine.sampling_params import SamplingParams
from runner.engine.upload import to_device
from runner.llm import LLM
from runner.tiny import HEAD_DIRS
from runner.whole_steps import WholeSteps

WIDTH = 512


def block(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A norm's weight and a product's, large enough for threads to share its work."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    if not can_pack(weight):
        pytest.skip("this machine has no panels")
    return torch.rand(WIDTH, generator=generator).to(dtype), weight.to(dtype)


def rows_of(seed: int, count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_replay_has_the_bits_of_the_calls(dtype: torch.dtype, num_threads: int) -> None:
    norm, weight = block(dtype)
    panels, eps, before = pack(weight), torch.tensor(1e-6), torch.get_num_threads()

    def compute(rows: Tensor) -> Tensors:
        residual, normed = rows, rms_norm(rows, norm, eps)
        for _ in range(3):
            normed, residual = add_rms_norm(act_and_mul(linear(normed, panels)), residual, norm, eps)
        return normed, residual

    expected = [compute(rows_of(seed, dtype=dtype)) for seed in range(4)]
    torch.set_num_threads(num_threads)
    try:
        graph = record_program(compute, (rows_of(0, dtype=dtype),), pool=Pool())
        for seed in (2, 0, 3, 1):
            graph.inputs[0].copy_(rows_of(seed, dtype=dtype))
            graph.replay()
            for found, wanted in zip(graph.outputs, expected[seed], strict=True):
                assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["in between", "of a copy"])
def test_what_torch_computes_itself_is_computed_at_every_replay(how: str) -> None:
    norm, weight = block()
    panels, eps = pack(weight), torch.tensor(1e-6)

    def compute(rows: Tensor) -> Tensors:
        if how == "of a copy":
            rows = rows[:, ::2].contiguous().repeat(1, 2)
        return (rms_norm(linear(rows, panels)[:, :WIDTH] * 2, norm, eps),)

    store = graph_store(torch.device("cpu"), GraphMemory())
    for seed in range(3):
        (found,) = store("one layout", compute, rows_of(seed))
        assert torch.equal(found, compute(rows_of(seed))[0])


def test_calls_of_torch_take_turns_with_kernels_at_every_replay() -> None:
    """Views, results in place, several results, values that choose rows, a state that goes on; and fresh memory."""
    norm, weight = block()
    panels, eps, state = pack(weight), torch.tensor(1e-6), torch.zeros(WIDTH)

    def compute(rows: Tensor) -> Tensors:
        made = linear(rms_norm(rows, norm, eps), panels)
        largest, places = made.view(len(rows), -1, 2).flatten(1).max(dim=1)
        chosen = made.index_select(1, places).clamp_(min=0.0)
        state.add_(rms_norm(rows, norm, eps).sum(dim=0))
        grown = torch.cat((chosen, torch.where(made[:, :3] > 0, made[:, :3], -1.0)), dim=1)
        counts = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, places % len(rows), torch.ones_like(places))
        return largest.double(), grown.t().contiguous(), counts, state[:5].clone(), torch.arange(4) + counts[0]

    states, expected = list[Tensor](), list[Tensors]()
    for seed in range(3):
        expected.append(compute(rows_of(seed)))
        states.append(state.clone())
    state.zero_()
    pool = Pool()
    graph = record_prepared(compute, (rows_of(0),), pool=pool)
    assert isinstance(graph.replay, Program) and not state.any(), "a recording computes nothing"
    for seed in range(3):
        graph.inputs[0].copy_(rows_of(seed))
        graph.replay()
        assert torch.equal(state, states[seed])
        for found, wanted in zip(graph.outputs, expected[seed], strict=True):
            assert found.dtype == wanted.dtype and found.stride() == wanted.stride() and torch.equal(found, wanted)
    in_use = {id(own) for blocks in pool._blocks.values() for own in blocks if not own.is_free}
    assert len(in_use) <= len(graph.outputs), "what torch's calls go between is free for the next recording"


def test_what_is_known_of_a_calls_results_is_that_of_the_same_call_alone() -> None:
    """Equal numbers of other types make results of other types; so do strides, and the default dtype."""

    def compute(ones: Tensor) -> Tensors:
        sums = tuple(torch.remainder(ones, divisor) for divisor in (1, 1.0, True))
        return *sums, torch.cumsum(ones, 0), torch.cumsum(ones.t(), 0), torch.full((2,), 1.5)

    ones = torch.ones(3, 4, dtype=torch.int64)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            graph = record_prepared(compute, (ones,), pool=Pool())
            assert isinstance(graph.replay, Program)
            graph.replay()
            for found, wanted in zip(graph.outputs, compute(ones), strict=True):
                assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride()) and torch.equal(found, wanted)
    finally:
        torch.set_default_dtype(before)


def test_what_reads_values_back_is_computed_anew_at_every_replay() -> None:
    norm, _ = block()
    eps = torch.tensor(1e-6)

    def compute(rows: Tensor) -> Tensors:
        normed = rms_norm(rows, norm, eps)
        return (normed * 2 if float(normed[0, 0]) > 0 else normed,)

    graph = record_prepared(compute, (rows_of(0),), pool=Pool())
    assert not isinstance(graph.replay, Program)
    for seed in range(4):
        graph.inputs[0].copy_(rows_of(seed))
        graph.replay()
        assert torch.equal(graph.outputs[0], compute(rows_of(seed))[0])


def test_what_the_host_uploads_is_never_written_down() -> None:
    """Its memory would be gone at the replay, and its values those of the recording."""
    table, given = torch.arange(12.0).view(6, 2), [[5, 0], [1, 2], [3, 3]]

    def compute(rows: Tensor) -> Tensors:
        return (take_rows(table, to_device(given[-1], torch.int64, rows.device)),)

    graph = record_prepared(compute, (rows_of(0),), pool=Pool())
    assert not isinstance(graph.replay, Program)
    while len(given) > 1:
        given.pop()
        graph.replay()
        assert torch.equal(graph.outputs[0], table[given[-1]])


def test_recordings_share_what_none_of_them_gives_back() -> None:
    """Outputs have memory of their own among the outputs, and hold until the next replay; all between is one memory."""
    norm, weight = block()
    panels, eps, pool = pack(weight), torch.tensor(1e-6), Pool()
    addresses: list[set[int]] = []
    programs, outputs = [], []
    for _ in range(2):
        with recording(pool) as recorded:
            seen = [linear(rows_of(0), panels)]
            addresses.append({seen[0].data_ptr()})
            seen[0] = act_and_mul(seen[0])
            outputs.append(rms_norm(seen.pop(), norm, eps))
        programs.append(recorded.program())
    assert addresses[0] == addresses[1]
    assert outputs[0].data_ptr() != outputs[1].data_ptr()


@pytest.mark.parametrize("count", [0, 1, 7, 128, 1000, 5000])
def test_the_pool_gives_room_of_any_size_aligned(count: int) -> None:
    with recording(Pool()):
        first, second = (empty(count, 3) for _ in range(2))
        assert first.shape == (count, 3) and first.is_contiguous() and first.data_ptr() % 64 == 0
        if count:
            first.fill_(1.0)
            second.fill_(2.0)
            assert bool((first == 1.0).all())


def test_an_interrupted_recording_leaves_nothing_behind() -> None:
    norm, _ = block()
    eps = torch.tensor(1e-6)
    expected = rms_norm(rows_of(0), norm, eps)

    def interrupted(rows: Tensor) -> Tensors:
        rms_norm(rows, norm, eps)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_program(interrupted, (rows_of(0),), pool=Pool())
    assert current() is None and torch.equal(rms_norm(rows_of(0), norm, eps), expected), "kernels run again"


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_a_run_says_the_same_with_recorded_passes_and_without(method: str | None) -> None:
    prompts: list[Any] = [{"prompt_token_ids": own} for own in ([1, 5, 9, 5, 9, 5], [7] * 20, list(range(3, 40)))]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    speculative_config = None if method is None else {"method": method, "num_speculative_tokens": 3}
    texts = []
    for enforce_eager in (False, True):
        llm = LLM(
            "tiny", speculative_config=speculative_config, enforce_eager=enforce_eager, num_gpu_blocks_override=64
        )
        assert (llm.engine.target.graphs is None) == enforce_eager
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_memory_goes_with_the_programs_that_used_it() -> None:
    norm, pool, eps = block()[0], Pool(), torch.tensor(1e-6)
    graph = record_program(lambda rows: (rms_norm(rows, norm, eps),), (rows_of(0),), pool=pool)
    blocks = [block for own in pool._blocks.values() for block in own]
    assert len(blocks) == 1
    gone = weakref.ref(blocks.pop())
    graph.replay()
    del graph
    gc.collect()
    assert gone() is None


def test_what_torch_prepares_once_keeps_no_layout_from_being_recorded() -> None:
    """A table of rotations is made when it is first asked for."""
    norm, eps, prepared = block()[0], torch.tensor(1e-6), list[Tensor]()

    def compute(rows: Tensor) -> Tensors:
        if not prepared:
            prepared.append(norm * 2)
        return (rms_norm(rows, prepared[0], eps),)

    graph = record_program(compute, (rows_of(0),), pool=Pool())
    assert isinstance(graph.replay, Program)
    graph.replay()
    assert torch.equal(graph.outputs[0], compute(rows_of(0))[0])


@pytest.mark.parametrize("method", [method for method in HEAD_DIRS if method != "pard"])
def test_passes_of_every_head_are_recorded(method: str) -> None:
    """Nothing else would tell of an operation that is torch's: the pass would be computed as ever, and slower."""
    config = {"method": method, "model": str(HEAD_DIRS[method]), "num_speculative_tokens": 2}
    llm = LLM("tiny", speculative_config=config, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1, 5, 9]}], params, use_tqdm=False)
    runners = [llm.engine.target, getattr(llm.engine.proposer, "runner", None)]
    stores = [own.graphs for own in runners if own is not None and own.graphs]
    steps = llm.engine.whole_steps[llm.engine.proposer](2)
    assert isinstance(steps, WholeSteps) and steps._graphs._graphs, "steps run whole, and were recorded"
    graphs = [graph for store in [*stores, steps._graphs] for graph in store._graphs.values()]
    assert all(isinstance(graph.replay, Program) for graph in graphs)


def test_engines_in_threads_of_their_own_say_what_they_say_alone() -> None:
    """Bug told here: programs of two engines shared memory, and a compiled call lets other threads run."""
    configs: list[dict[str, Any] | None] = [None, {"method": "ngram", "num_speculative_tokens": 3}]
    engines = [LLM("tiny", speculative_config=config, num_gpu_blocks_override=64) for config in configs]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [1, 5, 9, 5, 9, 5]}]

    def text(llm: LLM) -> list[int]:
        return list(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)

    alone = text(engines[0])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            assert list(pool.map(text, engines)) == [alone, alone]


def small_calls(state: Tensor) -> list[Tensor]:
    """Calls of every kind that lowering.py knows, of numbers of many types; and some that it must leave to torch."""
    n = torch.arange(24).view(2, 3, 4) * 7 % 11 - 3
    small, f = n.int(), (n.double() / 7).float()
    b, row, strange = n > 1, n[0, 0], torch.tensor([0.1, float("nan"), float("-inf"), -0.0])
    columns = f.transpose(1, 2)
    out = torch.empty(2, 3, 8, dtype=torch.int64)
    torch.cat((n, n - 1), dim=2, out=out)
    clamped = torch.empty_like(n)
    torch.clamp(n, min=0, out=clamped)
    compared, wider, wide_bools = f.clone(), torch.empty_like(n), torch.empty_like(n)
    compared.ge_(0.1)
    torch.add(small + 2**30, small + 2**30, out=wider)
    torch.add(b, b, out=wide_bools)
    huge = 2**60 + 2**36 + 1
    state[:, 1:3].copy_(n[:, :2, 0])
    state.mul_(2).clamp_(max=9)
    state[0].zero_()
    return [
        *(n + row, n - 2, 3 - n, n * b, b * b, n + small, small + 2**30 + 2**30, b + b, n / 2, n // 2, n % 3),
        *(f + columns.transpose(1, 2), f - 0.1, 0.1 - f, f * f, f / (f + 0.3), f / 3, torch.add(f, f, alpha=2)),
        *(f.double() * 0.1, f + n, f >= 0.1, f == f, strange == strange, strange < 0.0, strange * 0.0, f > n),
        *(n >= row, n != 3, small <= 2, b == b, b & ~b, b | (n < 0), n ^ 5, n.logical_and(b), b.logical_xor(b)),
        *(n.clamp(0, 3), n.clamp(min=row), small.clamp(max=2), f.clamp(0.0, 0.5), strange.clamp(min=0.0)),
        *(torch.where(b, n, row), torch.where(b, n, -1), torch.where(b, f, 0.5), torch.where(b, n, f)),
        *(torch.where(n.bool(), small, small * 2), torch.where(b[0], 1, 2)),
        *(n.float(), n.bool(), small.long(), b.double(), f.half(), f.double(), f.double().float(), f.bfloat16() + 1),
        *(
            columns.contiguous(),
            columns.clone(),
            small.to(torch.int64),
            n[:, ::2].clone(),
            n[:, :, 1:2].expand(2, 3, 5) + 0,
        ),
        *(torch.full((2, 3), 7), torch.full_like(f, 0.1), n.new_zeros(3), torch.ones(2, 2), torch.full((2,), True)),
        *(torch.stack((n, n + 1), dim=1), torch.stack(list(n.unbind(2)), dim=0), torch.cat((row, row[:0], row))),
        *(torch.cat((f, f.double()), dim=1), torch.cat((f.bfloat16(), f.bfloat16()), dim=-1), torch.zeros(0) + 1),
        *(
            f[0].index_select(0, row[:2].clamp(0, 2)),
            row.index_select(0, row.clamp(0, 3)),
            f.index_select(1, row[:1] * 0),
        ),
        *(f[0].t().index_select(0, row.clamp(0, 3)), torch.arange(3000) + 1, torch.arange(40_000).clone()),
        *(compared, wider, wide_bools, small >= 2**32 + 2, small + torch.tensor(2**32 + 2), small.clamp(max=9)),
        torch.stack((torch.complex(f, f), torch.complex(f, -f))).real,
        *((n + huge).float(), torch.full((2,), huge, dtype=torch.float32), f + huge),
        *(out, clamped, state.clone(), n.sum() + 1, torch.tensor(5) + n[0, 0, 0]),
    ]


def test_small_calls_of_torch_are_written_down_as_kernels_with_its_bits() -> None:
    """NaNs too, and states that go on."""
    state = torch.arange(6).view(2, 3) - 3
    wanted = [small_calls(state), small_calls(state)]  # the second goes on from the first
    state.copy_(torch.arange(6).view(2, 3) - 3)
    graph = record_prepared(lambda: tuple(small_calls(state)), (), pool=Pool())
    assert isinstance(graph.replay, Program)
    gc.collect()
    for expected in wanted:
        graph.replay()
        for index, (found, own) in enumerate(zip(graph.outputs, expected, strict=True)):
            assert found.dtype == own.dtype and found.shape == own.shape and found.stride() == own.stride(), index
            assert torch.equal(found != found, own != own), index
            assert torch.equal(found.nan_to_num(7.5), own.nan_to_num(7.5)), index


def test_a_program_keeps_what_its_kernels_read_and_write_of_nobody() -> None:
    """A tensor that was only written to was gone at a replay, which wrote to what lay there by then."""
    addresses = list[int]()

    def compute() -> Tensors:
        read, written = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
        addresses[:] = [read.data_ptr(), written.data_ptr()]
        written.fill_(-5)
        return (read + 1,)

    graph = record_prepared(compute, (), pool=Pool())
    assert isinstance(graph.replay, Program)
    kept = {own.data_ptr() for own in graph.replay._keeps if isinstance(own, torch.UntypedStorage)}
    assert set(addresses) <= kept
    graph.replay()
    assert graph.outputs[0].tolist() == [2, 3, 4]


def test_a_view_that_negates_what_it_shows_is_computed_anew() -> None:
    numbers = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    graph = record_prepared(lambda: (numbers.conj().imag + 1,), (), pool=Pool())
    graph.replay()
    assert graph.outputs[0].tolist() == [0.0, -1.0, -2.0]


def test_a_chain_of_small_calls_leaves_nothing_to_torch() -> None:
    x, y = torch.arange(8), torch.arange(8.0).view(2, 4)

    def compute() -> Tensors:
        counts = (x - 3).clamp(min=1) * (x >= 2)
        return torch.stack((counts, torch.where(counts > 3, counts, -1)), dim=1), torch.cat((y * 2, y + y), dim=1)

    graph = record_prepared(compute, (), pool=Pool())
    assert isinstance(graph.replay, Program) and len(graph.replay._parts) == 1
    graph.replay()
    for found, wanted in zip(graph.outputs, compute(), strict=True):
        assert torch.equal(found, wanted)
