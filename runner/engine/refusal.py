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
            "max_model_len where the model reads longer texts"
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
    dead_end = _dead_end(request, stop_rules, vocab_size)
    if dead_end is not None:
        allowed = request.sampling_params.allowed_token_ids
        behind = f" behind the output {list(dead_end)}" if dead_end else ""
        return (
            f"allowed_token_ids must hold a token that bad_words and min_tokens leave{behind}, got "
            f"{'all tokens' if allowed is None else list(allowed)}; allow more tokens, or forbid less"
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


def _dead_end(request: Request, stop_rules: StopRules, vocab_size: int) -> tuple[int, ...] | None:
    """An output that a request may come to, and that its masks leave no token behind; None: there is none.

    What bad words forbid behind an output follows from the longest of their beginnings that it ends with, so that
    asking behind the beginnings is enough. Where a grammar goes on, it holds alone (runner/engine/sampling.py).
    """
    params = request.sampling_params
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    ending = {*stop_rules.eos_token_ids, *params.stop_token_ids} if params.min_tokens else set[int]()
    last_token_ids: dict[tuple[int, ...], set[int]] = {(): set()}  # of bad words, by what stands before
    for word in request.bad_words_token_ids:
        last_token_ids.setdefault(word[:-1], set()).add(word[-1])
    if not ending.union(*last_token_ids.values()).issuperset(allowed):
        return None

    def left(output: tuple[int, ...]) -> set[int]:
        words = (last_token_ids.get(output[start:], ()) for start in range(len(output) + 1))
        return set(allowed).difference(*words)

    outputs = [()] if params.structured_outputs is not None else sorted(last_token_ids, key=len)
    for output in outputs:
        is_said = len(output) < params.max_tokens and all(
            token in left(output[:place]) for place, token in enumerate(output)
        )
        if is_said and not left(output) - (ending if len(output) < params.min_tokens else set()):
            return output
    return None
