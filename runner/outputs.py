"""What generate() returns, in the shape people know from vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop" | "length" | "error"
    stop_reason: int | str | None = None  # the stop token or string; None for eos and length


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions, n of them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None  # why the request failed; None when it did not


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A running total, under vLLM's metric name."""

    name: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A total per draft position, under vLLM's metric name."""

    name: str
    values: list[int]
