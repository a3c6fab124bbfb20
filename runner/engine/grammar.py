"""A request's grammar and its place in it: which tokens may come next, after what is committed and after guesses.

llguidance (Microsoft, 2024) parses and computes the masks; it is imported when the first request asks. End-of-text
tokens are kept here and never reach its matcher: they are allowed where the text so far is complete, and only they
may follow one another. A mask depends on the tokens before it alone, not on how they were grouped into steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from runner.engine.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64  # compiled; a workload asks for the same few forms again and again


class Grammar:
    """One request's text in its grammar: committed tokens, and guesses beyond them that are taken back."""

    def __init__(self, prototype: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        """prototype: a matcher that has seen nothing; shared by grammars, and left as it is."""
        self.error: str | None = None  # why no mask can be had any more; the request has to fail
        self._prototype, self._matcher = prototype, prototype.deep_copy()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._is_over = False  # end of text is committed
        self._committed: list[int] = []  # without ends of text, which the matcher never sees
        self._ahead: list[int] = []  # guesses in the matcher
        self._is_over_ahead = False  # end of text is among the guesses
        self._dead_end: tuple[list[int], str] | None = None  # guesses that nothing can follow, and why

    @property
    def is_over(self) -> bool:
        """The end of the text is said, or guessed; nothing but itself can follow."""
        return self._is_over or self._is_over_ahead or self.error is not None

    @property
    def matcher(self) -> LLMatcher | None:
        """What knows the next tokens; None when only the end of the text may follow."""
        return None if self.is_over or self._matcher.is_stopped() else self._matcher

    def push(self, token_id: int) -> None:
        """Go ahead by a guess that the mask allows."""
        if token_id in self._eos_token_ids:
            self._is_over_ahead = True
        elif (matcher := self.matcher) is not None:
            self._ahead.append(token_id)
            if matcher.try_consume_tokens([token_id]) != 1:
                self.fail(f"token {token_id} is in the mask and is refused")
        else:
            self.fail(f"token {token_id} is in the mask and is refused")

    def unwind(self) -> None:
        """Back to what is committed. A guess on which the grammar failed is not the request's fault."""
        if self._ahead and self.error is not None:
            self._dead_end = (self._ahead, self.error)
            self.error = None
            self._start_again()
        elif self._ahead and not self._matcher.rollback(len(self._ahead)):
            self._start_again()
        self._ahead, self._is_over_ahead = [], False

    def commit(self, token_ids: Sequence[int]) -> None:
        self.unwind()
        dead_end, self._dead_end = self._dead_end, None
        for token_id in token_ids:
            self.push(token_id)
            if self.error is not None:
                break
        if dead_end is not None and len(token_ids) > len(dead_end[0]) and self._ahead == dead_end[0]:
            self.error = self.error or dead_end[1]  # the text went where no token carries it on
        self._committed += self._ahead
        self._is_over |= self._is_over_ahead
        self._ahead, self._is_over_ahead = [], False

    def fail(self, reason: str) -> None:
        self.error = self.error or f"structured_outputs cannot be followed any further: {reason}"

    def _start_again(self) -> None:
        """A matcher that failed stays broken: another one is told what is committed."""
        self._matcher = self._prototype.deep_copy()
        if self._matcher.try_consume_tokens(self._committed) != len(self._committed):
            self.fail(_reason(self._matcher))


class GrammarCompiler:
    """Makes grammars for one tokenizer, and masks of many at once."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer: a fast one of transformers, or None; vocab_size: rows of the model's head, its padding too."""
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self.num_words = -(-vocab_size // 32)
        self._ll_tokenizer: LLTokenizer | None = None
        self._executor: Any = None
        self._prototype = lru_cache(maxsize=MAX_CACHED_GRAMMARS)(self._compile)
        bits = [0] * (self.num_words * 32)
        for token_id in self._eos_token_ids:
            bits[token_id] = 1
        self._end_row = torch.tensor(_pack(bits), dtype=torch.int32)  # [num_words]

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises ValueError: the request cannot be served; says why."""
        return Grammar(self._prototype(params), self._eos_token_ids)

    def masks(self, grammars: Sequence[Grammar]) -> torch.Tensor:
        """Which tokens may come next in each grammar, [len(grammars), num_words] int32 on the host.

        Bit v % 32 of word v // 32 is token v. A row is never empty: a grammar that no token can carry on fails, and
        its row ends the text. llguidance also allows an end of text where the form's own text spells it, in the middle.
        """
        bitmask = torch.empty(len(grammars), self.num_words, dtype=torch.int32)
        jobs = []
        for row, grammar in enumerate(grammars):
            if (matcher := grammar.matcher) is None:
                bitmask[row] = self._end_row
            else:
                jobs.append((grammar, matcher, row))
        if not jobs:
            return bitmask
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, row) for _, matcher, row in jobs], bitmask.data_ptr(), self.num_words * 4, len(bitmask)
        )
        is_empty = bitmask.any(dim=1).logical_not_().tolist()
        has_end = (bitmask & self._end_row).any(dim=1).tolist()
        for grammar, matcher, row in jobs:
            reason = "no token carries the text on"
            if has_end[row] and not matcher.is_error() and not matcher.is_accepting():
                bitmask[row] &= ~self._end_row
                is_empty[row] = not bitmask[row].any()
                reason = "it spells an end-of-text token, with which a text ends"
            if is_empty[row] or matcher.is_error():
                grammar.fail(_reason(matcher) if matcher.is_error() else reason)
                bitmask[row] = self._end_row
        return bitmask

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher

        kind, tokenizer = params.kind, self._start()
        try:
            matcher = LLMatcher(tokenizer, _source(params), log_level=0)
        except ValueError as error:
            raise ValueError(f"structured_outputs.{kind} must be one that llguidance can compile: {error}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that no text fits shows here
        if matcher.is_error():
            raise ValueError(
                f"structured_outputs.{kind} must be one that llguidance can compile: {_reason(matcher)}; mend it"
            )
        return matcher

    def _start(self) -> LLTokenizer:
        """Bring up llguidance with the tokenizer, once; a large vocabulary takes it about a second."""
        if self._ll_tokenizer is not None:
            return self._ll_tokenizer
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "tokenizer" if self._tokenizer is None else "end-of-text token"
            raise ValueError(
                f"structured_outputs needs a model with a {missing}, and this one has none; choose another"
            )
        import llguidance.hf
        from llguidance import LLExecutor

        try:
            self._ll_tokenizer = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self.vocab_size, eos_token=list(self._eos_token_ids)
            )
        except ValueError as error:
            raise ValueError(f"structured_outputs cannot be had with this model's tokenizer: {error}") from error
        self._executor = LLExecutor(min(32, max(1, (os.cpu_count() or 1) // 2)))
        return self._ll_tokenizer


def _source(params: StructuredOutputsParams) -> str:
    """The request's form in llguidance's own notation."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return _lark("start: " + " | ".join(json.dumps(text) for text in params.choice))
    if params.grammar is not None:
        return _lark(grammar_from("grammar", params.grammar))
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    overrides: Any = {"whitespace_flexible": False} if params.disable_any_whitespace else {}
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says, on one line, without the parser's state."""
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())
    return "no token carries the text on" if reason.startswith("NoExtension") else reason


def _pack(bits: Sequence[int]) -> list[int]:
    """Words of 32 bits, the lowest first, as signed integers."""
    words = [sum(bit << place for place, bit in enumerate(bits[i : i + 32])) for i in range(0, len(bits), 32)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]
