"""Every Triton kernel compiles for sm_80 and sm_90, GPU or none. Whether it is right is told elsewhere."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kernels
from tests.aot.kernel import OVERLAPS, SHARED_MEMORY
from tests.aot.rows import ADDING_NORMS, HEADS_OF_PARTS, WIDE_HEADS_OF_PARTS
from tests.compile_kernels import KERNELS, RECURRENT

pytest.importorskip("triton")


def test_the_table_holds_every_kernel() -> None:
    """Kernels are the functions of kernels/*.py whose name ends in _kernel."""
    found = {
        (module, name)
        for module in (f"kernels.{entry.name}" for entry in pkgutil.iter_modules(kernels.__path__))
        for name in vars(importlib.import_module(module))
        if name.endswith("_kernel")
    }
    assert found and found == {(kernel.module, kernel.name) for kernel in KERNELS}


# Of triton.language in 3.7 and not in 3.6, the oldest that pyproject.toml allows and the one that torch 2.11 pins.
NAMES_SINCE_3_7 = {"squeeze", "to_tensor", "unsqueeze"}


def test_kernels_use_no_name_that_the_oldest_triton_lacks() -> None:
    """tl.to_tensor compiled here, and nothing that draws noise would have compiled beside torch 2.11."""
    sources = [path.read_text(encoding="utf-8") for path in Path(inspect.getfile(kernels)).parent.glob("*.py")]
    used = {name for source in sources for name in re.findall(r"\btl\.(\w+)", source)}
    assert used and not used & NAMES_SINCE_3_7


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """compile_kernels.Compiled of every kernel and GPU, as a dict; without line numbers, which change no program.

    Triton's cache knows a program by its source, the compiler, the GPU and the options, so what changed is compiled.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1"}
    root = Path(inspect.getfile(kernels)).parent.parent
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


SPILLED_BY_TRITON_36 = {"gated_delta_kernel": 16}  # bytes of a thread, of a delta net in float32; 3.7 spills none


def test_every_kernel_compiles_and_keeps_to_its_shared_memory_and_registers(compiled: dict[str, Any]) -> None:
    assert len(compiled) == sum(len(kernel.compute_capabilities) for kernel in KERNELS)
    for kernel in KERNELS:
        for capability in kernel.compute_capabilities:
            found = compiled[f"{kernel} sm_{capability}"]
            assert found["shared"] <= min(kernel.max_shared, SHARED_MEMORY[capability]), f"{kernel} sm_{capability}"
            # What Hopper's matrix instructions take from shared memory older ones hold in registers.
            assert found["stack"] <= SPILLED_BY_TRITON_36.get(kernel.name, kernel.spilled) or capability < 90, (
                f"{kernel} spills registers"
            )


def test_what_overlaps_with_the_launch_before_awaits_it_before_it_touches_memory(compiled: dict[str, Any]) -> None:
    """On Hopper; norms ask for their weights before. Elsewhere nothing overlaps."""
    found, norms = set[str](), {"rms_norm_kernel", "rms_norm_pair_kernel"}
    for kernel in KERNELS:
        function = getattr(importlib.import_module(kernel.module), kernel.name).fn
        if OVERLAPS in function.arg_names:
            for capability in kernel.compute_capabilities:
                awaits = compiled[f"{kernel} sm_{capability}"]["first_access"] == "griddepcontrol.wait"
                assert awaits == (capability >= 90), str(kernel)
                opcodes = compiled[f"{kernel} sm_{capability}"]["opcodes"]
                assert (opcodes[:1] == ["prefetch.global"]) == (awaits and kernel.name in norms), str(kernel)
            found.add(kernel.name)
    of_experts = {"choose_kernel", "place_kernel", "linear_of_experts_kernel", "sum_of_experts_kernel"}
    others = {"linear_kernel", "rope_kernel", "attend_kernel", "merge_kernel", "sum_of_ranks_kernel"}
    others |= {"gated_delta_kernel", "gate_kernel", "add_up_kernel", "block_conv_kernel"}
    others |= {"linear_of_heads_kernel", "latent_rows_kernel", "short_conv_kernel"}
    assert found == norms | of_experts | others


PRODUCTS = ("linear_kernel", "linear_of_experts_kernel", "linear_of_heads_kernel")


def test_products_are_computed_while_later_steps_are_on_their_way(compiled: dict[str, Any]) -> None:
    """Attention used to wait for all that it had asked for in every step: keys behind a block table that was read in
    the same step had half of the pipeline's stages, which is none that overlaps."""
    for kernel in KERNELS:
        if 90 in kernel.compute_capabilities and kernel.name in {*PRODUCTS, "attend_kernel"}:
            # With an fp4's block scales, but of short steps: two bytes are no copy.
            copies_of_a_weight = 1 + (kernel.constants.get("READING") == "fp4" and kernel.signature.startswith("*bf16"))
            found, gated = compiled[f"{kernel} sm_90"], bool(kernel.constants.get("GATED"))
            num_copies = 1 + copies_of_a_weight * (1 + gated)
            num_stages = kernel.options.get("num_stages", 3)  # one is computed, one is waited for
            assert found["under_way"] == num_copies * (num_stages - 2) > 0, str(kernel)


# One of a row, request or tile: views of an upload or of another such tensor, that begin where what lies before ends.
ANYWHERE = {
    *("positions_ptr", "slots_ptr", "cuts_ptr", "masses_ptr", "num_drafts_ptr", "num_draft_tokens_ptr"),
    *("own_ids_ptr", "totals_ptr", "cu_ptr"),
    *("segments_ptr", "sizes_ptr", "last_keys_ptr", "tables_ptr", "branch_starts_ptr", "branch_slots_ptr"),
}


def test_how_many_rows_a_launch_has_makes_no_other_program(compiled: dict[str, Any]) -> None:
    """An odd number of rows used to have programs of its own, each compiled in the step that first met one."""
    for name, found in compiled.items():
        assert not ANYWHERE & set(found["aligned"]), name


@pytest.mark.parametrize("product", PRODUCTS)
def test_one_family_of_instructions_multiplies_for_any_number_of_rows(product: str, compiled: dict[str, Any]) -> None:
    """On Hopper: mma.sync, which Triton takes where the first operand is short, need not agree with wgmma in bits.

    A step of 64 columns is four of them, of a quantized weight eight, of a group of 32 two; nothing is copied before
    the launch before has written it.
    """
    own = [kernel for kernel in KERNELS if kernel.name == product and kernel.signature.startswith("*bf16")]
    linears = [kernel for kernel in own if kernel.constants["EVEN_K"]]
    on_hopper = [kernel for kernel in linears if kernel.compute_capabilities == (90,)]
    of_one_weight = {256} if product == "linear_kernel" else set()
    assert {kernel.constants["TOKENS"] for kernel in on_hopper} == {16, 32, 64, 128} | of_one_weight
    for kernel in on_hopper:
        opcodes = compiled[f"{kernel} sm_90"]["opcodes"]
        products = [opcode for opcode in opcodes if "mma" in opcode]
        sharing = kernel.options["num_warps"] // 4 * 64 // kernel.constants["FEATURES"]  # a tile's tokens among them
        instruction = f"wgmma.mma_async.sync.aligned.m64n{kernel.constants['TOKENS'] // sharing}k16.f32.bf16.bf16"
        of_a_step = kernel.constants["BLOCK_K"] // 16
        assert products == [instruction] * of_a_step * (2 if kernel.constants.get("GATED") else 1), str(kernel)
        assert opcodes[0] == "griddepcontrol.wait" and opcodes[1].startswith("cp.async.c"), str(kernel)
        is_dense = kernel.constants.get("READING", "dense") == "dense"
        assert of_a_step == (4 if is_dense else 8) or (of_a_step in (1, 2) and kernel.constants["STEP_GROUPS"])


@pytest.mark.parametrize("name", RECURRENT)
def test_a_token_is_computed_alike_in_steps_and_in_prompts(name: str, compiled: dict[str, Any]) -> None:
    """What a step keeps of a token may be computed anew in the program of prompts: ptxas fuses the same products with
    the same sums in both.
    """
    by_kind = dict[str, list[dict[str, int]]]()
    for kernel in KERNELS:
        if kernel.name == name:
            others = {key: value for key, value in kernel.constants.items() if value is not None or key == "bias_ptr"}
            kind = f"{kernel.signature.split()[0]}, {others}"
            by_kind.setdefault(kind, []).append(compiled[f"{kernel} sm_90"]["arithmetic"])
    assert len(by_kind) >= 3
    for programs in by_kind.values():
        assert len(programs) == 2 and programs[0] == programs[1] and programs[0]["FFMA"] > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_rows_are_read_from_moves_no_sum_along_them(dtype: str, compiled: dict[str, Any]) -> None:
    """Partial sums are wider than rows; were they read by more threads, squares would be added in another order.

    And no scale is fused with what is added behind it, which another launch adds to a row that is whole.
    """
    for by_rows in (ADDING_NORMS, HEADS_OF_PARTS, *WIDE_HEADS_OF_PARTS):
        programs = {name: compiled[f"{kernel} sm_90"] for name, kernel in by_rows.items() if name.startswith(dtype)}
        reductions = [program["reductions"] for program in programs.values()]
        assert all(len(own) == 1 and own == reductions[0] for own in reductions)
    in_parts, scaled = (compiled[f"{ADDING_NORMS[f'{dtype}, in parts{scaled}']} sm_90"] for scaled in ("", ", scaled"))
    assert scaled["additions"] == in_parts["additions"] > 0
