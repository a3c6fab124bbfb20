"""A token's bits are its own: logits and cached KV are equal, bit for bit, whatever shares the launch.

Compared with torch.equal, never with a tolerance: for every operation alone, for launches of one model, and for whole
runs of the engine under chunking, preemption and speculation. A CPU without panels gets products in tiles; where its
BLAS ends a tile with another kernel than it began it with, smaller ones; and where these do not help either, the
promise is off (`is_row_invariant`) and these tests skip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from kernels.cpu import linear_amx
from kernels.cpu.linear import linear as linear_from_panels
from kernels.cpu.panels import can_pack, pack
from kernels.reference.act_and_mul import LimitedSilu, act_and_mul
from kernels.reference.gate import gate
from kernels.reference.linear import linear, rows_keep_their_bits
from kernels.reference.paged_attention import paged_attention, places_keep_their_bits
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rope import apply_rope
from kernels.reference.softcap import softcap
from runner.engine import launch_shapes
from runner.engine.draft_budget import DraftBudget
from runner.engine.forward_batch import ForwardBatch
from runner.engine.launch import Part
from runner.engine.model_runner import ModelOutput, ModelRunner
from runner.engine.request import Request, StepOutcome
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import CommittedTokens, Schedule
from runner.engine.scheduler import Scheduler
from runner.engine.segment import Family, Segment
from runner.engine.stopping import StopRules
from runner.engine.tile_shape import ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES, TileShape
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.step_loop import StepLoop
from runner.trace import RequestTraces
from tests.conftest import Engines
from tests.other_families import GEMMA
from tests.product_bits import assert_panels_of_every_width_agree, multiply_no_pairs
from tests.product_errors import roundings_of
from tests.seeded import randn

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
TILES = {"large": ROW_INVARIANT_TILES, "small": SMALL_ROW_INVARIANT_TILES}
THREADS_AND_TILES = [(1, "large"), (1, "small"), (2, "small"), (3, "large")]


# --- operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["decode", "prefill"])
@pytest.mark.parametrize(("num_threads", "size"), THREADS_AND_TILES, indirect=["num_threads"])
def test_linear(num_threads: int, size: str, family: Family, dtype: torch.dtype) -> None:
    """Bug told here: a batched product of one tile took its sum apart among threads, one of two tiles did not."""
    tile = TILES[size][family].linear
    assert tile is not None
    num_tiles = 4 if family == "prefill" else 13
    sizes = ((48, 80), (50, 33), (96, 200), (128, 400), (384, 128), (1024, 256), (2048, 64))
    for in_features, out_features in sizes if num_threads == 1 else sizes[3:6]:
        weight, bias = randn(out_features, in_features, dtype=dtype), randn(out_features, dtype=dtype, seed=1)
        if not rows_keep_their_bits(weight, tile):
            continue
        x = randn(num_tiles * tile, in_features, dtype=dtype, seed=2)
        expected = linear(x, weight, bias, tile)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
        assert torch.equal(linear(x[order], weight, bias, tile), expected[order]), "another place, other neighbours"
        for count in {1, 2, 3, num_tiles - 1}:
            assert torch.equal(linear(x[: count * tile], weight, bias, tile), expected[: count * tile]), "fewer tiles"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_linear_from_panels(num_threads: int, dtype: torch.dtype) -> None:
    """In launches of 1 to 130 rows, forwards and backwards, in parts of panels and whole; and it is the product."""
    for in_features, out_features in (
        (48, 80),
        (50, 33),
        (96, 50),
        (384, 128),
        (2048, 1000),
        (2050, 256),
        (2050, 1000),
    ):
        weight, bias = randn(out_features, in_features, dtype=dtype), randn(out_features, dtype=dtype, seed=1)
        if not can_pack(weight):
            pytest.skip("this machine has no panels")
        panels = pack(weight)
        x = randn(130, in_features, dtype=dtype, seed=2)
        together = linear_from_panels(x, panels, bias, out_dtype=torch.float32)
        exact = x.double() @ weight.double().T + bias.double()
        assert (together - exact).abs().max() <= roundings_of(in_features) * exact.abs().max()
        assert torch.equal(linear_from_panels(x, panels, bias), together.to(dtype))
        assert torch.equal(linear_from_panels(x, panels, out_dtype=torch.float32) + bias.float(), together)
        lying_apart = torch.nn.functional.pad(x, (0, 6), value=torch.nan)[:, :in_features]
        assert torch.equal(linear_from_panels(lying_apart, panels, bias, out_dtype=torch.float32), together)
        for count in (1, 2, 4, 7, 33, 129):
            alone = linear_from_panels(x[:count], panels, bias, out_dtype=torch.float32)
            assert torch.equal(alone, together[:count]), count
            behind = linear_from_panels(x.flip(0)[-count:], panels, bias, out_dtype=torch.float32)
            assert torch.equal(behind, together[:count].flip(0)), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_of_every_width_give_the_same_bits(dtype: torch.dtype) -> None:
    weight, x = randn(200, 96, dtype=dtype), randn(9, 96, dtype=dtype, seed=1)
    assert_panels_of_every_width_agree(weight, x)


def test_bfloat16_without_a_matrix_unit_is_the_product_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_amx, "has_amx", lambda: False)
    test_linear_from_panels(2, torch.bfloat16)


def test_bfloat16_without_an_instruction_for_pairs_is_the_product_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_amx, "has_amx", lambda: False)
    multiply_no_pairs(monkeypatch)
    test_linear_from_panels(2, torch.bfloat16)


@pytest.mark.usefixtures("unpacked_weights")
@pytest.mark.parametrize("size", TILES)
def test_a_cpu_without_panels_gets_tiles(engines: Engines, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """Bug told here: a prompt of one tile of the attention got too few rows where tiles of products are smaller."""
    monkeypatch.setattr(launch_shapes, "CPU_TILES", (TILES[size],))
    # Built here, under the patches, and for no other test.
    runner = runner_of(engines, "grouped heads", torch.float32, max_num_seqs=65 + list(TILES).index(size))
    assert isinstance(runner.model.lm_head, torch.Tensor)
    assert runner.shapes["decode"].linear == TILES[size]["decode"].linear
    check_decode_launches(runner, requests_with_blocks(runner, [3 + 5 * index for index in range(11)], 1), (2, 7, 11))
    lone = requests_with_blocks(runner, [64], 0)[0]
    assert runner.run([part(lone, 0, 64)]).shape[0] == 64


ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {  # of two operands [num_rows, width] and a weight [width]
    "rms_norm": lambda x, y, weight: rms_norm(x, weight, torch.tensor(1e-6)),
    "add_rms_norm": lambda x, y, weight: torch.cat(add_rms_norm(x, y, weight, torch.tensor(1e-6)), dim=1),
    "scaled_add_rms_norm": lambda x, y, weight: torch.cat(
        add_rms_norm(x, y, weight, torch.tensor(1e-6), weight, torch.tensor(0.7)), dim=1
    ),
    "silu_and_mul": lambda x, y, weight: act_and_mul(torch.cat((x, y), dim=1)),
    "gelu_tanh_and_mul": lambda x, y, weight: act_and_mul(torch.cat((x, y), dim=1), "gelu_tanh"),
    "clamped_swiglu": lambda x, y, weight: act_and_mul(torch.cat((x, y), dim=1), "clamped_swiglu"),
    "limited_silu": lambda x, y, weight: act_and_mul(torch.cat((x, y), dim=1), LimitedSilu(0.5)),
    "gelu_tanh_gate": lambda x, y, weight: gate(x, y, "gelu_tanh"),
    "gelu_tanh_gate_of_columns": lambda x, y, weight: gate(torch.cat((y, x), dim=1)[:, y.shape[1] :], y, "gelu_tanh"),
    "softcap": lambda x, y, weight: softcap(x.float(), 2.0),
    "rope": lambda x, y, weight: apply_rope(x, y, y.sin(), torch.arange(x.shape[1]).flip(0)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_norms_activation_and_rope(num_threads: int, name: str, dtype: torch.dtype) -> None:
    """Widths that fill vector registers and widths that do not; 64 rows of the widest are split among threads."""
    operation = ELEMENTWISE[name]
    for width in (10, 48, 96, 100, 256, 1000, 4096) if num_threads == 1 else (1000, 4096):
        x, y, weight = randn(64, width, dtype=dtype), randn(64, width, dtype=dtype, seed=1), randn(width, dtype=dtype)
        together = operation(x, y, weight)
        for rows in ([5], [63], [0, 1, 2], list(range(40, 3, -1)), list(range(0, 64, 3))):
            assert torch.equal(operation(x[rows], y[rows], weight), together[rows]), (width, rows)


class KeptKeys:
    """Keys and values of three requests and their queries; the third has the first one's, in scattered blocks."""

    BLOCK_SIZE, MAX_LEN = 16, 1200

    def __init__(self, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        num_blocks = self.MAX_LEN // self.BLOCK_SIZE
        first = list(range(1, num_blocks + 1))
        second = list(range(num_blocks + 1, 2 * num_blocks + 1))
        scattered = list(range(3 * num_blocks, 2 * num_blocks, -1))
        self.tables = [first, second, scattered]
        self.cache = randn(3 * num_blocks + 1, self.BLOCK_SIZE, 2 * num_kv_heads * dim, dtype=dtype)
        self.cache[scattered] = self.cache[first]
        query = randn(2, self.MAX_LEN, num_heads, dim, dtype=dtype, seed=1)
        self.queries = [query[0], query[1], query[0]]
        self.num_kv_heads, self.dim = num_kv_heads, dim

    def attend(
        self, tiles: dict[Family, TileShape], family: Family, parts: Sequence[tuple[int, int, int]], window: int | None
    ) -> torch.Tensor:
        """Rows start..start + count of requests, (request, start, count) each: [rows, heads * dim]."""
        segments = [Segment(start=start, num_tokens=count, block_table=self.tables[r]) for r, start, count in parts]
        query = torch.cat([self.queries[r][start : start + count] for r, start, count in parts])
        batch = ForwardBatch.build(
            family,
            segments,
            [0] * len(query),
            shape=tiles[family],
            block_size=self.BLOCK_SIZE,
            device=CPU,
        )
        padding = query.new_zeros(len(batch.token_ids) - len(query), *query.shape[1:])
        out = paged_attention(
            torch.cat((query, padding)),
            self.cache,
            batch.attention,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.dim,
            scale=self.dim**-0.5,
            sliding_window=window,
        )
        return out[: len(query)]


# Around the ends of tiles (64), of torch's own splits (512), and where a BLAS was seen to cut sums (256, 384).
POSITIONS = (0, 15, 16, 63, 64, 130, 255, 256, 300, 383, 384, 400, 511, 512, 700, 900, 1023, 1024, 1100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 4, 16), (4, 2, 64), (6, 1, 24)])
@pytest.mark.parametrize(("num_threads", "size"), THREADS_AND_TILES, indirect=["num_threads"])
def test_attention(
    num_threads: int, size: str, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Bug told here: a context of 400 keys, padded to 416 for a neighbour, gave other bits than alone."""
    tiles, decode = TILES[size], TILES[size]["decode"]
    assert decode.context is not None
    if not places_keep_their_bits(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        value_dim=dim,
        tile_rows=decode.attention,
        context=decode.context,
        dtype=dtype,
    ):
        pytest.skip("this machine's BLAS does not keep a row's bits in tiles of this size")
    kept = KeptKeys(num_heads, num_kv_heads, dim, dtype)
    is_thorough = num_threads == 1 and size == "large"
    for window in (None, 37) if is_thorough else (None,):
        for position in POSITIONS if is_thorough else POSITIONS[7::6]:
            alone = {family: kept.attend(tiles, family, [(0, position, 1)], window) for family in tiles}
            for following in (1, 7, 63):
                for family, expected in alone.items():
                    rows = kept.attend(tiles, family, [(2, position, 1 + following)], window)
                    assert torch.equal(rows[:1], expected), (family, position, "with the tokens behind it")
            for before in (2, 50):
                start = max(0, position - before)
                for family, expected in alone.items():
                    rows = kept.attend(tiles, family, [(2, start, position - start + 1)], window)
                    assert torch.equal(rows[-1:], expected), (family, position, "with the tokens before it")
            neighbours = [(1, other, 2) for other in (3, 280, 390, 640, 1190)]
            for count in range(1, len(neighbours) + 1):
                rows = kept.attend(tiles, "decode", [*neighbours[:count], (2, position, 1)], window)
                assert torch.equal(rows[-1:], alone["decode"]), (position, "beside requests of other lengths", count)


# --- launches of one model ------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "hidden size 48, a key head each": {
        "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 80,
    },
    "hidden size 96, qwen3": {"model_type": "qwen3", "hidden_size": 96, "intermediate_size": 130, "vocab_size": 77},
    "sliding window": {"model_type": "mistral", "sliding_window": 20},
    "long context": {"max_position_embeddings": 1200, "num_hidden_layers": 1},
    "experts": EXPERTS,
    "experts of a float32 router": ERNIE,
    "gemma2": GEMMA,
}  # fmt: skip


def runner_of(engines: Engines, model: str, dtype: torch.dtype, **args: Any) -> ModelRunner:
    """A model's runner with room for 64 requests; a new engine for each number of threads."""
    llm = engines(
        architecture=MODELS[model], dtype=str(dtype).removeprefix("torch."), num_threads=torch.get_num_threads(), **args
    )
    runner = llm.engine.target
    if not runner.is_row_invariant:
        pytest.skip("this machine's BLAS does not keep a row's bits, and says so at the start")
    return runner


def requests_with_blocks(runner: ModelRunner, prompt_lengths: Sequence[int], num_output_tokens: int) -> list[Request]:
    """Requests that own their blocks, handed out in turns so that no table is contiguous."""
    vocab_size, block_size = runner.model.vocab_size, runner.block_size
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[(7 * index + 11 * place) % vocab_size for place in range(length)],
            output_token_ids=[(5 * index + 3 * place) % vocab_size for place in range(num_output_tokens)],
            sampling_params=SamplingParams(),
            seed=0,
        )
        for index, length in enumerate(prompt_lengths)
    ]
    block = 0
    while any(len(request.block_table) * block_size < request.num_tokens for request in requests):
        for request in requests:
            if len(request.block_table) * block_size < request.num_tokens:
                request.block_table.append(block := block + 1)
    assert runner.cache is not None and block < len(runner.cache.layers[0])
    return requests


def clear(runner: ModelRunner) -> None:
    assert runner.cache is not None
    for layer in runner.cache.layers:
        layer.zero_()


def stored(runner: ModelRunner, request: Request) -> torch.Tensor:
    """All layers' KV of a request, position by position: [num_tokens, widths]."""
    assert runner.cache is not None
    layers = [layer[request.block_table].flatten(0, 1)[: request.num_tokens] for layer in runner.cache.layers]
    return torch.cat(layers, dim=1)


def part(request: Request, start: int, end: int) -> Part:
    """With logits for every token, or for the generated ones where a part spans the end of the prompt."""
    num_prompt = request.num_prompt_tokens
    return Part(
        request=request, start=start, end=end, num_logits=end - (num_prompt if start < num_prompt < end else start)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_decode_launch_of_1_to_64_rows(engines: Engines, model: str, dtype: torch.dtype) -> None:
    runner = runner_of(engines, model, dtype)
    check_decode_launches(runner, requests_with_blocks(runner, [3 + 2 * index for index in range(64)], 1), range(2, 65))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decode_launch_on_several_threads(engines: Engines, num_threads: int, dtype: torch.dtype) -> None:
    runner = runner_of(engines, "grouped heads", dtype)
    requests = requests_with_blocks(runner, [3 + 40 * index for index in range(6)], 1)
    check_decode_launches(runner, requests, (2, 5, 6))


def check_decode_launches(runner: ModelRunner, requests: list[Request], counts: Iterable[int]) -> None:
    """One generated token a request, in launches of so many, against each alone."""
    clear(runner)
    for request in requests:
        runner.run([part(request, 0, request.num_prompt_tokens)])
    parts = [part(request, request.num_prompt_tokens, request.num_tokens) for request in requests]
    alone = torch.cat([runner.run([one]).clone() for one in parts])  # the next replay overwrites its results
    kept = [stored(runner, request) for request in requests]
    for count in counts:
        chosen = [(index * 5 + count) % len(requests) for index in range(count)]
        assert len(set(chosen)) == count
        assert torch.equal(runner.run([parts[index] for index in chosen]), alone[chosen]), f"{count} rows"
    assert all(torch.equal(stored(runner, request), before) for request, before in zip(requests, kept, strict=True))


CHUNKS = ([1], [2, 5], [7], [63, 1], [64], [65, 9], [100, 3, 40])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_in_any_chunks_beside_any_others(engines: Engines, model: str, dtype: torch.dtype) -> None:
    """Generated tokens too, recomputed in chunks as after a preemption: they stay in the decode family."""
    check_chunks(runner_of(engines, model, dtype), CHUNKS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_in_chunks_on_several_threads(engines: Engines, num_threads: int, dtype: torch.dtype) -> None:
    check_chunks(runner_of(engines, "grouped heads", dtype), CHUNKS[4:5])


def check_chunks(runner: ModelRunner, chunks: Sequence[Sequence[int]]) -> None:
    """Prompts and outputs of four requests, side by side in chunks of these sizes in turns, against each whole."""
    requests = requests_with_blocks(runner, [130, 1, 64, 33], 21)
    clear(runner)
    whole = [runner.run([part(request, 0, request.num_tokens)]).clone() for request in requests]
    kept = [stored(runner, request) for request in requests]
    for sizes in chunks:
        clear(runner)
        done = [0] * len(requests)
        step = 0
        while any(end < request.num_tokens for end, request in zip(done, requests, strict=True)):
            parts: dict[int, Part] = {}
            for index, request in enumerate(requests):
                size = min(sizes[(step + index) % len(sizes)], request.num_tokens - done[index])
                if size:
                    parts[index] = part(request, done[index], done[index] + size)
                    done[index] += size
            rows = runner.run(list(parts.values())).split([one.num_logits for one in parts.values()])
            for (index, one), chunk in zip(parts.items(), rows, strict=True):
                from_end = len(whole[index]) - (requests[index].num_tokens - one.end)
                if from_end > 0:  # the whole pass gave logits of the output's positions only
                    expected = whole[index][max(0, from_end - len(chunk)) : from_end]
                    assert torch.equal(chunk[-len(expected) :], expected), (sizes, "logits of", index)
            step += 1
        for index, request in enumerate(requests):
            assert torch.equal(stored(runner, request), kept[index]), (sizes, "KV of", index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_context_beside_short_ones(engines: Engines, dtype: torch.dtype) -> None:
    """Across 512 keys and 1024, decoded alone, with K drafts, and beside neighbours of other lengths."""
    runner = runner_of(engines, "long context", dtype)
    requests = requests_with_blocks(runner, [380, 500, 1010, 40], 24)
    clear(runner)
    for request in requests:
        runner.run([part(request, 0, request.num_prompt_tokens)])
    alone = []
    for request in requests:
        first = request.num_prompt_tokens
        one_by_one = [runner.run([part(request, first + i, first + i + 1)]).clone() for i in range(24)]
        alone.append(torch.cat(one_by_one))
    kept = [stored(runner, request) for request in requests]
    for size in (3, 5, 17):
        for start in range(0, 24, size):
            parts = [
                part(request, request.num_prompt_tokens + start, request.num_prompt_tokens + min(24, start + size))
                for request in requests
            ]
            rows = runner.run(parts).split([one.num_logits for one in parts])
            for index, chunk in enumerate(rows):
                assert torch.equal(chunk, alone[index][start : start + size]), (size, start, index)
    assert all(torch.equal(stored(runner, request), before) for request, before in zip(requests, kept, strict=True))


# --- whole runs -----------------------------------------------------------------------------------------------------


class Recorder:
    """Runs requests step by step and keeps the bits of every committed position: its logits and its KV.

    A position that is computed again, after a preemption, must come out with the bits it had.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.kv: dict[tuple[str, int], torch.Tensor] = {}
        self.num_recomputed = 0

    def run(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Request]:
        engine, hardware = self.llm.engine, self.llm.config.hardware
        scheduler = Scheduler(
            block_manager=engine.block_manager,
            stop_rules=StopRules(eos_token_ids=frozenset(), max_model_len=engine.target_info.max_model_len),
            vocab_size=engine.target.model.vocab_size,
            max_num_seqs=hardware.max_num_seqs,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            enable_chunked_prefill=hardware.enable_chunked_prefill,
            draft_budget=DraftBudget(num_speculative_tokens=engine.proposer.num_speculative_tokens),
        )
        forward, commit = engine.target.forward, scheduler.commit
        last_logits: torch.Tensor | None = None  # of a step in parts

        def recorded_forward(*args: Any, **keys: Any) -> ModelOutput:
            nonlocal last_logits
            output = forward(*args, **keys)
            last_logits = output.logits
            return output

        def recorded_commit(schedule: Schedule, outcome: StepOutcome) -> list[CommittedTokens]:
            nonlocal last_logits
            self._record(schedule, outcome, last_logits)
            last_logits = None
            return commit(schedule, outcome)

        requests = make_requests(prompts, params, engine.tokenizer, 0)
        for request in requests:
            scheduler.add(request)
        metrics, traces = MetricsCollector(), RequestTraces(engine.tokenizer.decode, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.target, "forward", recorded_forward)
            patch.setattr(scheduler, "commit", recorded_commit)
            loop = StepLoop(engine, scheduler, engine.proposer, metrics, traces)
            while scheduler.has_unfinished:
                loop.step()
        engine.block_manager.check_integrity([])
        return requests

    def _record(self, schedule: Schedule, outcome: StepOutcome, logits: torch.Tensor | None) -> None:
        cache = self.llm.engine.target.cache
        assert cache is not None
        row = yielding = 0
        for item in schedule.scheduled:
            request = item.request
            start, end = request.num_computed_tokens, request.num_computed_tokens + item.num_new_tokens
            if item.yields_token:
                accepted = outcome.num_accepted_tokens[yielding]
                for place in range(accepted + 1 if logits is not None else 0):
                    assert logits is not None
                    self._keep(self.logits, (request.request_id, end + place), logits[row + place])
                end += accepted
                row, yielding = row + outcome.num_draft_tokens[yielding] + 1, yielding + 1
            block_size = self.llm.engine.block_manager.block_size
            positions = torch.arange(start, end)
            slots = torch.tensor(request.block_table)[positions // block_size] * block_size + positions % block_size
            rows = torch.cat([layer.flatten(0, 1)[slots] for layer in cache.layers], dim=1)
            for position, kv in zip(positions.tolist(), rows, strict=True):
                self._keep(self.kv, (request.request_id, position), kv)

    def _keep(self, store: dict[tuple[str, int], torch.Tensor], key: tuple[str, int], bits: torch.Tensor) -> None:
        if key in store:
            assert torch.equal(store[key], bits), f"{key} came out differently when it was computed again"
            self.num_recomputed += 1
        store[key] = bits.clone()


PROMPTS = [
    {"prompt_token_ids": [(9 * i + 5 * j + j // 13) % 64 for j in range(4 + 17 * ((i + 3) % 7))]} for i in range(7)
]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), max_tokens=27 + i, seed=i, ignore_eos=True) for i in range(7)]
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 16}
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "one at a time": (None, {"max_num_seqs": 1}),
    "small chunks": (None, {"max_num_seqs": 4, "max_num_batched_tokens": 23}),
    "preempted": (None, {"num_gpu_blocks_override": 11}),
    "K = 16": (DRAFTED, {}),
    # Whatever the texts, and so the drafts that are accepted: in the third step prompts of 55 and 72 tokens hold all
    # ten blocks, neither request can have ended, and neither can end without a block of the other's.
    "K = 16, preempted, in chunks": (
        DRAFTED, {"num_gpu_blocks_override": 10, "max_num_seqs": 3, "max_num_batched_tokens": 51},
    ),
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "whole"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_leaves_the_same_bits_under_every_schedule(engines: Engines, dtype: str, whole: bool) -> None:
    """Every committed position's KV, and the logits of steps in parts, which whole ones do not show.

    In plain decoding and with 16 drafts, with and without preemption.
    """
    reference = Recorder(engines(dtype=dtype, enforce_eager=True))
    if not reference.llm.engine.target.is_row_invariant:
        pytest.skip("this machine's BLAS does not keep a row's bits, and says so at the start")
    expected = reference.run(PROMPTS, PARAMS)
    assert reference.num_recomputed == 0
    for name, (method, args) in RUNS.items():
        recorder = Recorder(engines(method, dtype=dtype, enforce_eager=not whole, **args))
        requests = recorder.run(PROMPTS, PARAMS)
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in expected], name
        assert any(request.num_preemptions for request in requests) == ("preempted" in name), name
        assert (recorder.num_recomputed > 0) == ("preempted" in name), name
        for kind, ours, theirs in (("logits", recorder.logits, reference.logits), ("KV", recorder.kv, reference.kv)):
            assert theirs.keys() <= ours.keys() or ours.keys() <= theirs.keys()
            for key in ours.keys() & theirs.keys():
                assert torch.equal(ours[key], theirs[key]), (name, kind, key)
        assert whole or recorder.logits.keys() >= {
            (request.request_id, request.num_prompt_tokens + place)
            for request in requests
            for place in range(len(request.output_token_ids))
        }
