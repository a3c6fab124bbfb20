"""What the tokens of a tokenizer stand for: ordinary ones as the bytes they print, special ones by name and role.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) spell a byte as a character of an alphabet; sentencepiece ones (Llama 2,
Gemma) spell a space as U+2581, and a byte that no piece has as <0x0A>. Any other token prints what is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.engine.errors import UserError

ROLES = ("eos", "bos", "unk", "pad")  # a token that has several counts as the first of them
SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One vocabulary."""

    numbering: Mapping[str, int]  # every token as the tokenizer writes it, and its id
    texts: Mapping[int, bytes]  # of the tokens that print something
    names: Mapping[int, str] = field(default_factory=dict)  # of tokens put beside the trained ones, special or not
    byte_token_ids: frozenset[int] = frozenset()  # <0x00> ... <0xFF>, said only where no piece fits
    roles: Mapping[str, int] = field(default_factory=dict)  # id of the token that has each of ROLES


def read_spelling(tokenizer: Any, name: str) -> Spelling:
    """The vocabulary of a tokenizer of transformers.

    Args:
        tokenizer: None for a model that has none.
        name: of the model, for errors.

    Raises:
        UserError: there is no tokenizer, or none whose rules can be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        found = "no tokenizer" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise UserError(
            f"method.use_heterogeneous_vocab=true compares tokens by what they print and needs a tokenizer.json of "
            f"target and draft, got {found} for {name}; name models that have one, or remove use_heterogeneous_vocab"
        )
    numbering: dict[str, int] = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    rules = _rules(backend)
    texts: dict[int, bytes] = {}
    byte_token_ids: list[int] = []
    for token, token_id in numbering.items():
        if token_id in special_ids:
            continue
        if token_id in added:
            texts[token_id] = token.encode()  # the rules are for trained tokens
        elif "ByteLevel" in rules:
            texts[token_id] = _from_alphabet(token)
        elif "ByteFallback" in rules and (byte := _BYTE_TOKEN.fullmatch(token)):
            texts[token_id] = bytes.fromhex(byte[1])
            byte_token_ids.append(token_id)
        else:
            texts[token_id] = token.replace(SPACE_MARK, " ").encode() if SPACE_MARK in rules else token.encode()
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in ROLES}
    return Spelling(
        numbering=numbering,
        texts=texts,
        names={
            token_id: token for token, token_id in numbering.items() if token_id in special_ids or token_id in added
        },
        byte_token_ids=frozenset(byte_token_ids),
        roles={role: token_id for role, token_id in roles.items() if token_id is not None},
    )


def _rules(backend: Any) -> set[str]:
    """By which a fast tokenizer turns text into tokens and back: their types, and the strings that they put in."""
    rules: set[str] = set()
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    nodes: list[Any] = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, str):
            rules.add(node)
    return rules


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes are U+0100 and the next ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _from_alphabet(token: str) -> bytes:
    """A token outside the alphabet prints as it is written."""
    return bytes(_BYTES[char] for char in token) if all(char in _BYTES for char in token) else token.encode()
