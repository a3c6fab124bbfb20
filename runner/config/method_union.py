"""The methods: one class each for the keys of its own, and their union, chosen by `method.method`.

A file of proposers/ without a class here is a method without keys of its own. Which class implements a method is not
known here: names map to classes in the composition root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, create_model, field_validator, model_validator

from proposers import available_methods
from runner.config.checkpoint_method import is_dotted_path, method_of_model
from runner.config.drafter_methods import (
    DflashMethod,
    DraftModelMethod,
    DsparkMethod,
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
    MlpSpeculatorMethod,
    MtpMethod,
    PardMethod,
)
from runner.config.from_vllm import names_method, translate
from runner.config.hybrid_method import HybridMethod
from runner.config.method import SYNTHETIC_KEYS, MethodConfig
from runner.config.node import Node
from runner.config.problem import ConfigError, Problem, node_classes, problems_of, union_tag
from runner.config.self_speculation_methods import EarlyExitMethod, SparseKVMethod
from runner.config.suffix_method import SuffixMethod
from runner.config.suffix_recycling_method import SuffixRecyclingMethod
from runner.config.token_recycling_method import TokenRecyclingMethod


class NoneMethod(MethodConfig):
    """Plain decoding: verification with zero drafts."""

    ignored_keys: ClassVar[tuple[str, ...]] = (
        "num_speculative_tokens",
        "rejection_sample_method",
        "draft_sample_method",
        "posterior_threshold",
        "posterior_alpha",
        "num_speculative_tokens_per_batch_size",
        "disable_by_batch_size",
        *SYNTHETIC_KEYS,
    )

    method: Literal["none"] = Field(default="none", description="plain decoding, no drafts")


class PromptLookupMethod(MethodConfig):
    """What the two n-gram methods share."""

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)

    prompt_lookup_min: int = Field(
        default=5, ge=1, description="shortest n-gram matched, tokens, in [1, prompt_lookup_max]; null takes the max"
    )
    prompt_lookup_max: int = Field(
        default=5, ge=1, description="longest n-gram matched, tokens, >= prompt_lookup_min; null takes the min"
    )

    @model_validator(mode="before")
    @classmethod
    def _mirror_bounds(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        bounds = {key: values.pop(key, None) for key in ("prompt_lookup_min", "prompt_lookup_max")}
        given = [bound for bound in bounds.values() if bound is not None]
        if len(given) == 1 and isinstance(given[0], int):
            bounds = dict.fromkeys(bounds, given[0])
        return values | {key: bound for key, bound in bounds.items() if bound is not None}

    @model_validator(mode="after")
    def _check_bounds(self) -> PromptLookupMethod:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be <= prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )
        return self


class NgramMethod(PromptLookupMethod):
    """Prompt lookup: drafts what followed an earlier occurrence of the n-gram that ends the text."""

    method: Literal["ngram"] = Field(default="ngram", description="drafts copied from earlier in the same text")


class NgramGpuMethod(PromptLookupMethod):
    """Prompt lookup on the device; no step waits for the host."""

    method: Literal["ngram_gpu"] = Field(default="ngram_gpu", description="prompt lookup on the device, no host sync")


class CustomClassMethod(MethodConfig):
    """A proposer of the user's own."""

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)

    method: Literal["custom_class"] = Field(default="custom_class", description="a proposer of the user's own")
    model: str = Field(description="dotted path of a Proposer subclass, for instance my_package.MyProposer")
    options: dict[str, JsonValue] = Field(
        default={}, description="keyword arguments of the class, values as JSON has them: method.options.window=8"
    )

    @field_validator("model")
    @classmethod
    def _check_dotted(cls, value: str) -> str:
        if not is_dotted_path(value):
            raise ValueError(f"must be a dotted path to a class, such as my_package.MyProposer, got {value!r}")
        return value

    @field_validator("options")
    @classmethod
    def _check_names(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in options:
            if not name.isidentifier() or name in ("num_speculative_tokens", "context"):
                raise ValueError(f"must name arguments other than num_speculative_tokens and context, got {name!r}")
        return options


class MethodWithoutKeys(MethodConfig):
    """A method that is a file of proposers/ and no more: the common keys are all it has."""

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)
    own_keys_remedy: ClassVar[str] = (
        "keys of its own are fields of a class in runner/config/ that is a member of AnyMethod in method_union.py"
    )


def method_without_keys(name: str) -> type[MethodWithoutKeys]:
    """Its class, for pydantic's union wants one of every name."""
    only_this: Any = Literal[name]
    field = Field(default=name, description=f"the method of proposers/{name}.py")
    return create_model(f"{name}_method", __base__=MethodWithoutKeys, method=(only_this, field))


def infer_method(values: Any) -> Any:
    """Add a missing `method` from what `model` names, and drop a `model` that only names the method."""
    if not isinstance(values, Mapping):
        return values
    values = dict(values)
    model = values.get("model")
    if values.get("method") is None:
        if not isinstance(model, str):
            raise ValueError(f"method is required when model is null; add one of {', '.join(METHODS)}")
        values["method"] = method_of_model(model)
        if values["method"] not in METHODS:
            raise ValueError(
                f"method inferred from the name of model {model!r} is {values['method']}, which is not available; "
                "name method=draft_model if it is a plain draft model"
            )
    method = values["method"]
    if method in METHODS and "model" not in FIELDS[method] and names_method(model, method):
        values.pop("model", None)
    return values


AnyMethod = (
    NoneMethod
    | NgramMethod
    | NgramGpuMethod
    | SuffixMethod
    | TokenRecyclingMethod
    | SuffixRecyclingMethod
    | DraftModelMethod
    | PardMethod
    | EagleMethod
    | Eagle3Method
    | MtpMethod
    | MedusaMethod
    | MlpSpeculatorMethod
    | DflashMethod
    | DsparkMethod
    | EarlyExitMethod
    | SparseKVMethod
    | HybridMethod
    | CustomClassMethod
)
MEMBERS = {union_tag(member): member for member in node_classes(AnyMethod)}
MEMBERS |= {name: method_without_keys(name) for name in available_methods() if name not in MEMBERS}
FIELDS = {name: member.model_fields for name, member in MEMBERS.items()}
METHODS = tuple(MEMBERS)
if TYPE_CHECKING:
    MethodUnion = AnyMethod | MethodWithoutKeys
else:
    MethodUnion = Annotated[
        Annotated[Union[tuple(MEMBERS.values())], Field(discriminator="method")],  # noqa: UP007 - of what is there
        BeforeValidator(infer_method),
    ]


class MethodNode(Node):
    """A method node by itself."""

    method: MethodUnion = Field(description="the method node")


def parse_method(values: Mapping[str, Any]) -> tuple[MethodUnion, tuple[str, ...]]:
    """The method that vLLM's speculative_config means, and notes on what was read otherwise than written.

    Raises:
        ConfigError: all problems, under the names of the speculative_config.
    """
    translation = translate(values, FIELDS)
    problems = [replace(problem, name=f"method.{problem.name}") for problem in translation.problems]
    if not any(problem.name == "method.method" for problem in problems):
        try:
            method = MethodNode.model_validate({"method": translation.values}).method
        except ValidationError as error:
            problems += problems_of(error, MethodNode)
    if problems:
        raise ConfigError([as_speculative_config(problem) for problem in problems])
    return method, translation.notes


def as_speculative_config(problem: Problem) -> Problem:
    """A problem of the method node under the names of the speculative_config that the node came from."""
    texts = (problem.name, problem.rule, problem.remedy)
    name, rule, remedy = (re.sub(r"\bmethod\.", "speculative_config.", text) for text in texts)
    return replace(problem, name=name, rule=rule, remedy=remedy)
