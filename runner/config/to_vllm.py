"""A method node as the speculative_config of vLLM 0.33 (VLLM_VERSION), and what changes on the way there."""

from __future__ import annotations

from typing import Any

from runner.config.checkpoint_method import DEEPSPECS_DFLASH, DFLASH2, DOMINO, PARD2, drafter_of
from runner.config.drafter_methods import GrownTreeMethod, TreeDrafterMethod
from runner.config.method import MethodConfig
from runner.config.vllm_keys import ONE_PASS_KEY, TREE_KEY, VLLM_VERSION

# Keys of single methods that mean the same in vLLM.
_SAME_KEYS = (
    "model",
    "revision",
    "max_model_len",
    "draft_tensor_parallel_size",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_SAME_RULES = {"strict": "standard", "probabilistic": "standard", "typical": "standard"}  # the others keep their names
_RULE_NOTES = {
    "strict": "rejection_sample_method=strict has no counterpart in vLLM: standard keeps the distribution, not the "
    "very tokens (at temperature 0 they are the same rule)",
    "typical": "rejection_sample_method=typical has no counterpart in vLLM: standard is lossless and accepts less",
    "block": "rejection_sample_method=block needs vLLM's V2 model runner: V1 verifies as standard does",
}
_SAME_METHODS = (
    "ngram",
    "ngram_gpu",
    "suffix",
    "draft_model",
    "custom_class",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
)
_REMOVED_METHODS = ("medusa", "mlp_speculator")  # of vLLM's V0 engine, gone with it
# vLLM 0.33 has them in its V1 model runner only, without a varying draft length. Later releases have suffix in V2 too,
# where it always drafts num_speculative_tokens and does not read max_spec_factor and min_token_prob.
_V1_METHODS = ("suffix", "custom_class")


def to_vllm(
    method: MethodConfig, *, draft_model: str | None = None, temperature: float = 0.0
) -> tuple[dict[str, Any] | None, list[str]]:
    """The speculative_config of vLLM 0.33 for a method, and notes on what has no counterpart there.

    Args:
        method: the checked method node.
        draft_model: the draft of a model drafter whose node names none.
        temperature: of the requests; it decides which of vLLM's ways of drafting is closest to `coupled`.

    Returns:
        (None, why) where vLLM does the same without a speculative_config, or has no such method.
    """
    if method.method == "none":
        return None, ["method=none is vLLM without a speculative_config"]
    if method.num_speculative_tokens == 0:
        return None, ["num_speculative_tokens=0 is vLLM without a speculative_config: there it must be > 0"]
    if method.method in _REMOVED_METHODS:
        return None, [f"method={method.method} has no counterpart in vLLM {VLLM_VERSION}, which has removed it"]
    if method.method not in (*_SAME_METHODS, "pard"):
        remedy = f"its methods are {', '.join(_SAME_METHODS)}"
        return None, [f"method={method.method} has no counterpart in vLLM {VLLM_VERSION}: {remedy}"]
    model = getattr(method, "model", None) or draft_model
    drafter = None if model is None else drafter_of(model)
    kind = None if drafter is None else drafter.kind
    if model is not None and drafter is None and "dflash2" in model.lower():
        kind = DFLASH2  # by its name on the hub
    if kind == DOMINO:
        return None, [f"{DOMINO} has no counterpart in vLLM {VLLM_VERSION}"]
    notes: list[str] = []
    num_tokens = _chain_length(method, notes, grows=method.method != "dflash" or kind == DFLASH2)
    config: dict[str, Any] = {"method": method.method, "num_speculative_tokens": num_tokens}
    if method.method == "pard":
        config |= {"method": "draft_model", ONE_PASS_KEY: True}
    for key in _SAME_KEYS:
        if (value := getattr(method, key, None)) is not None:
            config[key] = value
    _translate_rule(method, config, notes)
    _translate_drafting(method, config, notes, draft_model, temperature)
    _translate_load(method, config, notes)
    if method.method == "dspark":
        notes.append("method=dspark needs vLLM's V2 model runner, so a device with Triton")
    if kind == DFLASH2:
        notes.append(f"{DFLASH2} needs a release of vLLM that has it, and its V2 model runner, so a device with Triton")
    if kind == DEEPSPECS_DFLASH:
        notes.append(f"{DEEPSPECS_DFLASH} is one of method=dspark there, if the release loads it at all")
    if kind == PARD2:
        notes.append(f"{PARD2} drafts without the target's states there")
    if method.method == "custom_class":
        notes.append("vLLM's custom_class has an interface of its own: the class needs a counterpart written for it")
    if getattr(method, "suffix_decoding_corpus", None) is not None:
        notes.append("suffix_decoding_corpus has no counterpart in vLLM: its tree starts empty")
    if (quantization := getattr(method, "quantization", None)) == "fp8":
        config["quantization"] = quantization
    elif quantization is not None:
        notes.append(f"quantization={quantization} has no counterpart in vLLM: it takes a checkpoint in {quantization}")
    if getattr(method, "aux_hidden_state_layer_ids", None) is not None:
        notes.append("aux_hidden_state_layer_ids has no counterpart in vLLM: it goes by the checkpoint's config.json")
    return config, notes


def _chain_length(method: MethodConfig, notes: list[str], *, grows: bool) -> int:
    """Tokens that vLLM drafts, which knows chains only: those of a tree's longest branch.

    grows: tree_depth bounds the method's dynamic trees, if it has the key.
    """
    tree, num_tokens = getattr(method, TREE_KEY, None), method.num_speculative_tokens
    if tree is None:
        return num_tokens
    if isinstance(method, GrownTreeMethod) and tree == "dynamic" and grows:
        num_tokens = min(num_tokens, method.tree_depth)
    elif isinstance(method, TreeDrafterMethod) and isinstance(tree, tuple):
        num_tokens = max(len(path) for path in tree[:num_tokens])
    notes.append(f"{TREE_KEY} has no counterpart in vLLM: it drafts a chain of num_speculative_tokens={num_tokens}")
    return num_tokens


def _translate_rule(method: MethodConfig, config: dict[str, Any], notes: list[str]) -> None:
    rule = method.rejection_sample_method
    config["rejection_sample_method"] = _SAME_RULES.get(rule, rule)
    if rule in _RULE_NOTES:
        notes.append(_RULE_NOTES[rule])
    num_tokens = config["num_speculative_tokens"]
    if method.synthetic_acceptance_rates is not None:
        config["synthetic_acceptance_rates"] = list(method.synthetic_acceptance_rates)[:num_tokens]
    elif method.synthetic_acceptance_length is not None:
        config["synthetic_acceptance_length"] = min(method.synthetic_acceptance_length, num_tokens + 1)
    elif method.synthetic_acceptance_rate is not None:
        config["synthetic_acceptance_length"] = 1 + method.synthetic_acceptance_rate * num_tokens
        notes.append("synthetic_acceptance_rate is given to vLLM as synthetic_acceptance_length")


def _translate_drafting(
    method: MethodConfig, config: dict[str, Any], notes: list[str], draft_model: str | None, temperature: float
) -> None:
    if "draft_sample_method" in method.ignored_keys:
        return
    config["draft_sample_method"] = method.draft_sample_method
    if getattr(method, "use_heterogeneous_vocab", False):
        config |= {"use_heterogeneous_vocab": True, "draft_sample_method": "greedy"}
        if method.draft_sample_method != "greedy":
            notes.append(
                f"draft_sample_method={method.draft_sample_method} has no counterpart in vLLM with "
                "use_heterogeneous_vocab: it drafts greedily there"
            )
    elif method.draft_sample_method == "coupled":
        config["draft_sample_method"] = "greedy" if temperature == 0 else "probabilistic"
        notes.append(
            f"draft_sample_method=coupled has no counterpart in vLLM: {config['draft_sample_method']} drafts "
            f"at temperature {temperature:g}"
        )
    if "model" not in config and (method.method != "mtp" or draft_model is not None):  # its layer is in the target
        if draft_model is None:
            notes.append("vLLM needs speculative_config.model: here it comes from model.draft")
        else:
            config["model"] = draft_model


def _translate_load(method: MethodConfig, config: dict[str, Any], notes: list[str]) -> None:
    """vLLM has the ranges only: from a batch size on no drafts are made by a last range with K = 0."""
    limit, ranges = method.disable_by_batch_size, method.num_speculative_tokens_per_batch_size
    if ranges == "auto":
        notes.append(
            "num_speculative_tokens_per_batch_size=auto left out: vLLM finds no number by itself; "
            "python -m runner.tune prints a table of them"
        )
        ranges = None
    if limit is None and ranges is None:
        return
    if method.method in _V1_METHODS:
        keys = ("num_speculative_tokens_per_batch_size", "disable_by_batch_size")
        given = " and ".join(key for key in keys if getattr(method, key) is not None)
        notes.append(f"{given} left out: vLLM's method {method.method} drafts alike at every batch size")
        return
    kept = [list(entry) for entry in ranges or ()]
    if limit is not None:
        kept = [[start, min(end, limit), count] for start, end, count in kept if start <= limit]
        kept = [*(kept or [[1, limit, method.num_speculative_tokens]]), [limit + 1, limit + 1, 0]]
        notes.append(
            f"disable_by_batch_size={limit} is given to vLLM as num_speculative_tokens_per_batch_size, which counts "
            "the running requests only, not those that wait"
        )
    config["num_speculative_tokens_per_batch_size"] = kept
