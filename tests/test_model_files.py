"""What comes beside a model's weights is read, or refused in one message that names the file or the option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.config import ModelConfig
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel
from runner.model_files import find_eos_token_ids, load_tokenizer
from runner.tiny import TARGET_DIR
from runner.tokenizer import Tokenizer
from tests.transformers_reference import load

SOURCE = ModelSource(model=str(TARGET_DIR))


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load(SOURCE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the target without its weights, to be broken."""
    return Path(shutil.copytree(TARGET_DIR, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")))


def ends(directory: Path, target: LoadedModel) -> tuple[int, ...]:
    return find_eos_token_ids(ModelSource(model=str(directory)), target, Tokenizer(None))


@pytest.mark.parametrize(
    ("stated", "token_ids"), [(5, (5,)), ([5, 7], (5, 7)), ([5, -1, 10**6], (5,)), ([], ()), (None, (0,))]
)
def test_ends_are_those_of_the_generation_config_that_the_model_can_say(
    stated: object, token_ids: tuple[int, ...], directory: Path, target: LoadedModel
) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert ends(directory, target) == token_ids


@pytest.mark.parametrize("content", ["[]", "{bad", "[" * 100_000, "\xff"])
def test_a_broken_generation_config_is_named(content: str, directory: Path, target: LoadedModel) -> None:
    """It was a traceback, as what follows here."""
    file = directory / "generation_config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        ends(directory, target)
    assert str(caught.value).startswith(f"model.model: {file} must hold a JSON object (")
    assert str(caught.value).endswith("); download it again")


@pytest.mark.parametrize("stated", ["x", [1.5, None], [[1]], True, {"a": 1}])
def test_ends_that_are_no_token_ids_are_refused(stated: object, directory: Path, target: LoadedModel) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    with pytest.raises(UserError, match=r"its eos_token_id must be a token id or a list of them, got .*; mend its gen"):
        ends(directory, target)


BROKEN = [
    ("tokenizer.json", '{"version": 5, "added_tokens": []}'),  # an error of no kind of its own
    *((name, text) for name in ("tokenizer.json", "tokenizer_config.json") for text in ("[1]", "{", "[" * 100_000)),
    ("special_tokens_map.json", "[1]"),
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_a_broken_tokenizer_is_refused_with_the_option_to_set(name: str, content: str, directory: Path) -> None:
    (directory / name).write_text(content)
    with pytest.raises(UserError) as caught:
        Tokenizer(directory)
    message = str(caught.value)
    assert message.startswith(f"model.tokenizer: no tokenizer can be read from {directory} (") and "\n" not in message
    assert message.endswith("); set model.tokenizer=<directory or hub id>")


@pytest.mark.parametrize("is_trusted", [True, False])
def test_code_of_a_tokenizer_is_downloaded_where_it_is_trusted(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of model.tokenizer was left on the hub, and then looked for in vain."""
    patterns = list[str]()

    def snapshot_download(model: str, *, allow_patterns: list[str], **options: object) -> str:
        patterns.extend(allow_patterns)
        return str(TARGET_DIR)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = ModelConfig(model=str(TARGET_DIR), tokenizer="a/b", trust_remote_code=is_trusted)
    assert load_tokenizer(model, SOURCE).is_available
    assert ("*.py" in patterns) == is_trusted and "*.safetensors" not in patterns


def test_chat_templates_of_which_none_is_meant_for_all_are_a_users_error(directory: Path) -> None:
    """transformers raises a ValueError over names of which none is `default`."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": {"a": "{{ messages }}"}}))
    with pytest.raises(UserError, match=r"chat messages must be such as .*chat template.*; mend them, or"):
        Tokenizer(directory).encode([{"role": "user", "content": "Hello"}])
