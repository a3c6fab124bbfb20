"""The sampling parameters of every request of the run, under SamplingParams' names.

The ranges live in SamplingParams: this node checks by building one.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict, model_validator

from runner.config.node import Node
from runner.config.problem import Problem, RuleErrors
from runner.engine.sampling_params import SamplingParams


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _none_as_empty(value: Any) -> Any:
    return {} if value is None else value  # an empty mapping in YAML could not be replaced from the command line


def _schema_as_text(value: Any) -> Any:
    """A JSON schema is one value: as text it stays whole, its properties in order, on the way to files and trackers."""
    if isinstance(value, dict) and isinstance(value.get("json"), dict):
        return {**value, "json": json.dumps(value["json"])}
    return value


class SamplerConfig(Node):
    """Sampling parameters; `to_sampling_params` gives the record that the engine reads."""

    n: int = Field(default=1, description="completions per prompt, in [1, 16384], each with noise of its own")
    temperature: float = Field(default=0.0, description="logits are divided by it, in [1e-5, 100]; 0 is greedy")
    top_k: int = Field(default=0, description="keep the k most likely tokens, >= 1; 0 or -1 keeps all")
    top_p: float = Field(
        default=1.0, description="keep the smallest set of most likely tokens whose mass reaches it, in (0, 1]"
    )
    min_p: float = Field(default=0.0, description="drop tokens less likely than min_p times the likeliest, in [0, 1]")
    presence_penalty: float = Field(
        default=0.0, description="subtracted once from the logit of every token in the output, in [-2, 2]"
    )
    frequency_penalty: float = Field(
        default=0.0, description="subtracted per occurrence in the output from a token's logit, in [-2, 2]"
    )
    repetition_penalty: float = Field(
        default=1.0, description="weakens the logits of tokens in prompt or output, in (0, 10]; 1 is off"
    )
    logit_bias: Annotated[dict[Annotated[int, Strict(False)], float], BeforeValidator(_none_as_empty)] = Field(
        default_factory=dict, description="{token id: bias}, added to the token's logit, in [-100, 100]; null is none"
    )
    allowed_token_ids: Annotated[tuple[int, ...], Strict(False)] | None = Field(
        default=None, description="the only token ids, >= 0, that may be sampled; null is all"
    )
    bad_words: Annotated[tuple[str, ...], Strict(False), BeforeValidator(_as_list)] = Field(
        default=(), description="strings that the output may not spell in the tokenizer's own tokens"
    )
    seed: int | None = Field(
        default=None,
        description="seed of every request, in [0, 2**64 - 1]; null or -1 folds the run's with the request's index",
    )
    max_tokens: int | None = Field(
        default=128, description="output tokens at most, >= 1; null is as many as max_model_len leaves"
    )
    min_tokens: int = Field(default=0, description="output tokens before eos or a stop token may come, <= max_tokens")
    stop: Annotated[tuple[str, ...], Strict(False), BeforeValidator(_as_list)] = Field(
        default=(), description="strings that end the text"
    )
    stop_token_ids: Annotated[tuple[int, ...], Strict(False)] = Field(
        default=(), description="token ids, >= 0, that end the output, beside the model's eos"
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="what ended the text is part of it: a stop string, a stop token or eos"
    )
    skip_special_tokens: bool = Field(default=True, description="special tokens are left out of the text")
    ignore_eos: bool = Field(default=False, description="generate on after eos, as throughput benchmarks do")
    structured_outputs: Annotated[dict[str, Any] | None, BeforeValidator(_schema_as_text)] = Field(
        default=None,
        description="form of the output: one of {json: schema}, {regex: ...}, {choice: [...]}, {grammar: ...}, "
        "{json_object: true}",
    )
    logprobs: int | None = Field(
        default=None,
        description="likeliest tokens told for each output token beside it, >= 0, -1 for all; null tells nothing",
    )
    prompt_logprobs: int | None = Field(
        default=None, description="the same for each prompt token, >= 0, -1 for all; null tells nothing"
    )

    def notes(self) -> list[str]:
        """Hydra reads no escapes, so a shell's "\\n" comes as two characters."""
        return [
            f"sampler.{key}: {text!r} holds a backslash and a letter, not a line's end or a tab; in bash write "
            "$'...\\n...'"
            for key, texts in (("stop", self.stop), ("bad_words", self.bad_words))
            for text in texts
            if re.search(r"\\[nt]", text)
        ]

    @model_validator(mode="after")
    def _check_ranges(self) -> SamplerConfig:
        values = self.model_dump()
        problems = []
        while True:
            try:
                SamplingParams(**values)
            except ValueError as error:
                name, rule = str(error).split(" ", 1)
                problems.append(Problem(name=name, rule=rule))
                del values[name.partition(".")[0]]  # its default is in range, so the next round finds the next problem
                if name == "max_tokens":
                    values.pop("min_tokens", None)  # its rule reads max_tokens
            else:
                break
        if problems:
            raise RuleErrors(problems)
        return self

    def to_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())
