"""Suffix decoding's keys, and the method that has no others."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from runner.config.jsonl_file import require_jsonl_file
from runner.config.method import MethodConfig


class SuffixKeys(MethodConfig):
    """What finds matches in earlier text."""

    suffix_decoding_max_tree_depth: int = Field(
        default=24, ge=1, le=1024, description="tokens matched and drafted together at most, in [1, 1024]"
    )
    suffix_decoding_max_cached_requests: int = Field(
        default=10000, ge=0, description="finished responses kept, >= 0, the oldest leaves first; 0 keeps none"
    )
    suffix_decoding_max_spec_factor: float = Field(
        default=1.0, ge=0, description="drafted tokens at most, as a multiple of the tokens matched, >= 0"
    )
    suffix_decoding_min_token_prob: float = Field(
        default=0.1, ge=0, le=1, description="draft while the estimated probability of getting there is this, in [0, 1]"
    )
    suffix_decoding_corpus: str | None = Field(
        default=None,
        min_length=1,
        description="a .jsonl file of earlier responses (token_ids or text, as outputs.jsonl has) to start from",
    )

    def require_corpus(self) -> Path | None:
        """The path of the earlier responses, if any are named.

        Raises:
            ConfigError: there is no such file.
        """
        if self.suffix_decoding_corpus is None:
            return None
        return require_jsonl_file("method.suffix_decoding_corpus", self.suffix_decoding_corpus)

    @model_validator(mode="after")
    def _check_corpus(self) -> Self:
        if self.suffix_decoding_corpus is not None and self.suffix_decoding_max_cached_requests == 0:
            raise ValueError(
                f"suffix_decoding_corpus must be null with suffix_decoding_max_cached_requests=0, which keeps no "
                f"response, got {self.suffix_decoding_corpus!r}; raise suffix_decoding_max_cached_requests"
            )
        return self


class MatchKeys(SuffixKeys):
    """What drafts matches that are convincing, where others draft too."""

    min_match_score: float = Field(
        default=2.0,
        ge=0,
        description="tokens of a match that must be expected to be accepted, by suffix decoding's counts, for it to be "
        "drafted, >= 0; it is judged by 8 tokens where num_speculative_tokens are fewer",
    )

    @property
    def num_judged_tokens(self) -> int:
        """Of a match, by which it is found convincing or not: also where few are drafted."""
        return max(self.num_speculative_tokens, 8)

    def suffix_method(self) -> SuffixMethod:
        """The half that finds matches, as a method by itself."""
        keys = self.model_dump(include={key for key in SuffixKeys.model_fields if key not in MethodConfig.model_fields})
        return SuffixMethod(num_speculative_tokens=self.num_speculative_tokens, **keys)

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.min_match_score > self.num_judged_tokens:
            notes.append(
                f"min_match_score={self.min_match_score:g} is out of reach, so that no match is drafted: matches are "
                f"judged by {self.num_judged_tokens} tokens; lower it"
            )
        return notes


class SuffixMethod(SuffixKeys):
    """Suffix decoding: drafts what followed the same words before, in this request or in finished ones.

    vLLM, by Arctic Inference, lets requests draft from each other's responses while these run; here a response is
    shared when it is finished, so requests that answer alike at the same time accept less.
    """

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)

    method: Literal["suffix"] = Field(default="suffix", description="drafts copied from earlier requests and this one")
    num_speculative_tokens: int = Field(
        default=24, ge=0, le=128, description="tokens drafted per request and step at most, in [0, 128]; 0: none"
    )
    speculative_token_tree: Literal["dynamic"] | None = Field(
        default=None,
        description="null drafts the likeliest continuation; dynamic a tree of the num_speculative_tokens likeliest",
    )
