"""The keys of the methods whose drafter is the target itself, or a part of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runner.config.method import MethodConfig

ExitLayer = Annotated[int, Field(ge=1)]
NumSinkTokens = Annotated[int, Field(ge=0)]
NumRecentTokens = Annotated[int, Field(ge=1)]


class SelfSpeculationMethod(MethodConfig):
    """The target drafts, so that nothing is loaded."""

    @property
    def drafter_name(self) -> str:
        """As DrafterMethod has it."""
        return self.method


class EarlyExitMethod(SelfSpeculationMethod):
    """The target's first layers draft, with its own norm and head behind them (LayerSkip, arXiv 2404.16710)."""

    method: Literal["early_exit"] = Field(
        default="early_exit", description="the target's own first layers draft; nothing is loaded"
    )
    exit_layer: ExitLayer | None = Field(
        default=None,
        description="how many of the target's layers draft, in [1, all of them]; null: a quarter of them, at least one",
    )


class SparseKVMethod(SelfSpeculationMethod):
    """All layers of the target draft, over a part of its KV cache (MagicDec, arXiv 2408.11049)."""

    method: Literal["sparse_kv"] = Field(
        default="sparse_kv",
        description="the target drafts over the first and last tokens of its cache; nothing is loaded",
    )
    num_sink_tokens: NumSinkTokens = Field(
        default=16, description="tokens at a text's beginning that drafts attend to, >= 0; whole blocks of the cache"
    )
    num_recent_tokens: NumRecentTokens = Field(
        default=512, description="tokens at a text's end that drafts attend to, >= 1; whole blocks of the cache"
    )
