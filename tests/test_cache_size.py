"""The size of the KV cache: what the largest steps need is kept free, and what does not fit is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from proposers.hybrid import HybridProposer
from runner import cache_size
from runner.cache_size import LargestSteps, num_cache_blocks
from runner.config import ConfigError
from runner.config.hardware import HardwareConfig
from runner.engine.bucket import OF_PROMPTS
from runner.engine.errors import UserError
from runner.engine.graphs import MAX_OUTPUT_BYTES, GraphStore
from runner.engine.memory import GIB
from runner.engine.paged_shape import PagedShape
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows
from runner.engine.sampling_params import SamplingParams
from runner.engine.shard import Shard
from runner.step_loop import StepLoop
from tests.conftest import Engines
from tests.other_families import keys_of
from verifier.rejection_sampler import RejectionSampler

CUDA = torch.device("cuda", 0)
TREE = {"speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 9}  # 18 nodes have rows: two blocks
NO_GRAPHS = GraphStore(lambda *_: pytest.fail("it was captured"))


class NotingSampler(RejectionSampler):
    """Takes down how many distributions the drafts had, None for drafts without."""

    num_probs: list[int | None]

    def __call__(self, logits: torch.Tensor, drafts: DraftTokens, rows: SamplingRows) -> VerifyOutput:
        self.num_probs = [None if drafts.probs is None else len(drafts.probs)]
        return super().__call__(logits, drafts, rows)


@pytest.mark.parametrize(
    ("num_speculative_tokens", "rule", "keys"),
    [(0, "strict", {}), (3, "strict", {}), (3, "probabilistic", {}), (3, "strict", keys_of("qwen3_5_text"))],
    ids=["plain", "strict", "probabilistic", "states"],
)
def test_the_largest_steps_fill_both_budgets(
    num_speculative_tokens: int, rule: str, keys: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of all the prompt tokens that a step may have, one of all the requests, each with all its drafts.

    Those are at the end of the longest text: at short ones the partial results of split attention went unseen. Drafts
    have distributions where the rule reads them.
    """
    engine = engines(num_gpu_blocks_override=320, **keys).engine
    rejection_sampler = NotingSampler(rejection_sample_method=rule)
    target, cache = engine.target, engine.target.cache
    launches: list[tuple[str, int, int, int]] = []
    forward = target.forward

    def noted(parts: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(parts, *args, **kwargs)
        tokens = sum(part.end - part.start + part.num_draft_tokens for part in parts)
        longest = max(part.end + part.num_draft_tokens for part in parts)
        launches.append((f"{len(parts)} requests", tokens, len(output.logits), longest))
        return output

    monkeypatch.setattr(target, "forward", noted)
    try:
        steps = LargestSteps(
            target=target,
            rejection_sampler=rejection_sampler,
            max_num_seqs=5,
            max_num_batched_tokens=600,
            max_model_len=256,
            num_speculative_tokens=num_speculative_tokens,
            tap_layers=(1,),
        )
        steps.compute_prompts()
        steps.verify_drafts()
        assert target.cache is None
    finally:
        target.cache = cache
    rows = 5 * (num_speculative_tokens + 1)
    assert rejection_sampler.num_probs == [5 * num_speculative_tokens if rule == "probabilistic" else None]
    assert launches == [("3 requests", 600, 3, 256), ("5 requests", rows, rows, 256)]


@pytest.mark.parametrize("method", [None, {"method": "draft_model", "num_speculative_tokens": 3, "max_model_len": 1}])
def test_the_shortest_texts_are_a_token_and_the_one_behind_it(method: dict[str, Any] | None, engines: Engines) -> None:
    """max_model_len=1 was taken: it refused every prompt, and on a GPU the largest step was divided by zero."""
    with pytest.raises(ConfigError, match=r"^max_model_len must be >= 2, got 1"):
        engines(method, max_model_len=1)
    llm = engines(method, max_model_len=2, num_gpu_blocks_override=320)
    (output,) = llm.generate({"prompt_token_ids": [3]}, SamplingParams(temperature=0.0))
    assert len(output.outputs[0].token_ids) == 1
    target, cache = llm.engine.target, llm.engine.target.cache
    try:
        steps = LargestSteps(
            target=target,
            rejection_sampler=llm.engine.verifier.rejection_sampler,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_model_len=2,
            num_speculative_tokens=llm.engine.proposer.num_speculative_tokens,
            tap_layers=(),
        )
        steps.compute_prompts()
        steps.verify_drafts()
    finally:
        target.cache = cache


def gpu_blocks(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    peak: int,
    peak_of_drafts: int | None = None,
    graphs: GraphStore | None = None,
    speculative_config: dict[str, Any] | None = None,
    **hardware: Any,
) -> int:
    """Blocks on a GPU of 10 GiB of which `free` bytes are free, where the largest step of prompts takes `peak`.

    peak_of_drafts: what the largest step that verifies drafts takes; None: as much.
    """
    engine = engines(speculative_config, num_gpu_blocks_override=320).engine
    peaks = {"compute_prompts": peak, "verify_drafts": peak if peak_of_drafts is None else peak_of_drafts}
    monkeypatch.setattr(engine.target, "graphs", graphs)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cache_size, "_peak_bytes", lambda target, work: peaks[work.__name__])
    monkeypatch.setattr(engine.target, "device", CUDA)
    return num_cache_blocks(
        HardwareConfig(max_num_seqs=4096, max_num_batched_tokens=4096, **hardware),
        target=engine.target,
        proposer=engine.proposer,
        rejection_sampler=engine.verifier.rejection_sampler,
        max_model_len=100_000,
        shard=Shard(),
    )


def test_the_cache_gets_what_weights_and_the_largest_step_leave(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 GiB 2 are taken; blocks of 16 tokens take 8 KiB here."""
    per_block = engines(num_gpu_blocks_override=320).engine.target.cache_bytes_per_block
    assert per_block == 16 * 2 * (2 * 2 * 16) * 4
    half = gpu_blocks(engines, monkeypatch, free=8 * GIB, peak=GIB, gpu_memory_utilization=0.52)
    assert half == int((0.50 * 10 - 2 - 1) * GIB) // per_block
    assert gpu_blocks(engines, monkeypatch, free=8 * GIB, peak=GIB + per_block, gpu_memory_utilization=0.52) == half - 1


def test_the_larger_of_the_largest_steps_is_kept_free(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(prompts: int, drafts: int) -> int:
        return gpu_blocks(
            engines, monkeypatch, free=8 * GIB, peak=prompts, peak_of_drafts=drafts, gpu_memory_utilization=0.52
        )

    assert blocks(GIB, 0) == blocks(0, GIB) == blocks(GIB, GIB) < blocks(0, 0)


def test_a_draft_model_has_its_share_of_every_block(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the target, and the draft's one."""
    method = {"method": "draft_model", "num_speculative_tokens": 2}
    engine = engines(method, num_gpu_blocks_override=320).engine
    per_block = engine.target.cache_bytes_per_block
    assert engine.proposer.cache_bytes_per_block == per_block // 2
    found = gpu_blocks(
        engines, monkeypatch, free=8 * GIB, peak=GIB, speculative_config=method, gpu_memory_utilization=0.52
    )
    assert found == int((0.50 * 10 - 2 - 1) * GIB) // (per_block + per_block // 2)


@pytest.mark.parametrize(
    ("keys", "num_beside"),
    [
        ({"method": "eagle"}, 0),
        ({"method": "eagle", **TREE}, 2),
        ({"method": "eagle3", "speculative_token_tree": ((0,), (1,), (0, 0))}, 1),
        ({"method": "hybrid", "drafter": "eagle", **TREE}, 2),
    ],
    ids=["chains", "dynamic trees", "static trees", "trees with matches"],
)
def test_nodes_of_trees_have_their_blocks_beside_those_of_the_engine(
    keys: dict[str, Any], num_beside: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_beside: of each request. A head has taken them without a word: its cache was larger than there was memory."""
    method = {"num_speculative_tokens": 3, **keys}
    engine = engines(method, num_gpu_blocks_override=320).engine
    proposer = engine.proposer
    num_bytes = num_beside * proposer.context.max_num_seqs * proposer.cache_bytes_per_block
    head = proposer.drafter if isinstance(proposer, HybridProposer) else proposer
    assert sum(layer.nbytes for layer in head.runner.cache.layers) == 321 * proposer.cache_bytes_per_block + num_bytes
    found = gpu_blocks(
        engines, monkeypatch, free=8 * GIB, peak=GIB, speculative_config=method, gpu_memory_utilization=0.52
    )
    per_block = engine.target.cache_bytes_per_block + proposer.cache_bytes_per_block
    assert found == (int((0.50 * 10 - 2 - 1) * GIB) - num_bytes) // per_block


@pytest.mark.parametrize("step", ["compute_prompts", "verify_drafts"])
def test_a_largest_step_that_does_not_fit_says_what_to_lower(
    step: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LargestSteps, "compute_prompts", lambda _: None)
    monkeypatch.setattr(LargestSteps, "verify_drafts", lambda _: None)
    monkeypatch.setattr(LargestSteps, step, out_of_memory)
    monkeypatch.setattr(cache_size, "_peak_bytes", lambda target, work: work() or 0)
    engine = engines(num_gpu_blocks_override=320).engine
    monkeypatch.setattr(engine.target, "device", CUDA)
    with pytest.raises(UserError, match=r"max_num_batched_tokens=4096 tokens does not fit cuda:0 .*; lower it or"):
        num_cache_blocks(
            HardwareConfig(max_num_seqs=64, max_num_batched_tokens=4096),
            target=engine.target,
            proposer=engine.proposer,
            rejection_sampler=engine.verifier.rejection_sampler,
            max_model_len=256,
            shard=Shard(),
        )


def test_captured_steps_have_their_memory_beside_that_of_others(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_block = engines(num_gpu_blocks_override=320).engine.target.cache_bytes_per_block
    found = gpu_blocks(engines, monkeypatch, free=8 * GIB, peak=GIB // 2, graphs=NO_GRAPHS, gpu_memory_utilization=0.52)
    assert found == int((0.50 * 10 - 2 - 1) * GIB - MAX_OUTPUT_BYTES) // per_block


@pytest.mark.parametrize(("most_rows", "share"), [(256, 16), (1024, 4), (8192, 1)])
def test_prompts_that_are_captured_have_theirs_too(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, most_rows: int, share: int
) -> None:
    """Of steps with up to 4,096 tokens: a launch with a quarter of the rows takes a quarter of the memory."""
    target = engines(num_gpu_blocks_override=320).engine.target
    of_prompts = PagedShape(
        rows_per_tile=16, split_keys=None, max_context=256, buckets=replace(OF_PROMPTS, most_rows=most_rows)
    )
    monkeypatch.setitem(target.shapes, "prefill", of_prompts)
    where = {"free": 8 * GIB, "graphs": NO_GRAPHS, "gpu_memory_utilization": 0.72}
    found = gpu_blocks(engines, monkeypatch, peak=GIB, peak_of_drafts=1 << 20, **where)
    left = int((0.70 * 10 - 2 - 1) * GIB - GIB // share - MAX_OUTPUT_BYTES)
    assert found == left // target.cache_bytes_per_block


@pytest.mark.parametrize(("method", "num_layers"), [("draft_model", 3), ("early_exit", 2)])
def test_a_drafter_with_passes_of_its_own_has_outputs_of_its_own(
    method: str, num_layers: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_layers: that have a place in each block, of the target two; it may be that a drafter sees those alone."""
    config = {"method": method, "num_speculative_tokens": 2}
    per_block = engines(num_gpu_blocks_override=320).engine.target.cache_bytes_per_block * num_layers // 2
    where = {"free": 8 * GIB, "peak": GIB // 2, "graphs": NO_GRAPHS, "gpu_memory_utilization": 0.72}
    found = gpu_blocks(engines, monkeypatch, speculative_config=config, **where)
    assert found == int((0.70 * 10 - 2 - 1) * GIB - 2 * MAX_OUTPUT_BYTES) // per_block


def test_a_cache_too_small_for_one_request_is_refused_with_what_to_lower(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"max_model_len=100000 needs 48\.8 MiB on cuda:0, available are 0\.0 MiB; lower"
    ):
        gpu_blocks(engines, monkeypatch, free=8 * GIB, peak=3 * GIB, gpu_memory_utilization=0.52)


def test_more_blocks_than_memory_holds_are_refused(engines: Engines) -> None:
    """torch raised an error of its own, or the machine took the memory and then ended the process."""
    with pytest.raises(UserError, match=r"num_gpu_blocks_override=1000000000 blocks needs .* GiB on cpu, .*; lower it"):
        engines(num_gpu_blocks_override=10**9)


def test_memory_that_runs_out_in_a_step_says_what_to_lower(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines(num_gpu_blocks_override=320)

    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StepLoop, "step", step)
        with pytest.raises(UserError, match=r"lower gpu_memory_utilization \(now 0\.9\).*or max_num_seqs or"):
            llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))
    llm.engine.block_manager.check_integrity([])
    assert len(llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))) == 1
