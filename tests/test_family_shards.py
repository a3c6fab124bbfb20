"""Models in parts: checkpoints of several files, and layers that are spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.reference.linear import linear
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear
from runner.engine.loader import load_model
from runner.engine.shard import Shard
from runner.ranks.ranks import Ranks
from tests.family_options import LENGTHS, VOCAB_SIZE
from tests.model_families import make_config
from tests.rank_threads import in_ranks
from tests.transformers_reference import (
    CPU,
    assert_as_accurate,
    engine_logits,
    float64_logits,
    load,
    random_model,
    random_sequences,
    reference_logits,
    save,
)


def test_a_sharded_checkpoint_loads_as_the_whole_one_does(tmp_path: Path) -> None:
    model = random_model(make_config("qwen3"))
    whole = load(save(model, tmp_path / "whole")).model
    sharded = load(save(model, tmp_path / "sharded", max_shard_size="40KB")).model
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for (name, ours), (_, theirs) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_column_shards_concatenate_to_the_whole_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator)
    weights = {"a": torch.randn(8, 6, generator=generator), "b": torch.randn(4, 6, generator=generator)}
    biases = {"a": torch.randn(8, generator=generator), "b": torch.randn(4, generator=generator)}
    outputs: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for rank in range(2):
        layer = ColumnParallelLinear(
            6, {"a": 8, "b": 4}, bias=True, shard=Shard(rank=rank, size=2), dtype=torch.float32
        )
        targets = layer.weight_targets("p.")
        assert set(targets) == {"p.a.weight", "p.a.bias", "p.b.weight", "p.b.bias"}
        for name in ("a", "b"):
            assert targets[f"p.{name}.weight"].shard_dim == targets[f"p.{name}.bias"].shard_dim == 0
            targets[f"p.{name}.weight"].view.copy_(weights[name].chunk(2)[rank])
            targets[f"p.{name}.bias"].view.copy_(biases[name].chunk(2)[rank])
        for name, part in zip(("a", "b"), layer(x, 4).split([4, 2], dim=1), strict=True):
            outputs[name].append(part)
    for name in ("a", "b"):
        torch.testing.assert_close(torch.cat(outputs[name], dim=1), linear(x, weights[name], biases[name], 4))


def test_row_shards_sum_to_the_whole_product_and_add_the_bias_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((4, 6), (8, 6), (8,)))

    def product(ranks: Ranks) -> torch.Tensor:
        shard = ranks.shard
        layer = RowParallelLinear(6, 8, "o", bias=True, shard=shard, dtype=torch.float32)
        targets = layer.weight_targets("p.")
        assert targets["p.o.weight"].shard_dim == 1 and targets["p.o.bias"].shard_dim is None
        targets["p.o.weight"].view.copy_(weight.chunk(2, dim=1)[shard.rank])
        targets["p.o.bias"].view.copy_(bias)
        return layer(x.chunk(2, dim=1)[shard.rank].contiguous(), 4)

    both = in_ranks(2, product)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], linear(x, weight, bias, 4))


@pytest.mark.parametrize(
    "variant",
    [
        "llama, attention bias",
        "llama, mlp bias",
        "phi3",
        "qwen3",
        "seed_oss",
        "gemma2",
        "glm4",
        "ernie4_5, biased, tied",
        "gpt_oss",
        "qwen3_5_text",
        "qwen3_next",
        "qwen3_5_moe_text",
        "deepseek_v3",
        "deepseek_v3, queries at once, values wider than keys",
        "bailing_hybrid",
        "kimi_linear",
        "olmo2",
        "olmo_hybrid, turned, heads share keys, written once, tied",
        "minimax_m2",
        "llama4_text",
        "nemotron_h",
        "nemotron_h, experts over a latent",
        "granitemoeshared",
        "granitemoehybrid, experts, heads in groups, biased",
        "hunyuan_v1_moe",
        "hy_v3",
        "afmoe",
        "laguna",
        "mistral4, texts longer than it was trained with first",
    ],
)
def test_two_ranks_compute_together_what_one_computes_alone(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    source = save(model, tmp_path)
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    whole = load(source)

    def compute(ranks: Ranks) -> torch.Tensor:
        own = load_model(source, device=CPU, dtype=torch.float32, max_model_len=None, shard=ranks.shard)
        parts = (
            1 if variant.startswith(("bailing", "deepseek", "kimi", "mistral4")) else 2
        )  # latents are whole in every rank
        assert [parts * width for width in own.model.kv_widths] == whole.model.kv_widths
        assert isinstance(own.model, Decoder) and own.model.lm_head.shape[0] == VOCAB_SIZE // 2
        assert torch.equal(own.model.whole_head(), whole.model.whole_head())
        return engine_logits(own, sequences)

    logits = in_ranks(2, compute)
    assert torch.equal(*logits)
    assert_as_accurate(logits[0], reference_logits(model, sequences), float64_logits(model, sequences))


def test_a_shard_must_divide_its_dimension() -> None:
    with pytest.raises(
        UserError, match=r"num_key_value_heads must be divisible by hardware.tensor_parallel_size \(4\), got 2"
    ):
        Shard(rank=0, size=4).split(2, "num_key_value_heads")
