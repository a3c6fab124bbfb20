"""The method of matches and recycled candidates in one tree."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from runner.config.suffix_method import MatchKeys
from runner.config.token_recycling_method import TokenRecyclingMethod


class SuffixRecyclingMethod(MatchKeys):
    """Suffix decoding's matches in trees of token recycling; nothing is trained."""

    ignored_keys: ClassVar[tuple[str, ...]] = ("draft_sample_method",)

    method: Literal["suffix_recycling"] = Field(
        default="suffix_recycling", description="matches in earlier text, in a tree of what the target held likely"
    )
    num_speculative_tokens: int = Field(
        default=16, ge=0, le=128, description="nodes of a tree, the match's included, in [0, 128]; 0: none"
    )
    tree_depth: int = Field(
        default=6, ge=1, le=128, description="levels of recycled candidates at most, in [1, 128]; matches may be longer"
    )

    def recycling_method(self) -> TokenRecyclingMethod:
        """The half that fills the tree, as a method by itself."""
        return TokenRecyclingMethod(num_speculative_tokens=self.num_speculative_tokens, tree_depth=self.tree_depth)
