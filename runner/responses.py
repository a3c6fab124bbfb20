"""Earlier responses as token ids, from a .jsonl file: what suffix decoding starts from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.engine.errors import UserError
from runner.tokenizer import Tokenizer

KEY = "method.suffix_decoding_corpus"
TEXT_FIELDS = ("text", "response")


@dataclass(frozen=True)
class Responses:
    """The token ids of each line's response, in order; empty ones are left out. The file is read at every iteration.

    A line is an object with `token_ids`, as a run's outputs.jsonl has them, or with `text` or `response`.

    Raises:
        UserError: a line holds no response of this vocabulary, or no line does; the message names the line.
    """

    path: Path
    tokenizer: Tokenizer
    vocab_size: int

    def __iter__(self) -> Iterator[list[int]]:
        num_responses = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{self.path}:{number}"
                response = _read_line(line, place, self.tokenizer, self.vocab_size) if line.strip() else []
                if response:
                    num_responses += 1
                    yield response
        if num_responses == 0:
            raise UserError(f"{KEY} must hold at least one response, got {str(self.path)!r}, which holds none")


def _read_line(line: bytes, place: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    line, place = line.strip(), f"{KEY}: {place}"
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, no JSON, or nested too deep
        text = line[:60].decode(errors="replace")
        raise UserError(f"{place} must be a JSON object, got {text!r} ({error}); mend or remove that line") from error
    if not isinstance(row, Mapping):
        raise UserError(f"{place} must be a JSON object, got a {type(row).__name__}")
    if "token_ids" in row:
        token_ids = row["token_ids"]
        if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
            raise UserError(f"{place}: token_ids must be a list of token ids, got {str(token_ids)[:60]!r}")
        wrong = [token for token in token_ids if not 0 <= token < vocab_size]
        if wrong:
            raise UserError(
                f"{place}: token_ids must lie in [0, {vocab_size - 1}], the target's vocabulary, got {wrong[0]}; "
                "give responses of the same tokenizer, or their text"
            )
        return token_ids
    for field in TEXT_FIELDS:
        if isinstance(row.get(field), str):
            try:
                return tokenizer.encode_response(row[field])
            except UserError as error:  # half of a surrogate pair, or no tokenizer
                raise UserError(f"{place}: {error}") from error
    raise UserError(
        f"{place} must have token_ids, or a string {' or '.join(TEXT_FIELDS)}; it has {', '.join(row) or 'no field'}"
    )
