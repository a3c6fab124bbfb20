"""The head that belongs to each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from runner.train.heads.dflash import DFlashHead
from runner.train.heads.dspark import DSparkHead
from runner.train.heads.eagle import EagleHead
from runner.train.heads.eagle3 import Eagle3Head
from runner.train.heads.head import Head
from runner.train.heads.medusa import MedusaHead
from runner.train.heads.mlp_speculator import MLPSpeculatorHead
from runner.train.heads.mtp import MTPHead
from runner.train.heads.pard import PardHead
from runner.train.heads.states import FrozenTarget

HEAD_CLASSES: dict[str, Callable[..., Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MTPHead,
    "medusa": MedusaHead,
    "mlp_speculator": MLPSpeculatorHead,
    "pard": PardHead,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
}


def new_head(method: str, target: FrozenTarget, options: Mapping[str, Any], *, seed: int) -> Head:
    """An untrained head on the target's device; the same seed gives the same weights, torch's own generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = HEAD_CLASSES[method](target, **options)
    nn.Module.to(head, target.model.device)
    return head
