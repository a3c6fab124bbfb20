"""A head's tensors that can be no weights are refused by name, whatever file they lie in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.config import SpeculativeConfig
from runner.engine.errors import UserError
from runner.engine.fused_tensors import Fused, split_fused
from runner.engine.head_order import in_our_order
from runner.llm import LLM
from runner.proposer import build_proposer
from runner.tiny import DRAFTER_KEYS, HEAD_DIRS
from tests.edit_tensors import edit_tensors

PICKLE = "medusa_lm_head.pt"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def engine() -> Any:
    return LLM("tiny", num_gpu_blocks_override=40).engine


@pytest.fixture
def refusal(engine: Any, tmp_path: Path) -> Callable[[str, Change], str]:
    """What a head is refused with once its tensors have been changed."""

    def message(method: str, change: Change) -> str:
        directory = Path(shutil.copytree(HEAD_DIRS[method], tmp_path / "head"))
        if method == "medusa":
            tensors = torch.load(directory / PICKLE, weights_only=True)
            change(tensors)
            torch.save(tensors, directory / PICKLE)
        else:
            edit_tensors(directory, change)
        keys = {"method": method, "num_speculative_tokens": 2, "model": str(directory)}
        config = SpeculativeConfig.from_engine_args("tiny", keys, num_gpu_blocks_override=40, **DRAFTER_KEYS)
        with pytest.raises(UserError) as caught:
            build_proposer(config, engine.proposer.context, engine.tokenizer)
        told = str(caught.value)
        assert told.startswith("method.model") and str(directory) in told and "\n" not in told
        assert "; download " in told and " again" in told
        return told

    return message


def first_weight(tensors: dict[str, Any]) -> str:
    return min(name for name in tensors if name.endswith(".weight"))


def replaced(new: Callable[[Tensor], Any]) -> Change:
    """A change that puts something else where the first weight is."""
    return lambda tensors: tensors.update({(name := first_weight(tensors)): new(tensors[name])})


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp", "dflash", "mlp_speculator"])
@pytest.mark.parametrize(
    "new",
    [
        lambda weight: torch.tensor(1.0),
        lambda weight: weight.to(torch.complex64),
        lambda weight: weight.long(),
        lambda weight: weight > 0,
    ],
    ids=["a single number", "complex", "whole numbers", "flags"],
)
def test_a_weight_of_another_kind_is_named(
    method: str, new: Callable[[Tensor], Tensor], refusal: Callable[[str, Change], str]
) -> None:
    """Whole numbers, and the real part of complex ones, were taken for the weights."""
    names = list[str]()
    message = refusal(method, lambda tensors: (names.append(first_weight(tensors)), replaced(new)(tensors)))
    assert names[0].split(".", 1)[1] in message


def test_a_bias_of_another_kind_is_named_with_what_it_should_be(refusal: Callable[[str, Change], str]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].long()

    assert "of another kind: 0.0.linear.bias int64 for float32; download it again" in refusal("medusa", change)


@pytest.mark.parametrize(
    "new",
    [
        lambda weight: weight.float().to_sparse(),
        lambda weight: torch.quantize_per_tensor(weight.float(), 0.1, 0, torch.qint8),
        lambda weight: weight.to("meta"),
        lambda weight: torch.nested.nested_tensor([weight.float()]),
    ],
    ids=["sparse", "quantized", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds that are about to go
def test_a_pickled_tensor_that_is_not_dense_is_named(
    new: Callable[[Tensor], Tensor], refusal: Callable[[str, Change], str]
) -> None:
    assert " must be a dense tensor, got a sparse, nested or quantized one, or one without its " in refusal(
        "medusa", replaced(new)
    )


def test_a_pickle_of_mappings_within_themselves_is_refused(refusal: Callable[[str, Change], str]) -> None:
    assert "recursion" in refusal("medusa", lambda tensors: tensors.update({"own": tensors}))


def test_pickled_parameters_are_their_numbers(engine: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(HEAD_DIRS["medusa"], tmp_path / "head"))
    tensors = torch.load(directory / PICKLE, weights_only=True)
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, directory / PICKLE)
    keys = {"method": "medusa", "num_speculative_tokens": 2, "model": str(directory)}
    config = SpeculativeConfig.from_engine_args("tiny", keys, num_gpu_blocks_override=40, **DRAFTER_KEYS)
    build_proposer(config, engine.proposer.context, engine.tokenizer)


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_what_has_no_rows_is_in_no_order_and_has_no_parts(shape: tuple[int, ...]) -> None:
    """It is refused by its shape, once its place is known."""

    class Slice:
        def get_shape(self) -> list[int]:
            return list(shape)

    tensor = Slice()
    named = [("layers.0.q_proj.weight", tensor)]
    assert list(in_our_order(named, {"q_proj.weight": [1, 0]})) == named
    assert list(split_fused(named, {"q_proj": Fused(parts={"k_proj": 2})})) == named
