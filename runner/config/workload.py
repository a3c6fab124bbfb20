"""The requests of a run: the project's own demo prompts, a JSONL file, or random token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from runner.config.jsonl_file import require_jsonl_file
from runner.config.node import Node


class TrafficNode(Node):
    """What every workload has: how its requests arrive."""

    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="requests in flight at most, >= 1: the next arrives when one ends; null: no bound",
    )
    request_rate: float | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="requests that arrive a second, in [1e-6, 1e6], whether or not earlier ones have ended, in "
        "exponential gaps drawn from the run's seed; a wait for max_concurrency counts; null: no rate",
    )


class DemoWorkload(TrafficNode):
    """The project's own prompts, in the categories people compare by."""

    name: Literal["demo"] = Field(default="demo", description="which workload this is")
    limit: int | None = Field(default=None, ge=1, description="prompts taken from the start, >= 1; null takes all")


class JsonlWorkload(TrafficNode):
    """One JSON object a line: the prompt, and category, max_tokens and temperature where they are its own."""

    name: Literal["jsonl"] = Field(default="jsonl", description="which workload this is")
    path: str = Field(min_length=1, description="path of a .jsonl file, one JSON object a line")
    prompt_field: str = Field(
        default="prompt",
        min_length=1,
        description="the field of a line that holds the prompt: text, chat messages or token ids (a line without "
        "prompt may have messages); beside it a line may have id, category, max_tokens and temperature",
    )
    limit: int | None = Field(default=None, ge=1, description="lines taken from the start, >= 1; null takes all")

    def require_file(self) -> Path:
        """The path of the file.

        Raises:
            ConfigError: there is none.
        """
        return require_jsonl_file("workload.path", self.path)


class SyntheticWorkload(TrafficNode):
    """Random token ids: prompts of one length, no tokenizer needed. Output lengths are the sampler's.

    With prefix_len prompts begin alike, as those behind one system prompt do.
    """

    name: Literal["synthetic"] = Field(default="synthetic", description="which workload this is")
    num_requests: int = Field(default=16, ge=1, le=2**20, description="requests, in [1, 2**20]")
    prompt_len: int = Field(
        default=128, ge=1, le=2**20, description="tokens of each request's own prompt, in [1, 2**20]"
    )
    prefix_len: int = Field(
        default=0, ge=0, le=2**20, description="tokens that all prompts begin with, before their own, in [0, 2**20]"
    )
    seed: int = Field(default=0, ge=0, lt=2**64, description="seed of the token ids, in [0, 2**64 - 1]")


WorkloadConfig = Annotated[DemoWorkload | JsonlWorkload | SyntheticWorkload, Field(discriminator="name")]
