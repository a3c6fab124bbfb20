"""A checkpoint is loaded whole or refused: each way to be wrong is one message with name, rule, value and remedy."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.panels import multiplies_and_adds
from runner.engine import memory
from runner.engine.checkpoint import ModelSource, checkpoint_files, load_config, resolve_directory
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.rope import ONE_ROPE, HeadLayout, num_positions, rope_tables
from runner.engine.transformers_model import TransformersModel
from runner.llm import LLM
from tests.edit_json import edit_json
from tests.edit_tensors import edit_tensors
from tests.transformers_reference import CPU, load, random_model, save, save_tokenizer

GIB = 2**30
VOCAB_SIZE = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
BOTH_PATHS = pytest.mark.parametrize("model_type", ["llama", "bitnet"])  # our decoder, and transformers' own code


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories with a small checkpoint, written once; do not change them."""
    from transformers import AutoConfig

    written: dict[str, Path] = {}

    def write(model_type: str, *, max_shard_size: str = "1GB", **options: Any) -> Path:
        key = json.dumps([model_type, max_shard_size, options])
        if key not in written:
            written[key] = tmp_path_factory.mktemp(model_type)
            model = random_model(AutoConfig.for_model(model_type, **{**SHAPE, **options}))
            save(model, written[key], max_shard_size=max_shard_size)
            save_tokenizer(written[key], VOCAB_SIZE)
        return written[key]

    return write


@pytest.fixture
def checkpoint(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of such a directory, to be broken."""

    def copy(model_type: str, **options: Any) -> Path:
        return Path(shutil.copytree(saved(model_type, **options), tmp_path / "checkpoint"))

    return copy


def refusal(source: ModelSource | Path, **options: Any) -> str:
    """The message a model is refused with."""
    with pytest.raises(UserError) as caught:
        load(source if isinstance(source, ModelSource) else ModelSource(model=str(source)), **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("model.") and ";" in message, message
    return message


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "model"
    message = refusal(path)
    assert message.startswith("model.model must be a directory in Hugging Face layout or a hub id, got ")
    assert str(path) in message and message.endswith("check the path")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "where there is no directory; check the path" in refusal(file)


@pytest.mark.parametrize("name", ["somebody/some-model", "some-model", "not an id!"])
def test_a_hub_id_that_cannot_be_downloaded_names_the_ways_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(ModelSource(model=name))
    assert message.startswith(f"model.model={name}: cannot be downloaded from the hub (")
    for way_out in ("HF_TOKEN", "model=hf model.model=<directory>", "model.load_format=dummy"):
        assert way_out in message


def test_a_download_takes_safetensors_and_no_pickle_and_code_only_when_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        asked.append({"model": model, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_directory(ModelSource(model="a/b", revision="main")) == tmp_path
    resolve_directory(ModelSource(model="a/b", trust_remote_code=True), weights=False)
    assert asked[0]["revision"] == "main" and "*.safetensors" in asked[0]["allow_patterns"]
    assert not {"*", "*.bin", "*.pt", "*.py"} & set(asked[0]["allow_patterns"])
    assert "*.py" in asked[1]["allow_patterns"] and "*.safetensors" not in asked[1]["allow_patterns"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"model_type": "llama",', "not a valid JSON file"),
        ("", "not a valid JSON file"),
        ("[" * 100_000, "recursion"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "hidden_size": "big"}', "expected int, got str (value: 'big')"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}', "not a multiple"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "division"),
    ],
)
def test_a_bad_config_is_named_with_the_reason(config: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    message = refusal(tmp_path)
    assert message.startswith(f"model.model: {tmp_path / 'config.json'} cannot be read: ") and reason in message
    assert message.endswith("mend it or download the checkpoint again")


def test_a_number_of_any_size_may_stand_where_nothing_reads_it(checkpoint: Callable[..., Path]) -> None:
    """As what tokenizers write of texts without a bound."""
    file = checkpoint("llama") / "config.json"
    edit_json(file, model_max_length=int(1e30))
    assert isinstance(load(ModelSource(model=str(file.parent))).model, Decoder)


CODE_OF_ITS_OWN = '{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MyConfig"}}'


@pytest.mark.parametrize(
    ("config", "is_trusted", "python", "rule", "remedy"),
    [
        (CODE_OF_ITS_OWN, False, "", "none is run unasked", "to run it set model.trust_remote_code=true"),
        (CODE_OF_ITS_OWN, True, "", "a file named configuration_mine.py", "install what they import"),
        (CODE_OF_ITS_OWN, True, "import no_such_package", "no_such_package", "install what they import"),
        ('{"model_type": "llamma"}', False, "", "has model_type 'llamma'", "pip install -U transformers)"),
    ],
)
def test_a_family_that_transformers_does_not_know_gets_its_own_remedy(
    config: str, is_trusted: bool, python: str, rule: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was to be mended by another download."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])  # the cache is put there
    (tmp_path / "config.json").write_text(config)
    if python:
        (tmp_path / "configuration_mine.py").write_text(python)
    message = refusal(ModelSource(model=str(tmp_path), trust_remote_code=is_trusted))
    assert message.startswith(f"model.model: {tmp_path / 'config.json'} ") and "download" not in message
    assert rule in message and message.endswith(remedy)


@pytest.mark.parametrize(
    ("family", "key", "is_so"), [("gemma2", "use_bidirectional_attention", True), ("qwen2", "is_causal", False)]
)
def test_an_option_that_our_decoder_lacks_is_named_with_its_directory(
    family: str, key: str, is_so: bool, tmp_path: Path
) -> None:
    """With a target and a draft nobody knew whose it was.

    Bug told here: is_causal was not read, by which transformers makes an encoder of any decoder.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SHAPE, key: is_so}))
    with pytest.raises(UserError) as caught:
        load(ModelSource(model=str(tmp_path)))
    assert f"{key} of a {family} checkpoint ({tmp_path}) must be {str(not is_so).lower()}" in str(caught.value)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    assert "must hold a config.json, got" in refusal(tmp_path)


def test_an_architecture_for_dummy_weights_is_checked_under_its_own_name() -> None:
    assert refusal(dummy_source(hidden_size="big")).startswith(
        "model.hf_config must be a config that transformers reads"
    )
    assert "must have a model_type" in refusal(ModelSource(model="x", load_format="dummy", hf_config={"vocab_size": 8}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers of a llama checkpoint must be >= 1, got -1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers of a llama checkpoint must be <= 4096, got 1000000"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"divisible by num_key_value_heads \(3\), got 4"),
    ],
)
def test_a_shape_our_decoder_cannot_have_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(dummy_source(**option))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [
        ("llama", None, 64),
        ("qwen3", YARN, 128),  # Qwen3's 40960 positions become 131072 so
        ("llama", {**YARN, "original_max_position_embeddings": 16}, 64),  # they state the extended length already
        ("llama", LINEAR, 128),
        ("llama", {**LINEAR, "rope_type": "dynamic"}, 64),  # behind them its frequencies change with the length at hand
        ("gemma3_text", {"sliding_attention": {**LINEAR, "rope_type": "default"}, "full_attention": LINEAR}, 64),
    ],
)
def test_max_model_len_ends_where_the_rotations_do(family: str, rope: dict[str, Any] | None, limit: int) -> None:
    source = dummy_source(family, **({} if rope is None else {"rope_parameters": rope}))
    extended = " as its rope extends them" if limit > 64 else ""
    rule = f"must be <= {limit}, the max_position_embeddings of a-model{extended}, got {limit + 1}"
    assert refusal(source, max_model_len=limit + 1) == f"model.max_model_len {rule}; lower it or leave it out"
    assert num_positions(load_config(source)) == limit


LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("rope", "wrong"),
    [
        (YARN, {"factor": "x"}),
        (YARN, {"factor": float("nan")}),
        (YARN, {"attention_factor": []}),
        (LINEAR, {"factor": "x"}),
        (LINEAR, {"factor": None}),
        (LLAMA3, {"factor": [1]}),
        (LONGROPE, {"factor": 2.0, "short_factor": [1.0] * 3}),
        (LINEAR, {"rope_theta": 10**400}),
    ],
)
def test_rotations_that_cannot_be_computed_are_one_message(rope: dict[str, Any], wrong: dict[str, Any]) -> None:
    """transformers takes a config with anything in them, and stumbles in the first pass."""
    config = load_config(dummy_source(rope_parameters={**rope, **wrong}))
    with pytest.raises(UserError) as caught:
        num_positions(config)
        rope_tables(config, ONE_ROPE, HeadLayout(head_dim=16, num_rotated=16, is_interleaved=False), 64)
    message = str(caught.value)
    assert message.startswith("rope_parameters of a llama checkpoint") and message.endswith("); mend its config")
    assert "must be numbers that rotations can be computed by, got {" in message and "\n" not in message
    assert len(message) < 500


def test_a_key_of_yarn_that_transformers_does_not_read_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    load(dummy_source(rope_parameters={**YARN, "attn_factor": 0.8}))
    (note,) = [record.getMessage() for record in caplog.records if record.name == "runner.engine.rope"]
    assert note.startswith("model.model=a-model: attn_factor=0.8 in its rope parameters is not read")


@BOTH_PATHS
@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named_as_corrupt(model_type: str, keep: int, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(directory)
    assert message.startswith(f"model.model: {file} is corrupt (") and message.endswith("; download it again")


@BOTH_PATHS
def test_a_missing_tensor_is_named(model_type: str, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type)
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    message = refusal(directory)
    assert f"the tensors do not match its config ({model_type}, 2 layers)" in message
    assert "missing: model.layers.1.self_attn.k_proj.weight; download the checkpoint again" in message


@BOTH_PATHS
def test_an_unexpected_tensor_is_named(model_type: str, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type)
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    assert "unexpected: model.layers.0.extra.weight;" in refusal(directory)


def test_missing_and_unexpected_tensors_are_named_together_and_counted(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    edit_json(directory / "config.json", num_hidden_layers=1, tie_word_embeddings=False, attention_bias=True)
    message = refusal(directory)
    assert "unexpected: model.layers.1." in message and "and 5 more; missing: model.layers.0." in message


@BOTH_PATHS
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_tensor_with_a_number_that_is_none_is_named(
    model_type: str, number: float, checkpoint: Callable[..., Path]
) -> None:
    """Every text came out, and all of them the same; the CPU was blamed for rows that differ from themselves."""
    directory = checkpoint(model_type)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(directory, lambda tensors: tensors[name][3, 5:6].fill_(number))
    assert f"{name} must hold finite numbers in float32, but some are NaN or infinite" in refusal(directory)


@BOTH_PATHS
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_weight_of_other_numbers_is_named(
    dtype: torch.dtype, model_type: str, checkpoint: Callable[..., Path]
) -> None:
    """They were taken for the weights, without what follows the point."""
    directory = checkpoint(model_type)
    name = "model.layers.1.input_layernorm.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"{name} must hold weights, got " in refusal(directory)


@BOTH_PATHS
def test_a_tensor_of_another_shape_is_named(model_type: str, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(8, 32)}))
    message = refusal(directory)
    assert name in message
    if model_type == "llama":
        assert "must have shape [16, 32] by its config.json, got [8, 32]" in message


def test_experts_that_do_not_fit_together_are_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("olmoe", num_experts=2, num_experts_per_tok=1, hidden_act="gelu")
    edit_tensors(directory, drop_one_expert)
    assert "of another shape: model.layers.0.mlp.experts.down_proj; download the checkpoint again" in refusal(directory)


def test_an_expert_without_all_of_its_weights_is_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("mixtral", num_local_experts=2, num_experts_per_tok=1)
    edit_tensors(directory, drop_one_expert)
    assert "missing: model.layers.0.block_sparse_moe.experts.0.w1.weight; download the" in refusal(directory)


def drop_one_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(name for name in tensors if "experts" in name)]


@BOTH_PATHS
def test_pickled_weights_are_not_loaded(model_type: str, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type)
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")
    message = refusal(directory)
    assert f"{directory} holds no *.safetensors file" in message and "(pickled weights are not loaded)" in message


@BOTH_PATHS
def test_a_missing_shard_is_named(model_type: str, checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(model_type, max_shard_size="10KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{directory} has no file {shard.name}; download the checkpoint again" in refusal(directory)


@BOTH_PATHS
@pytest.mark.parametrize("what", ["a link to nothing", "a directory"])
def test_a_name_of_weights_with_no_file_behind_it_is_named(
    what: str, model_type: str, checkpoint: Callable[..., Path]
) -> None:
    """An interrupted download leaves links to nothing: each was a traceback."""
    file = checkpoint(model_type) / "model.safetensors"
    file.unlink()
    if what == "a directory":
        file.mkdir()
    else:
        file.symlink_to("nowhere")
    assert f"{file.parent} has no file {file.name}; download the checkpoint again" in refusal(file.parent)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ('{"weight_map": ', "must hold a JSON object (Expecting value: line 1"),
        ("[1]", "must hold a JSON object (it holds a list)"),
        ("[" * 100_000, "must hold a JSON object (it is nested too deep)"),
        ("{}", "must name the file of every tensor, got None"),
        (f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}', f"has no file {'x' * 100}; download the checkpoint again"),
        ('{"weight_map": {"a": 5}}', "must name the file of every tensor, got {'a': 5}"),
    ],
)
def test_a_broken_index_is_named(index: str, reason: str, checkpoint: Callable[..., Path]) -> None:
    file = checkpoint("llama", max_shard_size="10KB") / "model.safetensors.index.json"
    file.write_text(index)
    message = refusal(file.parent)
    assert message.startswith(f"model.model: {file.parent}") and reason in message and message.endswith(" again")


def test_the_makers_own_copy_beside_the_checkpoint_is_not_read(checkpoint: Callable[..., Path]) -> None:
    """Mistral's repositories hold the same weights twice, the second time as consolidated.safetensors."""
    directory = checkpoint("llama")
    (directory / "consolidated.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert checkpoint_files(ModelSource(model=str(directory))) == [directory / "model.safetensors"]


def test_a_tied_head_may_be_stored_or_left_out(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", tie_word_embeddings=True)
    source = ModelSource(model=str(directory))
    edit_tensors(directory, lambda tensors: tensors.pop("lm_head.weight", None))
    without = dict(load(source).model.named_parameters())
    edit_tensors(
        directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    for name, parameter in load(source).model.named_parameters():
        assert torch.equal(parameter, without[name])


@BOTH_PATHS
def test_a_head_that_is_no_copy_of_the_embedding_is_not_tied_to_it(
    model_type: str, checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers reads it. Bug told here: our decoder took the embedding, whatever the checkpoint's head was."""
    directory = checkpoint(model_type, tie_word_embeddings=True)
    edit_tensors(
        directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)})
    )
    with caplog.at_level(logging.WARNING):
        model = load(ModelSource(model=str(directory))).model
    assert torch.equal(model.whole_head(), model.embed_tokens.flip(0))
    own = [record.message for record in caplog.records if record.name.startswith("runner")]
    assert any("lm_head.weight is no copy of its embedding" in message for message in own) == (model_type == "llama")


def test_a_draft_with_another_vocabulary_is_refused(saved: Callable[..., Path]) -> None:
    target, draft = saved("llama"), saved("llama", vocab_size=48)
    method = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    with pytest.raises(UserError) as caught:
        LLM(str(target), speculative_config=method, device="cpu")
    message = str(caught.value)
    assert message.startswith(
        f"speculative_config.model={draft} must have the target's vocabulary (64 entries), got 48;"
    )
    assert message.endswith("the same family as the target, or set speculative_config.use_heterogeneous_vocab=True")


def test_a_missing_draft_is_refused_under_its_own_name(saved: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^speculative_config\.model must be a directory"):
        LLM(
            str(saved("llama")),
            speculative_config={"method": "draft_model", "model": str(tmp_path / "no"), "num_speculative_tokens": 4},
            device="cpu",
        )


@BOTH_PATHS
def test_a_model_that_does_not_fit_names_what_is_needed_and_available(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: GIB // 2)
    source = dummy_source(model_type, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    message = refusal(source)
    assert message.startswith("model.model=a-model needs ") and "MiB on cpu" in message
    needed = float(message.split(" needs ")[1].split(" MiB")[0])
    bytes_a_layer = 4 * (2 * 1024 * 1024 + 2 * 512 * 1024 + 3 * 1024 * 4096)
    assert needed == pytest.approx(12 * bytes_a_layer / (1 << 20), rel=0.08)
    assert memory.as_size(GIB) == "1.0 GiB" and memory.as_size(GIB - (1 << 20)) == "1023.0 MiB"
    smaller = "model.quantization=fp8, " if model_type == "llama" and multiplies_and_adds() else ""
    assert f"available are 512.0 MiB; choose {smaller}a smaller model, hardware.dtype=bfloat16" in message
    monkeypatch.setattr(memory, "available_memory", lambda device: GIB // 8)
    assert "a smaller model, or a device with more memory" in refusal(source, dtype=torch.bfloat16)


def test_memory_of_a_container_counts_cached_files_as_free(tmp_path: Path) -> None:
    """A checkpoint read before stays in the page cache, which is charged to the container and given back on demand."""
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file 0\n")
    assert memory._cgroup_limit(tmp_path) == 6 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_limit(tmp_path) > 2**60


@BOTH_PATHS
def test_dummy_weights_are_the_same_in_every_run(model_type: str) -> None:
    torch.manual_seed(1)
    first = dict(load(dummy_source(model_type)).model.named_parameters())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = load(dummy_source(model_type)).model
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is not touched"
    assert first.keys() == dict(second.named_parameters()).keys()
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, first[name]) and parameter.isfinite().all(), name
    assert len({float(parameter.double().sum()) for parameter in first.values() if parameter.dim() > 1}) > 10


@BOTH_PATHS
def test_weights_take_the_dtype_asked_for_and_are_counted(model_type: str, saved: Callable[..., Path]) -> None:
    loaded = load(ModelSource(model=str(saved(model_type))), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert {parameter.device for parameter in loaded.model.parameters()} == {CPU}
    assert loaded.num_weight_bytes == 2 * sum(parameter.numel() for parameter in loaded.model.parameters())


def test_the_log_says_which_path_a_model_takes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="runner.engine.loader"):
        assert isinstance(load(dummy_source("llama")).model, Decoder)
        assert isinstance(load(dummy_source("bitnet")).model, TransformersModel)
    assert [record.message for record in caplog.records] == [
        "a-model: llama runs on our own decoder",
        "a-model: bitnet runs through transformers' own modelling code",
    ]


def dummy_source(model_type: str = "llama", **options: Any) -> ModelSource:
    config = {"model_type": model_type, **SHAPE, **options}
    return ModelSource(model="a-model", load_format="dummy", hf_config=config)
