"""What is wrong with a configuration, in the terms of the person who wrote it: name, rule, value, remedy.

Translates pydantic's errors; knows the schema only through the model class it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from runner.engine.errors import UserError
from runner.engine.nearest_names import did_you_mean, nearest

NO_VALUE = object()  # the problem is not about a value, for instance a missing key
UNKNOWN_KEY = "is an unknown key"  # a rule

Place = tuple[type[BaseModel], tuple[str, ...], FieldInfo | None]  # the node, the path from the root, and the field

_TYPE_RULES = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "finite_number": "must be finite",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "string_too_short": "must not be empty",
}
_LIMITS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing to mend."""

    name: str  # dotted, as it is written on the command line
    rule: str  # "must be >= 1"
    value: Any = NO_VALUE
    remedy: str = ""

    def __str__(self) -> str:
        value = "" if self.value is NO_VALUE else f", got {self.value!r}"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.name} {self.rule}{value}{remedy}"


class ConfigError(UserError, ValueError):
    """A configuration that cannot run, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)  # the arguments pickle: launchers carry errors between processes

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RuleErrors(ValueError):
    """Raised by a validator that finds several problems at once; names are relative to its node."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in problems))


def problems_of(error: ValidationError, schema: type[BaseModel]) -> list[Problem]:
    """The problems behind a pydantic error raised by `schema`."""
    found = [(_locate(schema, details["loc"]), details) for details in error.errors(include_url=False)]
    # Where one kind of value has an entry that is wrong, it was meant, and not the others, which refuse the whole.
    refused = {path[:end] for (_, path, field), _ in found if _has_kinds(field) for end in range(len(path))}
    problems: list[Problem] = []
    for place, details in found:
        if place[1] not in refused:
            problems.extend(_translate(details, place, schema))
    return problems


def _translate(details: ErrorDetails, place: Place, schema: type[BaseModel]) -> Iterator[Problem]:
    node, path, field = place
    of_key = path[-1:] == ("[key]",)  # pydantic's mark of a mapping's key, behind the key itself
    name = ".".join(path[:-2] if of_key else path)
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "value_error" and isinstance(context["error"], RuleErrors):
        for problem in context["error"].problems:
            full_name = ".".join(part for part in (name, problem.name) if part)
            yield Problem(name=full_name, rule=problem.rule, value=problem.value, remedy=problem.remedy)
    elif kind == "value_error":
        rule = str(context["error"])
        if field is None or _is_node(field):  # the validator of a node begins with the field it is about
            key, rule = rule.split(" ", 1)
            name = f"{name}.{key}" if name else key
        yield Problem(name=name, rule=rule)
    elif kind == "missing":
        meaning = f"<{field.description}>" if field is not None else "<value>"
        yield Problem(name=name, rule="is required", remedy=f"add {name}={meaning}")
    elif kind == "extra_forbidden":
        yield Problem(name=name, rule=UNKNOWN_KEY, value=value, remedy=_unknown_key(path, node, schema))
    elif kind == "union_tag_invalid":
        options = context["expected_tags"].replace("'", "").split(", ")
        tag_name = f"{name}.{context['discriminator'].strip(chr(39))}"
        rule = f"must be one of {', '.join(options)}"
        yield Problem(name=tag_name, rule=rule, value=context["tag"], remedy=_closest(str(context["tag"]), options))
    elif kind == "union_tag_not_found":
        tag_name = f"{name}.{context['discriminator'].strip(chr(39))}"
        yield Problem(name=tag_name, rule="is required")
    elif kind == "literal_error":
        options = [str(option) for option in _literals(field)]
        rule = f"must be one of {', '.join(options)}"
        yield Problem(name=name, rule=rule, value=value, remedy=_closest(str(value), options))
    elif kind in _LIMITS:
        relation, key = _LIMITS[kind]
        meaning = field.description or "" if field is not None else ""
        yield Problem(name=name, rule=f"must be {relation} {context[key]}", value=value, remedy=meaning)
    else:
        rule = _TYPE_RULES.get(kind) or details["msg"]
        rule = f"has a key that {rule}" if of_key else rule
        yield Problem(name=name, rule=rule, value=value, remedy=_quote_it(name, kind, value))


def _closest(word: str, options: Sequence[str]) -> str:
    close = nearest(word, options)
    return f"did you mean {close[0]!r}?" if close else ""


def _quote_it(name: str, kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"""quote it twice on the command line: {name}='"..."'"""
    return ""


def _unknown_key(path: Sequence[str], node: type[BaseModel], schema: type[BaseModel]) -> str:
    key = path[-1]
    renamed: Mapping[str, str] = getattr(node, "renamed_keys", {})
    if key in renamed:
        return f"pass {renamed[key]!r} instead"
    # Its own group first: the key of another's means something else.
    for parent, field in sorted(schema.model_fields.items(), key=lambda item: item[0] != path[0]):
        owners = [owner for owner in node_classes(field.annotation) if key in owner.model_fields]
        if owners and parent == path[0]:
            return f"only {parent}={' or '.join(map(union_tag, owners))} has it"
        if owners:
            return f"it is a key of {parent}: {parent}.{key}"
    if not nearest(key, node.model_fields):
        if remedy := str(getattr(node, "own_keys_remedy", "")):
            return remedy
        siblings = node_classes(schema.model_fields[path[0]].annotation) if path[0] in schema.model_fields else []
        for sibling in siblings if len(siblings) > 1 else []:
            if close := nearest(key, sibling.model_fields):
                return f"did you mean {close[0]!r} of {path[0]}={union_tag(sibling)}?"
    return did_you_mean(key, node.model_fields)


def node_classes(annotation: Any) -> list[type[BaseModel]]:
    """The configuration nodes in an annotation: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [node for argument in get_args(annotation) for node in node_classes(argument)]


def _is_node(field: FieldInfo) -> bool:
    return bool(node_classes(field.annotation))


def _literals(field: FieldInfo | None) -> list[object]:
    def flatten(annotation: Any) -> list[object]:
        return [
            option for argument in get_args(annotation) for option in (flatten(argument) or [argument])
            if option is not None and not isinstance(option, type)
        ]  # fmt: skip

    return flatten(field.annotation) if field is not None else []


def _has_kinds(field: FieldInfo | None) -> bool:
    """Whether its values are of several kinds, null aside, of which none is a node."""
    if field is None or get_origin(field.annotation) not in (Union, UnionType) or _is_node(field):
        return False
    return sum(kind is not NoneType for kind in get_args(field.annotation)) > 1


def _locate(schema: type[BaseModel], location: Sequence[int | str]) -> Place:
    """What a pydantic location is about; the path is without union tags."""
    node, path, field = schema, [], None
    members: list[type[BaseModel]] = []
    is_kind = False
    for part in location:
        if len(members) > 1:  # a union: pydantic puts the tag of the member here
            node = next(member for member in members if part == union_tag(member))
            members = []
            continue
        if is_kind:  # of other unions, its name for the member
            is_kind = False
            continue
        if field is None or _is_node(field):
            field = node.model_fields.get(str(part))
            is_kind = _has_kinds(field)
        path.append(str(part))
        members = node_classes(field.annotation) if field is not None else []
        if len(members) == 1:
            node = members[0]
    return node, tuple(path), field


def union_tag(member: type[BaseModel]) -> str:
    """The value by which a member of a union is chosen: the default of its one-valued Literal field."""
    return next(
        str(field.default) for field in member.model_fields.values() if get_args(field.annotation) == (field.default,)
    )
