"""What generate() returns, in the shape people know from vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.engine.logprobs import TokenLogprobs
from runner.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """What the target thought of one token at one place, before any processing of its logits."""

    logprob: float
    rank: int  # 1 = the likeliest
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None  # sum over the tokens; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one a token: its own logprob, then the likeliest tokens
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token or string; None for eos and length


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions, n of them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a prompt token, None for the first
    error: str | None = None  # why it failed, or the first completion that did; None when none did
    # Of the prompt, that its first completion found in the prefix cache, None: not looked for; no part of the answer.
    num_cached_tokens: int | None = field(default=None, compare=False)


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


DecodeToken = Callable[[int], str | None]


def collect_outputs(
    requests: Sequence[Request], errors: Mapping[str, str], decode_token: DecodeToken
) -> list[RequestOutput]:
    """Requests of one prompt, its n children, as one output."""
    grouped: dict[int, list[Request]] = {}
    for request in requests:
        grouped.setdefault(request.prompt_index, []).append(request)
    return [
        RequestOutput(
            request_id=str(prompt_index),
            prompt=children[0].prompt,
            prompt_token_ids=tuple(children[0].prompt_token_ids),
            prompt_logprobs=prompt_logprobs(children[0], decode_token),
            outputs=tuple(
                CompletionOutput(
                    index=index,
                    text=child.text,
                    token_ids=tuple(child.output_token_ids),
                    cumulative_logprob=cumulative_logprob(child),
                    logprobs=output_logprobs(child, decode_token),
                    finish_reason=child.finish_reason,
                    stop_reason=child.stop_reason,
                )
                for index, child in enumerate(children)
            ),
            num_cached_tokens=children[0].num_cached_tokens,
            error=next((errors[child.request_id] for child in children if child.request_id in errors), None),
        )
        for prompt_index, children in grouped.items()
    ]


def cumulative_logprob(request: Request) -> float | None:
    if request.sampling_params.logprobs is None:
        return None
    return sum((token.logprob for token in request.logprobs), start=0.0)


def output_logprobs(request: Request, decode_token: DecodeToken) -> list[dict[int, Logprob]] | None:
    if request.sampling_params.logprobs is None:
        return None
    return list(_decoded(request.logprobs, decode_token))


def prompt_logprobs(request: Request, decode_token: DecodeToken) -> list[dict[int, Logprob] | None] | None:
    if request.sampling_params.prompt_logprobs is None:
        return None
    return [None, *_decoded(request.prompt_logprobs, decode_token)]


def logprob_fields(request: Request, decode_token: DecodeToken) -> dict[str, Any]:
    """What was asked for, under the names of the outputs, as JSON takes it."""
    fields = {
        "cumulative_logprob": cumulative_logprob(request),
        "logprobs": output_logprobs(request, decode_token),
        "prompt_logprobs": prompt_logprobs(request, decode_token),
    }

    def plain(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [place and {str(token): asdict(logprob) for token, logprob in place.items()} for place in value]

    return {name: plain(value) for name, value in fields.items() if value is not None}


def _decoded(tokens: Sequence[TokenLogprobs], decode_token: DecodeToken) -> Iterator[dict[int, Logprob]]:
    for token in tokens:
        entries = [(token.token_id, token.logprob, token.rank)]
        entries += zip(token.top_token_ids, token.top_logprobs, range(1, len(token.top_token_ids) + 1), strict=True)
        yield {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=decode_token(token_id))
            for token_id, logprob, rank in entries
        }
