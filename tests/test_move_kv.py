"""Moving cached slots: the torch reference against a copy by hand, Triton's kernel and a CPU's against both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.move_kv import move_kv as on_cpu
from kernels.reference.move_kv import move_kv as reference
from runner.engine.kv_cache import PagedKVCache

triton_ops = pytest.importorskip("kernels.move_kv")
CPU = torch.device("cpu")


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    """Requests with slots of their own; each moves some of them, in order, to its first ones, or moves nothing."""
    num_requests, num_slots = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    order = draw(st.permutations(range(1, num_requests * num_slots + 1)))
    own = [sorted(order[i * num_slots : (i + 1) * num_slots]) for i in range(num_requests)]
    places = [sorted(draw(st.sets(st.integers(0, num_slots - 1)))) for _ in range(num_requests)]
    deepest = max(1, *map(len, places))
    pad = [[0] * (deepest - len(kept)) for kept in places]
    return {
        "widths": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        "num_slots": num_requests * num_slots + 1,
        "sources": [[slots[p] for p in kept] + rest for slots, kept, rest in zip(own, places, pad, strict=True)],
        "targets": [slots[: len(kept)] + rest for slots, kept, rest in zip(own, places, pad, strict=True)],
    }


@settings(max_examples=60)
@given(moves(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([4, 16]))
def test_every_slot_holds_what_was_moved_there_and_others_stay(
    kernel_device: torch.device, case: dict[str, Any], dtype: torch.dtype, block: int
) -> None:
    """Blocks are small, so that a slot takes several programs; slots of a request overlap in source and target."""
    widths, num_slots = case["widths"], case["num_slots"]
    offsets = [num_slots * sum(widths[:layer]) for layer in range(len(widths))]
    kv = torch.randn(num_slots * sum(widths), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [kv[o : o + num_slots * w].view(num_slots, w).clone() for o, w in zip(offsets, widths, strict=True)]
    before = [layer.clone() for layer in expected]
    for sources, targets in zip(case["sources"], case["targets"], strict=True):
        for layer, old in zip(expected, before, strict=True):
            for source, target in zip(sources, targets, strict=True):
                layer[target] = old[source]
    layout = torch.tensor([offsets, widths])
    slots = torch.tensor([case["sources"], case["targets"]])
    by_reference, by_cpu, by_kernel = kv.clone(), kv.clone(), kv.clone().to(kernel_device)
    reference(by_reference, layout[0], layout[1], slots[0], slots[1])
    on_cpu(by_cpu, layout[0], layout[1], slots[0], slots[1], widest=max(widths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "BLOCK", block)
        layout, slots = layout.to(kernel_device), slots.to(kernel_device)
        triton_ops.move_kv(by_kernel, layout[0], layout[1], slots[0], slots[1], widest=max(widths))
    wanted = torch.cat([layer.flatten() for layer in expected])
    assert torch.equal(by_reference, wanted) and torch.equal(by_cpu, wanted)
    assert torch.equal(by_kernel.cpu(), wanted)


def test_nobody_and_nothing_to_move_are_fine(kernel_device: torch.device) -> None:
    kv = torch.arange(12.0, device=kernel_device)
    layout = torch.tensor([[0, 8], [2, 1]], device=kernel_device)
    for shape in ((0, 3), (2, 0)):
        nothing = torch.empty(shape, dtype=torch.int64, device=kernel_device)
        triton_ops.move_kv(kv, layout[0], layout[1], nothing, nothing, widest=2)
        reference(kv, layout[0], layout[1], nothing, nothing)
        on_cpu(kv.cpu(), layout[0].cpu(), layout[1].cpu(), nothing.cpu(), nothing.cpu(), widest=2)
    assert kv.tolist() == list(range(12))


def test_threads_of_a_cpu_move_all_that_there_is() -> None:
    """More than one of them copies; a move reads what the one before it has left alone."""
    num_slots, width, num_requests, before = 40, 600, 3, torch.get_num_threads()
    kv = torch.randn(2 * num_slots * width, generator=torch.Generator().manual_seed(0))
    sources = torch.arange(1, 1 + 12 * num_requests).view(num_requests, 12)[:, 1:]
    layout, by_cpu = torch.tensor([[0, num_slots * width], [width, width]]), kv.clone()
    torch.set_num_threads(3)
    on_cpu(by_cpu, layout[0], layout[1], sources.contiguous(), (sources - 1).contiguous(), widest=width)
    torch.set_num_threads(before)
    reference(kv, layout[0], layout[1], sources, sources - 1)
    assert torch.equal(by_cpu, kv)


def test_a_cache_moves_slots_in_all_of_its_layers() -> None:
    cache = PagedKVCache([3, 2], num_blocks=3, block_size=4, dtype=torch.float32, device=CPU)
    for layer, width in enumerate((3, 2)):
        cache.write(layer, torch.arange(12), torch.arange(12.0).unsqueeze(1).expand(-1, width) + 100 * layer)
    cache.move(torch.tensor([[6, 8, 0]]), torch.tensor([[5, 6, 0]]))
    for layer, width in enumerate((3, 2)):
        held = cache.layers[layer].flatten(0, 1)
        assert (held[:, 0] - 100 * layer).tolist() == [0, 1, 2, 3, 4, 6, 8, 7, 8, 9, 10, 11]
        assert held.shape == (12, width) and bool((held == held[:, :1]).all())
