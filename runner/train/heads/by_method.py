"""The head that belongs to each method."""

from __future__ import annotations

from collections.abc import Callable

from runner.train.heads.dflash import DFlashHead
from runner.train.heads.eagle import EagleHead
from runner.train.heads.eagle3 import Eagle3Head
from runner.train.heads.head import Head
from runner.train.heads.medusa import MedusaHead
from runner.train.heads.mlp_speculator import MLPSpeculatorHead
from runner.train.heads.mtp import MTPHead
from runner.train.heads.pard import PardHead

HEAD_CLASSES: dict[str, Callable[..., Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MTPHead,
    "medusa": MedusaHead,
    "mlp_speculator": MLPSpeculatorHead,
    "pard": PardHead,
    "dflash": DFlashHead,
}
