"""python -m runner.benchmarks.ngram: what prompt lookup costs a step, on this machine.

64 contexts of 32k tokens; the methods are first held to the definition on short texts. `ngram` is timed as the compiled
call and as the proposer's whole propose(), in warm and in cold caches, beside what others do, a search of every context
from its end (compiled too). `ngram_gpu` is timed where there is a GPU. Prints a table, and writes JSON when asked.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from proposers.base import ProposerContext
from proposers.lookup.ngram_definition import naive_lookup, search_from_the_end
from proposers.lookup.ngram_index import NgramIndex
from proposers.lookup.ngram_table import Int32Array, extend_and_draft
from proposers.ngram import NgramProposer
from proposers.ngram_gpu import ngram_match_on
from runner.benchmarks.ngram_texts import next_tokens, text_of
from runner.cli.arguments import at_least, file_to_write
from runner.cli.program import exit_status
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule, ScheduledRequest
from runner.machine import describe_machine
from runner.metrics.rates import SPREAD, percentiles
from runner.results import write_metrics

MIN_N, MAX_N, NUM_DRAFTS = 2, 5, 4
VOCAB_SIZE = 32_000
NUM_STEPS, NUM_WARM_UP_STEPS = 200, 20
CACHE_BYTES = 256 * 2**20  # more than most CPUs' last level of cache, and an H200's
Spread = dict[str, float | None]  # median, p20, p80, p99
KEYS = {"min_n": MIN_N, "max_n": MAX_N}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return exit_status(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _check(options.seed)
    texts = [
        text_of(options.context, random.Random(f"{options.seed} {row}"), VOCAB_SIZE) for row in range(options.requests)
    ]
    microseconds = _time_index(texts) | _time_propose(texts)
    microseconds["search from the end, 1 new token"] = _time_search(texts)
    if torch.cuda.is_available():
        microseconds |= _time_gpu(texts)
    found = {
        **describe_machine("numba", "numpy", "torch"),
        "conditions": {
            "requests": options.requests, "context": options.context, "prompt_lookup_min": MIN_N,
            "prompt_lookup_max": MAX_N, "num_speculative_tokens": NUM_DRAFTS, "seed": options.seed, "threads": 1,
        },
        "microseconds": microseconds,
        "bytes_per_token": _bytes_per_token(texts),
    }  # fmt: skip
    _print(found)
    if options.json is not None:
        write_metrics(options.json, found)


def _check(seed: int) -> None:
    """Every implementation against the definition, on short texts; raises where one differs."""
    generator = random.Random(seed)
    index = NgramIndex(MIN_N, MAX_N)
    for _ in range(300):
        text = [generator.randrange(3) for _ in range(generator.randint(0, 60))]
        expected = naive_lookup(text, MIN_N, MAX_N, NUM_DRAFTS)
        sequence = index.add()
        found = {"ngram": index.extend_and_draft([sequence], text, [len(text)], [NUM_DRAFTS])[0].tolist()}
        index.release(sequence)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            row, slots = torch.tensor([[*text, 0]], dtype=torch.int32, device=device), torch.tensor([0], device=device)
            lengths = torch.tensor([len(text)], device=device)
            drafts = ngram_match_on(torch.device(device))(row, lengths, slots, **KEYS, num_tokens=NUM_DRAFTS)[
                0
            ].tolist()
            found[f"ngram_gpu on {device}"] = [token for token in drafts if token >= 0]
        searched: Int32Array = np.empty((1, NUM_DRAFTS), dtype=np.int32)
        search_from_the_end(np.array([text], dtype=np.int32), len(text), MIN_N, MAX_N, searched)
        found["search from the end"] = [token for token in searched[0].tolist() if token >= 0]
        for name, drafts in found.items():
            assert drafts == expected, f"{name} differs from the definition at {text}: {drafts}, not {expected}"


def _time_index(texts: list[list[int]]) -> dict[str, Spread]:
    measured: dict[str, Spread] = {}
    evicted = np.zeros(CACHE_BYTES // 8, dtype=np.int64)
    for num_new in (1, 4):
        for caches in ("warm", "cold"):
            print(f"timing the compiled call, {num_new} new a step, {caches} caches", file=sys.stderr)
            index, seconds = NgramIndex(MIN_N, MAX_N), []
            sequences = [index.add() for _ in texts]
            for sequence, text in zip(sequences, texts, strict=True):
                started = time.perf_counter()
                index.extend_and_draft([sequence], text, [len(text)], [0])
                seconds.append(time.perf_counter() - started)
            measured["a new context, once"] = _spread(seconds)
            numbers = np.array(sequences)
            added, wanted = np.full(len(texts), num_new), np.full(len(texts), NUM_DRAFTS)
            drafts, cu = np.empty(len(texts) * NUM_DRAFTS, dtype=np.int64), np.zeros(len(texts) + 1, dtype=np.int64)
            seconds = []
            for step in next_tokens(texts, num_new, NUM_WARM_UP_STEPS + NUM_STEPS):
                flat = np.array([token for tokens in step for token in tokens], dtype=np.int32)
                index.make_room(numbers, added)
                # As the index itself calls it.
                arguments = (index.pool, index.sequences, MIN_N, MAX_N, index.table_log2, numbers, flat, added, wanted)
                if caches == "cold":
                    evicted += 1
                started = time.perf_counter()
                extend_and_draft(*arguments, drafts, cu)
                seconds.append(time.perf_counter() - started)
            plural = "s" if num_new > 1 else ""
            measured[f"compiled call, {num_new} new token{plural}, {caches} caches"] = _spread(seconds)
    return measured


def _bytes_per_token(texts: list[list[int]]) -> float:
    index = NgramIndex(MIN_N, MAX_N)
    for text in texts:
        index.extend_and_draft([index.add()], text, [len(text)], [0])
    return index.num_bytes / sum(map(len, texts))


def _time_propose(texts: list[list[int]]) -> dict[str, Spread]:
    measured = {}
    for num_new in (1, 4):
        context = ProposerContext(
            vocab_size=VOCAB_SIZE, max_model_len=2 * len(texts[0]), max_num_seqs=len(texts), eos_token_ids=(),
            max_num_batched_tokens=NUM_DRAFTS + 1, block_size=16, device=torch.device("cpu"), dtype=torch.float32,
            batch_invariant=True, needs_draft_probs=False,
        )  # fmt: skip
        proposer = NgramProposer(
            num_speculative_tokens=NUM_DRAFTS, context=context, prompt_lookup_min=MIN_N, prompt_lookup_max=MAX_N
        )
        requests = [
            Request(request_id=str(row), prompt_token_ids=text, sampling_params=SamplingParams(), seed=0)
            for row, text in enumerate(texts)
        ]
        seconds = []
        for step in next_tokens(texts, num_new, NUM_WARM_UP_STEPS + NUM_STEPS):
            for request, tokens in zip(requests, step, strict=True):
                request.output_token_ids += tokens
            schedule = _schedule(requests)
            started = time.perf_counter()
            proposer.propose(schedule)
            seconds.append(time.perf_counter() - started)
        measured[f"propose(), {num_new} new token{'s' if num_new > 1 else ''}"] = _spread(seconds)
    return measured


def _schedule(requests: list[Request]) -> Schedule:
    return Schedule(
        scheduled=[
            ScheduledRequest(
                request=request, start=request.num_tokens - 1, num_new_tokens=1, max_draft_tokens=NUM_DRAFTS,
                yields_token=True, is_decoding=True,
            )
            for request in requests
        ]
    )  # fmt: skip


def _time_search(texts: list[list[int]]) -> Spread:
    steps, length, seconds = next_tokens(texts, 1, NUM_WARM_UP_STEPS + NUM_STEPS), len(texts[0]), []
    held: Int32Array = np.zeros((len(texts), length + len(steps)), dtype=np.int32)
    held[:, :length] = texts
    drafts: Int32Array = np.empty((len(texts), NUM_DRAFTS), dtype=np.int32)
    for step in steps:
        held[:, length] = [tokens[0] for tokens in step]
        length += 1
        started = time.perf_counter()
        search_from_the_end(held, length, MIN_N, MAX_N, drafts)
        seconds.append(time.perf_counter() - started)
    return _spread(seconds)


def _time_gpu(texts: list[list[int]]) -> dict[str, Spread]:
    ngram_match = ngram_match_on(torch.device("cuda"))
    token_ids = torch.tensor(texts, dtype=torch.int32, device="cuda")
    lengths = torch.full((len(texts),), len(texts[0]), device="cuda")
    slots = torch.arange(len(texts), device="cuda")

    def match() -> None:
        ngram_match(token_ids, lengths, slots, **KEYS, num_tokens=NUM_DRAFTS)

    match()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        match()
    evicted = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    return {
        f"ngram_gpu, {name}, cold L2": _spread(_event_seconds(call, evicted))
        for name, call in (("two launches", match), ("in a CUDA graph", graph.replay))
    }


def _event_seconds(call: Callable[[], None], evicted: torch.Tensor) -> list[float]:
    seconds = []
    for _ in range(NUM_WARM_UP_STEPS + NUM_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(8):  # also keeps the GPU busy while the host launches, so that launching is not what is timed
            evicted.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return seconds


def _spread(seconds: list[float]) -> Spread:
    """Microseconds a call; the first steps warm up."""
    timed = seconds[min(NUM_WARM_UP_STEPS, len(seconds) // 4) :]
    return percentiles([1e6 * second for second in timed])


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    conditions, microseconds = found["conditions"], found["microseconds"]
    title = (
        f"{conditions['requests']} contexts of {conditions['context']:,} tokens, {found['cpu']}, microseconds a call"
    )
    search = microseconds["search from the end, 1 new token"]["median"]
    table = Table("", *SPREAD, "search / this", title=title)
    for name, spread in microseconds.items():
        ratio = f"{search / spread['median']:.1f}x" if "1 new token" in name else ""
        table.add_row(name, *(f"{spread[key]:,.1f}" for key in SPREAD), ratio)
    if found["gpu"] is None:
        table.add_row("ngram_gpu", "unmeasured: no GPU here", "", "", "")
    Console(width=110).print(table, f"{found['bytes_per_token']:.1f} bytes a token of context")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runner.benchmarks.ngram", description=__doc__)
    parser.add_argument("--requests", type=at_least(1), default=64, help="contexts in one call (default: %(default)s)")
    parser.add_argument(
        "--context", type=at_least(1), default=32_000, help="tokens of every context (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the numbers to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
