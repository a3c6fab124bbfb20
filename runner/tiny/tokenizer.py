"""The family's byte-level BPE tokenizer: trained here, loaded everywhere as a PreTrainedTokenizerFast.

Any unicode text survives encode and decode unchanged: there is no normalisation, no unknown token and no added space.
Id 0 is the document separator; it ends a generation and opens every training document.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MAX_TOKEN_LENGTH = 24  # characters; longer merges are rulers and licence boilerplate, not words


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` entries; raises ValueError when the text is too small to fill it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_LENGTH,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be reachable from the text ({backend.get_vocab_size()}), got {vocab_size}")
    assert backend.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer
