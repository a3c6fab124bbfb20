"""What form a request's output must have, under vLLM's names: a JSON schema, a regex, a choice, or a grammar.

Checks that the request says one thing and says it in the right type; whether a schema or a grammar makes sense is
found out when it is compiled (runner/engine/grammar.py). Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from runner.engine.known_arguments import known_fields


@known_fields
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of one request's output; exactly one of the first five is given.

    Raises:
        ValueError: none or several are given, or one is of the wrong type; the message begins with structured_outputs.
        UserError: there is no key of a name.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as a mapping; kept as text
    regex: str | None = None  # the whole text matches it; Rust's syntax, without look-around and back-references
    choice: Sequence[str] | None = None  # the text is one of these
    grammar: str | None = None  # Lark, as llguidance reads it, or GBNF
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # JSON without spaces and newlines between its parts

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"structured_outputs must have one of {', '.join(KINDS)}, got {found}")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str) and len(self.choice) > 0
            if not is_list or not all(isinstance(text, str) for text in self.choice):
                raise ValueError(f"structured_outputs.choice must be a list of strings, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"structured_outputs.{name} must be a string, got {getattr(self, name)!r}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, value: StructuredOutputsParams | Mapping[str, Any] | None) -> StructuredOutputsParams | None:
        """The record behind what a person or a YAML file wrote."""
        if value is None or isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not all(key in known for key in value):
            raise ValueError(f"structured_outputs must be a mapping with keys of {', '.join(known)}, got {value!r}")
        return cls(**value)


KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _schema_text(schema: object) -> str:
    """The schema as JSON text; its properties keep their order, which is the order of the output."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.json must be a JSON schema ({error}), got {schema!r}") from error
    if not isinstance(parsed, Mapping):
        raise ValueError(f"structured_outputs.json must be a JSON schema, a mapping, got {schema!r}")
    return text
