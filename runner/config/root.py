"""SpeculativeConfig: one validated run, and the rules that span its nodes."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from runner.config.checkpoint_method import kind_of, misfit
from runner.config.drafter_methods import DrafterMethod
from runner.config.hardware import HardwareConfig
from runner.config.method_union import (
    FIELDS,
    MethodNode,
    MethodUnion,
    NoneMethod,
    as_speculative_config,
    parse_method,
)
from runner.config.model import DraftDefaults, ModelConfig
from runner.config.node import Node
from runner.config.problem import ConfigError, Problem, RuleErrors, problems_of
from runner.config.python_names import as_argument
from runner.config.sampler import SamplerConfig
from runner.config.to_vllm import to_vllm
from runner.config.vllm_keys import RENAMED_KEYS
from runner.config.workload import DemoWorkload, WorkloadConfig
from runner.engine.nearest_names import did_you_mean

SPECULATIVE_KEYS = {*RENAMED_KEYS, *(key for keys in FIELDS.values() for key in keys)}


class SpeculativeConfig(Node):
    """One run: what is generated from what, by which method, on which hardware, and where the numbers go."""

    model: ModelConfig = Field(description="the target model and its draft")
    method: MethodUnion = Field(default_factory=NoneMethod, description="the speculation method")
    speculative_config: dict[str, Any] | None = Field(
        default=None,
        description="vLLM's speculative_config in place of the method group: a .json file, a JSON object or a mapping; "
        "excludes method=",
    )
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="sampling parameters of every request")
    hardware: HardwareConfig = Field(default_factory=HardwareConfig, description="device, arithmetic and budgets")
    workload: WorkloadConfig = Field(default_factory=DemoWorkload, description="the requests")
    seed: int = Field(
        default=0, ge=0, lt=2**64, description="seed of requests without one of their own, in [0, 2**64 - 1]"
    )
    baseline: bool = Field(
        default=True, description="also run method=none in the same process, for speedup and identity"
    )
    repeats: int = Field(
        default=1,
        ge=1,
        description="passes over the workload, of plain decoding and the method in turns, >= 1; several give medians "
        "with lowest and highest",
    )
    tracking: Literal["mlflow", "jsonl", "none"] = Field(
        default="mlflow",
        description="mlflow: also log the run there; jsonl: also add a line to runs/runs.jsonl; "
        "none: the run's files only",
    )
    tracking_uri: str | None = Field(
        default=None, min_length=1, description="MLflow tracking URI; null takes MLFLOW_TRACKING_URI, else ./mlflow.db"
    )
    experiment_name: str = Field(
        default="speculative-runner", min_length=1, description="MLflow experiment that the run belongs to"
    )
    run_name: str | None = Field(
        default=None, min_length=1, description="MLflow run name; null builds one from model and method"
    )

    @field_validator("tracking_uri")
    @classmethod
    def _check_scheme(cls, uri: str | None) -> str | None:
        """MLflow would say it only when the model is loaded, and speak of a model registry."""
        if uri is not None and re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
            raise ValueError(f"must begin with a scheme, got {uri!r}; write http://{uri}")
        return uri

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The checked configuration of a composed mapping.

        Raises:
            ConfigError: every problem found, each with name, rule, value and remedy.
        """
        config, problems = cls._read(values)
        if config is None:
            raise ConfigError(problems)
        return config

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> tuple[Self | None, list[Problem]]:
        """The configuration, or why there is none; a speculative_config becomes the method node."""
        values = dict(values)
        problems: list[Problem] = []
        given = values.get("speculative_config")
        if isinstance(given, Mapping):
            values["speculative_config"] = dict(given)
            try:
                values["method"] = _method_of(given, values.pop("method", None))
            except ConfigError as error:
                problems.extend(error.problems)  # go on without a method, to see what else is wrong
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            found = problems_of(error, cls)
            found += cls._problems_beside(found, _without_unknown_keys(values, error))
            problems.extend(map(as_speculative_config, found) if isinstance(given, Mapping) else found)
        return (None, problems) if problems else (config, [])

    @classmethod
    def _problems_beside(cls, found: list[Problem], values: dict[str, Any]) -> list[Problem]:
        """What the rules of whole nodes say, which are not asked about a node with an unknown key."""
        try:
            cls.model_validate(values)
        except ValidationError as error:
            names = {problem.name for problem in found}
            return [problem for problem in problems_of(error, cls) if problem.name not in names]
        return []

    @classmethod
    def from_engine_args(
        cls, model: str, speculative_config: Mapping[str, Any] | None = None, **engine_args: Any
    ) -> Self:
        """The configuration of the Python API: `LLM(model=..., speculative_config={...}, dtype=..., ...)`.

        Flat keyword arguments are keys of the model and hardware nodes, `seed` is the run's. No speculative_config
        is plain decoding.

        Raises:
            ConfigError: every problem found, under the names of the arguments.
        """
        values: dict[str, Any] = {"model": {"model": model}, "hardware": {}, "speculative_config": speculative_config}
        owners = dict.fromkeys(ModelConfig.model_fields, "model")
        owners |= dict.fromkeys(HardwareConfig.model_fields, "hardware")
        problems = []
        for key, value in engine_args.items():
            if key == "seed":
                if value is not None:  # as vLLM has it: no seed of one's own
                    values["seed"] = value
            elif key in owners:
                values[owners[key]][key] = value
            else:
                if key in SPECULATIVE_KEYS:  # flat arguments of older vLLM releases
                    remedy = f"give it inside: speculative_config={{..., {key!r}: {value!r}}}"
                else:
                    remedy = did_you_mean(key, [*owners, "seed", "speculative_config"])
                problems.append(Problem(name=key, rule="is an unknown argument", value=value, remedy=remedy))
        config, found = cls._read(values)
        problems.extend(as_argument(problem) for problem in found)
        if config is None or problems:
            raise ConfigError(problems)
        return config

    @model_validator(mode="after")
    def _check_across_nodes(self) -> Self:
        problems = [*self._draft_problems(), *self._budget_problems()]
        if problems:
            raise RuleErrors(problems)
        return self

    def _draft_problems(self) -> list[Problem]:
        if not isinstance(self.method, DrafterMethod):
            return []
        problems = []
        # Without one of its own mtp's layer is looked for in the target.
        needs_checkpoint = self.method.has_checkpoint and self.method.drafter_name != "mtp"
        if needs_checkpoint and self.method.model is None and self._default_drafter() is None:
            kind = kind_of(self.method.drafter_name)
            known = [*(["draft_model"] if self.model.draft else []), *(self.model.heads or {}), "ngram"]
            problems.append(
                Problem(
                    name="method.model",
                    rule=f"is required: model {self.model.model!r} comes without {kind}",
                    remedy=f"give method.model=<directory or hub id of {kind}>, or choose method={known[0]}",
                )
            )
        problems += self._default_problems()
        draft_len, target_len = self.method.max_model_len, self.model.max_model_len
        if draft_len is not None and target_len is not None and draft_len > target_len:
            problems.append(
                Problem(
                    name="method.max_model_len", rule=f"must be <= model.max_model_len ({target_len})", value=draft_len
                )
            )
        return problems

    def _default_problems(self) -> list[Problem]:
        """The model group may name a drafter of another kind, as method.model may."""
        default = self._default_drafter()
        if default is None or not isinstance(self.method, DrafterMethod) or self.method.model is not None:
            return []
        rule = misfit(default.model, self.method.drafter_name, key=self.method.drafter_key)
        key = "draft" if self.method.drafter_name == "draft_model" else f"heads.{self.method.drafter_name}"
        return [] if rule is None else [Problem(name=f"model.{key}.model", rule=rule)]

    def _budget_problems(self) -> list[Problem]:
        if isinstance(self.method, NoneMethod):
            return []
        num_tokens = self.hardware.max_num_seqs * (1 + self.method.num_speculative_tokens)
        if self.hardware.max_num_batched_tokens >= num_tokens:
            return []
        return [
            Problem(
                name="hardware.max_num_batched_tokens",
                rule=f"must be >= max_num_seqs * (1 + num_speculative_tokens) ({num_tokens})",
                value=self.hardware.max_num_batched_tokens,
                remedy=f"set it to {num_tokens}, or lower hardware.max_num_seqs",
            )
        ]

    def draft_model_config(self) -> ModelConfig | None:
        """The drafter as a model node of its own: method.model, or the one that the model group names for the method.

        None for methods that draft without a checkpoint, and for mtp when its layer is in the target's own.
        """
        if not isinstance(self.method, DrafterMethod):
            return None
        default = self._default_drafter()
        name = self.method.model or (default.model if default is not None else None)
        if name is None:
            return None
        is_default = default is not None and name == default.model
        return ModelConfig(
            model=name,
            revision=self.method.revision,
            load_format=self.model.load_format,
            quantization=self.method.quantization,
            trust_remote_code=self.model.trust_remote_code,
            hf_config=default.hf_config if default is not None and is_default else None,
        )

    def _default_drafter(self) -> DraftDefaults | None:
        if not isinstance(self.method, DrafterMethod):
            return None
        name = self.method.drafter_name
        return self.model.draft if name == "draft_model" else (self.model.heads or {}).get(name)

    def normalised(self) -> Self:
        """The same run with ignored keys at their defaults; points of a sweep that are equal so are run once."""
        return self.model_copy(update={"method": self.method.normalised(), "speculative_config": None})

    def notes(self) -> list[str]:
        """What the run reads otherwise than it was written, or does not do although asked for; one sentence each."""
        translated = () if self.speculative_config is None else parse_method(self.speculative_config)[1]
        return [*translated, *self.method.notes(), *self.sampler.notes()]

    def to_vllm(self) -> tuple[dict[str, Any] | None, list[str]]:
        """vLLM's speculative_config for this run, or None, and notes on what has no counterpart there."""
        draft = self.draft_model_config()
        return to_vllm(
            self.method, draft_model=None if draft is None else draft.model, temperature=self.sampler.temperature
        )


def _method_of(speculative_config: Mapping[str, Any], named: Any) -> MethodUnion:
    """The method of a speculative_config; a node beside it, as a configuration's own dump has it, must be the same."""
    method, _ = parse_method(speculative_config)
    try:
        is_same = named is None or MethodNode.model_validate({"method": named}).method == method
    except ValidationError:
        is_same = False
    if not is_same:
        remedy = "give speculative_config or method"
        raise ConfigError([Problem(name="speculative_config", rule="excludes another method", remedy=remedy)])
    return method


def _without_unknown_keys(values: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    values = copy.deepcopy(values)
    for details in error.errors(include_url=False):
        if details["type"] == "extra_forbidden":
            *path, key = details["loc"]
            node: Any = values
            for part in path:
                node = node.get(part, node)  # the tag of a union is no key
            del node[key]
    return values
