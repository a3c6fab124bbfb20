"""Why a request can never run on an engine, whatever else runs there."""

from __future__ import annotations

from runner.engine.block_manager import BlockManager
from runner.engine.request import Request
from runner.engine.stopping import StopRules


def refusal(request: Request, *, stop_rules: StopRules, vocab_size: int, blocks: BlockManager) -> str | None:
    """The reason, with its remedy; None when the request can run."""
    limit, num_prompt = stop_rules.max_model_len, request.num_prompt_tokens
    if num_prompt == 0:
        return "the prompt must have at least one token, got none"
    if num_prompt >= limit:
        return (
            f"the prompt must be shorter than max_model_len ({limit} tokens), got {num_prompt}; shorten it, or raise "
            "max_model_len"
        )
    strange = next((token for token in request.prompt_token_ids if not 0 <= token < vocab_size), None)
    if strange is not None:
        rule = f"prompt_token_ids must lie in [0, {vocab_size - 1}], the vocabulary"
        return f"{rule}, got {strange}; use the target's tokenizer"
    try:
        request.sampling_params.check_token_ids(vocab_size)
    except ValueError as error:
        return str(error)
    if not all(0 <= token < vocab_size for word in request.bad_words_token_ids for token in word):
        return f"bad_words must be spelled in tokens in [0, {vocab_size - 1}]; use the target's tokenizer"
    if not _leaves_a_token(request, stop_rules):
        return (
            "allowed_token_ids must hold a token that bad_words and min_tokens leave, "
            f"got {list(request.sampling_params.allowed_token_ids or ())}"
        )
    longest = min(limit, num_prompt + request.sampling_params.max_tokens)
    if blocks.num_blocks_for(longest) > blocks.num_usable_blocks:
        room = blocks.num_usable_blocks * blocks.block_size
        remedy = "lower max_tokens" if num_prompt < room else "shorten the prompt"
        return (
            f"prompt and max_tokens must fit the KV cache ({room} tokens), got {longest}; {remedy}, or give the cache "
            "more room (num_gpu_blocks_override, gpu_memory_utilization)"
        )
    return None


def _leaves_a_token(request: Request, stop_rules: StopRules) -> bool:
    """Whether its allowed tokens, if it names any, hold one that no other rule forbids from the start."""
    params = request.sampling_params
    if params.allowed_token_ids is None:
        return True
    left = set(params.allowed_token_ids) - {word[0] for word in request.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        left -= {*stop_rules.eos_token_ids, *params.stop_token_ids}
    return bool(left)
