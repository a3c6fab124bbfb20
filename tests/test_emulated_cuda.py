"""The emulated GPU refuses what a GPU refuses, and forgets what a GPU forgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from kernels.reference.rejection import residual_mass
from kernels.reference.sampling import softmax
from runner.engine.download import Download
from runner.engine.graphs import Graph, GraphMemory, record_cuda_graph
from runner.engine.upload import upload
from tests.emulated_device import EmulatedDevice

CUDA = torch.device("cuda")


@triton.jit
def add_kernel(values_ptr, amount, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(values_ptr + places, tl.load(values_ptr + places) + amount)


def add(values: torch.Tensor, amount: int) -> None:
    add_kernel[(1,)](values, amount, SIZE=len(values))


def counted(device: torch.device = CUDA) -> torch.Tensor:
    return torch.arange(4, device=device)


def test_tensors_are_where_they_were_made_or_sent(emulated_gpu: EmulatedDevice) -> None:
    there, here = counted(), counted(torch.device("cpu"))
    sent = here.to(CUDA, torch.float32)
    for tensor in (there, sent, here.cuda(), there + 1, there.view(2, 2), sent.to(torch.int64), there.new_zeros(2)):
        assert tensor.is_cuda and tensor.device == torch.device("cuda", 0)
    for tensor in (here, there.cpu(), sent.to("cpu"), there.new_zeros(2, device="cpu")):
        assert not tensor.is_cuda and tensor.device.type == "cpu"
    module = torch.nn.Linear(2, 2).to(CUDA)
    assert module.weight.is_cuda and module(torch.ones(1, 2, device=CUDA)).is_cuda


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a sum": (lambda there: there + torch.ones(4), "same device"),
    "an index": (lambda there: torch.ones(4)[there], "same device"),
    "numpy": (lambda there: there.numpy(), "numpy"),
    "a kernel": (lambda there: add(torch.ones(4), 1), "cpu tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_host_and_device_do_not_mix(what: str, emulated_gpu: EmulatedDevice) -> None:
    work, message = REFUSED[what]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        work(counted())
    assert int((counted() * torch.tensor(2))[1]) == 2  # numbers may


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda there: int(there[0]),
    "tolist": lambda there: there.tolist(),
    "nonzero": lambda there: there.nonzero(),
    "a mask": lambda there: there[there > 1],
    "a mask that is written to": lambda there: there.masked_fill(there > 1, 0).index_put((there > 1,), there[0]),
    "an index of the host": lambda there: there[[1, 2]],
    "cpu": lambda there: there.cpu(),
    "an upload": lambda there: torch.tensor([1, 2], device=CUDA),
    "pageable memory": lambda there: torch.ones(2).to(CUDA, non_blocking=True),
    "a copy": lambda there: there.copy_(torch.ones(4)),
    "synchronize": lambda there: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_cannot_be_captured_and_is_found(what: str, emulated_gpu: EmulatedDevice) -> None:
    there, work = counted(), WAITS[what]
    work(there)
    with pytest.raises(RuntimeError, match="capturing"):
        record_cuda_graph(lambda held: (work(held),), (there,), memory=GraphMemory())
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        work(there)
    torch.cuda.set_sync_debug_mode("default")


def test_what_the_engine_sends_and_fetches_waits_for_nothing(emulated_gpu: EmulatedDevice) -> None:
    torch.cuda.set_sync_debug_mode("error")
    download = Download(upload(torch.tensor([1, 2]), CUDA) + 1)
    torch.cuda.set_sync_debug_mode("default")
    assert download._values.tolist() != [2, 3], "it is there when it has been waited for"
    assert download.read().tolist() == [2, 3]


def test_a_capture_computes_nothing_and_a_replay_what_was_captured(emulated_gpu: EmulatedDevice) -> None:
    amount, total = 16, torch.zeros(4, dtype=torch.int64, device=CUDA)
    add(torch.zeros(4, dtype=torch.int64, device=CUDA), 16)  # compiles

    def compute(held: torch.Tensor) -> tuple[torch.Tensor]:
        total.add_(held)
        add(total, amount)
        return ((total.reshape(2, 2).t().reshape(4) * amount).to(torch.float32),)

    graph = record_cuda_graph(compute, (counted(),), memory=GraphMemory())
    assert total.tolist() == [0] * 4 and bool(graph.outputs[0].isnan().all())
    amount = 0
    graph.replay()
    assert total.tolist() == [16, 17, 18, 19] and graph.outputs[0].tolist() == [256.0, 288.0, 272.0, 304.0]
    graph.inputs[0].fill_(1)
    graph.replay()
    assert total.tolist() == [33, 34, 35, 36]
    assert len(emulated_gpu.graph_sizes) == 1 and emulated_gpu.num_replays == 2


def test_a_variant_of_a_kernel_is_not_compiled_while_capturing(emulated_gpu: EmulatedDevice) -> None:
    def compute(held: torch.Tensor) -> tuple[torch.Tensor]:
        add(held, 17)
        return (held,)

    add(counted(), 16)  # a multiple of sixteen is a variant of its own
    with pytest.raises(RuntimeError, match="add_kernel would be compiled"):
        record_cuda_graph(compute, (counted(),), memory=GraphMemory())
    add(counted(), 3)
    graph = record_cuda_graph(compute, (counted(),), memory=GraphMemory())
    graph.replay()
    assert graph.outputs[0].tolist() == [17, 18, 19, 20]


def test_memory_holds_nothing_of_use_until_it_is_written(emulated_gpu: EmulatedDevice) -> None:
    assert bool(torch.empty(2, device=CUDA).isnan().all())

    def compute(held: torch.Tensor) -> tuple[torch.Tensor]:
        scratch = torch.empty(2, device=CUDA)
        scratch[0] = held[0]
        return (scratch.clone(),)

    memory = GraphMemory()
    graph: Graph = record_cuda_graph(compute, (counted(),), memory=memory)
    graph.replay()
    assert bool(graph.outputs[0][1].isnan()) and int(graph.outputs[0][0]) == 0
    elsewhere = record_cuda_graph(compute, (counted(),), memory=GraphMemory())
    elsewhere.replay()
    assert bool(graph.outputs[0][1].isnan()) and int(graph.outputs[0][0]) == 0
    beside = record_cuda_graph(compute, (counted(),), memory=memory)
    beside.replay()
    assert bool(graph.outputs[0].isnan().all())


def test_a_graph_does_not_keep_what_it_reads(emulated_gpu: EmulatedDevice) -> None:
    weights = [torch.ones(4, device=CUDA)]
    graph = record_cuda_graph(lambda held: (held * weights[0],), (counted(),), memory=GraphMemory())
    graph.replay()
    weights.clear()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


def test_sums_whose_order_goes_by_the_rows_beside_them_are_refused(emulated_gpu: EmulatedDevice) -> None:
    """And those that verification is made of are not."""
    rows = torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    there = rows.to(CUDA)
    for unsteady in (torch.Tensor.cumsum, torch.Tensor.sum, torch.Tensor.softmax):
        with pytest.raises(RuntimeError, match=r"a GPU's .* goes by"):
            unsteady(there, dim=-1)
    assert torch.equal(softmax(there).cpu(), rows.softmax(dim=-1))
    for width in range(1, 8):
        sums = residual_mass(there[:, :width], torch.zeros_like(there[:, :width]), torch.ones(3, device=CUDA)).cpu()
        assert torch.allclose(sums, rows[:, :width].double().sum(dim=-1), rtol=1e-14)
