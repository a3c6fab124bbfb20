"""The target model: where its weights and tokenizer come from, and which draft goes with it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from runner.config.node import Node
from runner.config.quantization import NumbersOfWeights


class DraftDefaults(Node):
    """The drafter that a method takes when method.model is null."""

    model: str = Field(min_length=1, description="directory or hub id of the drafter")
    hf_config: dict[str, Any] | None = Field(
        default=None, description="architecture of the draft, used with load_format=dummy; null reads its config.json"
    )


class ModelConfig(Node):
    """The target model."""

    model: str = Field(min_length=1, description="directory, hub id, or a name of the tiny family (tiny, tiny-draft)")
    tokenizer: str | None = Field(
        default=None, min_length=1, description="directory or hub id of the tokenizer; null takes the model's own"
    )
    revision: str | None = Field(
        default=None, min_length=1, description="branch, tag or commit on the hub; null takes the default branch"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        default="auto",
        description="auto and safetensors read the checkpoint; dummy makes random weights of the right shape",
    )
    quantization: NumbersOfWeights = Field(
        default=None,
        description="fp8 or int8 holds what the layers multiply by in 8 bits, with a scale for each output; null "
        "leaves it as the checkpoint has it",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="longest prompt plus output, tokens, >= 2; null takes the model's own limit"
    )
    trust_remote_code: bool = Field(default=False, description="run modelling code that comes with the checkpoint")
    hf_config: dict[str, Any] | None = Field(
        default=None,
        description="architecture as in config.json, used with load_format=dummy, so that no hub is needed; "
        "null reads config.json",
    )
    hf_overrides: dict[str, Any] | None = Field(
        default=None,
        description="values in place of those of its config.json, such as {rope_scaling: {rope_type: yarn, factor: 4.0,"
        " original_max_position_embeddings: 32768}}, which makes room for longer texts; null: none",
    )
    draft: DraftDefaults | None = Field(
        default=None, description="draft of method=draft_model when method.model is null; null: none is known"
    )
    heads: dict[str, DraftDefaults] | None = Field(
        default=None,
        description="drafters of the other methods when method.model is null, as {eagle3: {model: ...}}; null: none",
    )
