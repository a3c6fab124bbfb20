"""Results as files: metrics.json, outputs.jsonl and vllm_speculative_config.json in the run's directory.

Every file appears whole or not at all: it is written beside its place and renamed onto it, so no reader ever sees
half of one, even when a run is killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kernels.whole_file import replacing
from runner.config.vllm_keys import VLLM_VERSION
from runner.engine.errors import UserError
from runner.metrics import RequestRecord
from runner.metrics.rates import per_output_token_ms, to_first_token_ms

METRICS_FILE = "metrics.json"
OUTPUTS_FILE = "outputs.jsonl"
PARTIAL_OUTPUTS_FILE = "partial_outputs.jsonl"  # the requests that an interrupted run had finished
VLLM_FILE = "vllm_speculative_config.json"
VLLM_NOTES_FILE = "vllm_speculative_config.txt"


def write_metrics(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Writes a summary as indented JSON.

    Raises:
        ValueError: a number is NaN or infinite; rates without a denominator are None instead.
    """
    text = json.dumps(summary, indent=2, allow_nan=False)
    with _written(Path(path)) as file:
        file.write(text.encode() + b"\n")


def write_outputs(
    path: str | Path,
    records: Iterable[RequestRecord],
    more: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    method: str | None = None,
) -> None:
    """Writes one JSON object a line and request, in the order given.

    `arrival` is in seconds since the first request's, `ttft_ms` and `tpot_ms` are as in the summary (null without a
    first or a second token), `seed` is the request's own, `num_cached_tokens` are those of its prompt that the prefix
    cache had (null where it was not asked). The last three fields have one entry per step that yielded
    tokens: how many were drafted, how many of those were accepted, and how many tokens were committed.
    `prompt_token_ids` is there when the prompt came without text, `cumulative_logprob`, `logprobs` and
    `prompt_logprobs` where they were asked for (token ids as text, as vLLM's server gives them).

    Args:
        more: request_id -> those three, the `id` of the workload's line, and the `error` of a request that failed.
        method: what each line names as the method that it comes from ("none": plain decoding); None: no such field.
    """
    with _written(Path(path)) as file:
        records = list(records)
        start = min((record.arrival_time for record in records), default=0.0)
        source = {} if method is None else {"method": method}
        for record in records:
            file.write(_json_line({**_output(record, start), **source, **(more or {}).get(record.request_id, {})}))


def write_vllm_config(directory: str | Path, config: Mapping[str, Any] | None, notes: Sequence[str]) -> list[Path]:
    """Writes what vLLM takes for the same method, and what changes on the way there; returns the files written.

    The JSON file is the object itself, so that it can be handed on (`vllm serve --speculative-config "$(cat ...)"`).
    Without a config there is only the text, which says why.
    """
    files = []
    if config is not None:
        files.append(Path(directory) / VLLM_FILE)
        with _written(files[-1]) as file:
            file.write(json.dumps(config, indent=2, allow_nan=False).encode() + b"\n")
    if notes:
        files.append(Path(directory) / VLLM_NOTES_FILE)
        with _written(files[-1]) as file:
            file.write("".join(f"{line}\n" for line in (f"For vLLM {VLLM_VERSION}:", *notes)).encode())
    return files


def remove_other_results(directory: str | Path, kept: Sequence[Path]) -> None:
    """What an earlier run has left in the same directory, and this one has not written."""
    for name in (METRICS_FILE, OUTPUTS_FILE, PARTIAL_OUTPUTS_FILE, VLLM_FILE, VLLM_NOTES_FILE):
        path = Path(directory) / name
        if path not in kept:
            path.unlink(missing_ok=True)


def _output(record: RequestRecord, start: float) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": record.prompt}
    if record.prompt is None:
        prompt["prompt_token_ids"] = list(record.prompt_token_ids)
    return {
        "request_id": record.request_id,
        "category": record.category,
        **prompt,
        "text": record.text,
        "token_ids": list(record.token_ids),
        "finish_reason": record.finish_reason,
        "seed": record.seed,
        "arrival": record.arrival_time - start,
        "num_cached_tokens": record.num_cached_tokens,
        "ttft_ms": next(iter(to_first_token_ms([record])), None),
        "tpot_ms": next(iter(per_output_token_ms([record])), None),
        "num_draft_tokens": list(record.num_draft_tokens),
        "num_accepted_tokens": list(record.num_accepted_tokens),
        **({} if record.draft_sources is None else {"draft_sources": list(record.draft_sources)}),
        "tokens_per_step": list(record.tokens_per_step),
    }


def _json_line(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold but a JSON escape can
        return json.dumps(value).encode() + b"\n"


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """As replacing(path), in a directory that is made where it lacks.

    Raises:
        UserError: it cannot be written: no room, no permission, a directory in its place.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or write elsewhere") from error
