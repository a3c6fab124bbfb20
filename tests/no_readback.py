"""A mode in which a look at tensor data from the host fails, as it would stall a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoReadback(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on operations whose result's shape or host value depends on tensor data: each would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2"), name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), "boolean indexing reads back"
        if name == "repeat_interleave":
            assert "output_size" in (kwargs or {})
        return func(*args, **(kwargs or {}))
