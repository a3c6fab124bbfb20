"""Engines whose cache keeps keys and values in 8 bits: what they compute, and that no method changes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.reference.fp8_rows import FP8, KVScales, as_fp8
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.machine import describe_run
from runner.report.text import numbers_of
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import PARD2
from tests.test_emulated_gpu import CASES, GPU, SMALL
from tests.test_emulated_gpu import PROMPTS as FEW_PROMPTS
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, answers, counts, method_config, tell_test_proposers
from tests.transformers_reference import engine_logits, load, random_model, random_sequences, save

KEPT = {"kv_cache_dtype": "fp8"}
# Drafters that read some, of their own or of the target's; and any drafts, of which rejected ones are overwritten.
WITH_KEYS_AND_VALUES = ("draft_model", "pard", "eagle", "eagle3", "mtp", "dflash", "dspark", "early_exit", "sparse_kv")
WITH_KEYS_AND_VALUES += ("custom_class",)
LENGTHS = ((40, 4), (30, 3), (17, 3))
SCALES = ((0.02, 0.011), (0.3, 1.7))  # of two layers


# --- no method changes a token --------------------------------------------------------------------------------------


@pytest.fixture
def reference(engines: Engines) -> list[tuple[Any, ...]]:
    plain, _ = complete(engines(None, **ROOMY, **KEPT), PROMPTS, PARAMS)
    tell_test_proposers(plain)
    return answers(plain)


def test_texts_are_others_than_those_of_a_whole_cache(engines: Engines, reference: list[tuple[Any, ...]]) -> None:
    """Guards what follows: keys and values are rounded."""
    whole, _ = complete(engines(None, **ROOMY), PROMPTS, PARAMS)
    assert sum(map(tuple.__ne__, answers(whole), reference)) > 0


@pytest.mark.parametrize("method", WITH_KEYS_AND_VALUES)
def test_a_method_changes_no_token(engines: Engines, reference: list[tuple[Any, ...]], method: str) -> None:
    requests, metrics = complete(engines(method_config(method, 4), **ROOMY, **KEPT), PROMPTS, PARAMS)
    assert answers(requests) == reference
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted


def test_what_pard_2_keeps_of_the_targets_states_stays_whole(
    engines: Engines, reference: list[tuple[Any, ...]]
) -> None:
    llm = engines(method_config("pard", 4), of_drafters=PARD2, **ROOMY, **KEPT)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == reference and metrics.num_accepted_tokens > 0
    proposer: Any = llm.engine.proposer
    assert [layer.dtype for layer in proposer.runner.cache.layers] == [FP8, torch.float32]


TREE = {"speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 3}


@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        ({"num_gpu_blocks_override": 8, **ROOMY}, method_config("eagle3", 8, **TREE)),
        ({"num_gpu_blocks_override": 4, "block_size": 32, "max_num_seqs": 6, "max_num_batched_tokens": 31}, None),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 37}, method_config("draft_model", 3)),
        (
            {"enforce_eager": True, "max_num_seqs": 3, "max_num_batched_tokens": 4096},
            method_config("dflash", 5, **TREE),
        ),
    ],
    ids=["trees that are preempted", "small chunks, preempted", "odd chunks", "a tree, nothing recorded"],
)
def test_the_schedule_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], schedule: dict[str, Any], method: dict[str, Any] | None
) -> None:
    requests, _ = complete(engines(method, **schedule, **KEPT), PROMPTS, PARAMS)
    assert answers(requests) == reference


FAMILIES: dict[str, dict[str, Any]] = {
    "latents": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "rope_theta": 1e4,
    },
    "a window": {"model_type": "mistral", "sliding_window": 9},
    "in bfloat16": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_decoded_as_one_at_a_time(engines: Engines, family: str) -> None:
    kept = {**KEPT, "architecture": FAMILIES[family], "dtype": "bfloat16" if "bfloat16" in family else "float32"}
    alone, _ = complete(engines(None, max_num_seqs=1, max_num_batched_tokens=4096, **kept), PROMPTS, PARAMS)
    requests, metrics = complete(engines(method_config("ngram", 5), **ROOMY, **kept), PROMPTS, PARAMS)
    assert answers(requests) == answers(alone) and metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["draft_model", "eagle3 tree", "early_exit"])
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    name: str, engines: Engines, emulated_gpu: EmulatedDevice
) -> None:
    method, params = CASES[name]
    expected, found = (
        complete(llm, FEW_PROMPTS, params)[0]
        for llm in (engines(method, **SMALL, **KEPT), Engines()(method, **GPU, **KEPT))
    )
    assert answers(found) == answers(expected) and emulated_gpu.num_replays > 0


# --- what is computed -----------------------------------------------------------------------------------------------


def rounding_cache(scales: tuple[KVScales, ...]) -> Any:
    """transformers' cache, of which attention sees what ours would keep."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            kept = (
                (as_fp8(rows, scale).to(rows.dtype) * scale)
                for rows, scale in zip((keys, values), scales[layer_idx], strict=True)
            )
            return super().update(*kept, layer_idx, *args, **kwargs)

    return Rounding()


@torch.inference_mode()
def logits_by_transformers(model: Any, scales: tuple[KVScales, ...]) -> torch.Tensor:
    sequences = random_sequences(model.config.vocab_size, LENGTHS)
    return torch.cat(
        [
            model(torch.tensor([own.token_ids]), past_key_values=rounding_cache(scales), use_cache=True).logits[0]
            for own in sequences
        ]
    )


def llama() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return random_model(LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes))


def assert_logits_are_those_of(model: Any, directory: Path, scales: tuple[KVScales, ...]) -> None:
    source = save_kept(model, directory)
    expected = logits_by_transformers(model, scales)
    for batch_invariant in (True, False):
        found = engine_logits(
            load(source, reads_kv_scales=True),
            random_sequences(model.config.vocab_size, LENGTHS),
            kv_dtype=FP8,
            batch_invariant=batch_invariant,
        )
        errors = [(own - theirs).abs().max() for own, theirs in zip(*map(by_sequence, (found, expected)), strict=True)]
        # A number half way between two of 8 bits may fall to either side, by a bit of the products before.
        assert max(errors) < 1e-2 and sum(error < 2e-4 for error in errors) >= len(LENGTHS) - 1, errors


def by_sequence(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split([prompt + output for prompt, output in LENGTHS])


def save_kept(model: Any, directory: Path) -> ModelSource:
    """The source of what was saved there, or is now."""
    return ModelSource(model=str(directory)) if (directory / "config.json").is_file() else save(model, directory)


def test_logits_are_those_of_transformers_over_rounded_keys_and_values(tmp_path: Path) -> None:
    model = llama()
    assert_logits_are_those_of(model, tmp_path, ((1.0, 1.0),) * 2)
    whole = engine_logits(load(save_kept(model, tmp_path)), random_sequences(96, LENGTHS))
    assert (whole - logits_by_transformers(model, ((1.0, 1.0),) * 2)).abs().max() > 1e-2, "rounding is seen"


LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, str], tuple[int, ...]]] = {
    "ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        (),
    ),
    "llm-compressor": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "format": "dense",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        },
        ("self_attn.k_scale", "self_attn.v_scale"),
        (1,),
    ),
    "Quark": (
        {"quant_method": "quark", "kv_cache_scheme": None},
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        (1,),
    ),
}


def with_scales(model: Any, directory: Path, layout: str, scales: tuple[KVScales, ...]) -> None:
    """The checkpoint's weights stay what they are: of scales of keys and values alone."""
    save(model, directory)
    stated, names, shape = LAYOUTS[layout]
    tensors = load_file(directory / "model.safetensors")
    for layer, own in enumerate(scales):
        for name, scale in zip(names, own, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.full(shape, scale)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    add_to_config(directory, quantization_config=stated)


def add_to_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_a_checkpoint_are_those_of_its_layers(layout: str, tmp_path: Path) -> None:
    model = llama()
    with_scales(model, tmp_path, layout, SCALES)
    rounded = tuple((float(torch.tensor(k)), float(torch.tensor(v))) for k, v in SCALES)
    assert load(save_kept(model, tmp_path), reads_kv_scales=True).model.kv_scales == list(rounded)
    assert_logits_are_those_of(model, tmp_path, rounded)


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(
    "scales", [(0.5, None), (0.5, 2.0), (None, 0.5)], ids=["keys'", "keys' and values'", "values'"]
)
def test_latents_have_one_scale_as_keys_and_as_values(
    scales: tuple[float | None, float | None], batch_invariant: bool, tmp_path: Path
) -> None:
    """Bug told here: they were kept by the keys' scale and found by the values'."""
    from transformers import AutoConfig

    values = {**TARGET_CONFIG, **FAMILIES["latents"]}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model, sequences = random_model(config), random_sequences(config.vocab_size, LENGTHS)
    source, names = save(model, tmp_path), ("self_attn.k_scale", "self_attn.v_scale")
    whole = engine_logits(load(source), sequences)
    plain = engine_logits(load(source), sequences, kv_dtype=FP8, batch_invariant=batch_invariant)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        own = {name: scale for name, scale in zip(names, scales, strict=True) if scale is not None}
        tensors |= {f"model.layers.{layer}.{name}": torch.tensor(scale) for name, scale in own.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    add_to_config(tmp_path, quantization_config=LAYOUTS["ModelOpt"][0])
    loaded = load(source, reads_kv_scales=True)
    assert loaded.model.kv_scales == [(0.5, 0.5)] * config.num_hidden_layers
    found = engine_logits(loaded, sequences, kv_dtype=FP8, batch_invariant=batch_invariant)
    assert 0 < (found - whole).abs().max() < 2 * (plain - whole).abs().max()


def test_a_whole_cache_has_no_scales(tmp_path: Path) -> None:
    model = llama()
    plain = engine_logits(load(save(model, tmp_path / "plain")), random_sequences(96, LENGTHS))
    with_scales(model, tmp_path / "scaled", "ModelOpt", SCALES)
    assert torch.equal(engine_logits(load(save_kept(model, tmp_path / "scaled")), random_sequences(96, LENGTHS)), plain)


def test_scales_of_numbers_of_4_bits_are_not_taken(tmp_path: Path) -> None:
    with_scales(llama(), tmp_path, "ModelOpt", SCALES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_quant_algo"] = "NVFP4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(save_kept(None, tmp_path), reads_kv_scales=True).model.kv_scales == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be_a_scale_is_told_where_it_is_asked_for(scale: float, tmp_path: Path) -> None:
    with_scales(llama(), tmp_path, "llm-compressor", ((1.0, 1.0), (1.0, scale)))
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.v_scale must be a scale"):
        load(save_kept(None, tmp_path), reads_kv_scales=True)
    load(save_kept(None, tmp_path))


# --- what users see -------------------------------------------------------------------------------------------------


def test_a_block_takes_a_quarter_of_float32s_memory_and_runs_say_so(engines: Engines) -> None:
    whole, kept = (engines(None, **ROOMY, **more).engine for more in ({}, KEPT))
    assert whole.target.cache_bytes_per_block == 4 * kept.target.cache_bytes_per_block
    assert numbers_of(describe_run(kept)) == "float32 with a KV cache in fp8"
    assert numbers_of(describe_run(whole)) == "float32"


def test_the_python_api_takes_vllms_name() -> None:
    llm = LLM("tiny", kv_cache_dtype="fp8", speculative_config={"method": "suffix", "num_speculative_tokens": 4})
    assert llm.engine.target.kv_dtype == FP8
    llm.generate(["def f(x):"], SamplingParams(max_tokens=4, temperature=0.0))
