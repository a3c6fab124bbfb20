"""Draft heads with weights held in 8 bits, once these are filled: other drafts may come of it, and no other token."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.panels import Change, Weight
from kernels.quantized_weight import quantize
from runner.engine.backend import multiplies_quantized, runs_kernels
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.quantized_tensors import require_scales
from runner.engine.transformers_model import TransformersModel

logger = logging.getLogger(__name__)


class Convertible(Protocol):
    def convert(self, change: Change) -> None:
        """As Decoder.convert."""


class ProjectsByTarget(Convertible, Protocol):
    """A head that may go without a projection to the vocabulary of its own."""

    lm_head: Weight | None  # None: the target's
    logits_softcap: Tensor | None  # of its own projection; as Decoder's, as the next
    logits_scale: Tensor | None
    target: Decoder | TransformersModel


def quantize_head(head: Convertible, source: ModelSource, device: torch.device) -> None:
    """Hold what a head multiplies by as its source asks, but for what it holds as its checkpoint quantizes it."""
    if source.quantization is None:
        return
    if not multiplies_quantized(device):
        logger.warning("%s: no kernel here multiplies by weights of 8 bits; they stay dense", source.model)
        return
    kind, in_words = source.quantization, runs_kernels(device)

    def change(weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        found = quantize(weight, kind)
        require_scales(found.scales, f"{source.name}={source.model}")
        return found.in_words() if in_words else found

    head.convert(change)


def quantize_head_of_target(head: ProjectsByTarget, source: ModelSource, device: torch.device) -> None:
    """The same of a head that may project by the target's head, of which it then holds a copy.

    That projection is most of what a head of one layer reads. What transformers' own code does behind it is not ours to
    copy, so such a target's is left alone.
    """
    if source.quantization is not None and head.lm_head is None and isinstance(head.target, Decoder):
        target = head.target
        head.lm_head, head.logits_softcap, head.logits_scale = (
            target.whole_head(),
            target.logits_softcap,
            target.logits_scale,
        )
    quantize_head(head, source, device)
