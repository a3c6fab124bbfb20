"""Builds an engine from a configuration: device, target, proposer, cache.

The one place where names of the configuration become classes and keyword arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from kernels.reference.fp8_rows import FP8
from proposers.base import Proposer, ProposerContext, check_tap_layers, proposer_class
from runner.cache_size import num_cache_blocks
from runner.config import SpeculativeConfig, SuffixKeys
from runner.engine.block_manager import BlockManager
from runner.engine.device_requests import DeviceRequests
from runner.engine.errors import UserError
from runner.engine.grammar import GrammarCompiler
from runner.engine.grammar_store import GrammarStore
from runner.engine.graphs import GraphMemory
from runner.engine.loader import LoadedModel
from runner.engine.memory import release_unused
from runner.engine.model_runner import ModelRunner
from runner.engine.shard import Shard
from runner.metrics import InParts
from runner.model_files import find_eos_token_ids, load_tokenizer
from runner.proposer import build_proposer
from runner.target import load_target, resolve_device, resolve_dtype
from runner.tokenizer import Tokenizer
from runner.whole_steps import WholeSteps
from verifier.rejection_sampler import RejectionSampler
from verifier.verifier import Verifier

logger = logging.getLogger(__name__)


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
    # by how many tokens a request drafts at most: its steps, captured when first needed, or why they need the host
    whole_steps: Mapping[Proposer, Callable[[int], WholeSteps | InParts]]


def assemble(config: SpeculativeConfig, target_info: LoadedModel | None = None, shard: Shard | None = None) -> Assembly:
    """Load everything a configuration names.

    Args:
        target_info: what `load_target` gave for the same model, device and dtype; engines may share it. None loads it.
        shard: which part of the target; None: all of it. Drafters are whole in every rank.

    Raises:
        UserError: what is asked for does not exist, does not fit, or does not go together.
    """
    if torch.cuda.is_available():  # an earlier job of this process may have left some of its memory full
        release_unused()
        torch.cuda.reset_peak_memory_stats()
    if isinstance(config.method, SuffixKeys):
        config.method.require_corpus()
    hardware = config.hardware
    shard = shard or Shard()
    info = load_target(config, shard) if target_info is None else target_info
    source = info.source
    device = resolve_device(hardware.device)
    dtype = resolve_dtype(hardware.dtype, device, source)
    kv_dtype = FP8 if hardware.kv_cache_dtype == "fp8" else dtype
    graph_memory = None if hardware.enforce_eager else GraphMemory()
    target = ModelRunner(
        info.model,
        block_size=hardware.block_size,
        device=device,
        dtype=dtype,
        batch_invariant=hardware.batch_invariant,
        kv_dtype=kv_dtype,
        graph_memory=graph_memory,
    )
    if not hardware.enable_chunked_prefill and hardware.max_num_batched_tokens < info.max_model_len:
        raise UserError(
            f"hardware.max_num_batched_tokens must be >= max_model_len ({info.max_model_len}) with "
            f"enable_chunked_prefill=false, got {hardware.max_num_batched_tokens}; raise it, lower "
            "model.max_model_len, or set hardware.enable_chunked_prefill=true"
        )
    tokenizer = load_tokenizer(config.model, source)
    eos_token_ids = find_eos_token_ids(source, info, tokenizer)
    if target.is_recurrent:
        _require_chains(config)
        logger.info("%s: layers with states: prompts that begin alike are computed each", source.model)
    rejection_sampler = _rejection_sampler(config)
    vocab_size = info.model.vocab_size
    compiler = GrammarCompiler(tokenizer.backend, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    grammars = GrammarStore(compiler, device=device)
    context = ProposerContext(
        vocab_size=vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=hardware.max_num_seqs,
        max_num_batched_tokens=hardware.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        block_size=hardware.block_size,
        device=device,
        dtype=dtype,
        batch_invariant=hardware.batch_invariant,
        needs_draft_probs=rejection_sampler.rule.reads_draft_probs,
        keys_by_draft_step=rejection_sampler.rule.keys_by_draft_step,
        kv_dtype=kv_dtype,
        graph_memory=graph_memory,
        grammars=grammars,
        target=info,
        target_runner=target,
    )
    proposer = build_proposer(config, context, tokenizer)
    check_tap_layers(proposer, info.model.num_layers)
    blocks = num_cache_blocks(
        hardware,
        target=target,
        proposer=proposer,
        rejection_sampler=rejection_sampler,
        max_model_len=info.max_model_len,
        shard=shard,
    )
    target.allocate_cache(blocks, max_num_seqs=hardware.max_num_seqs, num_uncertain=proposer.num_speculative_tokens)
    proposer.allocate_cache(blocks)
    plain_proposer = proposer_class("none")(num_speculative_tokens=0, context=context)

    @cache
    def on_device() -> DeviceRequests:
        return DeviceRequests(
            capacity=hardware.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=hardware.block_size,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            device=device,
        )

    def whole_steps(of: Proposer, max_draft_tokens: int) -> WholeSteps | InParts:
        return WholeSteps.of(
            of,
            target=target,
            rule=rejection_sampler.rule,
            on_device=on_device,
            max_draft_tokens=max_draft_tokens,
            max_num_seqs=hardware.max_num_seqs,
            max_model_len=info.max_model_len,
        )

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
        whole_steps={each: cache(partial(whole_steps, each)) for each in (proposer, plain_proposer)},
    )


def _require_chains(config: SpeculativeConfig) -> None:
    """Raises UserError for a method that drafts trees: states follow one path of tokens."""
    tree, name = getattr(config.method, "speculative_token_tree", None), config.method.method
    if tree is None and name != "suffix_recycling":
        return
    remedy = "set method.speculative_token_tree=null" if tree is not None else "choose method=suffix"
    raise UserError(
        f"method={name} must draft chains for {config.model.model}, whose layers have states that follow one path of "
        f"tokens; {remedy}"
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
