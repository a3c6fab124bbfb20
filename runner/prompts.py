"""From prompts in any accepted form to requests: strings, chat messages or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernels.reference.philox import seeds_of
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.prompt_forms import PROMPT_RULE, Prompt, is_token_ids
from runner.tokenizer import Tokenizer


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a mapping, a list of token ids and a list of chat messages are one.

    Raises:
        UserError: it is neither.
    """
    if isinstance(prompts, str | Mapping) or is_token_ids(prompts):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise UserError(f"{PROMPT_RULE}, or a list of these, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)  # also of a generator, which may be asked once
    if listed and all(isinstance(item, Mapping) and "role" in item for item in listed):
        return [listed]
    return listed


def list_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Those of each prompt, from one for all, one each, or none; UserError where they are neither."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    is_list = isinstance(sampling_params, Iterable) and not isinstance(sampling_params, str | Mapping)
    params = list(sampling_params) if is_list else []
    strange = [entry for entry in params if not isinstance(entry, SamplingParams)]
    if strange or not is_list:
        kind = f"a list with {strange[0]!r}" if strange else repr(sampling_params)
        raise UserError(f"sampling_params must be SamplingParams(...), or a list of them, one a prompt, got {kind}")
    if len(params) != num_prompts:
        rule = f"SamplingParams(...) for all, or a list of {num_prompts}, one a prompt"
        raise UserError(f"sampling_params must be {rule}, got a list of {len(params)}")
    return params


def make_requests(
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    tokenizer: Tokenizer,
    run_seed: int,
    origins: Sequence[str] = (),
) -> list[Request]:
    """n requests a prompt, ids "<prompt index>" or "<prompt index>-<child index>".

    A request's seed is its own, or the run's folded with its place in the workload: never with its place in a batch.

    Args:
        origins: what errors say of each prompt beside its number: " (prompts.jsonl:3)"; empty: nothing.
    """
    requests = []
    seeds = seeds_of(run_seed, len(prompts))
    spelled: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}  # one list for all requests that forbid the same
    for index, (prompt, parameters) in enumerate(zip(prompts, params, strict=True)):
        try:
            text, token_ids = tokenizer.encode(prompt)
        except UserError as error:
            origin = origins[index] if origins else ""
            raise UserError(
                f"request {index}{origin}: {error}" if origin or len(prompts) > 1 else str(error)
            ) from error
        if parameters.stop and not tokenizer.is_available:
            raise UserError("stop strings need a tokenizer; use stop_token_ids, or set model.tokenizer")
        if parameters.bad_words and not tokenizer.is_available:
            raise UserError("bad_words need a tokenizer; use logit_bias, or set model.tokenizer")
        if parameters.bad_words not in spelled:
            spelled[parameters.bad_words] = tokenizer.spell_bad_words(parameters.bad_words)
        of_child = parameters
        if parameters.prompt_logprobs is not None:  # siblings share their prompt, and the first one tells
            of_child = replace(parameters, prompt_logprobs=None)
        seed = seeds[index] if parameters.seed is None else parameters.seed
        own_seeds = [seed, *seeds_of(seed, parameters.n)[1:]] if parameters.n > 1 else [seed]
        for child, own_seed in enumerate(own_seeds):
            requests.append(
                Request(
                    request_id=f"{index}-{child}" if parameters.n > 1 else str(index),
                    prompt_index=index,
                    prompt=text,
                    prompt_token_ids=token_ids,
                    bad_words_token_ids=spelled[parameters.bad_words],
                    sampling_params=of_child if child else parameters,
                    seed=own_seed,
                )
            )
    return requests
