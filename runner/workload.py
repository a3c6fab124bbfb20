"""The requests of a run: the project's own demo prompts, a JSONL file, or random token ids."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runner.config import DemoWorkload, JsonlWorkload, SyntheticWorkload
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.prompt_forms import PROMPT_KEYS, Prompt, is_token_ids
from runner.tiny import DEMO_PATH

DEFAULT_FIELD = JsonlWorkload.model_fields["prompt_field"].default
CHAT_FIELD = "messages"  # what a line of chat messages calls them, read unasked beside the default
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = {  # UTF-32's begin with UTF-16's
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
LINE_PARAMS = ("max_tokens", "temperature")  # sampling parameters that a line may have for itself


@dataclass(frozen=True, kw_only=True)
class WorkloadItem:
    """One prompt, the category it is reported under, and what its line asks of the sampler."""

    prompt: Prompt
    category: str | None = None
    id: Any = None  # the line's own, for people
    sampling: Mapping[str, Any] = field(default_factory=dict)  # those of LINE_PARAMS that the line has
    unread_fields: tuple[str, ...] = ()
    place: str | None = field(default=None, compare=False)  # path:line where it is a file's, for errors

    @property
    def origin(self) -> str:
        """What a message adds to a request's number: " (id 7, prompts.jsonl:3)"."""
        known = [text for text in (f"id {self.id}" if self.id is not None else None, self.place) if text is not None]
        return f" ({', '.join(known)})" if known else ""


def read_workload(config: DemoWorkload | JsonlWorkload) -> list[WorkloadItem]:
    """The prompts of a file, in order.

    Raises:
        UserError: the file is missing, empty or malformed; the message names the line.
    """
    if isinstance(config, DemoWorkload):
        return _read_jsonl(DEMO_PATH, DEFAULT_FIELD, config.limit)
    return _read_jsonl(config.require_file(), config.prompt_field, config.limit)


def params_of(item: WorkloadItem, params: SamplingParams) -> SamplingParams:
    """What the item's requests sample by: its line's own parameters in place of these.

    Raises:
        UserError: the two contradict each other; min_tokens, say, comes from `sampler`.
    """
    try:
        return replace(params, **item.sampling)
    except ValueError as error:
        own = ", ".join(f"{key}={value}" for key, value in item.sampling.items())
        raise UserError(f"{item.place or 'the workload'} has {own}: {error}; mend it, or sampler") from error


def arrival_times(count: int, request_rate: float, seed: int) -> list[float]:
    """Seconds after the first arrival: a Poisson process, the same for the same seed."""
    draw = random.Random(seed)
    gaps = (draw.expovariate(request_rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def highest_temperature(items: Sequence[WorkloadItem], otherwise: float) -> float:
    """Of all lines; `otherwise` is that of a line without one."""
    return max(float(item.sampling.get("temperature", otherwise)) for item in items)


def unread_note(items: Sequence[WorkloadItem]) -> list[str]:
    """One note on all fields of a workload's lines that nothing reads, if there are any."""
    names = sorted({name for item in items for name in item.unread_fields})
    known = ", ".join(("the prompt", "id", "category", *LINE_PARAMS))
    return [f"workload.path has fields that no run reads: {', '.join(names)} (read are {known})"] if names else []


def synthetic_workload(config: SyntheticWorkload, vocab_size: int) -> list[WorkloadItem]:
    """Prompts of random token ids behind a prefix of such, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed % 2**63)
    rows = torch.randint(vocab_size, (config.num_requests, config.prompt_len), generator=generator).tolist()
    prefix = torch.randint(vocab_size, (config.prefix_len,), generator=generator).tolist()
    return [WorkloadItem(prompt={"prompt_token_ids": [*prefix, *row]}) for row in rows]


def _read_jsonl(path: Path, prompt_field: str, limit: int | None) -> list[WorkloadItem]:
    items: list[WorkloadItem] = []
    try:
        with path.open(encoding="utf-8-sig") as file:  # with or without the mark that some editors put first
            for number, line in enumerate(file, start=1):
                if limit is not None and len(items) == limit:
                    break
                if line.strip():
                    items.append(_read_line(line, prompt_field, f"{path}:{number}"))
    except UnicodeDecodeError as error:
        encoding = next((name for name, marks in BYTE_ORDER_MARKS.items() if error.object.startswith(marks)), None)
        held = f"byte 0x{error.object[error.start]:02x} ({error.reason})"
        remedy = "convert it, as with: iconv -f latin1 -t utf-8"
        if error.object.startswith(GZIP_MAGIC):
            held, remedy = "gzip's compressed data", "decompress it, as with: gzip -dk"
        elif encoding is not None:
            held, remedy = encoding, f"convert it, as with: iconv -f {encoding.lower()} -t utf-8"
        raise UserError(
            f"workload.path must be a file in UTF-8, got {str(path)!r}, which holds {held}; {remedy}"
        ) from error
    except OSError as error:
        raise UserError(
            f"workload.path must be a file that can be read, got {str(path)!r}: {error.strerror}; check path and rights"
        ) from error
    if not items:
        raise UserError(f"workload.path must hold at least one prompt, got {str(path)!r}, which holds none")
    return items


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):  # as which it would be written to outputs.jsonl, where it is no JSON
        raise ValueError(f"{text} is beyond the range of floats")
    return value


def _read_line(line: str, prompt_field: str, place: str) -> WorkloadItem:
    """A prompt is a string, a list of chat messages, or token ids; `id` is for people."""
    try:
        row: Any = json.loads(line.strip(), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # broken, a number of thousands of digits, or nested too deep
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        got = f"{line.strip()[:60]!r}: {reason}"
        is_list = line.lstrip().startswith("[") and place.endswith(":1")
        remedy = "write each entry of a JSON list in a line, as with: jq -c '.[]'" if is_list else "mend that line"
        raise UserError(f"{place} must be a JSON object, got {got}; {remedy}") from error
    if not isinstance(row, Mapping):
        remedy = f'write {{"{prompt_field}": ...}}, one object a line'
        raise UserError(f"{place} must be a JSON object, got a {type(row).__name__}; {remedy}")
    if prompt_field not in row and prompt_field == DEFAULT_FIELD and CHAT_FIELD in row:
        prompt_field = CHAT_FIELD
    if prompt_field not in row:
        raise UserError(
            f"{place} must have the field {prompt_field!r}, and has {', '.join(row) or 'none'}; "
            "set workload.prompt_field=<the one that holds the prompt>"
        )
    prompt = row[prompt_field]
    is_chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(entry, Mapping) for entry in prompt)
    is_mapping = isinstance(prompt, Mapping) and not prompt.keys().isdisjoint(PROMPT_KEYS)
    if not (is_chat or (isinstance(prompt, str) and prompt) or is_mapping or is_token_ids(prompt)):
        got = json.dumps(prompt)[:60]
        rule = "must be a string that is not empty, chat messages or token ids"
        raise UserError(f"{place}: {prompt_field} {rule}, got {got}; mend or remove that line")
    category = row.get("category")
    for name, value in ((prompt_field, prompt), ("category", category), ("id", row.get("id")), ("fields", list(row))):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, as "\ud800" in JSON
            half = error.object[error.start]
            raise UserError(f"{place}: {name} must be text that UTF-8 can hold, got {half!r}; mend it") from error
    sampling = {key: row[key] for key in LINE_PARAMS if row.get(key) is not None}
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise UserError(f"{place}: {error}; mend it, or leave it out to take sampler's") from error
    return WorkloadItem(
        prompt=prompt,
        category=None if category is None else str(category),
        id=row.get("id"),
        sampling=sampling,
        place=place,
        unread_fields=tuple(key for key in row if key not in (prompt_field, "id", "category", *LINE_PARAMS)),
    )
