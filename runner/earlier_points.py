"""What a point of a sweep reuses from the points that ran before it in the same process.

The target's weights and the ranks that hold them, while model and hardware stay the same, and plain decoding, so that
all points are compared with one baseline. Each point has an engine and a KV cache of its own. Nor is a note told again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.config import SpeculativeConfig
from runner.metrics import MetricsCollector

if TYPE_CHECKING:  # the command line imports this file, and torch takes a while
    from runner.engine.loader import LoadedModel
    from runner.ranks.ranks import Ranks

TARGET_NODES = {"model", "hardware"}
MEASURED = re.compile(r"\d+%|\d+\.\d+ s\b")  # in a note: another share or duration says the same
BASELINE_NODES = {*TARGET_NODES, "sampler", "workload", "seed"}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Plain decoding over the workload."""

    point: str  # which point of the sweep measured it
    metrics: MetricsCollector


@dataclass(frozen=True, kw_only=True)
class Held:
    """A target, in every rank."""

    nodes: str  # of the configuration that say which
    info: LoadedModel
    ranks: Ranks


class EarlierPoints:
    def __init__(self) -> None:
        self._held: Held | None = None
        self.forget()

    def forget(self) -> None:
        self._let_go()
        self._baselines: dict[str, Baseline] = {}
        self._told: set[str] = set()

    def target_for(self, config: SpeculativeConfig) -> Held | None:
        """That of the last point, if it had the same; others are let go of, to leave their memory to the next ones."""
        held = self._held
        if held is None or held.nodes != config.model_dump_json(include=TARGET_NODES) or not held.ranks.is_open:
            self._let_go()
        return self._held

    def keep_target(self, config: SpeculativeConfig, info: LoadedModel, ranks: Ranks) -> None:
        self._held = Held(nodes=config.model_dump_json(include=TARGET_NODES), info=info, ranks=ranks)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.ranks.close()
        self._held = None

    def baseline_for(self, config: SpeculativeConfig) -> Baseline | None:
        return self._baselines.get(config.model_dump_json(include=BASELINE_NODES))

    def keep_baseline(self, config: SpeculativeConfig, metrics: MetricsCollector) -> None:
        """The first one stays."""
        method = config.method
        point = f"method={method.method}"
        if method.method != "none":
            point += f" method.num_speculative_tokens={method.num_speculative_tokens}"
        key = config.model_dump_json(include=BASELINE_NODES)
        self._baselines.setdefault(key, Baseline(point=point, metrics=metrics))

    def untold(self, notes: Iterable[str]) -> list[str]:
        """Those that differ from all of the points before in more than a measured share or duration; now told."""
        new = [note for note in notes if MEASURED.sub("", note) not in self._told]
        self._told |= {MEASURED.sub("", note) for note in new}
        return new
