"""What a point of a sweep reuses from the points that ran before it in the same process.

The target's weights, while model and hardware stay the same, and plain decoding, so that all points are compared with
one baseline. Each point has an engine and a KV cache of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.config import SpeculativeConfig
from runner.metrics import MetricsCollector

if TYPE_CHECKING:  # the command line imports this file, and torch takes a while
    from runner.engine.loader import LoadedModel

TARGET_NODES = {"model", "hardware"}
BASELINE_NODES = {*TARGET_NODES, "sampler", "workload", "seed"}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Plain decoding over the workload."""

    point: str  # which point of the sweep measured it
    metrics: MetricsCollector


class EarlierPoints:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._target: tuple[str, LoadedModel] | None = None
        self._baselines: dict[str, Baseline] = {}

    def target_for(self, config: SpeculativeConfig) -> LoadedModel | None:
        """The weights, if the last point had the same; others are let go of, to leave their memory to the next ones."""
        if self._target is not None and self._target[0] != config.model_dump_json(include=TARGET_NODES):
            self._target = None
        return None if self._target is None else self._target[1]

    def keep_target(self, config: SpeculativeConfig, target: LoadedModel) -> None:
        self._target = config.model_dump_json(include=TARGET_NODES), target

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
