"""A draft head in training: what it learns, what it guesses, and the directory it is published as.

A head is an `nn.Module` whose `state_dict` has the names of the published layout (up to `tensor_prefix`), so that
saving it needs no translation. Guesses are counted from the pending token: `draft(...)[:, p]` are the tokens at
positions p + 1, p + 2, ..., given the tokens up to p and the target's hidden states up to p - 1, which is what a
proposer has.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from runner.train.heads.states import FrozenTarget, TargetStates

ANCHORS_AT_ONCE = 32  # that a head guesses from in one pass, which holds the logits of all their places
START_NORM = 0.02
"""Weight of a last norm before training: a first guess without opinion costs less to unlearn than a confident one."""


class Head(nn.Module, ABC):
    tensor_prefix: ClassVar[str] = ""
    vocabulary_names: tuple[str, ...] = ()
    """Weights with a row per token beside the embeddings: they are no matrices to Muon."""

    def __init__(self, target: FrozenTarget) -> None:
        super().__init__()
        self.target = target

    @abstractmethod
    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        """Scalar to minimise over texts of one length."""

    @abstractmethod
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        """[num_texts, length, num_speculative_tokens] greedy guesses; what position 0 holds means nothing."""

    @abstractmethod
    def published_config(self) -> dict[str, Any]:
        """The content of config.json."""

    def published_tensors(self) -> dict[str, Tensor]:
        """Names and weights of the checkpoint: floating point in bfloat16, each shared weight under its first name."""
        stored = self.state_dict()
        named = [*self.named_parameters(), *((n, b) for n, b in self.named_buffers() if n in stored)]
        return {
            self.tensor_prefix + name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu()
            for name, tensor in named
        }

    def save(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(self.published_config(), indent=2) + "\n")
        self.save_tensors(directory)

    def save_tensors(self, directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file({name: t.contiguous() for name, t in self.published_tensors().items()}, path, {"format": "pt"})
        path.chmod(0o644)  # safetensors writes it for its owner only

    def round_weights(self) -> None:
        """Puts every weight on the value its checkpoint holds, so that what is measured is what is stored."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.bfloat16())


def soft_label_loss(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` [..., vocab] against the target's distribution `probs`."""
    return F.cross_entropy(logits.flatten(0, -2), probs.flatten(0, -2))


def copy_matching(module: nn.Module, source: nn.Module) -> None:
    """Starts `module` from the parameters of `source` that have its names and shapes; the rest stays as it is."""
    theirs = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                parameter.copy_(theirs[name])
