"""Which calls of torch are written down as small_operations.py's kernels instead; all others stay torch's.

They are those whose result such a kernel has to the bit, of few numbers: of many torch's own loops are faster. What
torch checks, it has checked when the computation was made before it was recorded; a replay checks nothing, indices
neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.rows import WHOLE, take_into
from kernels.cpu.small_operations import FLOATS, INTEGERS, NUM_DIMS, RAW, Operation, choose, compute

MOST_COMPUTED, MOST_COPIED = 1 << 11, 1 << 15  # numbers
LARGEST_WHOLE = 2**53  # beyond it an integer is not a float64

Keep = Callable[[Tensor], None]
COMPARISONS = {name: Operation[name.upper()] for name in ("ge", "gt", "le", "lt", "eq", "ne")}
ARITHMETIC = {name: Operation[name.upper()] for name in ("add", "sub", "mul", "div")}
BITWISE = {f"bitwise_{name}": Operation[name.upper()] for name in ("and", "or", "xor")}
LOGICAL = {f"logical_{name}": Operation[name.upper()] for name in ("and", "or", "xor")}
BINARY = ARITHMETIC | COMPARISONS | BITWISE | LOGICAL
OF_BOOLS = {"mul", *COMPARISONS, *BITWISE, *LOGICAL}  # that give bools


def lower(func: Any, args: Any, kwargs: Any, out: Tensor, keep: Keep) -> bool:
    """Write the call down as kernels, if that can be; whether it was. keep: takes what they read or write for good.

    out: the one tensor that the call writes to.
    """
    if out.numel() == 0 or out.dim() > NUM_DIMS or out.device.type != "cpu" or out.is_complex():
        return False
    name = func._schema.name.removeprefix("aten::")
    lowering = LOWERINGS.get(name.removesuffix("_") if not name.startswith("_") else name)
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    is_lowered = lowering is not None and lowering(name.removesuffix("_"), named, out, keep)
    if is_lowered:
        keep(out)
    return is_lowered


def _binary(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    a, b = named["self"], named["other"]
    if named.get("alpha", 1) != 1 or named.get("rounding_mode") is not None or out.numel() > MOST_COMPUTED:
        return False
    dtype = torch.result_type(a, b)  # that torch computes in
    is_known = _fits_integers if dtype in INTEGERS else _fits_floats
    if not is_known(name, dtype, (a, b), out):
        return False
    dtype = torch.int64 if dtype in INTEGERS else dtype
    compute(BINARY[name], out, _tensor(a, dtype, keep), _tensor(b, dtype, keep))
    return True


def _fits_integers(name: str, dtype: torch.dtype, operands: tuple[Tensor | float, ...], out: Tensor) -> bool:
    """Whether computing in int64, and storing as many bits as the result has, is what torch does."""
    if name == "div" or out.dtype not in INTEGERS or (out.dtype == torch.bool and name not in OF_BOOLS):
        return False
    if dtype == torch.bool:
        return name in OF_BOOLS
    if name in LOGICAL:
        return False
    if dtype == torch.int64:
        return True
    # What is wider than int32, torch would cut first; and it would cut the result before it stores it.
    is_cut = any(_is_wider(own) for own in operands)
    return not is_cut and (name in COMPARISONS or out.dtype == torch.int32)


def _is_wider(operand: Tensor | float) -> bool:
    if isinstance(operand, Tensor):
        return operand.dtype == torch.int64
    limits = torch.iinfo(torch.int32)
    return not limits.min <= operand <= limits.max


def _fits_floats(name: str, dtype: torch.dtype, operands: tuple[Tensor | float, ...], out: Tensor) -> bool:
    """Whether torch computes in the type of the tensors, and rounds what it gives once."""
    if dtype not in FLOATS or name not in ARITHMETIC | COMPARISONS:
        return False
    if any(own.dtype != dtype if isinstance(own, Tensor) else abs(own) > LARGEST_WHOLE for own in operands):
        return False
    return out.dtype == (torch.bool if name in COMPARISONS else dtype)


def _clamp(name: str, named: dict[str, Any], out: Tensor, keep: Keep) -> bool:
    x, least, most = named["self"], named.get("min"), named.get("max")
    bounds = torch.iinfo(torch.int64)
    if x.dtype not in (torch.int64, torch.int32) or out.dtype != x.dtype or out.numel() > MOST_COMPUTED:
        return False
    given = [own for own in (least, most) if own is not None]
    if not all(isinstance(own, int) and (x.dtype == torch.int64 or not _is_wider(own)) for own in given):
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
    if out.numel() > MOST_COPIED or out.device != source.device or source.dim() > out.dim():
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
    is_known = isinstance(value, int | float) and (out.dtype in INTEGERS or not abs(value) > LARGEST_WHOLE)
    return is_known and _copied(_tensor(value, out.dtype, keep), out, keep)


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
            is_copied = _copied(own, place, keep)
            assert is_copied, "a part of what may be copied may be"
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
