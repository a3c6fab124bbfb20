"""Builds the proposer that the method's configuration names."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from proposers.base import Proposer, ProposerContext, proposer_class
from proposers.vocabularies.spelling import read_spelling
from runner.config import (
    DrafterMethod,
    HybridMethod,
    MethodConfig,
    SelfSpeculationMethod,
    SpeculativeConfig,
    SuffixMethod,
    SuffixRecyclingMethod,
)
from runner.engine.checkpoint import ModelSource, resolve_directory
from runner.engine.errors import UserError
from runner.engine.memory import making_weights
from runner.model_files import model_source, own_tokenizer
from runner.responses import Responses
from runner.tokenizer import Tokenizer

COMMON_METHOD_KEYS = frozenset({*MethodConfig.model_fields, "draft_tensor_parallel_size"})


def build_proposer(config: SpeculativeConfig, context: ProposerContext, tokenizer: Tokenizer) -> Proposer:
    method = config.method
    own_keys: dict[str, Any] = method.model_dump(exclude=set(COMMON_METHOD_KEYS))
    if isinstance(method, HybridMethod | SuffixRecyclingMethod):
        within = replace(context, max_draft_tokens=method.num_speculative_tokens)
        own_keys = {key: getattr(method, key) for key in ("min_match_score", "num_judged_tokens")}
        halves: dict[str, MethodConfig] = {"suffix": method.suffix_method()}
        if isinstance(method, HybridMethod):
            own_keys |= {key: getattr(method, key) for key in ("drafter_name", "speculative_token_tree")}
            halves["drafter"] = method.drafter_method()
        else:
            halves["recycling"] = method.recycling_method()
        for name, half in halves.items():
            own_keys[name] = build_proposer(config.model_copy(update={"method": half}), within, tokenizer)
    elif isinstance(method, DrafterMethod):
        _read_drafter(own_keys, config, method, context, tokenizer)
    elif isinstance(method, SelfSpeculationMethod):
        own_keys["draft_sample_method"] = method.draft_sample_method
    elif isinstance(method, SuffixMethod):
        own_keys.pop("suffix_decoding_corpus")
        if (path := method.require_corpus()) is not None:
            own_keys["corpus"] = Responses(path, tokenizer, context.vocab_size)
    num_tokens = 0 if method.method == "none" else method.num_speculative_tokens
    source: ModelSource | None = own_keys.get("source")
    with nullcontext() if source is None else making_weights(f"{source.name}={source.model}"):
        return proposer_class(method.method).build(num_speculative_tokens=num_tokens, context=context, **own_keys)


def _read_drafter(
    own_keys: dict[str, Any],
    config: SpeculativeConfig,
    method: DrafterMethod,
    context: ProposerContext,
    tokenizer: Tokenizer,
) -> None:
    """Replace what names a checkpoint among a proposer's keyword arguments by where it is and what it needs."""
    target_source, draft = model_source(config.model, "model.model"), config.draft_model_config()
    named = target_source if draft is None else model_source(draft, "method.model")
    # Of a draft the head is quantized too: no token depends on what it says.
    source = replace(named, quantization=method.quantization, quantizes_head=True)
    own_keys |= {"source": source, "draft_sample_method": method.draft_sample_method}
    for key in ("model", "revision", "quantization"):  # which the source says
        own_keys.pop(key)
    _require_length_of_target(method.max_model_len, context.max_model_len)
    if own_keys.pop("use_heterogeneous_vocab", False):
        own_keys["vocabularies"] = (
            read_spelling(tokenizer.backend, "the target"),
            read_spelling(own_tokenizer(source).backend, f"the draft {source.model}"),
        )
    else:
        _require_same_tokens(
            target_source, source, takes_another="use_heterogeneous_vocab" in type(method).model_fields
        )


def _require_length_of_target(asked: int | None, longest: int) -> None:
    """Raises UserError where a drafter shall follow longer texts than the target's, whose length its config says."""
    if asked is not None and asked > longest:
        raise UserError(
            f"method.max_model_len must be <= the target's max_model_len ({longest}), got {asked}; lower it, or leave "
            "it out"
        )


def _require_same_tokens(target: ModelSource, draft: ModelSource, *, takes_another: bool) -> None:
    """Raises UserError when both have a tokenizer.json and they number the tokens differently.

    Vocabularies of one size may still be two (Llama 2 and Mistral); a draft of the other one is never right.
    takes_another: whether the method has a way to draft with another vocabulary all the same.
    """
    if target.is_dummy or draft.is_dummy:
        return
    sources = target, draft
    files = [resolve_directory(source, weights=False) / "tokenizer.json" for source in sources]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_numbered_tokens(file, source.name) for file, source in zip(files, sources, strict=True))
    if ours != theirs:
        raise UserError(
            f"method.model={draft.model} must number its tokens as {target.model} does, and its tokenizer.json "
            "differs; choose a draft of the same family as the target"
            + (", or set method.use_heterogeneous_vocab=true" if takes_another else "")
        )


def _numbered_tokens(file: Path, name: str) -> Any:
    """The vocabulary of a tokenizer.json; name: the option to name in errors."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(
            f"{name}: {file} must hold a JSON object with model.vocab, and cannot be read as one "
            f"({type(error).__name__}: {error}); download it again"
        ) from error
