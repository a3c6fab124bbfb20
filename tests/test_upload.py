"""Host values go to the device as torch would read them, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.reference.sampling import unpack_bitmask
from runner.engine.upload import to_device, upload

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([], torch.int64),
        ([[], []], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
        ([(0, 1, 2), (3, 4, 5)], torch.int64),
        (range(3), torch.int32),
        ([True, False], torch.bool),
        ((0.1, 1 / 3, 2), torch.float32),
        ([0.1, 1 / 3, float("-inf")], torch.float64),
    ],
    ids=repr,
)
def test_values_are_what_torch_reads(values: Sequence[object], dtype: torch.dtype) -> None:
    found, wanted = to_device(values, dtype, CPU), torch.tensor(values, dtype=dtype)
    assert found.dtype == dtype and torch.equal(found, wanted)


def test_an_upload_comes_from_pinned_memory() -> None:
    """From pageable memory a copy waits for all that the stream has to do."""
    made: list[Any] = []

    class Host:
        def pin_memory(self) -> Host:
            made.append("pinned")
            return self

        def to(self, device: Any, non_blocking: bool = False) -> str:
            made.append(non_blocking)
            return "on the device"

    gpu: Any = SimpleNamespace(type="cuda")
    host: Any = Host()
    assert upload(host, gpu) == "on the device"
    assert made == ["pinned", True]


def test_a_bitmask_is_unpacked_without_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its powers of two were a list once, so that every step with a grammar waited for the device."""
    bitmask = torch.tensor([[-(2**31) + 5, 1]], dtype=torch.int32)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an upload")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert unpack_bitmask(bitmask, vocab_size=40).nonzero()[:, 1].tolist() == [0, 2, 31, 32]
