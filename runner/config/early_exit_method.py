"""The keys of the method whose drafter is the beginning of the target."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runner.config.method import MethodConfig

ExitLayer = Annotated[int, Field(ge=1)]


class EarlyExitMethod(MethodConfig):
    """The target's first layers draft, with its own norm and head behind them (LayerSkip, arXiv 2404.16710)."""

    method: Literal["early_exit"] = Field(
        default="early_exit", description="the target's own first layers draft; nothing is loaded"
    )
    exit_layer: ExitLayer | None = Field(
        default=None,
        description="how many of the target's layers draft, in [1, all of them]; null: a quarter of them, at least one",
    )

    @property
    def drafter_name(self) -> str:
        """As DrafterMethod has it."""
        return self.method
