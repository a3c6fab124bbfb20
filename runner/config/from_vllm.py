"""A vLLM user's speculative_config as keys of the `method` node, with a note for everything that is read otherwise.

`translate` judges what is vLLM's (spellings, switches, internal fields, methods); values are checked by the schema.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from runner.config.checkpoint_method import method_of_model, tokens_of_model
from runner.config.from_arctic import take_matches
from runner.config.problem import Problem
from runner.config.quantization import OF_CHECKPOINTS
from runner.config.sampler import SamplerConfig
from runner.config.vllm_keys import (
    DEPTH_KEY,
    ENGINE_ARGS_OFF,
    ENGINE_ARGS_UNDECIDED,
    ENGINE_ARGS_WITHOUT_EFFECT,
    KEYS_WITHOUT_EFFECT,
    MTP_SUFFIX,
    NEUTRAL,
    ONE_PASS_KEY,
    ONE_PASS_METHODS,
    REFUSED_KEYS,
    REFUSED_VALUES,
    RENAMED_KEYS,
    RENAMED_VALUES,
    SAMPLING_KEYS,
    TREE_KEY,
    UNAVAILABLE_METHODS,
)

Fields = Mapping[str, Mapping[str, FieldInfo]]  # of every method
# Values by which another method's key asks for what is so anyway.
KEYS_OFF = (("draft_tensor_parallel_size", 1), ("use_heterogeneous_vocab", False))
MAX_SUFFIX_TOKENS = 128  # vLLM's limit on num_speculative_tokens, and ours


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a speculative_config means here."""

    values: dict[str, Any]  # keys of the method node
    notes: tuple[str, ...]  # what is read otherwise than it was written, one sentence each
    problems: tuple[Problem, ...]  # what is refused; names are relative to the speculative_config


def translate(given: Mapping[str, Any], fields: Fields) -> Translation:
    """Read a speculative_config as vLLM reads it.

    Args:
        given: keys and values as the user wrote them.
        fields: the keys of every method that is available here, with their defaults.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    values = _today(given, notes, problems)
    _drop(values, KEYS_WITHOUT_EFFECT, "speculative_config.", notes)
    take_matches(values, _inferred(values), notes)
    _drop_refused(values, problems)
    _take_whole_drafter(values, notes)
    known = frozenset().union(*fields.values())
    unsaid = known - {TREE_KEY}  # with null; a tree's asks for a chain
    values = {key: value for key, value in values.items() if value is not None or key not in unsaid}
    if (quantization := values.get("quantization")) in OF_CHECKPOINTS:
        del values["quantization"]
        notes.append(f"speculative_config.quantization={quantization!r} is read from the checkpoint's config.json")
    method = values.get("method")
    if method in UNAVAILABLE_METHODS:
        problems.append(
            Problem(
                name="method",
                rule=f"{method!r} is not available yet",
                remedy=f"available: {', '.join(fields)}",
            )
        )
    elif isinstance(method, str) and method.endswith(MTP_SUFFIX) and method not in fields:
        remedy = "give 'mtp', the method of every checkpoint of this kind"
        problems.append(Problem(name="method", rule="is none of vLLM's names of mtp", value=method, remedy=remedy))
    method = _take_one_pass(values, _inferred(values), notes, problems)
    if isinstance(method, str) and method in fields:
        values["method"] = method  # before keys of other methods go, `model` may be one
        _take_tree(values, method, fields, problems)
        _drop_foreign(values, method, fields, known, notes)
        _take_depth_for_tokens(values, method, notes)
        if "revision" in fields[method]:  # a model or a head drafts: the others have no config
            _take_tokens_of_checkpoint(values, method, fields, notes)
        # Nor draft_probs, but for the target's own.
        if not {"revision", "exit_layer", "num_recent_tokens"}.isdisjoint(fields[method]):
            _take_rule_for_drafting(values, notes)
            _note_drafting_of_rule(values, notes)
    return Translation(values=values, notes=tuple(notes), problems=tuple(problems))


def without_switches(engine_args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments of an LLM without vLLM's switches that change nothing here, and a note on each that is on."""
    off = [*ENGINE_ARGS_OFF.items(), *((key, None) for key in ENGINE_ARGS_UNDECIDED)]
    kept, notes = {key: value for key, value in engine_args.items() if (key, value) not in off}, list[str]()
    _drop(kept, ENGINE_ARGS_WITHOUT_EFFECT, "", notes)
    return kept, notes


def names_method(model: Any, method: str) -> bool:
    """Whether `model` only says the method once more, as vLLM has it for the methods without a model."""
    return model in (None, method, f"[{method}]", "ngram", "[ngram]")


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


def _drop(values: dict[str, Any], reasons: Mapping[str, str], prefix: str, notes: list[str]) -> None:
    for key, reason in reasons.items():
        if key in values and (value := values.pop(key)) not in NEUTRAL:
            notes.append(f"{prefix}{key}={value!r} changes nothing here: {reason}")


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


def _take_whole_drafter(values: dict[str, Any], notes: list[str]) -> None:
    """Another number of GPUs would change how fast it drafts, and no token."""
    key = "draft_tensor_parallel_size"
    if type(size := values.get(key)) is int and size > 1:
        values[key] = 1
        notes.append(f"speculative_config.{key}={size} is read as 1: a drafter runs whole on each of the target's GPUs")


def _inferred(values: Mapping[str, Any]) -> Any:
    """The method, or the one that `model` means; None where that cannot be said, which the schema explains."""
    method, model = values.get("method"), values.get("model")
    if method is not None or not isinstance(model, str):
        return method
    try:
        return method_of_model(model)
    except ValueError:
        return None


def _take_one_pass(values: dict[str, Any], method: Any, notes: list[str], problems: list[Problem]) -> Any:
    """vLLM's switch for drafters that draft all tokens in one pass: here a method of its own, or the checkpoint's."""
    value = values.pop(ONE_PASS_KEY, None)
    written = f"speculative_config.{ONE_PASS_KEY}={value!r}"
    if value is None or method is None:
        return method
    if not isinstance(value, bool):
        problems.append(Problem(name=ONE_PASS_KEY, rule="must be true or false", value=value))
    elif method == "pard" and not value and values.get("method") is None:
        notes.append(f"{written}: the PARD draft model drafts token by token, method=draft_model")
        return "draft_model"
    elif method == "draft_model" and value:
        notes.append(f"{written} with method=draft_model is read as method=pard")
        return "pard"
    elif method == "eagle3" and value:
        notes.append(f"{written} changes nothing here: an EAGLE-3 checkpoint says itself whether it drafts in one pass")
    elif method in ONE_PASS_METHODS and not value:
        remedy = "remove it" + (", or name method=draft_model" if method == "pard" else "")
        problems.append(
            Problem(name=ONE_PASS_KEY, rule=f"must be true with method={method}", value=value, remedy=remedy)
        )
    elif method in ("eagle", "mtp", "medusa", "mlp_speculator") and value:
        remedy = "remove it; drafters made for one pass run under method=pard, eagle3 (P-EAGLE), dflash or dspark"
        problems.append(
            Problem(name=ONE_PASS_KEY, rule=f"is not available with method={method}", value=value, remedy=remedy)
        )
    elif method not in ONE_PASS_METHODS and value:
        notes.append(f"{written} changes nothing with method={method}")
    return method


def _take_tree(values: dict[str, Any], method: str, fields: Fields, problems: list[Problem]) -> None:
    """The tree of releases that had one: a list of paths, written as Python writes it."""
    tree = values.get(TREE_KEY)
    if tree is None:
        if TREE_KEY not in fields[method]:
            values.pop(TREE_KEY, None)
        return
    if TREE_KEY not in fields[method]:
        with_trees = ", ".join(name for name, keys in fields.items() if TREE_KEY in keys)
        remedy = f"remove it, its drafts are chains; trees are drafted by {with_trees}"
        problems.append(
            Problem(name=TREE_KEY, rule=f"is not available with method={method}", value=tree, remedy=remedy)
        )
        del values[TREE_KEY]
    elif isinstance(tree, str) and tree.lstrip().startswith(("[", "(")):
        try:
            paths = ast.literal_eval(tree)
            # Level by level, as vLLM sorts it: a parent comes before its children.
            values[TREE_KEY] = sorted(paths, key=lambda path: (len(path), path))
        except (ValueError, SyntaxError, TypeError):
            return  # the schema says what it should be


def _drop_foreign(
    values: dict[str, Any],
    method: str,
    fields: Fields,
    known: Set[str],
    notes: list[str],
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
    depth = values.get(DEPTH_KEY)
    if method != "suffix" or "num_speculative_tokens" in values or type(depth) is not int:
        return
    values["num_speculative_tokens"] = min(max(depth, 0), MAX_SUFFIX_TOKENS)
    notes.append(
        f"num_speculative_tokens={values['num_speculative_tokens']} comes from {DEPTH_KEY}={depth}, as in vLLM"
    )


def _take_tokens_of_checkpoint(values: dict[str, Any], method: str, fields: Fields, notes: list[str]) -> None:
    key, model = "num_speculative_tokens", values.get("model")
    if key in values:
        return
    found = tokens_of_model(model, method) if isinstance(model, str) else None
    if found is not None:
        values[key] = found
        notes.append(f"{key}={found} comes from the config.json of {model}, as in vLLM")
    else:
        default = fields[method][key].default
        notes.append(f"{key} is not given and is {default}, the default here; vLLM takes what the draft's config says")


def _take_rule_for_drafting(values: dict[str, Any], notes: list[str]) -> None:
    """A vLLM that has draft_sample_method has `standard` as its default rule; strict would waste such drafts."""
    key = "rejection_sample_method"
    if values.get("draft_sample_method") == "probabilistic" and key not in values:
        values[key] = "probabilistic"
        notes.append(f"{key}=probabilistic comes with draft_sample_method=probabilistic, as in vLLM")


def _note_drafting_of_rule(values: dict[str, Any], notes: list[str]) -> None:
    """In vLLM the way to draft does not depend on the rule; here a rule that reads draft_probs has drafts drawn."""
    rule, is_dynamic = values.get("rejection_sample_method"), values.get(TREE_KEY) == "dynamic"
    if rule in ("probabilistic", "block") and "draft_sample_method" not in values and not is_dynamic:
        notes.append(
            f"draft_sample_method=probabilistic comes with rejection_sample_method={rule}: drafts are drawn from the "
            "draft's own distribution; vLLM's default is draft_sample_method=greedy, name it to have that"
        )
