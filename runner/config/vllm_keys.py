"""vLLM's speculative_config, key by key: what is called otherwise here, what changes nothing, what is refused and why.

Data only; from_vllm.py reads it. Sources: vllm/config/speculative.py of 0.33 and of 0.8, the documentation of what came
after 0.33, and the engine arguments (--speculative-model and its kin) of the releases before; of its plugin Arctic
Inference vllm/config.py, which adds a method and some keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VLLM_VERSION = "0.33"  # that our own configurations are translated for

# Spellings of older releases, most of them flat engine arguments, and the key of today.
RENAMED_KEYS = {
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "acceptance_method": "rejection_sample_method",
    "draft_token_acceptance_method": "rejection_sample_method",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    "disable_logprobs_during_spec_decoding": "disable_logprobs",
    # Arctic Inference's.
    "suffix_cache_max_depth": "suffix_decoding_max_tree_depth",
    "suffix_cache_max_requests": "suffix_decoding_max_cached_requests",
    "suffix_max_spec_factor": "suffix_decoding_max_spec_factor",
    "suffix_min_token_prob": "suffix_decoding_min_token_prob",
}

# Deprecated names of mtp: the families whose checkpoints have such a layer, in 0.33 and after.
MTP_SUFFIX = "_mtp"
MTP_FAMILIES = (
    "bailing_hybrid",
    "bailing_hybrid_v3",
    "deepseek",
    "dots3_note",
    "ernie",
    "exaone4_5",
    "exaone_moe",
    "gemma4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm5_next",
    "glm_ocr",
    "hy_v3",
    "hy_v4",
    "inkling",
    "kimi_k3",
    "longcat_flash",
    "mimo",
    "mimo_v2",
    "minimax_m3",
    "nemotron_h",
    "pangu_ultra_moe",
    "qwen3_5",
    "qwen3_next",
    "qwen4_exp",
    "step3p5",
    "step5",
)

# Spellings of values; `standard` is the newest name of what was called probabilistic.
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "method": {
        "[ngram]": "ngram",
        "arctic": "mlp_speculator",
        "pard2": "pard",
        **{f"{family}{MTP_SUFFIX}": "mtp" for family in MTP_FAMILIES},
    },
    "rejection_sample_method": {
        "standard": "probabilistic",
        "rejection_sampler": "probabilistic",
        "typical_acceptance_sampler": "typical",
    },
}

ONE_PASS_KEY = "parallel_drafting"  # says which method is meant
ONE_PASS_METHODS = ("pard", "dflash", "dspark")  # of which it is true anyway
TREE_KEY = "speculative_token_tree"  # of the releases before PR #42121 (May 2026), a string there

DEPTH_KEY = "suffix_decoding_max_tree_depth"
MATCHES_KEY = "enable_suffix_decoding"  # of Arctic Inference: matches in front of its speculator
MATCHES_DEFAULTS = {DEPTH_KEY: 64, "suffix_decoding_max_cached_requests": 100_000}  # there
MATCH_TOKENS, MATCH_TOKENS_KEY = 16, "suffix_speculative_tokens"  # there, of suffix decoding by itself

NEUTRAL = (None, False, "auto")  # values by which vLLM's switches are off: nothing to tell about

# Switches of vLLM's own machinery: they change no token, and no setting of ours corresponds to them.
KEYS_WITHOUT_EFFECT = {
    "attention_backend": "the draft computes attention as the target does",
    "disable_eagle_block_drop": "no block that was found in the prefix cache is dropped",
    "disable_log_stats": "a run always has its statistics",
    "disable_logprobs": "logprobs come with speculation as they do without",
    "disable_lookahead_block_hashes": "a block's key in the prefix cache holds the next token, for every method",
    "disable_mqa_scorer": "drafts are always scored in one pass",
    "disable_padded_drafter_batch": "drafting pads no batch",
    "draft_lm_head_quantization": "method.quantization holds a copy of it in 8 bits",
    "dspark_draft_topk": "each guess is drawn from the whole vocabulary",
    "enable_adaptive_verification": "num_speculative_tokens_per_batch_size=auto is like it; drafts are verified whole",
    "enforce_eager": "hardware.enforce_eager decides for target and draft",
    "fly_entropy_threshold": "it is a key of the rule fly",
    "fly_entropy_top_k": "it is a key of the rule fly",
    "fly_window_size": "it is a key of the rule fly",
    "index_share_for_mtp_iteration": "no layer here has an index to share",
    "kv_cache_dtype": "the draft's KV cache is kept as the target's: hardware.kv_cache_dtype",
    "moe_backend": "one implementation serves target and draft",
    "suffix_decoding_corpus_tokens": "suffix_decoding_max_cached_requests limits what is kept, in responses",
    "use_local_argmax_reduction": "it is about drafts split over GPUs",
    "xpress_topc": "it is a key of XPress drafters",
}

# The same of arguments of its LLM.
ENGINE_ARGS_WITHOUT_EFFECT = {
    "async_scheduling": "a step is launched before the last one's tokens are read, wherever it can be",
    "compilation_config": "steps are captured without a compiler; enforce_eager=True turns that off",
    "disable_custom_all_reduce": "parts of products are gathered, and added up in the order of the ranks",
    "disable_log_stats": "statistics are always there, in get_metrics()",
    "distributed_executor_backend": "ranks are processes of this machine",
    "swap_space": "a preempted request is computed anew",
}
# Arguments that ask for nothing with this value, and are not known with another.
ENGINE_ARGS_OFF = {"data_parallel_size": 1, "pipeline_parallel_size": 1}
# Arguments that vLLM decides itself where they are None, as our defaults do.
ENGINE_ARGS_UNDECIDED = ("enable_chunked_prefill", "enable_prefix_caching")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A key that would change what is generated or how fast, and cannot be honoured."""

    rule: str
    remedy: str
    unless: tuple[Any, ...] = ()  # values that ask for nothing


def _internal() -> Refusal:
    return Refusal(rule="is an internal field", remedy="vLLM fills it itself; remove it", unless=(None,))


REFUSED_KEYS = {
    "code_revision": Refusal(
        rule="is not available", remedy="modelling code comes with the weights: pass 'revision'", unless=(None,)
    ),
    "draft_load_config": _internal(),
    "draft_model_config": _internal(),
    "draft_parallel_config": _internal(),
    MATCHES_KEY: Refusal(
        rule="is a key of the plugin Arctic Inference, for its own speculators",
        remedy="remove it; method='hybrid' with drafter=<the method> is suffix decoding in front of that",
        unless=(None, False),
    ),
    "hard_disable_by_batch_size": Refusal(
        rule="is a key of the plugin Arctic Inference, by which nobody drafts from so many requests on",
        remedy="pass 'disable_by_batch_size', one less, instead",
        unless=(None,),
    ),
    MATCH_TOKENS_KEY: Refusal(
        rule=f"is a key of the plugin Arctic Inference, beside {MATCHES_KEY}",
        remedy="pass 'num_speculative_tokens' instead",
        unless=(None,),
    ),
    "suffix_max_spec_offset": Refusal(
        rule="is not available",
        remedy="remove it; suffix_max_spec_factor alone says how long drafts are for the match",
        unless=(None, 0),
    ),
    "target_model_config": _internal(),
    "target_parallel_config": _internal(),
    "tensor_parallel_size": Refusal(
        rule="is not a key of speculative_config",
        remedy="pass 'draft_tensor_parallel_size' instead; the target's is hardware.tensor_parallel_size",
        unless=(None,),
    ),
}

REFUSED_VALUES = {
    ("rejection_sample_method", "fly"): "it is vLLM's own lossy rule; typical is the lossy rule here",
}

# What a request asks for, beside the keys of the sampler group.
SAMPLING_KEYS = ("speculative_ratio", "speculative_sampling")

UNAVAILABLE_METHODS = ("extract_hidden_states",)

# Substrings of a checkpoint's name by which vLLM recognises a head that is no plain draft model, in its order.
NAME_MARKS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
# Of heads that vLLM 0.33 lacks or knows by their configs: in names on the hub. A local directory's own files say it.
HUB_MARKS = (
    ("-it-assistant", "mtp"),  # Gemma 4's
    ("muse-glimmer-30b-assistant", "dflash"),
    ("medusa", "medusa"),
    ("accelerator", "mlp_speculator"),  # IBM's
    ("lstm-speculator", "mlp_speculator"),  # Arctic's
    ("mlp-speculator", "mlp_speculator"),
    ("mlp_speculator", "mlp_speculator"),
)
