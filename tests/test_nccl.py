"""Calls of NCCL as its C interface has them: a stand-in, called by the platform's own convention, says what arrives."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.engine import nccl
from runner.engine.errors import UserError
from runner.engine.nccl import UINT8, NcclExchange, UniqueId, unique_id

ID, GROUP, STREAM = bytes(range(1, 129)), 0x1234, 0x5678
REFUSED = 5  # ncclInvalidUsage


class Nccl:
    """A group of two ranks of which the other always has what this one has, and one more."""

    def __init__(self) -> None:
        self.calls = list[tuple[Any, ...]]()
        void, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._refuses, self.graphs_are_gone = 0, threading.Event()
        self.graphs_are_gone.set()

        def get_unique_id(to: int) -> int:
            ctypes.memmove(to, ID, len(ID))
            return self._refuses

        def init(group: int, num_ranks: int, of: UniqueId, rank: int) -> int:
            ctypes.c_void_p.from_address(group).value = GROUP
            self.calls.append(("init", num_ranks, bytes(of), rank))
            return self._refuses

        def all_gather(own: int, to: int, count: int, kind: int, group: int, stream: int) -> int:
            self.calls.append(("gather", count, kind, group, stream))
            ctypes.memmove(to, own, count)
            ctypes.memmove(to + count, bytes(byte ^ 1 for byte in ctypes.string_at(own, count)), count)
            return self._refuses

        def abort(group: int) -> int:
            self.calls.append(("abort", group))
            self.graphs_are_gone.wait()  # those that hold calls of the group
            return 0

        make = ctypes.CFUNCTYPE
        self.functions = SimpleNamespace(
            ncclGetUniqueId=make(integer, void)(get_unique_id),
            ncclCommInitRank=make(integer, void, integer, UniqueId, integer)(init),
            ncclAllGather=make(integer, void, void, size, integer, void, void)(all_gather),
            ncclCommAbort=make(integer, void)(abort),
            ncclGetErrorString=lambda result: f"refused with {result}".encode(),
        )

    def refuse(self) -> None:
        self._refuses = REFUSED


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    made = Nccl()
    monkeypatch.setattr(nccl, "functions", lambda: made.functions)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    return made


def test_a_group_is_joined_by_the_whole_of_its_id(stand_in: Nccl) -> None:
    """Which holds zeros, as text would end with the first of them."""
    assert unique_id() == ID
    with_zeros = bytes([7, 0, *range(126)])
    NcclExchange(with_zeros, rank=1, size=2)
    assert stand_in.calls == [("init", 2, with_zeros, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_bytes_are_gathered_on_the_current_stream(stand_in: Nccl, dtype: torch.dtype) -> None:
    own = torch.arange(12).view(3, 4).to(dtype)
    gathered = NcclExchange(ID, rank=0, size=2).gather(own.T)  # which is not contiguous
    assert stand_in.calls[1:] == [("gather", own.nbytes, UINT8, GROUP, STREAM)]
    assert torch.equal(gathered[0], own.T)
    assert gathered.shape == (2, 4, 3) and gathered.dtype == dtype
    assert torch.equal(gathered[1].view(torch.uint8), gathered[0].view(torch.uint8) ^ 1)


def test_nothing_is_gathered_of_nothing(stand_in: Nccl) -> None:
    assert NcclExchange(ID, rank=0, size=2).gather(torch.empty(0, 5)).shape == (2, 0, 5)
    assert len(stand_in.calls) == 1


def test_a_group_is_left_once_and_nothing_waits_for_its_graphs(stand_in: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the caller's to let go of: closing an engine would have hung."""
    monkeypatch.setattr(nccl, "SECONDS_TO_LEAVE", 0.01)
    stand_in.graphs_are_gone.clear()
    exchange = NcclExchange(ID, rank=0, size=2)
    exchange.give_up()
    exchange.give_up()
    stand_in.graphs_are_gone.set()
    assert stand_in.calls[1:] == [("abort", GROUP)]
    with pytest.raises(RuntimeError, match="this rank has left its group"):
        exchange.gather(torch.zeros(3))


def test_what_nccl_refuses_is_told(stand_in: Nccl) -> None:
    exchange = NcclExchange(ID, rank=0, size=2)
    stand_in.refuse()
    with pytest.raises(RuntimeError, match="NCCL: refused with 5"):
        exchange.gather(torch.zeros(3))


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARIES", ("libnowhere.so",))
    nccl.functions.cache_clear()
    with pytest.raises(UserError, match="there must be NCCL, and libnccl was not found"):
        nccl.functions()
