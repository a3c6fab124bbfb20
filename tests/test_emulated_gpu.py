"""The engine's GPU path on an emulated GPU (tests/emulated_cuda.py), over interpreted kernels and replayed graphs.

With the CPU's path tokens are compared, as its sums have another order; one test compares bits among schedules. Whether
compiled kernels keep them too, tests/test_gpu_engine.py says where there is a GPU, of more methods and schedules.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import chain
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

from kernels import linear_plan
from kernels.benchmarks.timing import GraphTimer
from kernels.cpu.exchange import num_bytes
from runner import whole_steps
from runner.benchmarks.decoding_cases import free_guesses
from runner.engine import start_check
from runner.engine.download import Download
from runner.engine.errors import UserError
from runner.engine.grammar_store import GrammarStore
from runner.engine.layers import DecoderLayer
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling_params import SamplingParams
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.schedule import Schedule
from runner.engine.scheduler import Scheduler
from runner.engine.upload import index_or_all, to_device
from runner.llm import LLM
from runner.metrics import InParts
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.emulated_ranks import complete_in_rank
from tests.other_families import FAMILIES as OTHER_FAMILIES
from tests.test_gpu_engine import Bits, allowed

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}, {"prompt_token_ids": [3, 4]}]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)
CUT = replace(DRAWN, max_tokens=4, top_p=0.9, top_k=20, min_p=0.01)  # the search takes the interpreter longest
SMALL: dict[str, Any] = {"architecture": {"num_hidden_layers": 1}, "num_gpu_blocks_override": 64}
GPU: dict[str, Any] = {**SMALL, "device": "cuda", "dtype": "float32", "batch_invariant": False}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2}
HYBRID = {"method": "hybrid", "num_speculative_tokens": 3, "num_drafter_tokens": 2, "min_match_score": 0.4}
LONGER = [replace(params, max_tokens=12) for params in (GREEDY, DRAWN)]  # for three forms of a step
STATIC = [[0], [1], [0, 0]]
CASES: dict[str, tuple[dict[str, Any] | None, list[SamplingParams]]] = {
    "none": (None, [GREEDY, CUT]),
    "draft_model": (DRAFT_MODEL, [GREEDY, DRAWN]),
    "probabilistic": ({**DRAFT_MODEL, "rejection_sample_method": "probabilistic"}, [GREEDY, DRAWN]),
    "block": ({**DRAFT_MODEL, "rejection_sample_method": "block"}, [GREEDY, DRAWN]),
    "typical": ({**DRAFT_MODEL, "rejection_sample_method": "typical"}, [GREEDY, DRAWN]),
    "pard": ({"method": "pard", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "eagle3": ({"method": "eagle3", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "mlp_speculator": ({"method": "mlp_speculator", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "early_exit": ({"method": "early_exit", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "dflash": ({"method": "dflash", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "dspark": ({"method": "dspark", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "ngram_gpu": ({"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_min": 1}, [GREEDY, DRAWN]),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}, [GREEDY, DRAWN]),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 2}, [GREEDY, DRAWN]),
    "suffix tree": (
        {"method": "suffix", "num_speculative_tokens": 3, "speculative_token_tree": "dynamic"},
        LONGER,
    ),
    # Any token that was said before is a match.
    "hybrid": ({**HYBRID, "drafter": "draft_model", "rejection_sample_method": "probabilistic"}, LONGER),
    "hybrid, eagle3": ({**HYBRID, "drafter": "eagle3"}, LONGER),
    "hybrid, eagle3 tree": (
        {**HYBRID, "drafter": "eagle3", "speculative_token_tree": "dynamic", "tree_top_k": 2},
        LONGER,
    ),
    "custom_class": (free_guesses(2), [GREEDY, DRAWN]),
    "dspark tree": (
        {
            "method": "dspark",
            "num_speculative_tokens": 3,
            "speculative_token_tree": "dynamic",
            "tree_depth": 2,
            "tree_top_k": 2,
        },
        [GREEDY, DRAWN],
    ),
    "eagle3 tree": (
        {
            "method": "eagle3",  # whose vocabulary is a part of the target's
            "num_speculative_tokens": 3,
            "speculative_token_tree": "dynamic",
            "tree_depth": 2,
            "tree_top_k": 2,
        },
        [GREEDY, DRAWN],
    ),
    "token_recycling": ({"method": "token_recycling", "num_speculative_tokens": 3, "tree_depth": 2}, [GREEDY, DRAWN]),
    # Any token that was said before is a match.
    "suffix_recycling": (
        {"method": "suffix_recycling", "num_speculative_tokens": 3, "tree_depth": 2, "min_match_score": 0.4},
        LONGER,
    ),
    "medusa tree": (
        {"method": "medusa", "num_speculative_tokens": 3, "speculative_token_tree": STATIC},
        [GREEDY, DRAWN],
    ),
}


def texts(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [request.output_token_ids for request in complete(llm, PROMPTS, params)[0]]


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_say_what_the_cpu_says(name: str, engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    method, params = CASES[name]
    (expected, on_cpu), (found, on_gpu) = (
        complete(llm, PROMPTS, params) for llm in (engines(method, **SMALL), Engines()(method, **GPU))
    )
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
    for count in ("num_draft_tokens", "num_accepted_tokens"):
        assert [getattr(r, count) for r in on_gpu.records] == [getattr(r, count) for r in on_cpu.records]
    assert emulated_gpu.graph_sizes and emulated_gpu.num_replays > 0


def test_an_engine_in_another_thread_writes_nothing_into_a_steps_memory(
    engines: Engines, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug told here: graphs of all engines shared memory, and another's step may come between a step and its copy."""
    expected = texts(engines(**SMALL), [GREEDY, DRAWN])
    first, second = Engines()(**GPU), Engines()(**GPU)
    assert texts(second, [GREEDY, DRAWN]) == expected
    between, others = whole_steps.Download, list[list[list[int]]]()

    def step_of_another(values: torch.Tensor) -> Download:
        with monkeypatch.context() as patch:
            patch.setattr(whole_steps, "Download", between)
            others.append(texts(second, [GREEDY, DRAWN]))
        return between(values)

    monkeypatch.setattr(whole_steps, "Download", step_of_another)
    assert texts(first, [GREEDY, DRAWN]) == expected
    assert others and all(own == expected for own in others)


@pytest.mark.parametrize("name", ["none", "draft_model", "eagle3"])
def test_prompts_of_one_size_are_replayed_and_told_apart(
    name: str, engines: Engines, emulated_gpu: EmulatedDevice
) -> None:
    """Of 11 to 16 tokens, alone and two together, each the first, the second and the third of its kind."""
    method, _ = CASES[name]
    params = [replace(GREEDY, max_tokens=2, prompt_logprobs=0)]
    llm = Engines()(method, **GPU, enable_prefix_caching=False)
    asked = [
        [{"prompt_token_ids": [(5 * turn + 3 * place + length) % 60 + 3 for place in range(length)]} for length in own]
        for turn, own in enumerate(([16], [11], [13], [7, 9], [12]))
    ]
    found = [complete(llm, prompts, params * len(prompts))[0] for prompts in asked]
    assert llm.engine.target.graphs is not None and any(
        "prefill" in str(key) for key in llm.engine.target.graphs._graphs
    )
    eager = Engines()(method, **GPU, enable_prefix_caching=False, enforce_eager=True)
    num_replays = emulated_gpu.num_replays
    expected = [complete(eager, prompts, params * len(prompts))[0] for prompts in asked]
    assert emulated_gpu.num_replays == num_replays
    for own, other in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
        assert own.output_token_ids == other.output_token_ids
        assert [told.logprob for told in own.prompt_logprobs] == [told.logprob for told in other.prompt_logprobs]


TREE = {"method": "eagle", "num_speculative_tokens": 3, "speculative_token_tree": STATIC}
ASKED = {
    "logprobs": (TREE, replace(DRAWN, logprobs=2, prompt_logprobs=1)),
    "more logprobs than steps have room for": (TREE, replace(DRAWN, logprobs=-1)),
    "penalties": (DRAFT_MODEL, replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)),
    "words": (DRAFT_MODEL, replace(GREEDY, logit_bias={4: 2.0}, allowed_token_ids=range(3, 40), min_tokens=4)),
    "all of it": (TREE, replace(DRAWN, repetition_penalty=1.2, logit_bias={4: 2.0}, min_tokens=4, logprobs=0)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_whatever_a_request_asks_for(asked: str, engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    """Of steps that run whole, and of one that needs the host; the second time they were captured meanwhile."""
    method, first = ASKED[asked]
    params = [first, replace(GREEDY, logprobs=0)]
    expected, _ = complete(engines(method, **SMALL), PROMPTS, params)
    llm = Engines()(method, **GPU)
    for _ in range(2):
        found, metrics = complete(llm, PROMPTS, params)
        assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
        assert [[told.rank for told in r.logprobs] for r in found] == [[t.rank for t in r.logprobs] for r in expected]
        assert (InParts.LOGPROBS in metrics.steps_in_parts) == (first.logprobs == -1)
    assert emulated_gpu.num_replays > 1


def every_other_token(store: GrammarStore, schedule: Schedule, drafts: DraftTokens) -> tuple[DraftTokens, BitmaskRows]:
    """GrammarStore.constrain of texts whose even positions hold even tokens, and odd positions odd ones."""
    yielding, rows, words, first_row = [i.request for i in schedule.scheduled if i.yields_token], [], [], 0
    counts = [*drafts.num_draft_tokens, *[0] * len(yielding)]
    for request, count in zip(yielding, counts, strict=False):
        if request.sampling_params.structured_outputs is not None:
            rows += range(first_row, first_row + count + 1)
            words += [[0x55555555 << (request.num_tokens + depth) % 2] * 2 for depth in range(count + 1)]
        first_row += count + 1
    bitmask = to_device(words, torch.int64, store._device).to(torch.int32)
    return drafts, BitmaskRows(row_idx=index_or_all(rows, first_row, store._device), words=bitmask)


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model"])
def test_grammars_are_followed(
    name: str, engines: Engines, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole steps where the host knows the drafts, beside a request that follows nothing."""
    monkeypatch.setattr(GrammarStore, "open", lambda *_: None)
    monkeypatch.setattr(GrammarStore, "constrain", every_other_token)
    method, params = CASES[name][0], [replace(DRAWN, structured_outputs={"regex": "x"}, max_tokens=9), GREEDY]
    expected = texts(engines(method, **SMALL), params)
    llm = Engines()(method, **GPU)
    for _ in range(2):
        found, metrics = complete(llm, PROMPTS, params)
        assert [request.output_token_ids for request in found] == expected
        assert (InParts.STRUCTURED_OUTPUTS in metrics.steps_in_parts) == (name == "draft_model")
    assert all(token % 2 == (7 + place) % 2 for place, token in enumerate(expected[0])) and len(expected[0]) == 9


def test_logits_and_kv_of_trees_chunks_and_preemption_have_plain_decodings_bits(emulated_gpu: EmulatedDevice) -> None:
    """Against requests that are decoded plainly, one by one."""
    prompts = [{"prompt_token_ids": [(7 * index + 3) % 61 + 3 for index in range(length)]} for length in (15, 14)]
    params = [replace(DRAWN, seed=seed, max_tokens=4) for seed in (1, 2)]
    gpu = {**GPU, "batch_invariant": True, "enforce_eager": True}
    plain = Engines()(None, **gpu, max_num_seqs=1)
    assert plain.engine.target.is_row_invariant
    bits = Bits.of(plain, prompts, params)
    tree = {"method": "eagle", "num_speculative_tokens": 3, "speculative_token_tree": STATIC}
    schedule = {"max_num_seqs": 2, "max_num_batched_tokens": 11, "max_model_len": 32, "num_gpu_blocks_override": 2}
    with pytest.MonkeyPatch.context() as patch:
        preempted = list[object]()
        preempt = Scheduler._preempt
        patch.setattr(Scheduler, "_preempt", lambda *args: (preempted.append(args), preempt(*args))[1])
        patch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)  # of the same kernels as above
        Bits.of(Engines()(tree, **{**gpu, **schedule}), prompts, params).assert_agree(bits)
    assert preempted


def test_behind_a_prefix_that_was_found_tokens_are_those_behind_one_that_was_computed(
    emulated_gpu: EmulatedDevice,
) -> None:
    llm = Engines()({"method": "eagle3", "num_speculative_tokens": 2}, **{**GPU, "batch_invariant": True})
    prompts = [{"prompt_token_ids": [*range(3, 20), last]} for last in (20, 21)]
    outputs = [llm.generate(prompts, GREEDY) for _ in range(2)]
    assert [[output.num_cached_tokens for output in each] for each in outputs] == [[0, 16], [16, 16]]
    assert [output.outputs for output in outputs[0]] == [output.outputs for output in outputs[1]]
    assert llm.metrics.num_accepted_tokens > 0


def test_kernels_launched_one_by_one_say_what_the_cpu_says(engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    params = [replace(GREEDY, max_tokens=4), replace(DRAWN, max_tokens=4)]
    expected = texts(engines(DRAFT_MODEL, **SMALL), params)
    assert texts(Engines()(DRAFT_MODEL, **GPU, enforce_eager=True), params) == expected
    assert not emulated_gpu.graph_sizes


def test_a_step_reads_back_once(emulated_gpu: EmulatedDevice) -> None:
    """Captured decoding waits for the device where the step's tokens are read, and nowhere else."""
    llm = Engines()(DRAFT_MODEL, **GPU)
    expected = texts(llm, [GREEDY, DRAWN])
    texts(llm, [GREEDY, DRAWN])  # now prompts are captured too
    with pytest.MonkeyPatch.context() as patch:
        for reader in (VerifyOutput, Download):
            patch.setattr(reader, "read", allowed(reader.read))
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert texts(llm, [GREEDY, DRAWN]) == expected
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_cache_is_sized_by_what_the_largest_steps_leave(emulated_gpu: EmulatedDevice) -> None:
    sizes = {"max_model_len": 24, "max_num_seqs": 2, "max_num_batched_tokens": 4, "num_gpu_blocks_override": None}
    llm = Engines()({"method": "ngram", "num_speculative_tokens": 1}, **{**GPU, **sizes})
    assert llm.engine.block_manager.num_free_blocks == 2 * 2  # all that two requests of 24 tokens can use


def test_a_pass_keeps_no_residual_stream_that_nobody_taps(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16,384 tokens of an 8B model a stream takes 128 MiB, in each of 32 layers."""
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)
    streams, num_alive = list[weakref.ref[torch.Tensor]](), list[int]()
    own = DecoderLayer.after_input_norm

    def noted(layer: DecoderLayer, normed: torch.Tensor, stream: torch.Tensor, *args: Any) -> Any:
        streams.append(weakref.ref(stream))
        num_alive.append(sum(ref() is not None for ref in streams))
        return own(layer, normed, stream, *args)

    monkeypatch.setattr(DecoderLayer, "after_input_norm", noted)
    gpu = {**GPU, "architecture": {"num_hidden_layers": 6}, "batch_invariant": True, "enforce_eager": True}
    texts(Engines()(None, **gpu), [replace(GREEDY, max_tokens=1)] * 2)
    assert len(num_alive) >= 6 and max(num_alive) <= 2


def test_a_plain_step_is_eight_launches_a_layer_and_seven_beside_them(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small operations between the kernels would cost a microsecond or two each, in every step."""
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)  # another test asks the machine
    for num_layers in (1, 2):
        gpu = {**GPU, "architecture": {"num_hidden_layers": num_layers}, "batch_invariant": True}
        texts(Engines()(None, **gpu), [replace(GREEDY, max_tokens=3)] * 2)
    assert emulated_gpu.graph_sizes == [15, 23]


TWO_LAYERS = {"num_hidden_layers": 2}
ONLY_SOME = {  # a layer with an MLP before one with experts
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [0],
}
IN_PARTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "none": (None, TWO_LAYERS),
    "biases": (None, {**TWO_LAYERS, "model_type": "qwen2"}),
    "weights of float32": (None, {**TWO_LAYERS, "model_type": "gemma", "head_dim": 16}),
    "a layer with an MLP, one with experts": (None, {**TWO_LAYERS, **ONLY_SOME}),
    "draft_model": (DRAFT_MODEL, TWO_LAYERS),
    "eagle": ({"method": "eagle", "num_speculative_tokens": 2}, TWO_LAYERS),
    "eagle3": (CASES["eagle3"][0], TWO_LAYERS),
    "mtp": ({"method": "mtp", "num_speculative_tokens": 2}, {**TWO_LAYERS, "model_type": "qwen3"}),
    "dflash": (CASES["dflash"][0], TWO_LAYERS),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_where_products_are_left_in_parts_steps_say_what_the_cpu_says(
    name: str, engines: Engines, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs too, to what float32 rounds; and drafters guess as well as there."""
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)
    monkeypatch.setattr(linear_plan, "MIN_STEPS", 1)
    method, architecture = IN_PARTS[name]
    params = [replace(GREEDY, logprobs=2), replace(DRAWN, logprobs=2)]
    own = {"architecture": architecture}
    (expected, on_cpu), (found, on_gpu) = (
        complete(llm, PROMPTS, params)
        for llm in (engines(method, **{**SMALL, **own}), Engines()(method, **{**GPU, **own, "batch_invariant": True}))
    )
    in_parts = {
        kind.__name__
        for kind, *arguments in emulated_gpu.variants
        if any(argument[0] == "NUM_PARTS" and argument[-1] > 0 for argument in arguments)
    }
    assert {"rms_norm_kernel", "rope_kernel"} <= in_parts and (name != "eagle" or "add_up_kernel" in in_parts)
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
    for here, there in zip(found, expected, strict=True):
        for ours, theirs in zip(here.logprobs, there.logprobs, strict=True):
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
    assert on_gpu.num_accepted_tokens == on_cpu.num_accepted_tokens


@pytest.mark.usefixtures("emulated_gpu")
def test_attention_that_a_gpu_has_no_room_for_is_told_at_the_start() -> None:
    """Triton raised OutOfResources: latents of 512 in float32, as on an A100."""
    latents = {**OTHER_FAMILIES["deepseek_v3"], "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    rule = r"^dtype must be .*, got float32: .* takes 180 KB .*, and this GPU has 163 KB .*; choose bfloat16, or"
    with pytest.raises(UserError, match=rule):
        Engines()(None, **{**GPU, "architecture": latents})


def test_a_benchmark_times_replays(emulated_gpu: EmulatedDevice) -> None:
    device = torch.device("cuda")
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    (timing,) = GraphTimer(device, 2)([lambda: counts.add_(1)])
    assert timing.p80_us >= timing.p20_us > 0 and len(emulated_gpu.graph_sizes) == 2 and int(counts.min()) > 2


def test_two_gpus_capture_their_exchanges_and_say_the_same_whatever_the_method() -> None:
    """A process each: products whose parts are added up, and heads of half the vocabulary, in every replay."""
    context = torch.multiprocessing.get_context("forkserver")  # one process imports for both
    context.set_forkserver_preload(["tests.emulated_ranks", "tests.emulated_cuda"])
    memory = torch.zeros(num_bytes(2), dtype=torch.uint8).share_memory_()
    results, ends = context.SimpleQueue(), context.Pipe()
    methods = [None, {"method": "eagle3", "num_speculative_tokens": 2}]
    told = (results, methods, PROMPTS, [GREEDY, DRAWN], {**GPU, "batch_invariant": True, "max_model_len": 64})
    processes = [context.Process(target=complete_in_rank, args=(rank, memory, ends[rank], *told)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)
        process.kill()  # one that waits for the other would keep this process from ending
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = sorted(results.get() for _ in processes)
    assert first[1:] == second[1:]
    texts, num_captured, num_replays = first[1:]
    assert texts[0] == texts[1] and len(texts[0][0]) == GREEDY.max_tokens
    assert num_captured > 0 and num_replays > 0
