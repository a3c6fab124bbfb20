"""Interpreted Triton functions, without the work that Triton's interpreter does again at every call and operation.

It replaces the builtins of triton.language when a kernel is launched, and again whenever that kernel calls another
jitted function, tl.sum among them: most of what such a call costs. Here they are replaced once, for good. What it
derives from a shape or a dtype it derives for each value of a kernel, and what operands have in common for each pair;
few shapes and dtypes are met again and again.

And with any numpy: Triton before 3.7 makes integers of arrays of one element, which numpy since 2.4 refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version


def interpret_quickly(patch: pytest.MonkeyPatch) -> None:
    """In this process."""
    index_with_any_numpy(patch)
    describe_once(patch)
    make_alike_once(patch)
    patch_once(patch)


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """The language stays replaced, as no test compiles in its own process."""
    from triton import language
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic

    def replace_builtin(place: Any, name: str, member: Any, *_: Any) -> None:
        called = inspect.unwrap(member)  # what is around it asks whether there is a _semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return called(*args, **named)

        patch.setattr(place, name, call)

    with pytest.MonkeyPatch.context() as replacing:
        replacing.setattr(interpreter, "_patch_attr", replace_builtin)
        scope = SimpleNamespace(set_attr=partial(patch.setattr, raising=False))
        replacing.setattr(interpreter, "_LangPatchScope", lambda: scope)
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))


def describe_once(patch: pytest.MonkeyPatch) -> None:
    """Tensors of one shape share its description, types of one shape theirs, and a dtype is looked up by its name.

    Most tensors are operands whose description nobody asks for: they hold their value and its type alone.
    """
    from triton.language import core
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    find_dtype, init_type, init_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    check_handle = interpreter.TensorHandle.__post_init__
    dtypes, sizes = dict[str, Any](), set[tuple[int, str]]()
    own_names = {"handle", "type", "dtype"}
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
            types[key]["sizes"] = key
        vars(block_type).update(types[key], element_ty=element_ty, name=f"<{key}, {element_ty}>")

    def new_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar

    def description(tensor: Any, name: str) -> Any:
        if name in own_names:  # of a tensor that is being made
            raise AttributeError(name)
        key = getattr(tensor.type, "sizes", ())
        if key not in tensors:
            probe = core.tensor.__new__(core.tensor)
            init_tensor(probe, tensor.handle, tensor.type)
            tensors[key] = {name: value for name, value in vars(probe).items() if name not in own_names}
        if name not in tensors[key]:
            raise AttributeError(name)
        return tensors[key][name]

    def check_size(handle: Any) -> None:
        key = handle.data.dtype.num, handle.dtype.name
        if key not in sizes:
            check_handle(handle)
            sizes.add(key)

    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    whole = {core.tensor, core.dtype, core.block_type, int, bool, float, str, type(None)}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in whole else unwrap(value)

    assert not hasattr(core.tensor, "__getattr__")
    # Whether an integer overflows is computed for device asserts alone, and without `debug` these do nothing.
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)
    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    patch.setattr(core.dtype, "__eq__", lambda own, other: own is other or equals(own, other))
    patch.setattr(core.block_type, "__init__", new_type)
    patch.setattr(core.tensor, "__init__", new_tensor)
    patch.setattr(core.tensor, "__getattr__", description, raising=False)
    patch.setattr(interpreter.TensorHandle, "__post_init__", check_size)


def make_alike_once(patch: pytest.MonkeyPatch) -> None:
    """What operands are cast to follows from their types, or a number's value, and is asked of Triton once for each.

    A scalar beside a block gets the block's type, but stays one element, and a column beside a row stays a column:
    numpy extends them.
    """
    from triton.language import core
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value
    make_alike, builder = semantic.binary_op_type_checking_impl, interpreter.interpreter_builder
    plans = dict[Hashable, tuple[Any, Any] | None]()
    blocks = dict[tuple[tuple[int, ...], str], Any]()
    joint = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]()

    def plan(lhs: Any, rhs: Any, rules: Any) -> tuple[Any, Any] | None:
        if all(isinstance(own, core.tensor) and isinstance(own.dtype, core.pointer_type) for own in (lhs, rhs)):
            return None  # two pointers of one name need not be of one type
        probes = (
            core.tensor(builder.get_null_value(own.dtype), own.dtype) if isinstance(own, core.tensor) else own
            for own in (lhs, rhs)
        )
        made: tuple[Any, Any] = make_alike(*probes, *rules)
        return made

    def extended(value: Any, sizes: tuple[int, ...]) -> Any:
        if getattr(value.type, "sizes", ()) == sizes:
            return value
        dtype = value.dtype
        if isinstance(dtype, core.pointer_type):
            return core.tensor(value.handle, core.block_type(dtype, list(sizes)))
        key = sizes, dtype.name
        if key not in blocks:
            blocks[key] = core.block_type(dtype, list(sizes))
        return core.tensor(value.handle, blocks[key])

    def made_alike(lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        is_tensor, is_other = isinstance(lhs, core.tensor), isinstance(rhs, core.tensor)
        left = lhs.dtype.name if is_tensor else (type(lhs), lhs)
        right = rhs.dtype.name if is_other else (type(rhs), rhs)
        key = left, right, rules
        if key not in plans and not named:
            plans[key] = plan(lhs, rhs, rules)
        if named or (likes := plans[key]) is None:
            return make_alike(lhs, rhs, *rules, **named)
        if not is_tensor:
            lhs = likes[0]
        elif left != likes[0].dtype.name:
            lhs = semantic.cast(lhs, likes[0].dtype)
        if not is_other:
            rhs = likes[1]
        elif right != likes[1].dtype.name:
            rhs = semantic.cast(rhs, likes[1].dtype)
        sizes, other_sizes = getattr(lhs.type, "sizes", ()), getattr(rhs.type, "sizes", ())
        if sizes == other_sizes:
            return lhs, rhs
        if (pair := (sizes, other_sizes)) not in joint:
            broadcast(lhs, rhs)  # which refuses sizes that do not go together
            joint[pair] = np.broadcast_shapes(sizes, other_sizes)
        return extended(lhs, joint[pair]), extended(rhs, joint[pair])

    def broadcasted(lhs: Any, rhs: Any) -> Any:
        is_done = getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ())
        return (lhs, rhs) if is_done else broadcast(lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcasted)
    patch.setattr(semantic, "binary_op_type_checking_impl", made_alike)


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
