"""A head that comes as a pickle is data: nothing in it runs, whether it is looked into or loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.tensor_names import tensor_names
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_tensors


class RunsCode:
    """Creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        return _write, (str(self.file), b"")


def _write(file: str, content: bytes) -> None:
    Path(file).write_bytes(content)


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def is_zip(request: pytest.FixtureRequest) -> bool:
    """What torch.save has written since 1.6, or what it wrote before."""
    return bool(request.param)


@pytest.fixture
def head(is_zip: bool, tmp_path: Path) -> Path:
    """A head's directory whose pickle leaves a file beside it when it is run."""
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    values = {"fc.weight": torch.zeros(2, 2), "layers.0.weight": RunsCode(tmp_path / "ran")}
    file = directory / "pytorch_model.bin"
    torch.save(values, file, _use_new_zipfile_serialization=is_zip)
    return directory


def test_the_pickle_of_this_test_is_harmful(head: Path) -> None:
    torch.load(head / "pytorch_model.bin", weights_only=False)
    assert (head.parent / "ran").exists()


def test_looking_into_a_pickle_runs_nothing(head: Path, is_zip: bool) -> None:
    expected = {"fc.weight", "layers.0.weight"} if is_zip else set[str]()
    assert tensor_names(head) & {"fc.weight", "layers.0.weight"} == expected
    assert not (head.parent / "ran").exists()


def test_loading_a_pickle_that_holds_more_than_tensors_is_refused_and_runs_nothing(head: Path) -> None:
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin is corrupt or holds more than tensors .*; download it again"
    ):
        read_head_tensors(ModelSource(model=str(head), name="method.model"))
    assert not (head.parent / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK", pickle.dumps({"fc.weight": 1}, protocol=2)])
def test_a_file_that_torch_did_not_write_has_no_names_and_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert tensor_names(tmp_path) == set()
    with pytest.raises(UserError, match=r"pytorch_model\.bin .*; download it again"):
        read_head_tensors(ModelSource(model=str(tmp_path), name="method.model"))
