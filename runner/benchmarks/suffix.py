"""python -m runner.benchmarks.suffix: the suffix cache, beside arctic-inference's C++ tree if that is there.

Checks first that drafts are those of the definition. Then, for each corpus and number of cached responses in a process
of its own: memory (growth of the process), insertion, eviction, and requests that grow token by token with a proposal
after each, ours and theirs taking turns text by text. Calls are single ones through Python on both sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from proposers.lookup.suffix_cache import SuffixCache, compile_suffix_cache
from proposers.lookup.suffix_forest import Int32Array
from proposers.lookup.suffix_reference import naive_propose
from runner.benchmarks.suffix_corpora import NAMES, Corpus
from runner.cli.arguments import at_least, file_to_write
from runner.cli.program import exit_status
from runner.machine import describe_machine
from runner.results import write_metrics

DEPTH, LIMIT = 24, 8
PROMPT_LEN = 100
LONG_PROMPT_LEN = 4096
BATCH = 64
NUM_EVICTED = 20

Calls = tuple[Callable[[int], Any], Callable[[int], Any], Callable[[], Any]]  # append(position), propose(end), close()


def _make_cache(max_cached_requests: int) -> SuffixCache:
    return SuffixCache(
        max_tree_depth=DEPTH, max_cached_requests=max_cached_requests, max_spec_factor=1.0, min_token_prob=0.1
    )


class Ours:
    def __init__(self) -> None:
        self.cache = SuffixCache(
            max_tree_depth=DEPTH, max_cached_requests=2**31, max_spec_factor=1.0, min_token_prob=0.1
        )
        self.insert, self.evict = self.cache.insert, self.cache.evict

    def request(self, text: Int32Array, prompt_len: int) -> Calls:
        cache, row = self.cache, self.cache.open()
        cache.append(row, text[:prompt_len])
        return (
            lambda position: cache.append(row, text[position : position + 1]),
            lambda end: cache.propose(row, LIMIT),
            lambda: cache.close(row),
        )


class Theirs:
    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self.cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=-1)
        self.num_requests = self.num_evicted = 0

    def insert(self, response: Int32Array) -> None:
        self.cache.start_request(self.num_requests, [])
        self.cache.add_active_response(self.num_requests, response)
        self.cache.stop_request(self.num_requests)
        self.num_requests += 1

    def evict(self) -> None:
        self.cache.evict_cached_response(self.num_evicted)
        self.num_evicted += 1

    def request(self, text: Int32Array, prompt_len: int) -> Calls:
        cache, request_id = self.cache, f"request {self.num_requests}"
        self.num_requests += 1
        cache.start_request(request_id, text[:prompt_len])

        def close() -> None:
            cache.stop_request(request_id)
            cache.evict_cached_response(request_id)  # ours has not learned from it either

        return (
            lambda position: cache.add_active_response(request_id, text[position : position + 1]),
            lambda end: cache.speculate(request_id, text[max(0, end - DEPTH) : end], max_spec_tokens=LIMIT),
            close,
        )


def check(name: str, seed: int) -> None:
    """Drafts of a cache with evicted and cached responses against the definition. Raises AssertionError."""
    corpus = Corpus(name, 120, seed)
    cache = _make_cache(max_cached_requests=6)
    responses = [corpus.response() for _ in range(9)]
    for response in responses:
        cache.insert(response)
    row, text = cache.open(), corpus.request(responses)
    cache.append(row, text[:40])
    for end in range(41, 80):
        cache.append(row, text[end - 1 : end])
        _, length, tokens, _ = naive_propose(
            text[:end].tolist(),
            [response.tolist() for response in responses[-6:]],
            limit=LIMIT,
            max_depth=DEPTH,
            max_spec_factor=Fraction(1),
            min_token_prob=Fraction(1, 10),
        )
        draft = cache.propose(row, LIMIT)
        assert (draft.token_ids, draft.match_length) == (tokens, length), f"{name}: {draft} is not {tokens}, {length}"


def measure(name: str, num_responses: int, length: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """side -> measure -> value, of one corpus; run in a process of its own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    compile_suffix_cache()
    corpus = Corpus(name, length, seed)
    responses = [corpus.response() for _ in range(num_responses)]
    sides: dict[str, Any] = {"ours": Ours()}
    if importlib.util.find_spec("arctic_inference") is not None:
        sides["arctic"] = Theirs()
    num_tokens = num_responses * length
    results: dict[str, dict[str, float]] = {}
    for side, cache in sides.items():
        resident, started = _resident_bytes(), time.perf_counter()
        for response in responses:
            cache.insert(response)
        seconds = time.perf_counter() - started
        results[side] = {
            "insert us/token": seconds / num_tokens * 1e6,
            "bytes/token": (_resident_bytes() - resident) / num_tokens,
        }
    results["ours"]["own count bytes/token"] = sides["ours"].cache.num_shared_bytes / num_tokens
    times: dict[str, dict[str, list[list[int]]]] = {side: {"append": [], "propose": []} for side in sides}
    for _ in range(rounds):
        text = corpus.request(responses)
        for side, cache in sides.items():
            for what, nanoseconds in _grow(cache, text).items():
                times[side][what].append(nanoseconds)
    for side in sides:
        for what, calls in times[side].items():
            # Others use the machine too: of the rounds the middle one, and for the median also the best one.
            medians = [float(np.median(call)) for call in calls]
            results[side][f"{what} p50 us"] = statistics.median(medians) / 1e3
            results[side][f"{what} p50 us, best round"] = min(medians) / 1e3
            results[side][f"{what} p99 us"] = (
                statistics.median([float(np.percentile(call, 99)) for call in calls]) / 1e3
            )
        results[side]["proposals/s"] = 1e6 / results[side]["propose p50 us"]
    for side, cache in sides.items():
        results[side][f"prompt of {LONG_PROMPT_LEN}, us/token"] = _start(cache, corpus, rounds)
    results["ours"][f"step of {BATCH}, us/request"] = _step_of_a_batch(sides["ours"].cache, corpus, responses)
    for side, cache in sides.items():
        started = time.perf_counter()
        for _ in range(NUM_EVICTED):
            cache.evict()
        results[side]["evict us/token"] = (time.perf_counter() - started) / (NUM_EVICTED * length) * 1e6
    return results


def _grow(cache: Ours | Theirs, text: Int32Array) -> dict[str, list[int]]:
    """Nanoseconds of every call while a request says `text`, a token and a proposal at a time."""
    append, propose, close = cache.request(text, PROMPT_LEN)
    times: dict[str, list[int]] = {"append": [], "propose": []}
    for position in range(PROMPT_LEN, len(text)):
        started = time.perf_counter_ns()
        append(position)
        appended = time.perf_counter_ns()
        propose(position + 1)
        proposed = time.perf_counter_ns()
        times["append"].append(appended - started)
        times["propose"].append(proposed - appended)
    close()
    return times


def _start(cache: Ours | Theirs, corpus: Corpus, rounds: int) -> float:
    """Microseconds a token of a long prompt, until its request is ready to draft and until it is gone again."""
    prompt = np.concatenate([corpus.response() for _ in range(-(-LONG_PROMPT_LEN // corpus.length))])
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        _, _, close = cache.request(prompt, LONG_PROMPT_LEN)
        close()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / LONG_PROMPT_LEN * 1e6


def _step_of_a_batch(cache: SuffixCache, corpus: Corpus, responses: Sequence[Int32Array]) -> float:
    """Microseconds a request of steps in which BATCH requests each say one token and draft."""
    texts = [corpus.request(responses).tolist() for _ in range(BATCH)]
    rows, limits = [cache.open() for _ in texts], [LIMIT] * BATCH
    cache.step(rows, [text[:PROMPT_LEN] for text in texts], limits)
    times = []
    for position in range(PROMPT_LEN, min(len(texts[0]), PROMPT_LEN + 200)):
        new_tokens = [text[position : position + 1] for text in texts]
        started = time.perf_counter()
        cache.step(rows, new_tokens, limits)
        times.append(time.perf_counter() - started)
    for row in rows:
        cache.close(row)
    return statistics.median(times) / BATCH * 1e6


def _resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return exit_status(lambda: _measure_all(options))


def _measure_all(options: argparse.Namespace) -> None:
    for name in options.corpora:
        check(name, options.seed)
    print("drafts are those of the definition", file=sys.stderr)
    if importlib.util.find_spec("arctic_inference") is None:
        print("arctic-inference is not installed: no comparison", file=sys.stderr)
    results: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_end_on_interrupt, max_tasks_per_child=1
    ) as processes:
        for name in options.corpora:
            for count in options.responses:
                work = (name, count, options.length, options.rounds, options.seed)
                results.setdefault(name, {})[count] = processes.submit(measure, *work).result()
                _print_table(f"{name}, {count:,} responses of {options.length:,} tokens", results[name][count])
    for name, by_count in results.items():
        medians = [by_count[count]["ours"]["propose p50 us"] for count in sorted(by_count)]
        print(
            f"{name}: propose p50 at {max(by_count):,} / {min(by_count):,} responses = {medians[-1] / medians[0]:.2f}"
        )
    if options.json is not None:
        conditions = {key: getattr(options, key) for key in ("length", "rounds", "seed")}
        conditions |= {"depth": DEPTH, "limit": LIMIT}
        found = {**describe_machine("numba", "numpy"), "conditions": conditions, "results": results}
        write_metrics(options.json, found)


def _end_on_interrupt() -> None:
    """Ctrl-C reaches a child as well, whose traceback would say nothing."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _print_table(title: str, results: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *results, *(["ours / arctic"] if len(results) > 1 else []), title=title)
    for what, value in results["ours"].items():
        values = [side.get(what) for side in results.values()]
        ratio = [f"{value / values[1]:.2f}"] if len(values) > 1 and values[1] else []
        table.add_row(what, *("" if v is None else f"{v:,.2f}" for v in values), *ratio)
    Console(width=100).print(table)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runner.benchmarks.suffix", description=__doc__)
    parser.add_argument(
        "--responses",
        type=at_least(1),
        nargs="+",
        default=[1_000, 10_000],
        help="cached responses (default: 1000 10000)",
    )
    parser.add_argument(
        "--length", type=at_least(PROMPT_LEN + 1), default=1_000, help="tokens of every response (default: %(default)s)"
    )
    parser.add_argument("--corpora", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="requests that are timed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the numbers to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
