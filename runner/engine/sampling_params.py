"""What one request asks of the sampler, under vLLM's names, and the rules those values obey.

Owns the ranges: the configuration and the Python API both check by building a SamplingParams.
Imports nothing heavy, so a configuration can be checked without loading torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from runner.engine.known_arguments import known_fields
from runner.engine.structured_outputs import StructuredOutputsParams

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1  # more tokens than any text or vocabulary has
NO_MAX_TOKENS = MAX_COUNT  # what max_tokens=None becomes: max_model_len ends a text long before
MAX_N = 2**14  # as vLLM's: a slip of the hand must not take the machine's memory

_INTEGERS = ("n", "top_k", "max_tokens", "min_tokens")
_INTEGERS_OR_NONE = ("seed", "logprobs", "prompt_logprobs", "speculative_ratio")
_OF_RATIO = "a number of tokens, an integer >= 0, or null"
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_BOOLS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_LISTS: dict[str, tuple[type, str]] = {
    "stop": (str, "strings"),
    "bad_words": (str, "strings"),
    "stop_token_ids": (Integral, "token ids"),
    "allowed_token_ids": (Integral, "token ids"),
}


@known_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, vLLM's names and meanings.

    Every one of them keeps its meaning under speculation. The last three say how much of it the request gets: without
    a method (`none`) they ask for nothing, and a draft is loaded by the engine only, never by a request.

    Raises:
        ValueError: a value is of another type or outside its range; the message names the field, the rule and the
            value.
        UserError: there is no parameter of a name.
    """

    n: int = 1  # completions per prompt, each with a noise stream of its own
    temperature: float = 1.0  # 0 is greedy; logits are divided by it
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose mass reaches top_p
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    presence_penalty: float = 0.0  # subtracted once from every token already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (positive) or multiplies logits of tokens in prompt or output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # only these may be sampled; None: all
    bad_words: tuple[str, ...] = ()  # strings that the output may not spell in the tokenizer's own tokens
    seed: int | None = None  # None: the run's seed folded with the request's index
    max_tokens: int = 16  # output tokens at most; None, held as 2**31 - 1: as many as max_model_len leaves
    min_tokens: int = 0  # eos and stop tokens are masked until this many output tokens
    stop: tuple[str, ...] = ()  # strings that end the text
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the output, beside the model's eos
    include_stop_str_in_output: bool = False  # what ended the text is part of it: stop string, stop token or eos
    skip_special_tokens: bool = True  # special tokens are left out of the text
    ignore_eos: bool = False  # generate on after eos, as throughput benchmarks do
    structured_outputs: StructuredOutputsParams | None = None  # the form of the output; a mapping of its keys will do
    logprobs: int | None = None  # likeliest tokens told for each output token beside it; -1: all, None: nothing
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    speculative_sampling: bool | None = None  # False: no drafts for this request; True, None: as the engine does
    speculative_model: str | None = None  # the draft to use, which must be the engine's own
    speculative_ratio: int | None = None  # drafts a step at most, below the engine's num_speculative_tokens

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", NO_MAX_TOKENS)
        if self.seed == -1:  # vLLM's word for none
            object.__setattr__(self, "seed", None)
        self._check_types()
        for name in (*_INTEGERS, *_INTEGERS_OR_NONE):
            if getattr(self, name) is not None:  # numpy's numbers count as far as their type, and then begin again
                object.__setattr__(self, name, int(getattr(self, name)))
        # A lone string, lists and None are taken as people write them for vLLM.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        stop_token_ids = () if self.stop_token_ids is None else tuple(map(int, self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", bad_words)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(map(int, self.allowed_token_ids)))
        bias = {int(token): float(value) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias)
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        rules = (
            ("n", 1 <= self.n <= MAX_N, f"be in [1, {MAX_N}]"),
            (
                "temperature",
                self.temperature == 0.0 or 1e-5 <= self.temperature <= 100.0,
                "be 0 (greedy) or in [1e-5, 100]",
            ),
            ("top_k", self.top_k >= -1, "be >= 1, or 0 or -1 for all tokens"),
            ("top_k", self.top_k <= MAX_COUNT, "be <= 2**31 - 1, or 0 or -1 for all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "be in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "be in [0, 1]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "be in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "be in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "be in (0, 10]"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "be in [0, 2**64 - 1] or null"),
            ("max_tokens", self.max_tokens >= 1, "be >= 1"),
            ("max_tokens", self.max_tokens <= MAX_COUNT, "be <= 2**31 - 1, or null for no limit but max_model_len"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"be in [0, max_tokens ({self.max_tokens})]"),
            ("stop", all(self.stop), "hold no empty string"),
            ("logit_bias", all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "have values in [-100, 100]"),
            ("allowed_token_ids", self.allowed_token_ids != (), "hold a token, or be null for all"),
            ("bad_words", all(word.strip() for word in self.bad_words), "hold no string of white space alone"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "be >= 0, -1 for all tokens, or null"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= -1,
                "be >= 0, -1 for all tokens, or null",
            ),
            ("speculative_ratio", self.speculative_ratio is None or self.speculative_ratio >= 0, f"be {_OF_RATIO}"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must {rule}, got {getattr(self, name)!r}")

    def _check_types(self) -> None:
        """A number that only looks like one (n=2.0, stop=[1]) would fail far from here, or be taken for another."""

        def check(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        for name in _INTEGERS:
            rule = "an integer, or null for no limit but max_model_len" if name == "max_tokens" else "an integer"
            check(name, _is(Integral, getattr(self, name)), rule)
        for name in _INTEGERS_OR_NONE:
            rule = "an integer or null" if name != "speculative_ratio" else _OF_RATIO
            check(name, getattr(self, name) is None or _is(Integral, getattr(self, name)), rule)
        for name in _NUMBERS:
            check(name, _is(Real, getattr(self, name)), "a number")
        for name in _BOOLS:  # "false" is true
            check(name, isinstance(getattr(self, name), bool), "true or false")
        is_switch = self.speculative_sampling is None or isinstance(self.speculative_sampling, bool)
        check("speculative_sampling", is_switch, "true, false or null")
        for name, (kind, what) in _LISTS.items():
            value = getattr(self, name)
            is_lone = kind is str and isinstance(value, str)
            is_list = not isinstance(value, str | Mapping) and isinstance(value, Collection)
            check(name, value is None or is_lone or (is_list and all(_is(kind, x) for x in value)), f"a list of {what}")
        is_bias = isinstance(self.logit_bias, Mapping) and all(
            (_is(Integral, token) or str(token).isdecimal()) and _is(Real, bias)  # JSON has no keys but strings
            for token, bias in self.logit_bias.items()
        )
        check("logit_bias", self.logit_bias is None or is_bias, "a mapping of token ids to numbers")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError if a parameter names a token outside the vocabulary; for use on admission."""
        named = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    rule = f"must name tokens in [0, {vocab_size - 1}] (the vocabulary)"
                    raise ValueError(f"{name} {rule}, got {token_id}")

    @cached_property
    def longest_stop(self) -> int:
        """Bytes of the longest stop string; 0 without one."""
        return max((len(text.encode(errors="replace")) for text in self.stop), default=0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and cut-offs comes before the draw."""
        biased = self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0
        return biased or self.allowed_token_ids is not None or bool(self.bad_words) or bool(self.structured_outputs)

    @property
    def takes_the_argmax(self) -> bool:
        """Greedy, and nothing changes the logits first."""
        return self.is_greedy and not self.changes_logits

    @property
    def max_draft_tokens(self) -> int | None:
        """The most drafts a step that the request allows; None: as many as the engine makes."""
        return 0 if self.speculative_sampling is False else self.speculative_ratio

    @property
    def speculates(self) -> bool:
        """Whether the request takes drafts at all."""
        return self.max_draft_tokens != 0


def _is(kind: type, value: Any) -> bool:
    """Also for numpy's numbers; a bool is no number."""
    return isinstance(value, kind) and not isinstance(value, bool)
