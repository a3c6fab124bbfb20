"""Training text that every Python install carries: the standard library's own sources.

`read_corpus` returns a `Corpus`: documents in a fixed order, each content once, split into training and held-out
documents by a hash of the path, so that a file stays on its side when its content changes. `TokenStream` is a split as
one line of token ids and deals out windows of it in a seeded order. Nothing here downloads or executes anything.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Installed packages are not the standard library; slim installs leave the tests out, so counting on them would make
# the result depend on the distribution; the other two are generated tables, not code.
EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
EXCLUDED_PREFIX = "_sysconfigdata"  # written at build time, full of the build machine's paths
MIN_DOCUMENT_BYTES = 200
HELD_OUT_SHARE = 12 / 256


@dataclass(frozen=True, kw_only=True)
class Document:
    path: str  # relative to the standard library, with forward slashes
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """Identifies the text itself: another Python version has another standard library."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            digest.update(document.path.encode() + b"\0" + document.text.encode() + b"\0")
        return digest.hexdigest()


def num_bytes(documents: Sequence[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def is_held_out(path: str) -> bool:
    return hashlib.sha256(path.encode()).digest()[0] < HELD_OUT_SHARE * 256


def read_corpus(root: Path | None = None, *, max_documents: int | None = None) -> Corpus:
    """The sources under `root` (default: this interpreter's standard library), each distinct content once.

    `max_documents` keeps the first so many of each split, for runs that only check the recipe.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    seen: set[bytes] = set()
    train: list[Document] = []
    held_out: list[Document] = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if EXCLUDED_DIRECTORIES.intersection(relative.parts) or path.name.startswith(EXCLUDED_PREFIX):
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if len(content) < MIN_DOCUMENT_BYTES or digest in seen:
            continue
        seen.add(digest)
        try:
            text = content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:  # a few old sources declare another encoding
            continue
        split = held_out if is_held_out(relative.as_posix()) else train
        split.append(Document(path=relative.as_posix(), text=text))
    if not train or not held_out:
        raise ValueError(f"corpus root must hold Python sources for both splits, got {root}: pass a standard library")
    return Corpus(train=tuple(train[:max_documents]), held_out=tuple(held_out[:max_documents]))


class TokenStream:
    """One split as a line of token ids, each document opened by the separator token."""

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> None:
        ids: list[int] = []
        for encoding in tokenizer.backend_tokenizer.encode_batch([document.text for document in documents]):
            ids.append(tokenizer.eos_token_id)
            ids.extend(encoding.ids)
        ids.append(tokenizer.eos_token_id)
        self.token_ids = torch.tensor(ids, dtype=torch.int64)  # [num_tokens]
        self.num_bytes = num_bytes(documents)

    def __len__(self) -> int:
        return len(self.token_ids)

    def windows(self, *, length: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Endless windows of `length` tokens: every epoch cuts at a new offset and deals in a new order."""
        if len(self) <= 2 * length:
            raise ValueError(f"windows of {length} tokens need more than {2 * length} tokens, got {len(self)}")
        while True:
            offset = int(torch.randint(length, (1,), generator=generator))
            starts = torch.arange(offset, len(self) - length + 1, length)
            for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
                yield self.token_ids[start : start + length]

    def batches(self, *, length: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Endless [batch_size, length] int64 batches of `windows`."""
        windows = self.windows(length=length, generator=generator)
        while True:
            yield torch.stack([next(windows) for _ in range(batch_size)])

    def consecutive(self, *, length: int) -> Tensor:
        """[num_windows, length]: the stream cut from its start, the remainder dropped; for evaluation."""
        return self.token_ids[: len(self) // length * length].view(-1, length)
