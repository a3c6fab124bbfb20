"""model.quantization and method.quantization: weights in 8 bits as a model is loaded; and the promise, in 4 too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.panels import Panels, multiplies_and_adds, unpack
from kernels.quantized_weight import quantize
from kernels.words import Kind
from proposers.drafting.from_hidden_states import HeadProposer
from runner.benchmarks import decoding
from runner.cli.compose import Composer
from runner.config import SpeculativeConfig
from runner.config.method_union import FIELDS
from runner.config.problem import ConfigError
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.llm import LLM
from runner.run import execute
from runner.target import load_target
from runner.tiny import DRAFTER_KEYS
from tests import mtp_checkpoints
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import SELECTING
from tests.other_families import FAMILIES
from tests.test_emulated_gpu import DRAWN, GPU, GREEDY, SMALL
from tests.test_losslessness import (
    METHODS,
    PARAMS,
    PROMPTS,
    ROOMY,
    SCHEDULES,
    answers,
    method_config,
    tell_test_proposers,
)

pytestmark = pytest.mark.skipif(not multiplies_and_adds(), reason="this machine has no kernels for 8 bits")
DRAFTERS = [name for name, keys in FIELDS.items() if "quantization" in keys]
NUMBERS: tuple[Kind, ...] = ("fp8", "int8")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
# How engines are asked for them: by the option, or for dummies of a quantized checkpoint.
WAYS: dict[str, dict[str, Any]] = {
    **{numbers: {"quantization": numbers} for numbers in NUMBERS},
    "int4": {"architecture": {"quantization_config": AWQ}},
}


def decoder_of(llm: LLM) -> Decoder:
    assert isinstance(llm.engine.target_info.model, Decoder)
    return llm.engine.target_info.model


# --- what is held ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_layers_products_are_held_in_8_bits_and_nothing_else(numbers: Kind) -> None:
    dense, held = LLM("tiny", device="cpu"), LLM("tiny", device="cpu", quantization=numbers)
    assert held.engine.target_info.held == numbers
    for layer, twin in zip(decoder_of(held).layers, decoder_of(dense).layers, strict=True):
        for weight, exact in zip(layer.product_weights, twin.product_weights, strict=True):
            assert isinstance(weight, Panels) and weight.kind == numbers
            assert torch.equal(unpack(weight), quantize(unpack(exact), numbers).dense())
    assert torch.equal(unpack(decoder_of(held).lm_head), unpack(decoder_of(dense).lm_head))
    assert torch.equal(decoder_of(held).embed_tokens, decoder_of(dense).embed_tokens)
    assert held.engine.target_info.num_weight_bytes < 0.4 * dense.engine.target_info.num_weight_bytes


def test_of_a_draft_the_head_is_held_in_8_bits_too() -> None:
    """Its embedding, which the head is tied to, stays: a row of it costs nothing to read."""
    method = {"method": "draft_model", "num_speculative_tokens": 4, "quantization": "int8"}
    llm = LLM("tiny", device="cpu", speculative_config=method)
    draft, target = llm.engine.proposer.runner.model, decoder_of(llm)  # type: ignore[attr-defined]
    head = draft.lm_head
    assert isinstance(head, Panels) and head.kind == "int8"
    assert torch.equal(unpack(head), quantize(draft.embed_tokens, "int8").dense())
    assert target.layers[0].product_weights[0].dtype == torch.float32 and llm.engine.target_info.held is None


def test_dummy_weights_are_of_the_usual_size() -> None:
    """As those of a dense model, so that activations stay finite."""
    source = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    stds = [
        unpack(decoder_of(LLM("dummy", quantization=numbers, **source)).layers[0].mlp.gate_up_proj.weight).std()
        for numbers in (None, "fp8")
    ]
    assert stds[0] == pytest.approx(0.02, rel=0.05) and stds[1] == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("method", DRAFTERS)
def test_all_that_a_drafter_multiplies_by_is_held_in_8_bits(method: str, engines: Engines) -> None:
    """Also the projection that a head without one of its own takes from the target, which keeps its own dense."""
    keys = {"drafter": "eagle"} if method == "hybrid" else {}
    llm = engines(method_config(method, 3, quantization="int8", **keys), **ROOMY)
    proposer: Any = llm.engine.proposer
    proposer = getattr(proposer, "drafter", proposer)
    part = next(
        getattr(proposer, name) for name in ("head", "heads", "speculator", "runner") if hasattr(proposer, name)
    )
    found = list[Panels]()

    def note(weight: Panels) -> Panels:
        found.append(weight)
        return weight

    getattr(part, "model", part).convert(note)
    assert found and all(weight.kind == "int8" for weight in found)
    head = unpack(decoder_of(llm).lm_head)
    has_other_head = method in (
        "eagle3",
        "medusa",
        "mlp_speculator",
    )  # drafts are the target's first layer, head and all
    assert any(torch.equal(unpack(weight), quantize(head, "int8").dense()) for weight in found) != has_other_head
    assert decoder_of(llm).lm_head.numbers.dtype == torch.float32  # type: ignore[union-attr]


def test_a_selecting_heads_copy_of_the_targets_projection_scales_nothing(engines: Engines) -> None:
    """As DFlash 2's, which has numbers of its own for what targets do behind theirs."""
    method = method_config("dflash", 3, quantization="int8")
    llm = engines(method, architecture=FAMILIES["granite"], of_drafters=SELECTING)
    head, target = llm.engine.proposer.head, decoder_of(llm)  # type: ignore[attr-defined]
    rows = torch.randn(8, TARGET_CONFIG["hidden_size"], generator=torch.Generator().manual_seed(0))
    ours, theirs = head.logits(rows, 1), target.raw_logits(rows, 1)
    assert 0 < (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("family", ["gemma2", "granite", "muse_glimmer_text"])
def test_a_copy_of_the_targets_projection_gives_logits_as_the_target_does(engines: Engines, family: str) -> None:
    """With its soft cap, its scale, or both."""
    llm = engines(method_config("eagle", 2, quantization="int8"), architecture=FAMILIES[family])
    assert isinstance(llm.engine.proposer, HeadProposer)
    head, target = llm.engine.proposer.head, decoder_of(llm)
    rows = torch.randn(8, TARGET_CONFIG["hidden_size"], generator=torch.Generator().manual_seed(0))
    ours, theirs = head.logits(rows, 1), target.logits(rows, 1)
    assert 0 < (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


# --- the promise ----------------------------------------------------------------------------------------------------


Quantized = tuple[dict[str, Any], list[Request]]  # how an engine is asked for, and plain decoding's requests


@pytest.fixture(scope="module", params=["fp8", "int4"])
def quantized(request: pytest.FixtureRequest, engines: Engines) -> Quantized:
    way = WAYS[request.param]
    llm = engines(**way, **ROOMY)
    held = llm.engine.target_info.held
    assert held is not None and held.startswith(request.param)
    weight = decoder_of(llm).layers[0].attention.qkv_proj.weight
    assert isinstance(weight, Panels) and weight.kind == request.param
    return way, complete(llm, PROMPTS, PARAMS)[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_no_token(engines: Engines, quantized: Quantized, method: str) -> None:
    way, plain = quantized
    tell_test_proposers(plain)
    requests, metrics = complete(engines(method_config(method, 4), **way, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)


@pytest.mark.parametrize("schedule", ["one request at a time", "odd chunks", "few blocks of 32, small chunks"])
def test_the_schedule_changes_no_token(engines: Engines, quantized: Quantized, schedule: str) -> None:
    way, plain = quantized
    requests, _ = complete(engines(method_config("draft_model", 3), **way, **SCHEDULES[schedule]), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("method", DRAFTERS)
def test_how_a_drafter_is_held_changes_no_token(engines: Engines, method: str, numbers: str) -> None:
    """Only which drafts there are."""
    plain = complete(engines(**ROOMY), PROMPTS, PARAMS)[0]
    config = method_config(method, 4, quantization=numbers)
    requests, metrics = complete(engines(config, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain) and metrics.num_accepted_tokens > 0


def test_bfloat16_keeps_the_promise_too(engines: Engines) -> None:
    plain, drafted = (
        complete(engines(method, quantization="fp8", dtype="bfloat16", **ROOMY), PROMPTS, PARAMS)[0]
        for method in (None, method_config("draft_model", 4))
    )
    assert answers(plain) == answers(drafted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "method",
    [None, *({"method": method, "num_speculative_tokens": 2} for method in ("draft_model", "eagle"))],
    ids=["none", "draft", "head"],
)
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    method: dict[str, Any] | None, way: str, engines: Engines, emulated_gpu: EmulatedDevice
) -> None:
    """Kernels read quantized weights whether batches are invariant or not: no BLAS does."""
    if method is not None and way in NUMBERS:
        method = {**method, "quantization": way}
    prompts, asked = PROMPTS[:2], WAYS[way]
    small, gpu = ({**options, **asked} for options in (SMALL, GPU))
    if "architecture" in asked:
        small["architecture"] = gpu["architecture"] = {**SMALL["architecture"], **asked["architecture"]}
    expected = complete(engines(method, **small), prompts, [GREEDY, DRAWN])[0]
    found = complete(Engines()(method, **gpu), prompts, [GREEDY, DRAWN])[0]
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
    assert emulated_gpu.num_replays > 0


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_an_mtp_module_inside_a_target_is_found_however_both_are_held(layout: str, tmp_path: Path) -> None:
    """What the two hold in 8 bits does not make them two checkpoints."""
    mtp_checkpoints.write(tmp_path, layout, {"mimo": "qwen2", "deepseek": "llama"}[layout])
    texts = []
    for method in (None, {"method": "mtp", "num_speculative_tokens": 2, "quantization": "int8"}):
        llm = LLM(str(tmp_path), device="cpu", quantization="fp8", speculative_config=method)
        texts.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], use_tqdm=False)])
    assert texts[0] == texts[1]
    assert llm.engine.proposer.head.projection.weight.kind == "int8"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "said"), [(float("nan"), "must hold finite numbers"), (3e5, "finite scales below 128")]
)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_weight_that_8_bits_cannot_hold_is_told(number: float, said: str, numbers: str, tmp_path: Path) -> None:
    mtp_checkpoints.write(tmp_path, "mimo", "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][1, 2] = number
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        LLM(str(tmp_path), device="cpu", quantization=numbers)
    assert "model.layers.0.self_attn.q_proj.weight" in str(caught.value) and said in str(caught.value)


# --- configuration --------------------------------------------------------------------------------------------------


def test_the_70b_preset_is_made_to_fit_one_gpu() -> None:
    """68 GiB of weights where bfloat16 takes 131; what does not fit says what would."""
    with Composer() as composer:
        configs = [
            composer.config(["model=llama70b", "model.load_format=dummy", "hardware=cpu", *more])
            for more in (["hardware.dtype=bfloat16"], ["hardware.dtype=bfloat16", "model.quantization=null"])
        ]
    messages = []
    for config in configs:
        with pytest.raises(UserError) as caught:
            load_target(config)
        messages.append(str(caught.value))
    assert "needs 67.7 GiB on cpu" in messages[0] and "choose a smaller model" in messages[0]
    assert "needs 131.4 GiB on cpu" in messages[1] and "choose model.quantization=fp8, a smaller" in messages[1]


def test_a_checkpoint_that_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    values = {**TARGET_CONFIG, "quantization_config": stated}
    with pytest.raises(UserError) as caught:
        LLM("dummy", device="cpu", load_format="dummy", hf_config=values, quantization="fp8")
    assert str(caught.value) == (
        "model='dummy' must not be quantized to fp8: its checkpoint is quantized already (int4 in groups of 128); "
        "leave quantization null, or choose the unquantized checkpoint"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"quantization": "fp9"}, "quantization must be one of fp8, int8, got 'fp9'"),
        ({"quantization": "gptq"}, "quantization must be fp8, int8 or null, got 'gptq': how a checkpoint is quantized"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_engine_args("tiny", **arguments)
    assert said in str(caught.value)


def test_vllms_key_is_read_and_written() -> None:
    method = {"method": "draft_model", "num_speculative_tokens": 3}
    configs = {
        numbers: SpeculativeConfig.from_engine_args("tiny", {**method, "quantization": numbers}, **DRAFTER_KEYS)
        for numbers in ("fp8", "int8", "gptq")
    }
    assert [config.method.quantization for config in configs.values()] == ["fp8", "int8", None]  # type: ignore[union-attr]
    assert configs["gptq"].notes() == [
        "speculative_config.quantization='gptq' is read from the checkpoint's config.json"
    ]
    translated, notes = configs["fp8"].to_vllm()
    assert translated is not None and translated["quantization"] == "fp8" and "quantization" not in " ".join(notes)
    translated, notes = configs["int8"].to_vllm()
    assert translated is not None and "quantization" not in translated
    assert "quantization=int8 has no counterpart in vLLM: it takes a checkpoint in int8" in notes


# --- what people see ------------------------------------------------------------------------------------------------


def test_a_run_says_how_weights_are_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SpeculativeConfig.parse(
        {
            "model": {"model": "tiny", "quantization": "fp8"},
            "method": {"method": "ngram"},
            "sampler": {"temperature": 0.0, "max_tokens": 8},
            "workload": {"name": "demo", "limit": 2},
            "tracking": "none",
            "hardware": {"num_gpu_blocks_override": 320},
        }
    )
    summary = execute(config, tmp_path)
    assert summary["machine"]["weights"] == "fp8" and summary["machine"]["dtype"] == "float32"
    assert "tiny on cpu, float32 with weights in fp8" in capsys.readouterr().out


def test_the_decoding_benchmark_measures_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET_CONFIG))
    file = tmp_path / "decoding.json"
    lengths = ("--prompt-tokens", "4", "--new-tokens", "4", "--rounds", "1")
    options = ("--cases", "plain", "identical", "--quantization", "int8", "--json", str(file))
    assert decoding.main(["--model", str(tmp_path), "--device", "cpu", *lengths, *options]) == 0
    found = json.loads(file.read_text())
    assert found["conditions"]["weights"] == "int8" and "weights in int8" in " ".join(capsys.readouterr().out.split())
    assert all(counts["identical"] == counts["requests"] for counts in found["cases"]["identical"].values())
