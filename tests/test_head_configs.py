"""A head's config.json with something else where a number, names or a mapping should stand is refused in one message.

Which sizes and kinds each head takes is tested beside it; here are the mistakes that any file may have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proposers.base import Proposer
from runner.config import SpeculativeConfig
from runner.engine.errors import UserError
from runner.llm import LLM
from runner.proposer import build_proposer
from runner.tiny import DRAFT_DIR, DRAFTER_KEYS, HEAD_DIRS
from tests.test_laguna_dflash import HEAD as LAGUNA

Build = Callable[[str, dict[str, Any]], Proposer]
DIRECTORIES = {**HEAD_DIRS, "draft_model": DRAFT_DIR, "laguna": HEAD_DIRS["dflash"]}
LAYERS = "transformer_layer_config"  # of the speculators format
NOT_NAMES = (5, "LlamaForCausalLM", {"a": 1}, [5])
NOT_MAPPINGS = (5, "abc", ["x"], True)
NOT_SIZES = ("abc", [1], {"a": 1}, -1, 1.5, True)
NOT_FLAGS = ("false", 2, [True])
NOT_IDS = (5, "abc", ["x"], {"a": 1}, [1.5], True)
# (method, key, values that it cannot have); a key of what is within another stands behind a point.
MALFORMED: list[tuple[str, str, tuple[Any, ...]]] = [
    *((method, "architectures", NOT_NAMES) for method in ("eagle", "eagle3", "dflash", "dspark", "mlp_speculator")),
    *((method, "architectures", NOT_NAMES) for method in ("mtp", "medusa", "pard", "draft_model", "laguna")),
    *((method, LAYERS, (*NOT_MAPPINGS, None)) for method in ("eagle3", "dflash", "dspark", "mtp")),
    *((method, "dflash_config", NOT_MAPPINGS) for method in ("dflash", "dspark", "laguna")),
    ("eagle3", "eagle_config", NOT_MAPPINGS),
    *((method, "draft_vocab_size", NOT_SIZES) for method in ("eagle3", "dflash", "dspark")),
    *((method, "target_hidden_size", NOT_SIZES) for method in ("eagle3", "dflash", "dspark")),
    ("eagle3", "eagle_aux_hidden_state_layer_ids", NOT_IDS),
    ("eagle3", "aux_hidden_state_layer_ids", NOT_IDS),
    ("eagle3", "target_layer_ids", NOT_IDS),
    ("eagle3", "eagle_config.layer_ids", NOT_IDS),
    ("eagle3", "eagle_config.eagle_aux_hidden_state_layer_ids", NOT_IDS),
    ("dflash", "dflash_config.target_layer_ids", NOT_IDS),
    ("dspark", "aux_hidden_state_layer_ids", NOT_IDS),
    *((method, "head_dim", (-1, 0)) for method in ("eagle", "eagle3", "dflash", "pard", "draft_model")),
    *((method, f"{LAYERS}.head_dim", (-1, 0)) for method in ("mtp", "dspark")),
    *((method, "rope_theta", ({}, {"a": 1}, "abc", -1)) for method in ("eagle", "eagle3", "dflash")),
    *((method, f"{LAYERS}.rope_theta", ({}, "abc")) for method in ("mtp", "dspark")),
    ("draft_model", "rope_parameters.rope_theta", ({}, "abc")),
    ("draft_model", "vocab_size", (-1,)),
    ("draft_model", "max_position_embeddings", (-1,)),
    ("draft_model", "model_type", (5, [], ["x"], {"a": 1})),
    ("draft_model", "dtype", ("abc", [], ["x"])),
    ("eagle", "torch_dtype", ("abc",)),
    ("eagle3", "num_attention_heads", (-1,)),
    *(("dflash", f"dflash_config.{key}", NOT_FLAGS) for key in ("use_swa", "sample_from_anchor", "causal")),
    *(("dflash", key, NOT_FLAGS) for key in ("attention_sink_bias", "add_swa_attention_sink_bias", "has_lm_head")),
    *(("dspark", key, NOT_FLAGS) for key in ("dspark_bonus_anchor", "sliding_window_non_causal", "has_embed_tokens")),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Any:
    return LLM("tiny", num_gpu_blocks_override=40).engine


@pytest.fixture
def build(engine: Any, tmp_path: Path) -> Build:
    def with_config(method: str, values: dict[str, Any]) -> Proposer:
        directory = tmp_path / "head"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for file in DIRECTORIES[method].iterdir():
            (directory / file.name).symlink_to(file)
        (directory / "config.json").unlink()
        (directory / "config.json").write_text(json.dumps(values))
        own = {"method": "dflash" if method == "laguna" else method, "model": str(directory)}
        config = SpeculativeConfig.from_engine_args(
            "tiny", {"num_speculative_tokens": 2, **own}, num_gpu_blocks_override=40, **DRAFTER_KEYS
        )
        return build_proposer(config, engine.proposer.context, engine.tokenizer)

    return with_config


def config_of(method: str) -> dict[str, Any]:
    if method == "laguna":
        return dict(LAGUNA)
    values: dict[str, Any] = json.loads((DIRECTORIES[method] / "config.json").read_text())
    if method == "eagle3":  # a key that counts hides those behind it
        del values["eagle_aux_hidden_state_layer_ids"]
    return values


@pytest.mark.parametrize(("method", "key", "wrong"), MALFORMED, ids=[f"{method}-{key}" for method, key, _ in MALFORMED])
def test_a_malformed_value_is_one_message_that_names_its_key_and_the_head(
    build: Build, tmp_path: Path, method: str, key: str, wrong: tuple[Any, ...]
) -> None:
    """Each ended in a traceback from Python, torch or transformers."""
    outer, _, inner = key.rpartition(".")
    for value in wrong:
        values = config_of(method)
        values |= {outer: {**(values.get(outer) or {}), inner: value}} if outer else {inner: value}
        with pytest.raises(UserError) as caught:
            build(method, values)
        message = str(caught.value)
        assert "dtype" in key or inner in message, message  # transformers says what it did not find, not where
        assert str(tmp_path) in message and "config" in message and "\n" not in message and "; " in message


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_no_heads_at_all_are_one_message(build: Build, method: str) -> None:
    """transformers divides by their number."""
    with pytest.raises(UserError, match=r"its config\.json cannot be read as a llama config: .*; mend it"):
        build(method, {**config_of(method), "num_attention_heads": 0})


@pytest.mark.parametrize("size", [2**40, 2**62])
@pytest.mark.parametrize(
    ("method", "key"),
    [
        *((method, "intermediate_size") for method in ("eagle", "eagle3", "dflash", "pard")),
        ("dspark", "markov_rank"),
        ("mlp_speculator", "inner_dim"),
    ],
)
def test_sizes_that_no_memory_holds_are_one_message(
    build: Build, tmp_path: Path, method: str, key: str, size: int
) -> None:
    """Each ended in torch's traceback."""
    with pytest.raises(UserError) as caught:
        build(method, {**config_of(method), key: size})
    message = str(caught.value)
    assert message.startswith(f"method.model={tmp_path / 'head'}") and "\n" not in message and "; " in message
    assert "no weights of the sizes in its config.json can be made" in message or "GiB" in message


@pytest.mark.parametrize("method", ["eagle", "eagle3", "pard"])
def test_a_million_layers_are_one_message(build: Build, method: str) -> None:
    """They were built, one by one, until memory was full."""
    with pytest.raises(UserError, match=r"num_hidden_layers of a \w+ checkpoint .*must be <= 4096, got 1000000"):
        build(method, {**config_of(method), "num_hidden_layers": 10**6})


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
def test_null_sizes_are_the_targets(build: Build, method: str) -> None:
    """As published heads write them; that of EAGLE-3 here has a projection to less than the target's vocabulary."""
    nulls = {"target_hidden_size": None, "rope_scaling": None, "architectures": None}
    build(method, {**config_of(method), **nulls, **({} if method == "eagle3" else {"draft_vocab_size": None})})
