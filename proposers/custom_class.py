"""A user's own proposer, named by its dotted path (vLLM's `custom_class`).

The class subclasses proposers.base.Proposer and takes num_speculative_tokens, context and what `options` names.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from proposers.base import Proposer, ProposerContext
from proposers.captured.drafter import CapturedDrafter
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.schedule import Schedule


class CustomClassProposer(Proposer):
    """Passes everything on to a Proposer of the class.

    Args:
        model: dotted path of the class.
        options: keyword arguments of the class.
    """

    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, model: str, options: Mapping[str, Any]
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        chosen = _import_class(model)
        arguments = {"num_speculative_tokens": num_speculative_tokens, "context": context, **options}
        try:
            inspect.signature(chosen).bind(**arguments)
        except TypeError as error:
            asked, remedy = "num_speculative_tokens and context", "see proposers/base.py"
            if options:
                asked, remedy = f"{asked}, method.options ({', '.join(options)})", f"{remedy}, or mend method.options"
            raise UserError(f"method.model={model} must take {asked}: {error}; {remedy}") from error
        try:
            self.inner = chosen(**arguments)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in options:
                raise  # a bug of the class, as whatever else it raises, and keeps its traceback
            remedy = f"mend method.options, or let the class take {unknown[1]} out of its **kwargs"
            raise UserError(f"method.model={model} must take method.options.{unknown[1]}: {error}; {remedy}") from error
        if not (hasattr(self.inner, "num_speculative_tokens") and hasattr(self.inner, "context")):
            call = "super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)"
            raise UserError(f"method.model={model} must call {call} in its __init__; add it there")
        self.reads_logits, self.taps_every_token = self.inner.reads_logits, self.inner.taps_every_token

    @property
    def name(self) -> str:
        return self.inner.name

    def propose(self, schedule: Schedule) -> DraftTokens:
        return self.inner.propose(schedule)

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        self.inner.update(schedule, output)

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)

    def fills_blocks(self, request: Request) -> bool:
        return self.inner.fills_blocks(request)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        return self.inner.captured_drafter(num_tokens)

    def restart(self) -> None:
        self.inner.restart()

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.inner.tap_layers

    @property
    def cache_bytes_per_block(self) -> int:
        return self.inner.cache_bytes_per_block

    @property
    def state_bytes(self) -> int:
        return self.inner.state_bytes

    @property
    def has_passes(self) -> bool:
        return self.inner.has_passes

    def allocate_cache(self, num_blocks: int) -> None:
        self.inner.allocate_cache(num_blocks)


def _import_class(dotted_path: str) -> type[Proposer]:
    module_name, _, class_name = dotted_path.rpartition(".")
    try:
        found = getattr(_import_module(module_name, dotted_path), class_name)
    except AttributeError as error:
        raise _not_there(dotted_path, error) from error
    if not (isinstance(found, type) and issubclass(found, Proposer)):
        raise UserError(f"method.model must name a subclass of proposers.base.Proposer, got {dotted_path!r}: {found!r}")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise UserError(f"method.model={dotted_path} must define {lacking}; see proposers/base.py")
    return found


def _import_module(name: str, dotted_path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise UserError(f"method.model={dotted_path}: {place} is no valid Python: {error.msg}; mend it") from error
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise _not_there(dotted_path, error) from error
        remedy = "install that package, or mend the import"
        raise UserError(f"method.model={dotted_path}: {name} cannot import all it needs: {error}; {remedy}") from error


def _not_there(dotted_path: str, error: Exception) -> UserError:
    return UserError(
        f"method.model must be the dotted path of a Proposer class, got {dotted_path!r}: {error}; "
        "check the spelling, and that the module is on PYTHONPATH"
    )
