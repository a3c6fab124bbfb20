"""A vLLM user's speculative_config as keys of the `method` node, with a note for everything that is read otherwise.

`translate` judges what is vLLM's (spellings, switches, internal fields, methods); values are checked by the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from runner.config.problem import Problem
from runner.config.sampler import SamplerConfig
from runner.config.vllm_keys import (
    KEYS_WITHOUT_EFFECT,
    MTP_SUFFIX,
    NAME_MARKS,
    NEUTRAL,
    REFUSED_KEYS,
    REFUSED_VALUES,
    RENAMED_KEYS,
    RENAMED_VALUES,
    SAMPLING_KEYS,
    UNAVAILABLE_METHODS,
)

# Values by which another method's key asks for what is so anyway.
KEYS_OFF = (("draft_tensor_parallel_size", 1), ("use_heterogeneous_vocab", False))
MAX_SUFFIX_TOKENS = 128  # vLLM's limit on num_speculative_tokens, and ours


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a speculative_config means here."""

    values: dict[str, Any]  # keys of the method node
    notes: tuple[str, ...]  # what is read otherwise than it was written, one sentence each
    problems: tuple[Problem, ...]  # what is refused; names are relative to the speculative_config


def translate(given: Mapping[str, Any], fields: Mapping[str, Set[str]]) -> Translation:
    """Read a speculative_config as vLLM reads it.

    Args:
        given: keys and values as the user wrote them.
        fields: the keys of every method that is available here.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    values = _today(given, notes, problems)
    _drop_switches(values, notes)
    _drop_refused(values, problems)
    known = frozenset().union(*fields.values())
    values = {key: value for key, value in values.items() if value is not None or key not in known}
    method = values.get("method")
    if isinstance(method, str) and (name := _unavailable(method)):
        written = "" if name == method else f" ({name} in vLLM's newer spelling)"
        problems.append(
            Problem(
                name="method",
                rule=f"{method!r}{written} is not available yet",
                remedy=f"available: {', '.join(fields)}",
            )
        )
    if method is None and isinstance(model := values.get("model"), str):
        method = method_of_model(model)
    if isinstance(method, str) and method in fields:
        values["method"] = method  # before keys of other methods go, `model` may be one
        _drop_foreign(values, method, fields, known, notes)
        _take_depth_for_tokens(values, method, notes)
        _take_rule_for_drafting(values, method, notes)
    return Translation(values=values, notes=tuple(notes), problems=tuple(problems))


def method_of_model(model: str) -> str:
    """The method that vLLM infers from `model` when none is named; heads are known by their names."""
    if is_dotted_path(model):
        return "custom_class"
    if model in ("ngram", "[ngram]"):
        return "ngram"
    return next((method for mark, method in NAME_MARKS if mark in model.lower()), "draft_model")


def names_method(model: Any, method: str) -> bool:
    """Whether `model` only says the method once more, as vLLM has it for the methods without a model."""
    return model in (None, method, f"[{method}]", "ngram", "[ngram]")


def is_dotted_path(model: str) -> bool:
    """Whether `model` reads as package.module.Class."""
    return "." in model and all(part.isidentifier() for part in model.split("."))


def _today(given: Mapping[str, Any], notes: list[str], problems: list[Problem]) -> dict[str, Any]:
    """Keys and values in today's spelling."""
    values: dict[str, Any] = {}
    for written, value in given.items():
        key = RENAMED_KEYS.get(written, written)
        if key in values or (key != written and key in given):
            problems.append(Problem(name=written, rule=f"is an older name of {key}", remedy="give one of the two"))
            continue
        if key != written and value is not None:
            notes.append(f"speculative_config.{written}={value!r} is read as {key}")
        values[key] = value
    for key, spellings in RENAMED_VALUES.items():
        value = values.get(key)
        if isinstance(value, str) and value in spellings:
            values[key] = spellings[value]
            notes.append(f"speculative_config.{key}={value!r} is read as {spellings[value]!r}")
    return values


def _drop_switches(values: dict[str, Any], notes: list[str]) -> None:
    for key, reason in KEYS_WITHOUT_EFFECT.items():
        if key in values and (value := values.pop(key)) not in NEUTRAL:
            notes.append(f"speculative_config.{key}={value!r} changes nothing here: {reason}")


def _drop_refused(values: dict[str, Any], problems: list[Problem]) -> None:
    for key, refusal in REFUSED_KEYS.items():
        if key in values and (value := values.pop(key)) not in refusal.unless:
            problems.append(Problem(name=key, rule=refusal.rule, value=value, remedy=refusal.remedy))
    for key in (*SamplerConfig.model_fields, *SAMPLING_KEYS):
        if key in values:
            remedy = f"pass sampler.{key}, from Python SamplingParams({key}=...)"
            if key not in SamplerConfig.model_fields:
                remedy = f"pass SamplingParams({key}=...) with the prompt"
            problems.append(Problem(name=key, rule="is a sampling parameter", value=values.pop(key), remedy=remedy))
    for (key, value), remedy in REFUSED_VALUES.items():
        if values.get(key) == value:
            problems.append(Problem(name=key, rule="is not available", value=values.pop(key), remedy=remedy))


def _unavailable(method: str) -> str | None:
    """The name of a method of vLLM's that is not here."""
    name = "mtp" if method.endswith(MTP_SUFFIX) else method
    return name if name in UNAVAILABLE_METHODS else None


def _drop_foreign(
    values: dict[str, Any], method: str, fields: Mapping[str, Set[str]], known: Set[str], notes: list[str]
) -> None:
    """vLLM's keys exist on every method; those of another method change nothing there either."""
    for key in list(values):
        if key in known and key not in fields[method]:
            value = values.pop(key)
            if key == "model" and names_method(value, method):
                continue
            if (key, value) not in KEYS_OFF:
                notes.append(f"speculative_config.{key}={value!r} changes nothing with method={method}")


def _take_depth_for_tokens(values: dict[str, Any], method: str, notes: list[str]) -> None:
    depth = values.get("suffix_decoding_max_tree_depth")
    if method != "suffix" or "num_speculative_tokens" in values or type(depth) is not int:
        return
    values["num_speculative_tokens"] = min(max(depth, 0), MAX_SUFFIX_TOKENS)
    notes.append(
        f"num_speculative_tokens={values['num_speculative_tokens']} comes from "
        f"suffix_decoding_max_tree_depth={depth}, as in vLLM"
    )


def _take_rule_for_drafting(values: dict[str, Any], method: str, notes: list[str]) -> None:
    """A vLLM that has draft_sample_method has `standard` as its default rule; strict would waste such drafts."""
    key = "rejection_sample_method"
    if method == "draft_model" and values.get("draft_sample_method") == "probabilistic" and key not in values:
        values[key] = "probabilistic"
        notes.append(f"{key}=probabilistic comes with draft_sample_method=probabilistic, as in vLLM")
