"""The promise in models that transformers' own code runs: a row's bits are its own, whatever architecture it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kernels.cpu.panels import can_pack, pack, unpack
from kernels.quantized_weight import quantize
from runner.engine import loader, transformers_functions
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel
from runner.engine.model_runner import ModelRunner
from runner.engine.transformers_attention import Launch, LayerAttention
from runner.engine.transformers_functions import RowFunctions, keep_rows_in
from runner.engine.transformers_model import ROUTERS, TransformersModel
from runner.engine.transformers_modules import OwnExperts, OwnLinear, take_products
from tests.conftest import Engines, complete
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, SCHEDULES, answers, counts, tell_test_proposers
from tests.test_transformers_model import (
    EXPERTS,
    MODELS,
    ONE_SLIDING_LAYER,
    OTHER_ACT,
    VOCAB_SIZE,
    dummy_source,
    make_config,
)
from tests.test_trees import known
from tests.transformers_reference import CPU, engine_logits, load, random_model, random_sequences, save

needs_panels = pytest.mark.skipif(not can_pack(torch.zeros(16, 16)), reason="this CPU has no products from panels")
DTYPES = (torch.float32, torch.bfloat16)
# Families beside those of tests/test_transformers_model.py, by what else their code has: model_type -> options
MORE: dict[str, dict[str, Any]] = {
    "cohere": {},  # no residual between attention and MLP
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_norm_min": 1e-6},
    "exaone4": {**OTHER_ACT, "sliding_window": 8},  # norms behind what they norm
    "glm4_moe": {
        **OTHER_ACT, "head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "gpt_neox": {},
    "granitemoe": {**OTHER_ACT, **EXPERTS},
    "minimax_m2": {**OTHER_ACT, **EXPERTS, "head_dim": 16},
    "olmo": {},  # norms without weights
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},  # attention beside the MLP
    "qwen2_moe, odd widths": {
        "model_type": "qwen2_moe", "hidden_act": "gelu", "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 50, "intermediate_size": 102,
    },
    "starcoder2": {"sliding_window": 8},
}  # fmt: skip


def runner_of(loaded: LoadedModel, dtype: torch.dtype, *, batch_invariant: bool = True) -> ModelRunner:
    return ModelRunner(loaded.model, block_size=16, device=CPU, dtype=dtype, batch_invariant=batch_invariant)


def loaded_model(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    options = {"model_type": family, **MORE.get(family, {})}
    return load(dummy_source(**options), dtype=dtype)


# --- whole models ---------------------------------------------------------------------------------------------------


@needs_panels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*MODELS, *MORE])
def test_the_check_at_the_start_finds_that_rows_are_kept(family: str, dtype: torch.dtype) -> None:
    runner = runner_of(loaded_model(family, dtype), dtype)
    assert isinstance(runner.model, TransformersModel) and runner.is_row_invariant


@needs_panels
@pytest.mark.parametrize("max_model_len", [1, 2, 3, 7, 13])
def test_the_check_at_the_start_has_room_in_short_texts(max_model_len: int) -> None:
    assert runner_of(load(dummy_source("olmo2"), max_model_len=max_model_len), torch.float32).is_row_invariant


@pytest.mark.parametrize("family", [*MODELS, "glm4_moe", "opt"])
def test_logits_have_the_same_bits_in_other_company_and_other_chunks(family: str, tmp_path: Path) -> None:
    """One sequence is a prompt in one piece, in two, and verified at other depths, beside others."""
    options = MORE.get(family, {})
    loaded = load(save(random_model(make_config(family, **options)), tmp_path))
    first, second, third, other = random_sequences(VOCAB_SIZE, ((17, 5), (17, 5), (17, 4), (40, 4)))

    def logits_of_first(*sequences: Any) -> torch.Tensor:
        found, row = engine_logits(loaded, sequences), 0
        for sequence in sequences:
            if sequence is first:
                return found[row : row + len(first.token_ids)]
            row += len(sequence.token_ids)
        raise AssertionError

    alike = logits_of_first(first, second, third)
    assert torch.equal(logits_of_first(second, first, third), alike), "read in chunks"
    assert torch.equal(logits_of_first(first, other, third), alike), "beside a longer one"


ARCHITECTURES: dict[str, dict[str, Any]] = {
    family: {"model_type": family, **MODELS[family]}
    for family in ("deepseek_v3", "vaultgemma", "gpt_oss", "olmoe", "gpt2")
}
ARCHITECTURES["deepseek_v3"]["head_dim"] = 8  # of rope


@pytest.mark.parametrize("schedule", ["few blocks", "chunks down to one token"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_neither_trees_nor_schedules_change_a_token(engines: Engines, family: str, schedule: str) -> None:
    args: dict[str, Any] = {"architecture": ARCHITECTURES[family], "weight_scale": 12.0}
    plain = engines(**args, **ROOMY)
    assert plain.engine.target.is_row_invariant or not can_pack(torch.zeros(16, 16))
    expected, _ = complete(plain, PROMPTS, PARAMS)
    tell_test_proposers(expected)
    llm = engines(known("RandomTreeProposer", 4), **args, **SCHEDULES[schedule])
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == answers(expected)
    assert 0 < counts(metrics)[1] < counts(metrics)[0]
    assert any(request.num_preemptions for request in requests) == (schedule == "few blocks")
    assert len({tuple(request.output_token_ids) for request in requests}) > len(requests) // 2, "texts wander"


def test_without_batch_invariance_the_code_is_left_alone() -> None:
    loaded = loaded_model("olmoe")
    runner = runner_of(loaded, torch.float32, batch_invariant=False)
    assert not runner.is_row_invariant
    assert not any(isinstance(module, OwnLinear | OwnExperts) for module in loaded.model.modules())
    assert not any("forward" in vars(module) for module in loaded.model.modules())


@needs_panels
@pytest.mark.parametrize("family", ["gpt_oss", "phi", "gpt2"])
def test_weights_of_products_are_held_once(family: str) -> None:
    model = loaded_model(family).model
    before = sum(parameter.dim() > 1 for parameter in model.parameters())
    model.keep_rows(pack)
    left = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    assert len(left) < before and all(
        "embed" in name or "router" in name or name.endswith(("wte.weight", "wpe.weight", "bias")) for name in left
    )


@needs_panels
@pytest.mark.parametrize("numbers", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["vaultgemma", "gpt_oss", "gpt2", "qwen2_moe"])
def test_layers_in_8_bits_compute_what_the_weights_that_they_stand_for_give(family: str, numbers: str) -> None:
    """Bit for bit, of one row as of many; embedding, head, and routers and gates of experts are the dense ones."""
    source, dense = dummy_source(family), loaded_model(family)
    held, twin = load(replace(source, quantization=numbers)), loaded_model(family)
    assert held.held == numbers and held.num_weight_bytes < dense.num_weight_bytes == twin.num_weight_bytes
    left = {name for name, _ in held.model.named_parameters()}
    is_gate = re.compile(r"\.(gate|router|shared_expert_gate)\.")
    assert {name for name, _ in dense.model.named_parameters() if is_gate.search(name)} <= left
    assert isinstance(twin.model, TransformersModel)
    expanded = partial(quantize, kind=numbers)
    take_products(twin.model.decoder, lambda weight: pack(unpack(expanded(unpack(weight)))), but=ROUTERS)
    sequences = random_sequences(VOCAB_SIZE, ((17, 5), (40, 4), (17, 4)))
    found = engine_logits(held, sequences)
    assert torch.equal(found, engine_logits(twin, sequences))
    assert not torch.equal(found, engine_logits(dense, sequences))
    assert torch.equal(held.model.embed_tokens, dense.model.embed_tokens)


def test_layers_in_8_bits_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "runs_kernels", lambda device: True)
    with pytest.raises(
        UserError, match=r"model\.quantization must be null on a GPU, got fp8: olmoe runs through trans"
    ):
        load(replace(dummy_source("olmoe"), quantization="fp8"))


@needs_panels
def test_an_activation_that_looks_at_the_whole_launch_is_found() -> None:
    model = loaded_model("cohere2").model
    for module in model.modules():
        if type(module).__name__ == "SiLUActivation":
            module.forward = lambda x: F.silu(x) + 1e-6 * (x.shape[-2] > 3)
    assert not runner_of_model(model).is_row_invariant


@needs_panels
@pytest.mark.parametrize("row", ["first", "last"])
def test_attention_with_one_bit_that_depends_on_company_is_found(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Launch.attend

    def changed(launch: Launch, call: LayerAttention) -> torch.Tensor:
        output = attend(launch, call)
        if len(output) > 5:
            own = output[0 if row == "first" else -1]
            own.view(torch.int32).bitwise_xor_(1)
        return output

    monkeypatch.setattr(Launch, "attend", changed)
    assert not runner_of(loaded_model("olmo2"), torch.float32).is_row_invariant


@needs_panels
@pytest.mark.parametrize(
    ("family", "left_out", "options"),
    [("starcoder2", F.gelu, {"approximate": "tanh"}), ("gpt_oss", torch.sigmoid, {})],
    ids=["gelu", "sigmoid"],
)
def test_functions_left_to_torch_are_found(
    family: str, left_out: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug told here: where the last numbers of a launch fill no vector they are computed by other code than the rest.

    So what this test leaves to torch is what RowFunctions is for, here and not only in theory.
    """
    monkeypatch.delitem(transformers_functions._WAYS, left_out)
    values: dict[str, Any] = {"intermediate_size": 102, "hidden_act": "gelu_pytorch_tanh"}
    if family == "gpt_oss":
        values = {**ONE_SLIDING_LAYER, **EXPERTS, "head_dim": 16, "intermediate_size": 100}
    loaded = load(dummy_source(family, **values))
    for name, parameter in loaded.model.named_parameters():
        if name.endswith("c_fc.weight"):
            parameter.mul_(16)  # what gelu gets is then of order one, where the two differ in every sixth number
    runner = runner_of(loaded, torch.float32)
    skip_where_alike(lambda x: left_out(x, **options), torch.float32)
    assert not runner.is_row_invariant


def skip_where_alike(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)).add(0.1).to(dtype)
    if torch.equal(function(x), torch.cat([function(number.clone()) for number in x.split(1)])):
        pytest.skip("this CPU's torch computes numbers that fill no vector as it does others")


@needs_panels
@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_number_of_each_row_is_looked_at_in_as_many_rows_as_fill_vectors(
    is_left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One root of a mean a row, in bfloat16: in a few rows all of them are computed by the same code."""
    model = load(dummy_source("olmo2", max_position_embeddings=1024), dtype=torch.bfloat16).model

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5)

    for module in model.modules():
        if type(module).__name__ == "Olmo2RMSNorm":
            module.forward = partial(norm, module)
    if is_left_out:
        monkeypatch.setitem(transformers_functions._WAYS, torch.Tensor.__pow__, torch.Tensor.__pow__)
        monkeypatch.setitem(transformers_functions._WAYS, torch.Tensor.pow, torch.Tensor.pow)
        skip_where_alike(lambda x: x**-0.5, torch.bfloat16)
    runner = ModelRunner(model, block_size=16, device=CPU, dtype=torch.bfloat16, batch_invariant=True)
    assert runner.is_row_invariant == (not is_left_out)


def runner_of_model(model: Any) -> ModelRunner:
    return ModelRunner(model, block_size=16, device=CPU, dtype=torch.float32, batch_invariant=True)


# --- functions ------------------------------------------------------------------------------------------------------

OF_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "a power": lambda x: x.abs() ** 1.7,
    "a reciprocal of a root": lambda x: (x.abs() + 0.1) ** -0.5,
    "a power of a number": lambda x: 2.0**x,
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "silu by name": lambda x: F.silu(input=x),
    "sigmoid": lambda x: x.sigmoid(),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "tanh": lambda x: x.tanh(),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "log": lambda x: torch.log(x.abs()),
    "sin": lambda x: x.sin(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_function_of_numbers_gives_a_row_its_bits_alone_and_in_company(
    name: str, dtype: torch.dtype, num_threads: int
) -> None:
    function = OF_NUMBERS[name]
    for num_rows, width in ((9, 7), (5, 64), (3, 1030), (31, 2050)):
        x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)
        with RowFunctions():
            together = function(x)
            alone = torch.stack([function(row.clone()) for row in x])
            strided = function(torch.stack([x, -x], dim=-1)[..., 0])
        assert torch.equal(together, alone) and torch.equal(strided, together)
        torch.testing.assert_close(together, function(x))  # torch's own tolerances of these dtypes
        assert together.shape == x.shape and together.dtype == dtype


@given(data=st.data())
def test_products_give_each_row_its_bits_and_torchs_results(data: st.DataObject) -> None:
    num_rows, inputs, outputs = (data.draw(st.integers(1, most)) for most in (9, 40, 20))
    batch = data.draw(st.sampled_from([(), (2,), (3, 2)]))
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (
        torch.randn(*shape, generator=generator)
        for shape in ((*batch, num_rows, inputs), (outputs, inputs), (outputs,))
    )
    stacked = w.t().expand(*batch, inputs, outputs)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: F.linear(x, w, b),
        lambda x: F.linear(weight=w, bias=b, input=x),
        lambda x: torch.matmul(other=w.t(), input=x),
        lambda x: torch.matmul(x, w.t(), out=torch.empty(0)),
        lambda x: F.linear(x, w),
        lambda x: x @ w.t(),
        lambda x: torch.matmul(x, stacked),
    ]
    if len(batch) == 0:
        products.append(lambda x: torch.addmm(b, x, w.t()))
        products.append(lambda x: torch.addmm(b * torch.nan, mat2=w.t(), mat1=x, beta=0, alpha=0.5))
        products.append(lambda x: torch.mm(x, mat2=w.t()))
    if len(batch) == 1:
        products += [lambda x: torch.bmm(x, stacked), lambda x: torch.baddbmm(b, x, stacked)]
    for product in products:
        with RowFunctions():
            together = product(x)
            alone = torch.cat([product(row.clone()) for row in x.split(1, dim=-2)], dim=-2)
        assert torch.equal(together, alone)
        torch.testing.assert_close(together, product(x))


def test_in_place_is_in_place() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected, given = F.silu(x), x.clone()
    with RowFunctions():
        assert F.silu(given, inplace=True) is given
    torch.testing.assert_close(given, expected)


def test_no_rows_give_no_rows() -> None:
    x, w = torch.zeros(0, 8), torch.zeros(5, 8)
    with RowFunctions():
        assert F.linear(x, w).shape == (x @ w.t()).shape == (0, 5) and F.silu(x).shape == (0, 8)


def test_only_modules_that_call_such_functions_are_slowed_down() -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x)

    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = Norm(), Gate()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gate(self.norm(x))

    num_threads = torch.get_num_threads()
    layer, x = Layer(), torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    keep_rows_in(layer, lambda: layer(x))
    assert [name for name, module in layer.named_modules() if "forward" in vars(module)] == ["gate"]
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))
    assert torch.get_num_threads() == num_threads


def test_modules_that_the_pass_did_not_come_by_are_known_by_their_kind() -> None:
    """Of experts only those chosen run."""

    class Expert(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(x)

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
            out: torch.Tensor = self.experts[chosen](x)
            return out

    routed, x = Routed(), torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    keep_rows_in(routed, lambda: routed(x, 1))
    assert ["forward" in vars(expert) for expert in routed.experts] == [True] * 3
    for chosen in range(3):
        assert torch.equal(routed(x, chosen), torch.cat([routed(row, chosen) for row in x.split(1)]))


# --- modules --------------------------------------------------------------------------------------------------------


def test_a_layer_that_is_held_in_several_places_is_taken_once_and_everywhere() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(layer))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected, packed = model(x), []

    def change(weight: Any) -> Any:
        packed.append(weight)
        return pack(weight)

    take_products(model, change)
    own = model[0]
    assert isinstance(own, OwnLinear) and own is model[2] is model[3][0] and len(packed) == 1
    assert (own.in_features, own.out_features) == (8, 8) and own.bias is layer.bias
    torch.testing.assert_close(model(x), expected)


@needs_panels
def test_experts_of_older_releases_have_no_norm_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_model("olmoe")
    runner = runner_of(loaded, torch.float32)
    for module in loaded.model.modules():
        if isinstance(module, OwnExperts) and hasattr(module._experts, "has_post_expert_norm"):
            monkeypatch.delattr(module._experts, "has_post_expert_norm")
    assert runner.is_row_invariant
    sequences = random_sequences(VOCAB_SIZE, ((17, 5), (40, 4), (17, 4)))
    assert torch.equal(engine_logits(loaded, sequences), engine_logits(loaded_model("olmoe"), sequences))
