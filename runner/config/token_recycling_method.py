"""The keys of token recycling."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from runner.config.method import MethodConfig


class TokenRecyclingMethod(MethodConfig):
    """Token recycling: drafts what the target itself last held likely behind each token; nothing is trained."""

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)

    method: Literal["token_recycling"] = Field(
        default="token_recycling", description="drafts what the target itself last held likely behind each token"
    )
    num_speculative_tokens: int = Field(
        default=16, ge=0, le=128, description="tokens drafted per request and step, in [0, 128]; 0: none"
    )
    speculative_token_tree: Literal["dynamic"] | None = Field(
        default="dynamic",
        description="dynamic drafts a tree of the num_speculative_tokens likeliest; null the likeliest chain",
    )
    tree_depth: int = Field(default=6, ge=1, le=128, description="dynamic tree: levels at most, in [1, 128]")
