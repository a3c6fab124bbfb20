"""The method of two drafters: suffix decoding, and a model where no match is convincing."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from runner.config.drafter_methods import (
    DflashMethod,
    DrafterMethod,
    DraftModelMethod,
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
    MlpSpeculatorMethod,
    MtpMethod,
    PardMethod,
)
from runner.config.method import MethodConfig
from runner.config.suffix_method import SuffixKeys, SuffixMethod

DRAFTERS: dict[str, type[DrafterMethod]] = {
    "draft_model": DraftModelMethod,
    "pard": PardMethod,
    "eagle": EagleMethod,
    "eagle3": Eagle3Method,
    "mtp": MtpMethod,
    "medusa": MedusaMethod,
    "mlp_speculator": MlpSpeculatorMethod,
    "dflash": DflashMethod,
}


class HybridMethod(SuffixKeys, DrafterMethod):
    """Suffix decoding where a match is convincing, a model drafter elsewhere (arXiv 2411.04975, "hybrid")."""

    drafter_key: ClassVar[str] = "method.drafter"

    method: Literal["hybrid"] = Field(
        default="hybrid", description="drafts copied from earlier text where a match is convincing, else a model's"
    )
    num_speculative_tokens: int = Field(
        default=8, ge=0, le=128, description="tokens of a match drafted per request and step at most, in [0, 128]"
    )
    drafter: Literal["draft_model", "pard", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash"] = Field(
        default="draft_model", description="what drafts where no match is convincing; `model` is its checkpoint"
    )
    num_drafter_tokens: int = Field(
        default=4, ge=1, le=128, description="tokens that the drafter drafts at most, in [1, num_speculative_tokens]"
    )
    min_match_score: float = Field(
        default=2.0,
        ge=0,
        description="tokens of a match that must be expected to be accepted, by suffix decoding's counts, for it to "
        "take the drafter's place, >= 0",
    )

    @property
    def drafter_name(self) -> str:
        return self.drafter

    def suffix_method(self) -> SuffixMethod:
        """The half that finds matches, as a method by itself."""
        keys = self.model_dump(include={key for key in SuffixKeys.model_fields if key not in MethodConfig.model_fields})
        return SuffixMethod(num_speculative_tokens=self.num_speculative_tokens, **keys)

    def drafter_method(self) -> DrafterMethod:
        """The half that drafts elsewhere, as a method by itself."""
        keys = self.model_dump(include={*DrafterMethod.model_fields} - {*MethodConfig.model_fields})
        return DRAFTERS[self.drafter](
            num_speculative_tokens=min(self.num_drafter_tokens, self.num_speculative_tokens),
            draft_sample_method=self.draft_sample_method,
            **keys,
        )

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.num_drafter_tokens > self.num_speculative_tokens:
            notes.append(
                f"num_drafter_tokens={self.num_drafter_tokens} is more than num_speculative_tokens="
                f"{self.num_speculative_tokens}: so many are drafted at most"
            )
        return notes
