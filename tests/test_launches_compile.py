"""What an engine launches on an emulated GPU is what Triton compiles, in the very variants: the interpreter takes more.

It divides by integers where a float is due and asks for no number of warps; tests/compile_kernels.py compiles what its
table says, and a launch may ask for something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import linear_plan
from runner.engine import start_check
from tests.aot.kernel import OVERLAPS, Kernel
from tests.compile_kernels import KERNELS
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import SELECTING
from tests.other_families import FAMILIES as OTHER_FAMILIES
from tests.other_families import GEMMA
from tests.test_emulated_gpu import ASKED, CASES, CUT, DRAWN, GPU, PROMPTS
from tests.test_row_invariance import EXPERTS

pytest.importorskip("triton")

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int8: "i8",
}
# A step in parts, one that is captured and one that is replayed. What cuts a distribution takes the interpreter longest
# and is launched alike by all of them.
SHORT_CUT, SHORT = (replace(drawn, max_tokens=3) for drawn in (CUT, DRAWN))
WITH_STATES_AND_EXPERTS = {
    **OTHER_FAMILIES["qwen3_5_text"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
METHODS = ("none", "probabilistic", "block", "eagle3 tree", "ngram_gpu", "suffix_recycling")


def kernel_of(variant: Any) -> Kernel:
    """As tests/aot has it, of what tests/emulated_kernels.py calls a variant."""
    function, *kinds = variant
    types, constants, options = dict[str, str](), dict[str, Any](), dict[str, Any]()
    for name, *kind in kinds:
        if name not in function.__code__.co_varnames[: function.__code__.co_argcount]:
            options[name] = kind[1]
        elif isinstance(kind[0], torch.dtype):
            types[name] = f"*{TYPES[kind[0]]}"
        elif kind == [float, None]:
            types[name] = "fp32"
        elif isinstance(kind[0], type):
            constants[name] = kind[1]
        else:  # an integer: whether it is 1 and divisible by 16, where that is looked at, and whether it takes 64 bits
            is_one, divides = kind[:2] if len(kind) == 3 else (False, False)
            if is_one:
                constants[name] = 1
            else:
                types[name] = ("i64" if kind[-1] else "i32") + (":16" if divides else "")
    options.pop("launch_pdl", None)
    constants.pop(OVERLAPS, None)  # what the GPU is decides it
    order = [name for name in function.__code__.co_varnames if name in types]
    return Kernel(
        module=function.__module__,
        name=function.__name__,
        signature=" ".join(types[name] for name in order),
        constants=constants,
        options=options,
    )


def test_every_variant_that_engines_launch_compiles_for_hopper(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)  # of more rows than steps have
    for name in METHODS:
        method, params = CASES[name]
        second = SHORT_CUT if name == "none" else SHORT
        complete(Engines()(method, **GPU), PROMPTS, [replace(params[0], max_tokens=4), second])
    for method, asked in ASKED.values():
        complete(Engines()(method, **GPU), PROMPTS, [replace(asked, max_tokens=4), SHORT])
    mxfp4 = {**OTHER_FAMILIES["gpt_oss"], "num_hidden_layers": 2, "quantization_config": {"quant_method": "mxfp4"}}
    experts = {**EXPERTS, "num_hidden_layers": 1}
    for own in (
        {"kv_cache_dtype": "fp8"},
        {"architecture": GEMMA},
        {"architecture": experts},
        {"architecture": experts, "quantization": "fp8"},
        {"architecture": mxfp4},
        {"architecture": OTHER_FAMILIES["deepseek_v3"]},
        {"architecture": OTHER_FAMILIES["laguna"]},
    ):
        complete(Engines()(None, **{**GPU, **own}), PROMPTS, [replace(DRAWN, max_tokens=4), SHORT])
    with monkeypatch.context() as patch:  # products left in partial sums, which those of larger weights are
        patch.setattr(linear_plan, "MIN_STEPS", 1)
        in_parts = Engines()({"method": "eagle", "num_speculative_tokens": 2}, **{**GPU, "batch_invariant": True})
        complete(in_parts, PROMPTS, [replace(DRAWN, max_tokens=4), SHORT])
    with_states = ("granitemoehybrid", "bailing_hybrid", "kimi_linear", "lfm2_moe", "olmo_hybrid")
    for own in (WITH_STATES_AND_EXPERTS, *map(OTHER_FAMILIES.get, with_states)):
        states = {**GPU, "architecture": own}
        complete(Engines()(CASES["ngram_gpu"][0], **states), PROMPTS, [replace(DRAWN, max_tokens=4), SHORT])
    of_drafters = {**GPU["architecture"], **SELECTING}
    selecting = Engines()({"method": "dflash", "num_speculative_tokens": 2}, of_drafters=of_drafters, **GPU)
    complete(selecting, PROMPTS, [replace(DRAWN, max_tokens=4), SHORT])
    found = {str(kernel): kernel for kernel in map(kernel_of, emulated_gpu.variants)}
    launched = {kernel.name for kernel in found.values()}
    # Those of contexts that are split, of several ranks, and of Gemma 4's drafters.
    others = {"merge_kernel", "sum_of_ranks_kernel", "cluster_logits_kernel"}
    assert launched == {kernel.name for kernel in KERNELS} - others
    root = Path(__file__).parent.parent
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "-"],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root), "TRITON_DISABLE_LINE_INFO": "1"},
        input=json.dumps([asdict(kernel) for kernel in found.values()]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout)) == len(found)
