"""On a GPU: the same seed gives the same tokens, logits and KV, bit for bit, whatever the method, K, batch or schedule.

bfloat16, captured and eager. What the interpreter cannot tell: whether compiled kernels keep a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from runner.engine.download import Download
from runner.engine.request import VerifyOutput
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.whole_steps import WholeSteps
from tests.conftest import Engines, complete
from tests.heads_for_tests import PARD2, SELECTING
from tests.other_families import FAMILIES, WITH_LLAMAS, WITH_STATES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Shaped as the kernels take them at size: heads in groups of four, of 128 dimensions; long enough for two splits.
ARCHITECTURE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "architecture": ARCHITECTURE,
    "weight_scale": 2.0,
    "max_num_batched_tokens": 2048,
}
METHODS: list[dict[str, Any] | None] = [
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "ngram_gpu", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 8},
    {"method": "token_recycling", "num_speculative_tokens": 16},
    *({"method": "draft_model", "num_speculative_tokens": count} for count in (1, 4, 16)),
    {"method": "eagle", "num_speculative_tokens": 3},
    {"method": "eagle", "num_speculative_tokens": 8, "speculative_token_tree": "dynamic"},
    {"method": "eagle3", "num_speculative_tokens": 7},
    *({"method": method, "num_speculative_tokens": 3} for method in ("mtp", "medusa", "mlp_speculator", "pard")),
    {"method": "medusa", "num_speculative_tokens": 4, "speculative_token_tree": [[0], [1], [0, 0], [0, 1]]},
    {"method": "dflash", "num_speculative_tokens": 6},
    *({"method": "hybrid", "drafter": drafter, "min_match_score": 0.4} for drafter in ("draft_model", "eagle3")),
    {"method": "dflash", "num_speculative_tokens": 12, "speculative_token_tree": "dynamic"},
    {"method": "suffix_recycling", "num_speculative_tokens": 16},
    {
        "method": "hybrid",
        "drafter": "eagle3",
        "num_speculative_tokens": 16,
        "num_drafter_tokens": 8,
        "speculative_token_tree": "dynamic",
        "min_match_score": 0.4,
    },
    {"method": "suffix", "num_speculative_tokens": 12, "speculative_token_tree": "dynamic"},
    {"method": "dspark", "num_speculative_tokens": 7},
    {"method": "dspark", "num_speculative_tokens": 12, "speculative_token_tree": "dynamic"},
    {"method": "early_exit", "num_speculative_tokens": 4},
    {"method": "sparse_kv", "num_speculative_tokens": 4, "num_sink_tokens": 1, "num_recent_tokens": 20},
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_seqs": 7, "max_num_batched_tokens": 128},
    "preempted": {"num_gpu_blocks_override": 200},
    "eager": {"enforce_eager": True},
}


def workload(count: int) -> tuple[list[Any], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 560, (count,), generator=generator).tolist()
    prompts = [
        {"prompt_token_ids": torch.randint(3, 2048, (length,), generator=generator).tolist()} for length in lengths
    ]
    params = [
        SamplingParams(temperature=0.0 if index % 2 else 0.8, top_p=0.95, seed=index, max_tokens=40, ignore_eos=True)
        for index in range(count)
    ]
    return prompts, params


def texts(llm: LLM, count: int = 64) -> list[list[int]]:
    return [request.output_token_ids for request in complete(llm, *workload(count))[0]]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[list[int]]:
    llm = engines(None, **GPU)
    assert llm.engine.target.is_row_invariant, "this GPU's kernels do not keep a row's bits"
    return texts(llm)


@pytest.mark.parametrize("spec", METHODS, ids=repr)
def test_a_method_changes_no_token(spec: dict[str, Any], engines: Engines, plain: list[list[int]]) -> None:
    assert texts(engines(spec, **GPU)) == plain


def test_a_draft_that_reads_the_targets_states_changes_no_token(engines: Engines, plain: list[list[int]]) -> None:
    spec = {"method": "pard", "num_speculative_tokens": 3}
    assert texts(engines(spec, of_drafters={**ARCHITECTURE, **PARD2}, **GPU)) == plain


@pytest.mark.parametrize("tree", [None, "dynamic"])
def test_a_dflash2_head_changes_no_token(tree: str | None, engines: Engines, plain: list[list[int]]) -> None:
    spec = {"method": "dflash", "num_speculative_tokens": 7, "speculative_token_tree": tree}
    assert texts(engines(spec, of_drafters={**ARCHITECTURE, **SELECTING}, **GPU)) == plain


@pytest.mark.parametrize(
    ("method", "head", "num_layers"), [("eagle3", "Gemma4Eagle3Model", 1), ("dflash", "Gemma4DSparkModel", 2)]
)
def test_a_head_of_gemma_4s_layers_changes_no_token(method: str, head: str, num_layers: int, engines: Engines) -> None:
    """Of the size as published: heads of 512 with keys for values, whose rows see all of a block."""
    layers = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True}
    layers |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "pad_token_id": 0}
    of_head = {**ARCHITECTURE, **layers, "architectures": [head], "layer_types": ["full_attention"] * num_layers}
    own = {**GPU, "architecture": {**ARCHITECTURE, **layers}, "of_drafters": of_head}
    spec = {"method": method, "num_speculative_tokens": 6}
    assert texts(engines(spec, **own), 16) == texts(engines(None, **own), 16)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("spec", [None, {"method": "draft_model", "num_speculative_tokens": 4}], ids=repr)
def test_the_schedule_changes_no_token(
    spec: dict[str, Any] | None, schedule: dict[str, Any], engines: Engines, plain: list[list[int]]
) -> None:
    assert texts(engines(spec, **{**GPU, **schedule})) == plain


@dataclass
class Bits:
    """What a run computed: of each request the logits behind every length that a step began with, and its KV."""

    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (seed, tokens before) -> [vocab]
    kv: dict[int, torch.Tensor] = field(default_factory=dict)  # seed -> [num_layers, committed tokens, width]

    @classmethod
    def of(cls, llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> Bits:
        bits, target = cls(), llm.engine.target
        forward = target.forward

        def noted(parts: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(parts, *args, **kwargs)
            assert target.cache is not None
            for part, own in zip(parts, output.logits.split([part.num_logits for part in parts]), strict=True):
                seed = part.request.seed
                if len(own):  # the first row is the last committed token's, those behind it are drafts'
                    bits.logits[seed, part.request.num_tokens] = own[0].clone()
                table = torch.tensor(part.request.block_table, device=target.device)
                bits.kv[seed] = torch.stack([layer[table].flatten(0, 1)[: part.end] for layer in target.cache.layers])
            return output

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, "forward", noted)
            complete(llm, prompts, params)
        return bits

    def assert_agree(self, others: Bits) -> None:
        """Where both have them."""
        shared = self.logits.keys() & others.logits.keys()
        assert len(shared) >= 4
        assert all(torch.equal(self.logits[key], others.logits[key]) for key in shared)
        for seed in self.kv.keys() & others.kv.keys():
            length = min(self.kv[seed].shape[1], others.kv[seed].shape[1])
            assert length > 8 and torch.equal(self.kv[seed][:, :length], others.kv[seed][:, :length])


@pytest.fixture(scope="module")
def plain_bits(engines: Engines) -> Bits:
    prompts, params = workload(16)
    return Bits.of(engines(None, **GPU, enforce_eager=True, max_num_seqs=1), prompts[:4], params[:4])


@pytest.mark.parametrize("schedule", [{}, SCHEDULES["small chunks"], {"num_gpu_blocks_override": 60}], ids=repr)
@pytest.mark.parametrize("spec", [None, METHODS[4], METHODS[5], METHODS[7]], ids=repr)
def test_logits_and_kv_keep_their_bits_whatever_the_method_and_the_schedule(
    spec: dict[str, Any] | None, schedule: dict[str, Any], engines: Engines, plain_bits: Bits
) -> None:
    """Sixteen requests against the first four of them, decoded plainly one at a time.

    Eager: captured steps do not pass through what is patched here.
    """
    Bits.of(engines(spec, **{**GPU, "enforce_eager": True, **schedule}), *workload(16)).assert_agree(plain_bits)


def test_prompts_that_are_replayed_keep_their_bits(engines: Engines, plain_bits: Bits) -> None:
    """Launched one by one, then captured, then replayed, a few together."""
    prompts, params = workload(16)
    llm = engines(None, **GPU, max_num_seqs=3, enable_prefix_caching=False)
    for _ in range(3):
        Bits.of(llm, prompts, [replace(own, max_tokens=1) for own in params]).assert_agree(plain_bits)
    assert llm.engine.target.graphs is not None and any(
        "prefill" in str(key) for key in llm.engine.target.graphs._graphs
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_do_more_than_llamas_keep_their_bits(family: str, engines: Engines) -> None:
    own, of_head = {**GPU, "architecture": {**ARCHITECTURE, **FAMILIES[family]}}, METHODS[8]
    if family in WITH_LLAMAS:
        own["of_drafters"] = ARCHITECTURE
    if family in WITH_STATES:  # of the size that kernels take them at, and drafts in chains
        sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        own["architecture"] |= {**sizes, "mamba_d_state": 128, "ssm_state_size": 128, "mamba_head_dim": 64}
        of_head = METHODS[9]
    if family == "gemma4_text":  # as published
        sizes = {"head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256}
        own["architecture"] |= {**sizes, "vocab_size_per_layer_input": ARCHITECTURE["vocab_size"]}
    if family == "deepseek_v3":  # as published
        sizes = {
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "v_head_dim": 128,
        }
        own["architecture"] |= sizes
    plain = engines(None, **own)
    assert plain.engine.target.is_row_invariant, "this GPU's kernels do not keep a row's bits"
    expected = texts(plain, 16)
    assert texts(engines(METHODS[5], **{**own, **SCHEDULES["small chunks"]}), 16) == expected
    assert texts(engines(of_head, **{**own, **SCHEDULES["one at a time"]}), 16) == expected


def test_products_that_add_up_their_own_partial_sums_keep_bits(engines: Engines) -> None:
    """`o` and `down` of 4,096 features do so in steps of 2,048 rows; in those of 128 each has a program."""
    wide = {**GPU, "architecture": {**ARCHITECTURE, "hidden_size": 4096}, "enforce_eager": True}
    prompts, params = workload(8)
    whole = Bits.of(engines(None, **wide), prompts, params)
    Bits.of(engines(None, **{**wide, **SCHEDULES["small chunks"]}), prompts, params).assert_agree(whole)


@pytest.mark.parametrize("spec", [None, METHODS[4], METHODS[7], METHODS[8], METHODS[14]], ids=repr)
def test_a_prefix_that_was_found_changes_no_token(spec: dict[str, Any] | None, engines: Engines) -> None:
    begun, params = workload(16)
    shared = list(range(3, 603))
    prompts = [{"prompt_token_ids": shared + prompt["prompt_token_ids"][:40]} for prompt in begun]
    off = engines(spec, **GPU, enable_prefix_caching=False).generate(prompts, params)
    llm = engines(spec, **GPU)
    for least in (592 * 15, 592 * 16):
        found = llm.generate(prompts, params)
        assert sum(output.num_cached_tokens for output in found) >= least
        assert [output.outputs for output in found] == [output.outputs for output in off]


@pytest.mark.parametrize("spec", [None, *METHODS[1:6]], ids=repr)
def test_steady_decoding_is_a_graph_a_step(
    spec: dict[str, Any] | None, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spec is not None and spec["method"] == "suffix":
        pytest.skip("its drafts come from the host")
    llm = engines(spec, **GPU)
    texts(llm, 4)
    launched: list[object] = []
    launch = WholeSteps._launch
    monkeypatch.setattr(WholeSteps, "_launch", lambda *a, **k: (launched.append(a), launch(*a, **k))[1])
    _, metrics = complete(llm, *workload(4))
    assert len(launched) > len(metrics.step_points) / 2


def allowed(read: Any) -> Any:
    """A function that may wait for the device."""

    def reading(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return reading


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # whoever sets it is told so
def test_a_step_reads_back_once(engines: Engines) -> None:
    """Captured decoding syncs with the host where the step's tokens are read, and nowhere else."""
    llm = engines({"method": "draft_model", "num_speculative_tokens": 4}, **GPU)
    texts(llm, 4)
    texts(llm, 4)  # every layout is captured
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for reader in (VerifyOutput, Download):
                patch.setattr(reader, "read", allowed(reader.read))
            texts(llm, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_say_the_same_whatever_the_method_and_the_batch() -> None:
    """In processes, captured and eager, by NCCL."""
    prompts = [f"def f{index}(x):\n    return" * (1 + index % 3) for index in range(16)]
    params = [SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=40) for index in range(16)]
    said = list[list[tuple[int, ...]]]()
    for method in (None, "draft_model", "eagle3", "suffix", "suffix_recycling", "ngram_gpu"):
        for engine_args in ({}, {"max_num_seqs": 3}, {"enforce_eager": True}):
            spec = None if method is None else {"method": method, "num_speculative_tokens": 4}
            llm = LLM("tiny", speculative_config=spec, device="cuda", tensor_parallel_size=2, **engine_args)
            assert llm.engine.target.is_row_invariant, "these GPUs do not keep a row's bits"
            said.append([tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params)])
            llm.close()
    assert all(texts == said[0] for texts in said)
