"""Exchanges between GPUs of one machine by NCCL: the library that torch brings, called as nccl.h has it.

Not by torch.distributed: its process groups do some bookkeeping on the host for every call, which no replay of a CUDA
graph does; a call of NCCL's own is captured as it is. Only bytes are moved, so that NCCL's choice of a route and of an
order is none of a sum's.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runner.engine.errors import UserError

UNIQUE_ID_BYTES, UINT8, SUCCESS = 128, 1, 0  # NCCL_UNIQUE_ID_BYTES, ncclUint8, ncclSuccess
SECONDS_TO_LEAVE = 1.0
LIBRARIES = ("libnccl.so.2", "libnccl.so")


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


@cache
def functions() -> Any:
    """Raises UserError where there is none."""
    for name in LIBRARIES:
        try:
            found = ctypes.CDLL(name)  # torch has loaded the one that it was built with
        except OSError:
            continue
        found.ncclGetErrorString.restype = ctypes.c_char_p
        found.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int)
        found.ncclAllGather.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        found.ncclCommAbort.argtypes = (ctypes.c_void_p,)
        return found
    raise UserError(
        "hardware.tensor_parallel_size must be 1, or there must be NCCL, and libnccl was not found; install a torch "
        "that brings it (the CUDA builds for Linux do)"
    )


def unique_id() -> bytes:
    """By which the ranks of one group find each other."""
    made = UniqueId()
    _check(functions().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class NcclExchange:
    """On the device that is torch's current one in this process."""

    device = torch.device("cuda")
    has_parted = False  # NCCL does not tell

    def __init__(self, unique_id: bytes, *, rank: int, size: int) -> None:
        """Waits for all ranks."""
        self._size, self._group = size, ctypes.c_void_p()
        self._leaving = threading.Lock()
        own = UniqueId.from_buffer_copy(unique_id)
        _check(functions().ncclCommInitRank(ctypes.byref(self._group), size, own, rank))

    def gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        gathered = torch.empty(self._size, *own.shape, dtype=own.dtype, device=own.device)
        if own.nbytes:
            if not self._group:
                raise RuntimeError("NCCL: this rank has left its group")
            where = (self._group, torch.cuda.current_stream().cuda_stream)
            _check(functions().ncclAllGather(own.data_ptr(), gathered.data_ptr(), own.nbytes, UINT8, *where))
        return gathered

    def give_up(self) -> None:
        """Ends what waits on the device, too."""
        with self._leaving:
            group, self._group = self._group, ctypes.c_void_p()
        if group:
            # It lets kernels go at once, and returns when no graph holds calls of the group any more: those that do may
            # be this thread's to let go of.
            leaving = threading.Thread(target=functions().ncclCommAbort, args=(group,), daemon=True)
            leaving.start()
            leaving.join(SECONDS_TO_LEAVE)


def _check(result: int) -> None:
    if result != SUCCESS:
        raise RuntimeError(f"NCCL: {functions().ncclGetErrorString(result).decode()}")
