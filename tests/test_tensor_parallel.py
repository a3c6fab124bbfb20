"""Several ranks, each with its part of the target: all come to the same tokens, whatever the method and the batch.

Threads stand for processes where the claim is about the engine; where it is about processes there are some.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kernels.cpu.exchange import PLACE_BYTES
from proposers import available_methods
from proposers.base import proposer_class
from runner.cli.compose import Composer
from runner.config import SpeculativeConfig
from runner.earlier_points import EarlierPoints
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.loader import load_model
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.ranks.leader import Leader
from runner.ranks.others import Others
from runner.ranks.ranks import Ranks
from runner.run import execute
from runner.tiny import DRAFTER_KEYS
from tests.conftest import TARGET_CONFIG
from tests.other_families import FAMILIES
from tests.rank_threads import in_ranks
from tests.test_online_budget import make_restless
from tests.transformers_reference import random_model, save, save_tokenizer

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Reader:\n",
    "for i in range(10):\n    print(i)\n" * 2,
    "a" * 12,  # which goes on so: whatever a method guesses by, some of it is right
]
PARAMS = [
    SamplingParams(temperature=temperature, top_p=0.95, seed=7, max_tokens=count)
    for temperature, count in ((0.0, 24), (0.7, 17), (1.0, 24), (0.0, 12))
]
METHODS: dict[str, dict[str, Any]] = {
    **{method: {"method": method, "num_speculative_tokens": 3} for method in available_methods()},
    "suffix_tree": {"method": "suffix", "num_speculative_tokens": 6, "speculative_token_tree": "dynamic"},
    "eagle3_tree": {"method": "eagle3", "num_speculative_tokens": 6, "speculative_token_tree": "dynamic"},
    "mtp_8_bits": {"method": "mtp", "num_speculative_tokens": 3, "quantization": "int8"},
}
for method in ("ngram", "ngram_gpu"):
    METHODS[method] |= {"prompt_lookup_min": 1}
del METHODS["none"], METHODS["custom_class"]


def config_of(method: dict[str, Any] | None, size: int, **engine_args: Any) -> SpeculativeConfig:
    engine_args = {**DRAFTER_KEYS, "num_threads": 1, "device": "cpu", "tensor_parallel_size": size, **engine_args}
    return SpeculativeConfig.from_engine_args("tiny", method, **engine_args)


def completed(llm: LLM) -> tuple[list[Request], MetricsCollector]:
    requests, metrics = make_requests(PROMPTS, PARAMS, llm.engine.tokenizer, 0), MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics)
    llm.engine.block_manager.check_integrity([])
    return requests, metrics


def texts_of(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def run_in_ranks(method: dict[str, Any] | None, **engine_args: Any) -> tuple[list[list[int]], MetricsCollector]:
    """Texts, which all ranks have, and the first rank's counts, which are all ranks'."""

    def run(ranks: Ranks) -> tuple[list[list[int]], MetricsCollector]:
        llm = LLM.from_config(config_of(method, 2, **engine_args), ranks=ranks)
        assert llm.engine.target.is_row_invariant
        requests, metrics = completed(llm)
        return texts_of(requests), metrics

    (texts, metrics), *others = in_ranks(2, run, place_bytes=PLACE_BYTES)
    for others_texts, others_metrics in others:
        assert others_texts == texts
        assert others_metrics.records[0].num_accepted_tokens == metrics.records[0].num_accepted_tokens
    return texts, metrics


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    return run_in_ranks(None)[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_in_two_ranks_what_plain_decoding_says_there(
    method: str, plain_texts: list[list[int]]
) -> None:
    texts, metrics = run_in_ranks(METHODS[method])
    assert texts == plain_texts
    assert sum(sum(record.num_accepted_tokens) for record in metrics.records) > 0


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_ranks_draft_as_many_tokens_as_the_first_ones_clock_says(
    method: str, plain_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a clock of its own, and steps of its own length by it."""
    make_restless(monkeypatch)
    texts, metrics = run_in_ranks({**METHODS[method], "num_speculative_tokens_per_batch_size": "auto"})
    assert texts == plain_texts
    assert len(metrics.decoding_steps_by_budget) > 1


@pytest.mark.parametrize(
    "engine_args",
    [
        {"max_num_seqs": 1},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 8, "max_model_len": 96},  # requests are preempted
    ],
    ids=str,
)
def test_neither_batch_nor_chunks_nor_preemptions_leave_a_trace_in_two_ranks(
    engine_args: dict[str, Any], plain_texts: list[list[int]]
) -> None:
    assert run_in_ranks(METHODS["draft_model"], **engine_args)[0] == plain_texts


@pytest.mark.parametrize(
    "options",
    [
        # Each rank norms the heads of both, which takes one exchange more than other layers.
        {"model_type": "olmo2", "pad_token_id": 0},
        FAMILIES["lfm2_moe"],
    ],
    ids=lambda options: options["model_type"],
)
def test_layers_of_other_families_keep_the_promise_in_two_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    save(random_model(AutoConfig.for_model(**{**TARGET_CONFIG, **options})), tmp_path)
    save_tokenizer(tmp_path, TARGET_CONFIG["vocab_size"])
    keys: dict[str, Any] = {"num_threads": 1, "device": "cpu", "tensor_parallel_size": 2}
    prompts = [[5, 9, 7, 5, 9, 7, 5], [11, 3, 40], list(range(3, 40))]
    answers: list[list[list[int]]] = []
    for method in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        config = SpeculativeConfig.from_engine_args(str(tmp_path), method, **keys)

        def run(ranks: Ranks, config: SpeculativeConfig = config) -> list[list[int]]:
            llm = LLM.from_config(config, ranks=ranks)
            assert llm.engine.target.is_row_invariant
            requests, metrics = make_requests(prompts, PARAMS[:3], llm.engine.tokenizer, 0), MetricsCollector()
            llm.run(requests, llm.engine.proposer, metrics)
            assert metrics.steps_in_parts.total() < metrics.num_decoding_steps, "some are recorded"
            return texts_of(requests)

        answers += in_ranks(2, run, place_bytes=PLACE_BYTES)
    assert all(own == answers[0] for own in answers) and all(answers[0])


def test_a_rank_holds_its_part_of_every_product() -> None:
    whole = LLM.from_config(config_of(None, 1)).engine.target.model

    def sizes(ranks: Ranks) -> tuple[list[int], list[int]]:
        target = LLM.from_config(config_of(None, 2), ranks=ranks).engine.target
        assert isinstance(target.model, Decoder)
        products = [target.model.lm_head, *target.model.layers[0].product_weights]
        return [weight.shape.numel() for weight in products], target.kv_widths

    assert isinstance(whole, Decoder)
    wanted = [weight.shape.numel() // 2 for weight in (whole.lm_head, *whole.layers[0].product_weights)]
    assert in_ranks(2, sizes, place_bytes=PLACE_BYTES) == [(wanted, [width // 2 for width in whole.kv_widths])] * 2


def test_ranks_that_come_to_other_tokens_are_stopped() -> None:
    def part(ranks: Ranks) -> None:
        llm = LLM.from_config(config_of(None, 2), ranks=ranks)
        requests = make_requests(PROMPTS, PARAMS, llm.engine.tokenizer, 0)
        requests[1].seed += ranks.shard.rank
        if ranks.shard.rank == 0:  # which the others' end ends
            with suppress(RuntimeError):
                llm.run(requests, llm.engine.proposer, MetricsCollector())
            return
        with pytest.raises(RuntimeError, match="have come to do different things"):
            llm.run(requests, llm.engine.proposer, MetricsCollector())
        assert ranks.shard.exchange is not None
        ranks.shard.exchange.give_up()

    in_ranks(2, part, place_bytes=PLACE_BYTES)


def test_ranks_that_compute_other_rows_are_stopped() -> None:
    """One found in its cache what the other computed anew: what they added up meant nothing, and both said the same."""

    def part(ranks: Ranks) -> None:
        llm = LLM.from_config(config_of(None, 2), ranks=ranks)
        llm.generate(PROMPTS[1] * 9, PARAMS[0])
        if ranks.shard.rank == 0:
            llm.engine.block_manager.forget()
        with pytest.raises(RuntimeError, match="have come to do different things"):
            llm.generate(PROMPTS[1] * 9, PARAMS[0])

    in_ranks(2, part, place_bytes=PLACE_BYTES)


def test_a_vocabulary_that_cannot_be_split_is_whole_in_every_rank() -> None:
    hf_config = {**TARGET_CONFIG, "vocab_size": 65, "tie_word_embeddings": False}

    def head(ranks: Ranks) -> torch.Tensor:
        source = ModelSource(model="dummy", load_format="dummy", hf_config=hf_config)
        loaded = load_model(
            source, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64, shard=ranks.shard
        )
        assert isinstance(loaded.model, Decoder) and loaded.model.lm_head.shape == (65, 64)
        return loaded.model.logits(torch.ones(1, 64), 1)

    assert torch.equal(*in_ranks(2, head))


# --- processes ------------------------------------------------------------------------------------------------------


def others_of(llm: LLM) -> list[int]:
    """Process ids of the ranks but the first."""
    assert isinstance(llm.ranks, Leader)
    return [other.process.pid for other in llm.ranks._others.running]


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_processes_say_what_ranks_say_and_their_failure_is_told(plain_texts: list[list[int]]) -> None:
    """The calls of an LLM one after another: the second finds prompts in the cache, and answers in suffix's memory."""
    with torch.inference_mode():  # memory that was mapped in it could not be written to elsewhere
        llm = LLM.from_config(config_of(METHODS["suffix"], 2))
    assert texts_of(completed(llm)[0]) == plain_texts
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [list(output.outputs[0].token_ids) for output in outputs] == plain_texts
    assert outputs[2].num_cached_tokens
    llm.reset_prefix_cache()
    assert llm.generate(PROMPTS, PARAMS)[2].num_cached_tokens == 0
    with pytest.raises(UserError, match="the proposer must be one of the engine's own"):
        other = proposer_class("none")(num_speculative_tokens=0, context=llm.engine.proposer.context)
        llm.run([], other, MetricsCollector())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        fork = os.fork()
    if not fork:
        llm.close()  # which is the parent's to do
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)
    os.kill(others_of(llm)[0], signal.SIGKILL)
    with pytest.raises(UserError, match=r"rank 1 of hardware.tensor_parallel_size=2: ended with status -9"):
        llm.generate(PROMPTS, PARAMS)
    with pytest.raises(UserError, match="build a new LLM"):
        llm.generate(PROMPTS, PARAMS)
    llm.close()  # once more does nothing


def test_a_rank_that_fails_alone_says_why() -> None:
    method = {
        "method": "custom_class",
        "model": "tests.proposers_for_tests.FailsElsewhereProposer",
        "num_speculative_tokens": 2,
        "options": {"process": os.getpid()},
    }
    llm = LLM.from_config(config_of(method, 2))
    (other,) = others_of(llm)
    with pytest.raises(UserError, match=r"(?s)rank 1 of .*=2: failed:.*this process must draft nothing"):
        llm.generate(PROMPTS, PARAMS)
    assert has_ended(other)


def test_an_interrupted_call_ends_the_other_ranks() -> None:
    llm = LLM.from_config(config_of(None, 2))
    (other,) = others_of(llm)

    def interrupt(metrics: MetricsCollector) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, observer=interrupt)
    assert has_ended(other)
    with pytest.raises(UserError, match="build a new LLM"):
        llm.generate(PROMPTS, PARAMS)


def test_ranks_end_with_an_llm_that_nobody_holds() -> None:
    llm = LLM.from_config(config_of(None, 2))
    (other,) = others_of(llm)
    del llm
    gc.collect()
    assert has_ended(other)


def test_threads_are_shared_by_the_ranks_and_given_back_by_the_last_engine() -> None:
    """A second engine had half of what the first one had left, and torch kept that."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, second = Others(2), Others(2)
        for others in (first, second):
            others.share_threads(others.threads_of_process() // 2)
            assert torch.get_num_threads() == 2
        first.end()
        assert torch.get_num_threads() == 2 and second.threads_of_process() == 4
        second.end()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_run_compares_a_method_with_plain_decoding_in_the_same_ranks(tmp_path: Path) -> None:
    """And each of its repeats begins with a memory that holds no answers, in all ranks: else drafts would part."""
    with Composer() as composer:
        options = ["method=suffix", "repeats=2", "hardware.tensor_parallel_size=2", "hardware.num_threads=1"]
        config = composer.config([*options, "workload.limit=3", "sampler.max_tokens=16", "tracking=none"])
    summary = execute(config, tmp_path)
    assert summary["identical_to_baseline"] == summary["identical_between_repeats"] == {"requests": 3, "identical": 3}
    assert summary["lossless"] == "tokens" and summary["acceptance_rate"] > 0


def test_the_points_of_a_sweep_share_processes_and_weights() -> None:
    """One whose call fails leaves none to the next."""
    earlier, processes, targets = EarlierPoints(), list[int](), list[Any]()
    for method in (METHODS["suffix"], None, METHODS["draft_model"]):
        config = config_of(method, 2)
        held = earlier.target_for(config)
        llm = LLM.from_config(config) if held is None else LLM.from_config(config, held.info, held.ranks)
        earlier.keep_target(config, llm.engine.target_info, llm.ranks)
        processes += others_of(llm)
        targets.append(llm.engine.target_info)
        completed(llm)
    assert len(set(processes)) == 1 and all(target is targets[0] for target in targets)
    other = processes[0]
    assert not has_ended(other)
    assert earlier.target_for(config_of(None, 1)) is None and has_ended(other)
    earlier.keep_target(config, llm.engine.target_info, llm.ranks)
    assert earlier.target_for(config) is None, "nobody is there to go on with"
