"""The keys that every speculation method has: vLLM's `speculative_config` keys, spelled as vLLM spells them.

Common keys exist on every method, so any cross product of a sweep composes; a method names those it ignores.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, ValidationInfo, field_validator, model_validator

from runner.config.node import Node

RejectionSampleMethod = Literal["strict", "probabilistic", "block", "typical", "synthetic"]
LOSSY_RULES = ("typical", "synthetic")
DraftSampleMethod = Literal["greedy", "probabilistic", "coupled"]
BatchSizeRange = Annotated[
    tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0, le=128)]], Strict(False)
]
TYPICAL_KEYS = ("posterior_threshold", "posterior_alpha")
SYNTHETIC_KEYS = ("synthetic_acceptance_rate", "synthetic_acceptance_rates", "synthetic_acceptance_length")


class MethodConfig(Node):
    """Keys that every method has."""

    renamed_keys: ClassVar[dict[str, str]] = {"tensor_parallel_size": "draft_tensor_parallel_size"}
    ignored_keys: ClassVar[tuple[str, ...]] = ()  # common keys that change nothing for this method

    method: str = Field(description="the speculation method")
    num_speculative_tokens: int = Field(
        default=4, ge=0, le=128, description="tokens drafted per request and step at most, in [0, 128]; 0: none"
    )
    rejection_sample_method: RejectionSampleMethod = Field(
        default="strict",
        description="strict keeps the very tokens of plain decoding, probabilistic (alias standard) and block their "
        "distribution; typical is lossy (Medusa's); synthetic accepts at a set rate whatever the tokens are",
    )
    draft_sample_method: DraftSampleMethod | None = Field(
        default=None,
        validate_default=True,
        description="how a model drafter picks tokens; null: probabilistic under the rules probabilistic and block, "
        "else coupled (drawn with the noise the target will use)",
    )
    posterior_threshold: float = Field(
        default=0.09, gt=0, le=1, description="typical rule: accept a token at least this probable, in (0, 1]"
    )
    posterior_alpha: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="typical rule: or at least this times exp(-entropy) of the target's distribution, in (0, 1]",
    )
    num_speculative_tokens_per_batch_size: (
        Annotated[tuple[BatchSizeRange, ...], Strict(False)] | Literal["auto"] | None
    ) = Field(
        default=None,
        description="[[start, end, K], ...], in any order, K in [0, 128]: drafts at most while start..end requests "
        "run; gaps and what lies behind keep the K before them. auto: the K, up to num_speculative_tokens, that "
        "brings most tokens per second, found for each load while requests run",
    )
    disable_by_batch_size: int | None = Field(
        default=None, ge=1, description="draft nothing while more requests than this are running or waiting, >= 1"
    )
    synthetic_acceptance_rate: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="synthetic rule: accepted / drafted tokens on average, in [0, 1], of chains of "
        "num_speculative_tokens; shorter drafts have more of theirs accepted, trees fewer",
    )
    synthetic_acceptance_rates: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Strict(False)] | None = (
        Field(
            default=None,
            description="synthetic rule: share of drafts accepted up to each position (unconditional), each in "
            "[0, 1], non-increasing, num_speculative_tokens of them",
        )
    )
    synthetic_acceptance_length: float | None = Field(
        default=None,
        ge=1,
        description="synthetic rule: tokens per step on average, in [1, num_speculative_tokens + 1]",
    )

    @field_validator("rejection_sample_method", mode="before")
    @classmethod
    def _resolve_alias(cls, value: Any) -> Any:
        return "probabilistic" if value == "standard" else value

    @field_validator("draft_sample_method")
    @classmethod
    def _resolve_default(cls, value: DraftSampleMethod | None, info: ValidationInfo) -> DraftSampleMethod:
        if value is not None:
            return value
        rule = info.data.get("rejection_sample_method")
        return "probabilistic" if rule in ("probabilistic", "block") else "coupled"

    @field_validator("num_speculative_tokens_per_batch_size", mode="before")
    @classmethod
    def _check_shape(cls, ranges: Any) -> Any:
        is_list = isinstance(ranges, list | tuple)
        if ranges in (None, "auto"):
            return ranges
        if is_list and all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in ranges):
            return ranges
        raise ValueError(f"must be a list of [start, end, K], such as [[1, 8, 4], [9, 64, 2]], or auto, got {ranges!r}")

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _check_ranges(
        cls, ranges: tuple[BatchSizeRange, ...] | Literal["auto"] | None
    ) -> tuple[BatchSizeRange, ...] | Literal["auto"] | None:
        if ranges is None or ranges == "auto":
            return ranges
        ranges = tuple(sorted(ranges))  # vLLM takes them in any order
        if not ranges or ranges[0][0] != 1:
            raise ValueError(f"must hold ranges [start, end, K] whose first starts at 1, got {_as_lists(ranges)}")
        for start, end, _ in ranges:
            if start > end:
                raise ValueError(f"must have start <= end in every range, got [{start}, {end}]")
        for (_, end, _), (start, _, _) in itertools.pairwise(ranges):
            if start <= end:
                raise ValueError(f"must hold ranges that do not overlap, got {_as_lists(ranges)}")
        return ranges

    @model_validator(mode="after")
    def _check_block_drafts(self) -> MethodConfig:
        rule, drafting = self.rejection_sample_method, self.draft_sample_method
        if (rule, drafting) == ("block", "coupled") and "draft_sample_method" not in self.ignored_keys:
            raise ValueError(
                "draft_sample_method must be probabilistic or greedy under rejection_sample_method=block, got "
                "'coupled': block looks at drafts beyond its cut, and coupled ones are drawn with the noise of target "
                "tokens to come, which that would bias; leave draft_sample_method null, or choose "
                "rejection_sample_method=strict"
            )
        return self

    @model_validator(mode="after")
    def _check_synthetic(self) -> MethodConfig:
        given = [key for key in SYNTHETIC_KEYS if getattr(self, key) is not None]
        if self.rejection_sample_method != "synthetic":
            if given:
                raise ValueError(
                    f"{given[0]} must be null unless rejection_sample_method=synthetic, got "
                    f"{getattr(self, given[0])!r}; add method.rejection_sample_method=synthetic"
                )
            return self
        if len(given) != 1:
            raise ValueError(
                "rejection_sample_method synthetic needs exactly one of "
                f"{', '.join(SYNTHETIC_KEYS)}, got {', '.join(given) or 'none'}"
            )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is not None:
            if len(rates) != self.num_speculative_tokens:
                raise ValueError(
                    f"synthetic_acceptance_rates must have num_speculative_tokens ({self.num_speculative_tokens}) "
                    f"entries, got {len(rates)}"
                )
            if any(later > earlier for earlier, later in itertools.pairwise(rates)):
                raise ValueError(
                    f"synthetic_acceptance_rates must be non-increasing, got {list(rates)}; "
                    "entry i is the share of drafts whose tokens 0..i are all accepted"
                )
        if length is not None and length > self.num_speculative_tokens + 1:
            raise ValueError(
                f"synthetic_acceptance_length must be <= num_speculative_tokens + 1 "
                f"({self.num_speculative_tokens + 1}), got {length}"
            )
        return self

    def synthetic_rates(self) -> list[float]:
        """Share of drafts accepted up to each position, unconditional: K entries, the last ones may be 0."""
        num_tokens = self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return list(self.synthetic_acceptance_rates)
        if self.synthetic_acceptance_rate is not None:
            accepted = self.synthetic_acceptance_rate * num_tokens
        elif self.synthetic_acceptance_length is not None:
            accepted = self.synthetic_acceptance_length - 1
        else:
            raise ValueError("synthetic rates exist only under rejection_sample_method=synthetic")
        # vLLM's schedule: of all with this mean, the one whose accepted length varies least
        whole = math.floor(accepted)
        return [1.0 if i < whole else accepted - whole if i == whole else 0.0 for i in range(num_tokens)]

    def synthetic_conditional_rates(self) -> list[float]:
        """Acceptance at each position given that all before were accepted: p_i / p_{i-1}, with 0/0 = 0."""
        rates = self.synthetic_rates()
        return [rate / before if before > 0 else 0.0 for before, rate in itertools.pairwise([1.0, *rates])]

    def lossless(self, temperature: float) -> Literal["tokens", "distribution", False]:
        """What the rule keeps of plain decoding's text: the very tokens, their distribution, or neither (lossy)."""
        if "rejection_sample_method" in self.ignored_keys:
            return "tokens"
        if self.rejection_sample_method in LOSSY_RULES:
            return False
        return "tokens" if self.rejection_sample_method == "strict" or temperature == 0 else "distribution"

    def normalised(self) -> Self:
        """The same run with the keys that it ignores at their defaults: two equal ones need one run."""
        ignored = {*self.ignored_keys, *self._keys_of_other_rules()}
        return type(self).model_validate({key: value for key, value in self.model_dump().items() if key not in ignored})

    def notes(self) -> list[str]:
        """What the run does not do although it was asked for, and that it is lossy if it is."""
        default = self.normalised()
        ignorers = {
            f"method={self.method}": self.ignored_keys,
            f"rejection_sample_method={self.rejection_sample_method}": self._keys_of_other_rules(),
        }
        notes = []
        for ignorer, keys in ignorers.items():
            ignored = [f"{key}={getattr(self, key)}" for key in keys if getattr(self, key) != getattr(default, key)]
            if ignored:
                notes.append(f"{ignorer} ignores {', '.join(ignored)}")
        ranges = default.num_speculative_tokens_per_batch_size
        if ranges == "auto":
            if self.lossless(temperature=1.0) != "tokens":
                texts = "sampled texts" if self.lossless(temperature=0.0) else "texts"
                notes.append(
                    "num_speculative_tokens_per_batch_size=auto goes by the clock, and under "
                    f"rejection_sample_method={self.rejection_sample_method} {texts} go by how long drafts are: "
                    "the same seed may say something else another time"
                )
        elif (most := max((tokens for _, _, tokens in ranges or ()), default=0)) > self.num_speculative_tokens:
            notes.append(
                f"num_speculative_tokens_per_batch_size asks for {most} tokens; no load gives more than "
                f"num_speculative_tokens={self.num_speculative_tokens}"
            )
        if not self.lossless(temperature=1.0):
            rule = f"rejection_sample_method={self.rejection_sample_method}"
            notes.append(f"lossy: {rule} keeps neither plain decoding's tokens nor their distribution")
        return notes

    def _keys_of_other_rules(self) -> tuple[str, ...]:
        """Keys, of those that the method itself would heed, which this rule does not read."""
        unread = () if self.rejection_sample_method == "typical" else TYPICAL_KEYS
        return tuple(key for key in unread if key not in self.ignored_keys)


def _as_lists(ranges: tuple[BatchSizeRange, ...]) -> list[list[int]]:
    return [list(entry) for entry in ranges]
