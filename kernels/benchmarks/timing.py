"""Times of calls on a CUDA GPU: replays of a graph of many of them, between two events.

A graph, so that what Python and the driver take to launch does not count; many calls, so that what a replay takes to
start does not. Calls follow one another as in an engine's step: on Hopper the beginning of one may overlap with the
end of the one before (kernels/dependent_launch.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.benchmarks.case import Call

REPLAY_SECONDS = 0.004  # of a graph, about
MOST_LAUNCHES = 4096  # calls of a graph
WARM_UP_REPLAYS = 5
COPIED_BYTES = 1 << 30  # read, and as many written


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one call, over repetitions."""

    median_us: float
    p20_us: float
    p80_us: float


def summarise(microseconds: Sequence[float]) -> Timing:
    """Percentiles interpolate between the neighbours."""
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.quantile(torch.tensor(microseconds, dtype=torch.float64), points).tolist()
    return Timing(median_us=median, p20_us=p20, p80_us=p80)


class GraphTimer:
    def __init__(self, device: torch.device, repetitions: int) -> None:
        self.device, self.repetitions = device, repetitions

    def __call__(self, *contenders: Sequence[Call]) -> list[Timing]:
        """Of each contender's calls, one after the other; contenders take turns, so that all meet the same clocks."""
        graphs = [self._captured(calls) for calls in contenders]
        for graph, _ in graphs:
            for _ in range(WARM_UP_REPLAYS):
                graph.replay()
        samples: list[list[float]] = [[] for _ in graphs]
        for _ in range(self.repetitions):
            for own, (graph, num_calls) in zip(samples, graphs, strict=True):
                own.append(_seconds(graph.replay) * 1e6 / num_calls)
        return [summarise(own) for own in samples]

    def copy_gb_per_second(self) -> float:
        """Bytes read and written by a large copy on the device, launched: a graph copies more slowly."""
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        samples = [_seconds(lambda: target.copy_(source)) for _ in range(WARM_UP_REPLAYS + self.repetitions)]
        return 2 * COPIED_BYTES / statistics.median(samples[WARM_UP_REPLAYS:]) / 1e9

    def _captured(self, calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
        for call in calls:  # compiles, and allocates what outlives a call
            call()
        torch.cuda.synchronize(self.device)
        once = _capture(calls, 1)
        once.replay()
        rounds = math.ceil(REPLAY_SECONDS / max(_seconds(once.replay), 1e-6))
        rounds = max(1, min(rounds, MOST_LAUNCHES // len(calls)))
        return _capture(calls, rounds), rounds * len(calls)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _seconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
