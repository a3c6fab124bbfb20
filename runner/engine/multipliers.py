"""What a family multiplies by numbers of its config: embeddings, what layers add, and logits.

Granite multiplies what each layer adds to the residual stream. Here the stream is divided by that number instead, once,
as embeddings enter it: norms with an accordingly larger eps make the same of it, and no layer multiplies anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.engine.errors import UserError
from runner.engine.family import Family, is_told, stated

_GRANITE = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """None: of nothing."""

    inputs: float | None = None  # of embeddings on their way into the first layer; heads see those of the table
    stream: float | None = None  # of the residual stream here, which make it the model's
    logits: float | None = None

    def eps(self, eps: float) -> float:
        """Of norms of the residual stream here, of the model's."""
        return eps if self.stream is None else eps / self.stream**2


NO_MULTIPLIERS = Multipliers()


def read_multipliers(config: Any, family: Family) -> Multipliers:
    """From a transformers config; raises UserError for those that cannot be."""
    if stated(config, family, "output_multiplier") is not None:
        return Multipliers(logits=_positive(config, "output_multiplier"))
    if is_told(config, family.is_input_scaled):
        return Multipliers(inputs=float(config.hidden_size) ** 0.5)
    if not family.has_multipliers:
        return NO_MULTIPLIERS
    of_embeddings, stream, _, divisor = (_positive(config, key) for key in _GRANITE)
    inputs = of_embeddings / stream
    return Multipliers(
        inputs=None if inputs == 1.0 else inputs,
        stream=None if stream == 1.0 else stream,
        logits=None if divisor == 1.0 else 1.0 / divisor,
    )


def _positive(config: Any, key: str) -> float:
    number = getattr(config, key)
    if number is None or not number > 0:
        raise UserError(f"{key} of a {config.model_type} checkpoint must be > 0, got {number}; mend its config")
    return float(number)
