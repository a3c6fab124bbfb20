"""An MLP and experts beside each other, as Gemma 4 26B-A4B's layers have them, beside transformers' own layer.

What stands behind the attention is compared where the layer's last norm reads it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.cpu.panels import can_pack, pack, unpack
from kernels.quantized_weight import QuantizedWeight, quantize
from runner.engine import launch_shapes, start_check
from runner.engine.architecture import Architecture, read_architecture
from runner.engine.asked_products import asked_products
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.decoder_weights import fill_from_checkpoint, fill_randomly
from runner.engine.errors import UserError
from runner.engine.expert_shapes import read_expert_shapes
from runner.engine.families import FAMILIES
from runner.engine.layers import DecoderLayer
from runner.engine.mlp_beside_experts import MLPBesideExperts
from runner.engine.shard import Shard
from runner.ranks.ranks import Ranks
from tests.conftest import Engines
from tests.product_bits import weights_asked_of_a_gpu
from tests.rank_threads import in_ranks
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64, random_model

HIDDEN, NUM_EXPERTS, CHOICES = 64, 6, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": NUM_EXPERTS,
    "top_k_experts": CHOICES,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"],
}
NUM_ROWS = 32
MARGIN = 0.02  # of probability between the experts that a row goes to and others: more than any rounding


def gemma4(**options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("gemma4_text", **{**SHAPE, **MIXTURE, **options})


def architecture() -> Architecture:
    arch = read_architecture(gemma4())
    assert arch is not None
    return arch


def decoder_of(arch: Architecture, dtype: torch.dtype = torch.float32, shard: Shard | None = None) -> Decoder:
    return Decoder(arch, gemma4(), max_model_len=64, dtype=dtype, shard=shard)


class NoAttention(torch.nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class TheirLayer:
    """transformers' layer behind its attention, in float32."""

    def __init__(self) -> None:
        self.model = random_model(gemma4())
        self.layer = self.model.model.layers[0]
        self.layer.router.proj.weight.data.mul_(8.0)  # rows differ in whom they go to
        self.layer.router.per_expert_scale.data.copy_(torch.randn(NUM_EXPERTS))
        self.layer.self_attn = NoAttention()

    def save(self, directory: Path) -> ModelSource:
        """Beside what a model has that is not of this layer's second half."""
        own = {f"model.layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        tensors = random_model(gemma4()).state_dict() | own
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if name != "lm_head.weight"}
        save_file(tensors, directory / "model.safetensors")
        return ModelSource(model=str(directory))

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """What its last norm reads, [num_rows, hidden]; in the dtype of the rows."""
        layer = in_float64(self.model).model.layers[0].to(rows.dtype)
        found: list[Tensor] = []
        layer.post_feedforward_layernorm.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        with KeepFloat64():
            layer(rows.unsqueeze(0))
        return found[0].squeeze(0)

    @torch.inference_mode()
    def rows(self, dtype: torch.dtype) -> Tensor:
        """[NUM_ROWS, hidden], of which none goes elsewhere for a rounding."""
        drawn = torch.randn(16 * NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
        ordered = self.layer.router(drawn.float())[0].sort(dim=1, descending=True).values
        kept = drawn[ordered[:, CHOICES - 1] - ordered[:, CHOICES] > MARGIN]
        assert len(kept) >= NUM_ROWS
        return kept[:NUM_ROWS]


@pytest.fixture(scope="module")
def theirs() -> TheirLayer:
    return TheirLayer()


@pytest.fixture(scope="module")
def source(theirs: TheirLayer, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return theirs.save(tmp_path_factory.mktemp("beside"))


def loaded(source: ModelSource, dtype: torch.dtype, shard: Shard | None = None) -> Decoder:
    arch = architecture()
    decoder = decoder_of(arch, dtype, shard)
    fill_from_checkpoint(decoder, arch, gemma4(), source, shard or Shard())
    return decoder


@torch.inference_mode()
def behind_attention(layer: DecoderLayer, rows: Tensor, tile: int | None) -> Tensor:
    """What the layer makes of rows of the residual stream that its attention adds nothing to."""
    layer.mixer = lambda normed, *_: torch.zeros_like(normed)  # type: ignore[assignment]
    batch: Any = SimpleNamespace(linear_tile=tile)
    found, residual = layer.after_input_norm(rows, rows, None, batch, None)  # type: ignore[arg-type]
    assert torch.equal(residual, rows) and isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("held", ["dense", "panels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_that_of_transformers(
    theirs: TheirLayer, source: ModelSource, dtype: torch.dtype, held: str
) -> None:
    decoder = loaded(source, dtype)
    if held == "panels":
        if not can_pack(torch.zeros(16, 16)):
            pytest.skip("this CPU has no products from panels")
        decoder.convert(pack)
    rows = theirs.rows(dtype)
    found = behind_attention(decoder.layers[0], rows, 1 if held == "panels" else None)
    assert_as_accurate(found, theirs(rows), theirs(rows.double()))


def test_the_layer_leaves_the_residual_stream_to_what_norms_it_itself(theirs: TheirLayer, source: ModelSource) -> None:
    layer = loaded(source, torch.float32).layers[0]
    assert isinstance(layer.mlp, MLPBesideExperts) and layer.before_mlp is None and layer.experts is layer.mlp.experts
    names = {name for name in theirs.layer.state_dict() if not name.startswith("experts.")}
    found = {name for name in layer.weight_targets("") if not name.startswith(("self_attn.", "experts."))}
    assert found == names
    scale = theirs.layer.router.scale.detach() * HIDDEN**-0.5
    assert torch.equal(layer.mlp.before_router.weight, scale)


def test_kernels_compute_the_same(theirs: TheirLayer, source: ModelSource, interpreted: Engines) -> None:
    rows = theirs.rows(torch.float32)
    layer = loaded(source, torch.float32).layers[0]
    assert_as_accurate(behind_attention(layer, rows, 1), theirs(rows), theirs(rows.double()))


def test_ranks_add_up_their_parts_before_these_are_normed(theirs: TheirLayer, source: ModelSource) -> None:
    rows = theirs.rows(torch.float32)

    def run(ranks: Ranks) -> Tensor:
        layer = loaded(source, torch.float32, ranks.shard).layers[0]
        assert layer.experts is not None and layer.experts.down_projs[0].shape == (HIDDEN, 16)
        return behind_attention(layer, rows, None)

    first, second = in_ranks(2, run)
    assert torch.equal(first, second)
    assert_as_accurate(first, theirs(rows), theirs(rows.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_keep_their_bits(theirs: TheirLayer, source: ModelSource, dtype: torch.dtype) -> None:
    """In shapes in which the start, too, finds that they do."""
    decoder = loaded(source, dtype)
    if can_pack(torch.zeros(16, 16)):
        decoder.convert(pack)
    shapes = start_check.row_invariant_shapes(
        launch_shapes.decoder_shapes(decoder.attentions, batch_invariant=True, max_model_len=64),
        decoder.sample_layers,
        decoder.beside_layers,
        max_model_len=64,
        block_size=16,
        kv_dtype=dtype,
        shard=Shard(),
    )
    assert shapes is not None
    tile, rows = shapes["decode"].linear, theirs.rows(dtype)
    assert tile is not None
    together = behind_attention(decoder.layers[0], rows, tile)
    for own in (slice(tile), slice(2 * tile, 5 * tile)):
        assert torch.equal(behind_attention(decoder.layers[0], rows[own], tile), together[own])


def test_the_start_asks_a_gpu_for_every_product(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded(source, torch.float32)
    asked = weights_asked_of_a_gpu(monkeypatch, decoder.sample_layers, decoder.beside_layers)
    (layer,) = decoder.layers
    assert layer.experts is not None and len(layer.product_weights) == 2 + 4
    assert asked == sorted(map(id, [decoder.lm_head, layer.experts.router, *layer.product_weights]))


def test_what_is_asked_is_computed_as_launches_compute_it(source: ModelSource) -> None:
    for asked in asked_products(loaded(source, torch.float32).sample_layers, None):
        rows = torch.randn(4, asked.weights[0].shape[1])
        assert asked.compute(rows).isfinite().all()


def test_quantized_are_the_products_of_both_and_the_router_stays_dense(theirs: TheirLayer, source: ModelSource) -> None:
    layer = loaded(source, torch.float32).layers[0]
    names = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    names += [f"experts.{at}.{part}_proj" for at in range(NUM_EXPERTS) for part in ("gate", "up", "down")]
    assert [name for name in layer.product_names if not name.startswith("self_attn.")] == names
    whole = 3 * HIDDEN * (96 + CHOICES * 32) + NUM_EXPERTS * HIDDEN
    assert layer.mlp.products_per_row == whole
    rows = theirs.rows(torch.float32)
    exact = behind_attention(layer, rows, None)
    layer.mlp.convert(lambda weight: quantize(unpack(weight), "int8"))
    assert isinstance(layer.mlp, MLPBesideExperts) and isinstance(layer.mlp.experts.router, Tensor)
    assert all(isinstance(weight, QuantizedWeight) for weight in layer.mlp.product_weights)
    error = (behind_attention(layer, rows, None) - exact).norm() / exact.norm()
    assert 0.0 < error < 0.03


def test_of_random_weights_scales_are_ones_as_norms_are() -> None:
    """A router then sends rows to unlike experts, whose results count alike."""
    decoder = decoder_of(architecture())
    fill_randomly(decoder)
    block = decoder.layers[0].mlp
    assert isinstance(block, MLPBesideExperts)
    for scales in (block.experts.factors, block.before_router.weight, block.after_experts.weight):
        assert scales is not None and torch.equal(scales, torch.ones_like(scales))


def test_a_config_says_whether_there_are_experts() -> None:
    assert read_expert_shapes(gemma4(enable_moe_block=False), FAMILIES["gemma4_text"].experts) is None
    shapes = read_expert_shapes(gemma4(), FAMILIES["gemma4_text"].experts)
    assert shapes is not None and shapes.in_layers == (True,) and shapes.shared_size == 0
    assert (shapes.num_experts, shapes.rule.choices, shapes.intermediate_size) == (NUM_EXPERTS, CHOICES, 32)
    with pytest.raises(UserError, match=r"top_k_experts of a gemma4_text checkpoint must lie in \[1, 6\], .* got 7"):
        read_expert_shapes(gemma4(top_k_experts=7), FAMILIES["gemma4_text"].experts)
    with pytest.raises(UserError, match="num_experts of a gemma4_text checkpoint must be given, got null"):
        read_expert_shapes(gemma4(num_experts=None), FAMILIES["gemma4_text"].experts)
