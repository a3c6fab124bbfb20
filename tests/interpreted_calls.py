"""Interpreted Triton functions, without the work that Triton's interpreter does again at every call and operation.

It replaces the builtins of triton.language when a kernel is launched, and again whenever that kernel calls another
jitted function, tl.sum among them: most of what such a call costs. A launch's replacements hold until it ends, and what
a call replaces beyond them (in tl.core) stays for good, so that once is enough for each function. What it derives from
a shape or a dtype it derives for each value of a kernel; few shapes and dtypes are met again and again.

And with any numpy: Triton before 3.7 makes integers of arrays of one element, which numpy since 2.4 refuses.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """A jitted function that another calls patches the language in its first call alone."""
    from triton.runtime.interpreter import InterpretedFunction

    first_call = InterpretedFunction.__call__
    prepared = set[Any]()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn in prepared:
            return function.rewrite()(*args, **kwargs)
        prepared.add(function.fn)
        return first_call(function, *args, **kwargs)

    patch.setattr(InterpretedFunction, "__call__", call)


def describe_once(patch: pytest.MonkeyPatch) -> None:
    """Tensors of one shape share its description, types of one shape theirs, and a dtype is looked up by its name."""
    from triton.language import core
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    find_dtype, init_type, init_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes = dict[str, Any]()
    types, tensors = dict[tuple[int, ...], dict[str, Any]](), dict[tuple[int, ...], dict[str, Any]]()

    def dtype_of(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = find_dtype(scalar)
        return dtypes[scalar.name]

    def new_type(block_type: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in types:
            init_type(block_type, element_ty, shape)  # which checks the shape
            types[key] = {name: vars(block_type)[name] for name in vars(block_type).keys() - {"element_ty", "name"}}
        vars(block_type).update(types[key], element_ty=element_ty, name=f"<{key}, {element_ty}>")

    def new_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in tensors:
            init_tensor(tensor, handle, kind)
            tensors[key] = {name: vars(tensor)[name] for name in vars(tensor).keys() - {"handle", "type", "dtype"}}
        vars(tensor).update(tensors[key], handle=handle, type=kind, dtype=kind.scalar)

    # Whether an integer overflows is computed for device asserts alone, and without `debug` these do nothing.
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)
    patch.setattr(core.block_type, "__init__", new_type)
    patch.setattr(core.tensor, "__init__", new_tensor)


def index_with_any_numpy(patch: pytest.MonkeyPatch) -> None:
    """A value of a kernel is an array of one element: numpy before 2.4 makes it an integer, later ones a scalar."""
    if Version(version("triton")) >= Version("3.7"):
        return  # it makes a scalar of it first
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.squeeze()))

    patch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
