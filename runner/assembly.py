"""Builds an engine from a configuration: device, target, proposer, cache.

The one place where names of the configuration become classes and keyword arguments.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proposers.base import Proposer, ProposerContext, proposer_class
from proposers.vocabularies.spelling import read_spelling
from runner.cache_size import num_cache_blocks
from runner.config import DrafterMethod, MethodConfig, ModelConfig, SpeculativeConfig, SuffixMethod
from runner.engine.backend import runs_kernels
from runner.engine.checkpoint import DTYPES, ModelSource, load_config, resolve_directory
from runner.engine.errors import UserError
from runner.engine.grammar import GrammarCompiler
from runner.engine.grammar_store import GrammarStore
from runner.engine.kv_cache import BlockManager
from runner.engine.loader import LoadedModel, load_model
from runner.engine.model_runner import ModelRunner
from runner.prompts import Tokenizer
from runner.responses import check_responses_file, read_responses
from runner.tiny import BUILT_IN_MODELS
from runner.whole_steps import WholeSteps
from verifier.rejection_sampler import RejectionSampler
from verifier.verifier import Verifier

COMMON_METHOD_KEYS = frozenset({*MethodConfig.model_fields, "draft_tensor_parallel_size"})


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Everything a step needs, built once a run."""

    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer
    target: ModelRunner
    target_info: LoadedModel
    proposer: Proposer
    plain_proposer: Proposer  # method=none over the same target, for the baseline
    verifier: Verifier
    block_manager: BlockManager
    grammars: GrammarStore
    eos_token_ids: tuple[int, ...]
    whole_steps: Mapping[Proposer, WholeSteps]  # of the proposers whose steps are captured whole


def assemble(config: SpeculativeConfig, target_info: LoadedModel | None = None) -> Assembly:
    """Load everything a configuration names.

    Args:
        target_info: what `load_target` gave for the same model, device and dtype; engines may share it. None loads it.

    Raises:
        UserError: what is asked for does not exist, does not fit, or does not go together.
    """
    _release_unused_memory()
    if isinstance(config.method, SuffixMethod) and config.method.suffix_decoding_corpus is not None:
        check_responses_file(config.method.suffix_decoding_corpus)
    hardware = config.hardware
    info = load_target(config) if target_info is None else target_info
    source = info.source
    device = resolve_device(hardware.device)
    dtype = _resolve_dtype(hardware.dtype, device, source)
    captures_graphs = runs_kernels(device) and not hardware.enforce_eager
    target = ModelRunner(
        info.model,
        block_size=hardware.block_size,
        device=device,
        dtype=dtype,
        batch_invariant=hardware.batch_invariant,
        captures_graphs=captures_graphs,
    )
    if not hardware.enable_chunked_prefill and hardware.max_num_batched_tokens < info.max_model_len:
        raise UserError(
            f"hardware.max_num_batched_tokens must be >= max_model_len ({info.max_model_len}) with "
            f"enable_chunked_prefill=false, got {hardware.max_num_batched_tokens}; raise it, lower "
            "model.max_model_len, or set hardware.enable_chunked_prefill=true"
        )
    tokenizer = _load_tokenizer(config.model, source)
    eos_token_ids = _eos_token_ids(source, info, tokenizer)
    rejection_sampler = _rejection_sampler(config)
    vocab_size = info.model.vocab_size
    compiler = GrammarCompiler(tokenizer.backend, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    grammars = GrammarStore(compiler, device=device)
    context = ProposerContext(
        vocab_size=vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=hardware.max_num_seqs,
        eos_token_ids=eos_token_ids,
        block_size=hardware.block_size,
        device=device,
        dtype=dtype,
        batch_invariant=hardware.batch_invariant,
        needs_draft_probs=rejection_sampler.rule.reads_draft_probs,
        keys_by_draft_step=rejection_sampler.rule.keys_by_draft_step,
        captures_graphs=captures_graphs,
        grammars=grammars,
        target=info,
    )
    proposer = _build_proposer(config, context, tokenizer)
    blocks = num_cache_blocks(
        hardware,
        target=target,
        proposer=proposer,
        rejection_sampler=rejection_sampler,
        max_model_len=info.max_model_len,
    )
    target.allocate_cache(blocks)
    proposer.allocate_cache(blocks)
    plain_proposer = proposer_class("none")(num_speculative_tokens=0, context=context)
    captured = {
        each: WholeSteps.of(
            each,
            target=target,
            rule=rejection_sampler.rule,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=info.max_model_len,
        )
        for each in (proposer, plain_proposer)
    }
    return Assembly(
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        target=target,
        target_info=info,
        proposer=proposer,
        plain_proposer=plain_proposer,
        verifier=Verifier(target=target, rejection_sampler=rejection_sampler, eos_token_ids=eos_token_ids),
        block_manager=BlockManager(blocks, hardware.block_size),
        grammars=grammars,
        eos_token_ids=eos_token_ids,
        whole_steps={each: steps for each, steps in captured.items() if steps is not None},
    )


def load_target(config: SpeculativeConfig) -> LoadedModel:
    """The target's weights on the run's device.

    Raises:
        UserError: no such device or model, or one that does not fit.
    """
    hide_kernels_client()
    hardware = config.hardware
    device = resolve_device(hardware.device)
    if hardware.num_threads is not None:
        torch.set_num_threads(hardware.num_threads)
    source = model_source(config.model, "model.model")
    dtype = _resolve_dtype(hardware.dtype, device, source)
    return load_model(source, device=device, dtype=dtype, max_model_len=config.model.max_model_len)


def resolve_device(name: str) -> torch.device:
    """Raises UserError when the device is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "hardware.device=cuda needs a CUDA GPU that torch can use, and none was found; "
            "choose hardware=cpu, or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def model_path(name: str) -> str:
    """A model's directory or hub id."""
    return str(BUILT_IN_MODELS.get(name, name))


def model_source(model: ModelConfig, name: str) -> ModelSource:
    return ModelSource(
        model=model_path(model.model),
        revision=model.revision,
        load_format=model.load_format,
        trust_remote_code=model.trust_remote_code,
        hf_config=model.hf_config,
        name=name,
    )


def hide_kernels_client() -> None:
    """Keep transformers from taking our `kernels` package for an optional client of the same name.

    Its probe finds any package called `kernels`; with the real client installed beside us, model imports would break.
    """
    import kernels

    if not getattr(kernels, "IS_SPECULATIVE_RUNNER", False):
        raise UserError(
            f"the package `kernels` must be this project's, found {kernels.__file__}; "
            "uninstall the Hugging Face client of that name, or run from the project's directory"
        )
    import transformers.utils as utils
    import transformers.utils.import_utils as import_utils

    def is_kernels_available(*_: object, **__: object) -> bool:
        return False

    for module in (import_utils, utils):
        setattr(module, "is_kernels_available", is_kernels_available)  # noqa: B010 - mypy knows it as a function


def _release_unused_memory() -> None:
    """Give back what an earlier job of this process held, so that this one finds the GPU's memory free."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _resolve_dtype(name: str, device: torch.device, source: ModelSource) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu" or Path(source.model) in BUILT_IN_MODELS.values():
        return torch.float32  # the tiny family is stored in bfloat16 for its size only
    stored = getattr(load_config(source), "dtype", None)
    return next((dtype for dtype in DTYPES.values() if dtype == stored), torch.bfloat16)


def _load_tokenizer(model: ModelConfig, source: ModelSource) -> Tokenizer:
    if model.tokenizer is not None:
        tokenizer_source = ModelSource(model=model_path(model.tokenizer), name="model.tokenizer")
        return Tokenizer(resolve_directory(tokenizer_source, weights=False), trust_remote_code=model.trust_remote_code)
    return _own_tokenizer(source, "model.tokenizer")


def _own_tokenizer(source: ModelSource, name: str | None = None) -> Tokenizer:
    """The tokenizer that comes with a model; name: the option to set when there is none."""
    if source.is_dummy and source.hf_config is not None:
        return Tokenizer(None)
    directory = resolve_directory(source, weights=False)
    return Tokenizer(directory, trust_remote_code=source.trust_remote_code, name=name or source.name)


def _eos_token_ids(source: ModelSource, info: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json's eos tokens, else config.json's, else the tokenizer's; those the model can say."""
    from transformers import GenerationConfig

    found: Any = None
    if not (source.is_dummy and source.hf_config is not None):
        directory = resolve_directory(source, weights=False)
        if (directory / "generation_config.json").is_file():
            found = GenerationConfig.from_pretrained(directory).eos_token_id
    if found is None:
        found = getattr(info.hf_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    listed = found if isinstance(found, list | tuple) else [] if found is None else [found]
    # Some configurations name an id that the head has no row for, or -1 for none.
    return tuple(int(token_id) for token_id in listed if 0 <= token_id < info.model.vocab_size)


def _build_proposer(config: SpeculativeConfig, context: ProposerContext, tokenizer: Tokenizer) -> Proposer:
    method = config.method
    own_keys: dict[str, Any] = method.model_dump(exclude=set(COMMON_METHOD_KEYS))
    if isinstance(method, DrafterMethod):
        target_source, draft = model_source(config.model, "model.model"), config.draft_model_config()
        source = target_source if draft is None else model_source(draft, "method.model")
        own_keys |= {"source": source, "draft_sample_method": method.draft_sample_method}
        for key in ("model", "revision"):
            own_keys.pop(key)
        if own_keys.pop("use_heterogeneous_vocab", False):
            own_keys["vocabularies"] = (
                read_spelling(tokenizer.backend, "the target"),
                read_spelling(_own_tokenizer(source).backend, f"the draft {source.model}"),
            )
        else:
            _require_same_tokens(
                target_source, source, takes_another="use_heterogeneous_vocab" in type(method).model_fields
            )
    if isinstance(method, SuffixMethod):
        path = own_keys.pop("suffix_decoding_corpus")
        if path is not None:
            own_keys["corpus"] = read_responses(check_responses_file(path), tokenizer, context.vocab_size)
    num_tokens = 0 if method.method == "none" else method.num_speculative_tokens
    return proposer_class(method.method)(num_speculative_tokens=num_tokens, context=context, **own_keys)


def _require_same_tokens(target: ModelSource, draft: ModelSource, *, takes_another: bool) -> None:
    """Raises UserError when both have a tokenizer.json and they number the tokens differently.

    Vocabularies of one size may still be two (Llama 2 and Mistral); a draft of the other one is never right.
    takes_another: whether the method has a way to draft with another vocabulary all the same.
    """
    if target.is_dummy or draft.is_dummy:
        return
    files = [resolve_directory(source, weights=False) / "tokenizer.json" for source in (target, draft)]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"] for file in files)
    if ours != theirs:
        raise UserError(
            f"method.model={draft.model} must number its tokens as {target.model} does, and its tokenizer.json "
            "differs; choose a draft of the same family as the target"
            + (", or set method.use_heterogeneous_vocab=true" if takes_another else "")
        )


def _rejection_sampler(config: SpeculativeConfig) -> RejectionSampler:
    method = config.method
    rule = "strict" if method.method == "none" else method.rejection_sample_method
    rates = method.synthetic_conditional_rates() if rule == "synthetic" else None
    return RejectionSampler(
        rejection_sample_method=rule,
        synthetic_conditional_rates=rates,
        posterior_threshold=method.posterior_threshold,
        posterior_alpha=method.posterior_alpha,
    )
