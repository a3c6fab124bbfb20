"""What a training run may be told beside its configuration; loads no torch, so that --help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEARNING_RATE = 0.012  # at a hidden size of WIDTH; wider matrices take steps smaller by the root
WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    steps: int = field(default=400, metadata={"help": "optimizer steps"})
    rows: int = field(default=8, metadata={"help": "windows of text a step"})
    length: int = field(default=256, metadata={"help": "tokens of a window"})
    texts: int = field(default=4, metadata={"help": "answers a prompt: one greedy, the others at temperature 1"})
    learning_rate: float | None = field(
        default=None,
        metadata={"help": f"of matrices, by Muon; AdamW's is 0.4 of it; None: {LEARNING_RATE} x sqrt({WIDTH} / width)"},
    )

    def rate_at(self, hidden_size: int) -> float:
        return self.learning_rate or LEARNING_RATE * math.sqrt(WIDTH / hidden_size)
