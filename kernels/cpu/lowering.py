"""Which calls of torch are written down as small_operations.py's kernels instead; all others stay torch's.

They are those whose result such a kernel has to the bit, of few numbers: of many torch's own loops are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.rows import WHOLE, take_into
from kernels.cpu.small_operations import FLOATS, INTEGERS, NUM_DIMS, RAW, Operation, choose, compute

MOST_COMPUTED, MOST_COPIED = 1 << 11, 1 << 15  # numbers

Keep = Callable[[Tensor], None]
COMPARISONS = {name: Operation[name.upper()] for name in ("ge", "gt", "le", "lt", "eq", "ne")}
ARITHMETIC = {name: Operation[name.upper()] for name in ("add", "sub", "mul", "div")}
BITWISE = {f"bitwise_{name}": Operation[name.upper()] for name in ("and", "or", "xor")}
LOGICAL = {f"logical_{name}": Operation[name.upper()] for name in ("and", "or", "xor")}
BINARY = ARITHMETIC | COMPARISONS | BITWISE | LOGICAL
OF_BOOLS = {"mul", *COMPARISONS, *BITWISE, *LOGICAL}  # that give bools


def lower(func: Any, args: Any, kwargs: Any, out: Tensor, keep: Keep) -> bool:
    """Write the call down as kernels, if that can be; whether it was. keep: takes what the kernels read for good.

    out: the one tensor that the call writes to.
    """
    if out.numel() == 0 or out.dim() > NUM_DIMS or out.device.type != "cpu":
        return False
    name = func._schema.name.removeprefix("aten::")
    lowering = LOWERINGS.get(name.removesuffix("_") if not name.startswith("_") else name)
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return lowering is not None and lowering(name.removesuffix("_"), named, out, keep)


def _binary(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    a, b = named["self"], named["other"]
    if named.get("alpha", 1) != 1 or named.get("rounding_mode") is not None or out.numel() > MOST_COMPUTED:
        return False
    tensors = [own for own in (a, b) if isinstance(own, Tensor)]
    if all(own.dtype in INTEGERS for own in tensors):
        if name == "div" or not all(isinstance(own, Tensor | int) for own in (a, b)) or out.dtype not in INTEGERS:
            return False
        are_bools = all(own.dtype == torch.bool for own in tensors)
        if (name in LOGICAL and not are_bools) or (out.dtype == torch.bool and name not in OF_BOOLS):
            return False
        dtype = torch.int64
    else:
        dtype = tensors[0].dtype
        if name not in ARITHMETIC | COMPARISONS or dtype not in FLOATS or any(own.dtype != dtype for own in tensors):
            return False
        if out.dtype not in (dtype, torch.bool):
            return False
    compute(BINARY[name], out, _tensor(a, dtype, keep), _tensor(b, dtype, keep))
    return True


def _clamp(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    x, least, most = named["self"], named.get("min"), named.get("max")
    bounds = torch.iinfo(torch.int64)
    if x.dtype not in (torch.int64, torch.int32) or out.dtype != x.dtype or out.numel() > MOST_COMPUTED:
        return False
    if not all(own is None or isinstance(own, int) for own in (least, most)):
        return False
    lowest, highest = (bounds.min if least is None else least), (bounds.max if most is None else most)
    compute(
        Operation.CLAMP,
        out,
        _tensor(x, x.dtype, keep),
        _tensor(lowest, torch.int64, keep),
        _tensor(highest, torch.int64, keep),
    )
    return True


def _where(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    condition, a, b = named["condition"], named["self"], named["other"]
    is_known = condition.dtype == torch.bool and a.dtype == b.dtype == out.dtype and out.element_size() in RAW
    if not is_known or out.numel() > MOST_COPIED:
        return False
    choose(out, *(_tensor(own, own.dtype, keep) for own in (a, b, condition)))
    return True


def _copy(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    source = named["src"] if "src" in named else named["self"]
    return _copied(source, out, keep)


def _copied(source: Tensor, out: Tensor, keep: Keep) -> bool:
    """A copy, to another type too."""
    if out.numel() > MOST_COPIED or out.device != source.device or out.is_complex() or source.dim() > out.dim():
        return False
    if source.dtype == out.dtype and out.element_size() in RAW:
        choose(out, _tensor(source, source.dtype, keep))
        return True
    is_known = source.dtype in INTEGERS and (out.dtype in INTEGERS or out.dtype in FLOATS)
    is_known = is_known or (source.dtype in FLOATS and out.dtype in FLOATS)
    if not is_known or out.numel() > MOST_COMPUTED:
        return False
    compute(Operation.CONVERT, out, _tensor(source, source.dtype, keep))
    return True


def _fill(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    value = 0
    for key in ("fill_value", "value", "s"):
        value = named.get(key, value)
    if name in ("ones", "new_ones", "ones_like"):
        value = 1
    return isinstance(value, int | float) and _copied(_tensor(value, out.dtype, keep), out, keep)


def _cat(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    tensors, dim = named["tensors"], named.get("dim", 0)
    if out.numel() > MOST_COPIED or any(own.dtype != out.dtype for own in tensors) or out.element_size() not in RAW:
        return False
    if name == "stack":
        places = list(out.unbind(dim))
    elif all(own.dim() == out.dim() for own in tensors):
        places = list(out.split_with_sizes([own.shape[dim] for own in tensors], dim))
    else:
        return False  # torch leaves empty vectors out
    for place, own in zip(places, tensors, strict=True):
        if own.numel():
            _copied(own, place, keep)
    return True


def _take(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    table, rows = named["self"], named["index"]
    if named["dim"] not in (0, -table.dim()) or table.dim() not in (1, 2) or rows.dim() != 1:
        return False
    if rows.dtype != torch.int64 or not rows.is_contiguous() or out.element_size() not in WHOLE:
        return False
    if out.numel() > MOST_COPIED or (table.dim() == 2 and not table.stride(1) == out.stride(1) == 1):
        return False
    keep(table)
    keep(rows)
    if table.dim() == 1:
        out, table = out.unsqueeze(1), table.unsqueeze(1)
    take_into(out, table, rows)
    return True


def _tensor(value: Tensor | float, dtype: torch.dtype, keep: Keep) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    keep(tensor)
    return tensor


LOWERINGS: dict[str, Callable[[str, dict[str, Any], Tensor, Keep], bool]] = {
    **dict.fromkeys(BINARY, _binary),
    "clamp": _clamp,
    "where": _where,
    **dict.fromkeys(("copy", "clone", "_to_copy"), _copy),
    **dict.fromkeys(("fill", "zero", "full", "zeros", "ones", "new_full", "new_zeros", "new_ones"), _fill),
    **dict.fromkeys(("full_like", "zeros_like", "ones_like", "scalar_tensor"), _fill),
    **dict.fromkeys(("cat", "stack"), _cat),
    "index_select": _take,
}
