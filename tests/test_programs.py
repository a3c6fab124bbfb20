"""Recorded passes of a CPU: what replays compute is what the calls would have, whatever they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.linear import linear
from kernels.cpu.panels import can_pack, pack
from kernels.cpu.recording import Pool, empty, recording
from kernels.cpu.rms_norm import add_rms_norm, rms_norm
from kernels.cpu.silu_and_mul import silu_and_mul
from runner.engine.graphs import GraphStore, Tensors
from runner.engine.programs import record_program
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM

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
            normed, residual = add_rms_norm(silu_and_mul(linear(normed, panels)), residual, norm, eps)
        return normed, residual

    expected = [compute(rows_of(seed, dtype=dtype)) for seed in range(4)]
    torch.set_num_threads(num_threads)
    try:
        graph = record_program(compute, (rows_of(0, dtype=dtype),))
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

    store = GraphStore(record_program, at_once=True)
    for seed in range(3):
        (found,) = store("one layout", compute, rows_of(seed))
        assert torch.equal(found, compute(rows_of(seed))[0])


def test_recordings_share_what_none_of_them_gives_back() -> None:
    """Outputs hold until the next replay of their own graph, at least; all between is one memory."""
    norm, weight = block()
    panels, eps, pool = pack(weight), torch.tensor(1e-6), Pool()
    addresses: list[set[int]] = []
    outputs = []
    for _ in range(2):
        with recording(pool) as recorded:
            seen = [linear(rows_of(0), panels)]
            addresses.append({seen[0].data_ptr()})
            seen[0] = silu_and_mul(seen[0])
            outputs.append(rms_norm(seen.pop(), norm, eps))
        assert len(recorded.calls) == 3
    assert addresses[0] == addresses[1]
    assert outputs[0].data_ptr() != outputs[1].data_ptr()


@pytest.mark.parametrize("count", [0, 1, 7, 128, 1000, 5000])
def test_the_pool_gives_room_of_any_size_aligned(count: int) -> None:
    pool = Pool()
    with recording(pool):
        first, second = (empty(count, 3) for _ in range(2))
        assert first.shape == (count, 3) and first.is_contiguous() and first.data_ptr() % 64 == 0
        if count:
            first.fill_(1.0)
            second.fill_(2.0)
            assert bool((first == 1.0).all())


def test_an_interrupted_recording_leaves_nothing_behind() -> None:
    norm, _ = block()

    def interrupted(rows: Tensor) -> Tensors:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_program(interrupted, (rows_of(0),))
    eps = torch.tensor(1e-6)
    assert bool(rms_norm(rows_of(0), norm, eps).isfinite().all()), "kernels run again"


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
