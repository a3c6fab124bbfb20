"""y = x W^T + b with W in oneDNN's own layout: on a CPU, fast for any number of rows, and each row keeps its bits.

oneDNN adds up the products of a result in one order, whatever the number of rows and the place of a row (measured: an
AMD EPYC with AVX2 in float32, one with AVX-512 in bfloat16 too; 1 to 130 rows, 1 and 2 threads). MKL, behind F.linear,
does not, so that it needs tiles of fixed size (kernels/reference/linear.py); on the first of these a tile of 4 rows
took two to three times as long as they take here. Nobody promises the order, so `any_rows_keep_their_bits` asks the
machine.
"""

from __future__ import annotations

import torch


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out_features, in_features] in oneDNN's layout: a copy, or itself where it is packed.

    Its shape, dtype and device can be read; it can neither be indexed nor written.

    Raises:
        RuntimeError: this CPU, this build of torch or this dtype has no such layout.
    """
    if weight.is_mkldnn:
        return weight
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        raise RuntimeError(f"products on {weight.device} have no packed weights in this build of torch")
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """The numbers of a weight, packed or not: a copy of those of a packed one."""
    return weight.to_dense() if weight.is_mkldnn else weight


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[num_rows, in_features] x [out_features, in_features] -> [num_rows, out_features]; has no gradient."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


def any_rows_keep_their_bits(packed: torch.Tensor) -> bool:
    """Whether, on this machine, a row's result depends neither on the number of rows nor on its place among them.

    Tried once for each shape, dtype and number of threads, on which the choice of instructions depends.
    """
    kind = (packed.shape, packed.dtype, torch.get_num_threads())
    if kind not in _TRIED:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(130, packed.shape[1], generator=generator).to(packed.dtype)
        together = packed_linear(rows, packed, None)
        _TRIED[kind] = all(
            torch.equal(packed_linear(rows[:count], packed, None), together[:count])
            and torch.equal(packed_linear(rows[-count:], packed, None), together[-count:])
            for count in (1, 2, 5, 17, 64)
        )
    return _TRIED[kind]


_TRIED: dict[tuple[torch.Size, torch.dtype, int], bool] = {}
