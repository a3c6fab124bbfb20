"""Torch's functions as transformers' modelling code calls them on a CPU, such that a row's bits are its own.

Torch lets bits depend on a launch in two ways: a BLAS picks another order of its sums for another number of rows; and
the last numbers of a tensor, or of a thread's share of it, which fill no vector, are computed by other code than the
rest (measured: silu, sigmoid, softplus and gelu in float32, rsqrt in bfloat16). `RowFunctions` takes the functions that
do so out of the code's hands while it is active. Others are exact, or a row's own by what they do;
runner.engine.transformers_check asks a whole model whether that is so.

To look at every call takes about a millisecond a layer, so only modules that call such functions run under it: those of
the kinds that do so in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

NUMBERS = 64  # of any dtype fill the vectors that a pass over a tensor takes together, on every CPU
Function = Callable[..., Any]


class RowFunctions(TorchFunctionMode):
    """Active, it computes what may depend on a row's company in ways of its own, and leaves the rest to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _way_of(func, args)(*args, **(kwargs or {}))


def keep_rows_in(model: nn.Module, run: Callable[[], object]) -> None:
    """Has every module that calls such a function run under RowFunctions from now on.

    Args:
        run: a pass through the model, which need not come by all modules (of experts only some are chosen), but by some
            of every kind.
    """
    callers = _Callers()
    with callers:
        run()
    for module in model.modules():
        if type(module) in callers.found:
            module.forward = partial(_under_row_functions, module.forward)


def _under_row_functions(forward: Function, *args: Any, **kwargs: Any) -> Any:
    with RowFunctions():
        return forward(*args, **kwargs)


class _Callers(TorchFunctionMode):
    """Notes the kinds of modules whose own code, not that of modules inside, calls a function that is taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[type[nn.Module]] = set()
        self._running: list[nn.Module] = []

    def __enter__(self) -> _Callers:
        self._hooks = (
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(lambda *_: self._leave()),
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _leave(self) -> None:
        self._running.pop()  # and gives nothing back: what a hook returns takes the place of the module's output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _way_of(func, args) is not func and self._running:
            self.found.add(type(self._running[-1]))
        return func(*args, **(kwargs or {}))


def untouched() -> AbstractContextManager[None]:
    """Inside, functions are torch's own again: what our own code calls is a row's own already."""
    return torch._C.DisableTorchFunction()


@contextmanager
def one_thread() -> Iterator[None]:
    """What torch computes meanwhile it does not share among threads: a setting of the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _product(x: Tensor, other: Tensor) -> Tensor:
    """Each row of x by a product of its own."""
    if x.dim() < 2 or x.shape[-1] == 1:  # of one input: a product a number, added to nothing
        return torch.matmul(x, other)
    if other.dim() <= 2:
        rows = [torch.matmul(row.clone(), other) for row in x.reshape(-1, 1, x.shape[-1])]
        return _stacked(rows, (*x.shape[:-1], *other.shape[1:]), x)
    batch = (x[..., 0, 0] * other[..., 0, 0]).shape  # of both, broadcast
    matrices = zip(
        x.expand(*batch, *x.shape[-2:]).flatten(0, -3),
        other.expand(*batch, *other.shape[-2:]).flatten(0, -3),
        strict=True,
    )
    rows = [torch.matmul(row.clone(), weight) for own, weight in matrices for row in own.split(1)]
    return _stacked(rows, (*batch, x.shape[-2], other.shape[-1]), x)


def _stacked(rows: list[Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.cat(rows).view(shape) if rows else like.new_empty(shape)


# Parameters are torch's, also where it calls the same ones by several names (other, mat2; mat1 and mat2, batch1 ...).


def _matmul(*operands: Tensor, out: Tensor | None = None, **named: Tensor) -> Tensor:
    first = (named.pop("input"),) if "input" in named else ()
    return _into(out, _product(*first, *operands, *named.values()))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = [F.linear(row.clone(), weight, bias) for row in input.reshape(-1, 1, input.shape[-1])]
    return _stacked(rows, (*input.shape[:-1], len(weight)), input)


def _addmm(
    input: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, out: Tensor | None = None, **named: Tensor
) -> Tensor:
    product = alpha * _product(*factors, *(named[name] for name in sorted(named)))
    return _into(out, product if beta == 0 else beta * input + product)  # by 0 not even NaN counts


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.resize_(result.shape).copy_(result)


def _in_whole_vectors(func: Function, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
    """A function of each number by itself: by one thread, over as many numbers as fill all vectors."""
    x, *others = (kwargs.pop("input"), *args) if "input" in kwargs else args
    if not isinstance(x, Tensor) or any(isinstance(other, Tensor) for other in (*others, *kwargs.values())):
        return func(x, *others, **kwargs, **({"inplace": True} if inplace else {}))
    count = x.numel()
    flat = F.pad(x.reshape(-1), (0, -count % NUMBERS))
    with one_thread():
        found = func(flat, *others, **kwargs)[:count].view(x.shape)
    return x.copy_(found) if inplace else found


def _in_place(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(_in_whole_vectors(func, x, *args, **kwargs))


# Functions of each number by itself, but for those that are rounded once whatever computes them: sums, quotients and
# roots. What takes two tensors (powers of one by the other, atan2), einsum, and sums with alpha are torch's still.
_OF_NUMBERS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "rsqrt", "sigmoid", "tanh", "erf", "erfc"),
    *("sin", "cos", "tan", "sinh", "cosh", "atan", "atanh", "silu", "gelu", "softplus", "mish", "elu", "selu", "celu"),
    *("logsigmoid", "softsign", "tanhshrink"),
)
_EXACT_POWERS = (2, 3, 0.5, -1, -2)  # which torch computes by products, quotients and roots
_WIDE = (torch.float32, torch.float64)  # of which it has the reciprocal of a root by a root and a quotient


def _way_of(func: Any, args: Any) -> Any:
    """How a call is computed so that rows keep their bits; the function itself where they do."""
    is_wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype in _WIDE
    if func in _ROOTS and is_wide:
        return func
    if func in _POWERS and len(args) > 1 and isinstance(args[1], int | float):
        is_exact = args[1] in _EXACT_POWERS or (args[1] == -0.5 and is_wide)
        return func if is_exact else _WAYS[func]
    return _WAYS.get(func, func)


def _ways() -> dict[Any, Function]:
    places = (torch, F, Tensor, torch.special)
    ways: dict[Any, Function] = {
        F.linear: _linear,
        torch.addmm: _addmm,
        torch.baddbmm: _addmm,
        Tensor.addmm: _addmm,
        Tensor.baddbmm: _addmm,
        Tensor.__matmul__: _matmul,
        Tensor.__pow__: partial(_in_whole_vectors, Tensor.pow),
        Tensor.__rpow__: partial(_in_whole_vectors, Tensor.__rpow__),
    }
    for name in ("matmul", "mm", "bmm"):
        ways |= {getattr(place, name): _matmul for place in (torch, Tensor)}
    for name in _OF_NUMBERS:
        out_of_place = getattr(torch, name, None) or getattr(F, name)
        for place in places:
            if (func := getattr(place, name, None)) is not None:
                ways[func] = partial(_in_whole_vectors, func)
            if (func := getattr(place, f"{name}_", None)) is not None:
                ways[func] = partial(_in_place, out_of_place)
    return ways


_WAYS = _ways()
_POWERS = (torch.pow, Tensor.pow, Tensor.__pow__)
_ROOTS = (torch.rsqrt, Tensor.rsqrt)
