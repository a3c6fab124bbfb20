"""kernels/kernel.py: what a start launches is compiled before, by threads, and nothing is launched for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proposers.drafting.blocks import BlockProposer
from proposers.drafting.from_hidden_states import HeadProposer
from runner.engine import start_check
from tests.conftest import Engines
from tests.emulated_device import EmulatedDevice
from tests.other_families import FAMILIES as OTHER_FAMILIES
from tests.other_families import GEMMA, keys_of
from tests.test_emulated_gpu import GPU
from tests.test_launches_compile import WITH_STATES_AND_EXPERTS
from tests.test_row_invariance import EXPERTS

pytest.importorskip("triton")

COMPILED = "CompiledKernel"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    root = Path(__file__).parent.parent
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ahead_of_launches"],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    claims: dict[str, Any] = json.loads(done.stdout)
    return claims


def test_threads_compile_what_is_asked_for_and_launches_find_it(found: dict[str, Any]) -> None:
    first = found["first"]
    assert first["threads"] == ["compile_0", "compile_1"]
    assert first["held"] == [COMPILED] * first["count"] and first["count"] > 2
    assert found["again"] == {"count": 0, "held": first["held"]}
    assert "launcher" in found["launched"]  # a launch itself goes on to the GPU, which is not there


def test_a_kernel_that_does_not_compile_says_so_every_time(found: dict[str, Any]) -> None:
    assert found["broken"] == ["CompileTimeAssertionFailure"] * 2


def test_an_interrupt_waits_for_nothing_and_what_it_left_is_compiled_later(found: dict[str, Any]) -> None:
    # Or the process would not have ended: what was under way ended later.
    assert found["interrupted"] == {"raised": "KeyboardInterrupt", "held": []}
    assert found["mended"]["held"] == found["first"]["held"]


RULES = ("probabilistic", "strict", "block", "typical")  # in turns
STARTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"architecture": GEMMA},
    "experts, fp8": {"architecture": {**EXPERTS, "num_hidden_layers": 1}, "quantization": "fp8"},
    "states and experts": {"architecture": WITH_STATES_AND_EXPERTS},
    "gpt_oss, mxfp4": {
        "architecture": {
            **OTHER_FAMILIES["gpt_oss"],
            "num_hidden_layers": 2,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    },
    **{family: keys_of(family) for family in OTHER_FAMILIES},
}


@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash"])
def test_products_of_a_draft_heads_layers_are_compiled_ahead(
    method: str, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is built, as a target's are at the start."""
    asked, agree = list[Any](), start_check._rows_agree
    monkeypatch.setattr(
        start_check,
        "_rows_agree",
        lambda product, weights, *args: (asked.extend(weights), agree(product, weights, *args))[1],
    )
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)
    model = {"architecture": {"model_type": "qwen3", "num_hidden_layers": 2}} if method == "mtp" else {}
    llm = Engines()({"method": method, "num_speculative_tokens": 2}, **{**GPU, **model, "batch_invariant": True})
    proposer = llm.engine.proposer
    assert isinstance(proposer, HeadProposer | BlockProposer)
    layers = proposer.head.layers
    weights = [weight for layer in layers for weight in layer.product_weights]
    assert len(layers) > 0 and {id(weight) for weight in weights} == {id(weight) for weight in asked}
    assert emulated_gpu.variants and emulated_gpu.variants == emulated_gpu.ahead


@pytest.mark.parametrize("name", STARTS)
def test_a_start_launches_nothing_that_was_not_compiled_ahead(name: str, emulated_gpu: EmulatedDevice) -> None:
    """And takes no index from memory that nobody wrote, which holds absurd ones here."""
    sizes = {"max_model_len": 24, "max_num_seqs": 2, "max_num_batched_tokens": 24, "num_gpu_blocks_override": None}
    rule = RULES[list(STARTS).index(name) % len(RULES)]
    method = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": rule}
    Engines()(method, **{**GPU, **STARTS[name], **sizes, "batch_invariant": True})
    assert emulated_gpu.variants
    assert emulated_gpu.variants == emulated_gpu.ahead
