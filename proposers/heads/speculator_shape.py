"""What the config.json of an MLP or LSTM speculator says, IBM's (arXiv 2404.19124) or of Snowflake's Arctic family.

Arctic's MLP speculator is IBM's. Its other class has two recurrences, which `method` tells apart: sum_rnn, that of an
MLP speculator whose parts may have several layers, and sum_lstm. There widths are written "4096", or "4096.2048" where
one layer follows another. How many tokens may be drafted is num_lookahead_tokens, or n_predict where that is not said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proposers.heads.head_sizes import head_size
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError

Kind = Literal["mlp", "sum_rnn", "sum_lstm"]
MLP_ARCHITECTURES = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
# Two names of one class.
ARCTIC_ARCHITECTURES = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")


@dataclass(frozen=True, kw_only=True)
class SpeculatorShape:
    kind: Kind
    hidden_size: int
    vocab_size: int
    num_steps: int  # it was trained for, each with weights of its own unless they are tied
    max_depth: int  # tokens drafted at most
    inner_sizes: tuple[int, ...]  # of the state: behind the sum, and behind each layer that follows
    num_token_layers: int = 1  # the embedding, and layers behind it
    num_state_layers: int = 1  # the projection, and layers behind it
    is_tied: bool
    ties_gates: bool = False  # all gates of an LSTM read one embedding
    scales_input: bool

    @property
    def token_weight(self) -> float:
        """Of a token's embedding in the sum: the first state is half of its magnitude by the last step."""
        state_weight: float = 0.5 ** (0.5 / self.num_steps)
        return math.sqrt((1 - state_weight**2) * self.inner_sizes[0] / 2) / state_weight


def read_shape(config: Mapping[str, Any], source: ModelSource) -> SpeculatorShape:
    """Raises UserError for another kind of head, or sizes that make no speculator."""
    is_arctic = _is_arctic(config, source)
    is_tied, num_steps = bool(config.get("tie_weights", False)), head_size(config, "n_predict", 3, source)
    max_depth = head_size(config, "num_lookahead_tokens", num_steps, source)
    if not is_tied or num_steps == 1:  # there are no weights for more
        max_depth = min(max_depth, num_steps)
    common: dict[str, Any] = {
        "vocab_size": head_size(config, "vocab_size", 32000, source),
        "num_steps": num_steps,
        "max_depth": max_depth,
        "is_tied": is_tied,
        "scales_input": bool(config.get("scale_input", False)),
    }
    if is_arctic:
        return _arctic_shape(config, source, common)
    hidden_size = head_size(config, "emb_dim", 4096, source)
    inner_size = head_size(config, "inner_dim", 0, source, minimum=0) or hidden_size
    return SpeculatorShape(kind="mlp", hidden_size=hidden_size, inner_sizes=(inner_size,), **common)


def _is_arctic(config: Mapping[str, Any], source: ModelSource) -> bool:
    """Whether the config is that of Arctic's class with two recurrences, and not an MLP speculator's."""
    architectures = [str(name) for name in config.get("architectures") or []]
    if not architectures and config.get("model_type") == "mlp_speculator":
        return False
    if len(architectures) == 1 and architectures[0] in (*MLP_ARCHITECTURES, *ARCTIC_ARCHITECTURES):
        return architectures[0] in ARCTIC_ARCHITECTURES
    found = ", ".join(architectures) or str(config.get("model_type"))
    known = ", ".join((*MLP_ARCHITECTURES, *ARCTIC_ARCHITECTURES))
    raise UserError(
        f"{source.name}={source.model} must be one of {known}, got {found}; name the method that it was made for"
    )


def _arctic_shape(config: Mapping[str, Any], source: ModelSource, common: dict[str, Any]) -> SpeculatorShape:
    kind = config.get("method", "sum_rnn")
    if kind not in ("sum_rnn", "sum_lstm"):
        raise UserError(
            f"{source.name}={source.model}: method in its config must be sum_rnn or sum_lstm, got {kind!r}; "
            "choose a speculator with one of these recurrences"
        )
    is_lstm = kind == "sum_lstm"
    if is_lstm and not common["is_tied"]:
        raise UserError(
            f"{source.name}={source.model}: tie_weights in its config must be true with method=sum_lstm, whose steps "
            "share their weights, got false; mend it or download the head again"
        )
    widths = {key: _widths(config, key, source) for key in ("emb_dim", "proj_dim", "inner_dim")}
    inner_sizes = widths["inner_dim"]
    # What is added up is as wide as a gate, and what a norm stands before as what is behind it.
    alike = {*widths["emb_dim"], *widths["proj_dim"], *(inner_sizes if is_lstm else inner_sizes[:1])}
    if len(alike) > 1:
        written = ", ".join(f"{key}={'.'.join(map(str, sizes))}" for key, sizes in widths.items())
        where = "inner_dim" if is_lstm else "what inner_dim starts with"
        raise UserError(
            f"{source.name}={source.model}: emb_dim, proj_dim and {where} in its config must be one width with "
            f"method={kind}, got {written}; mend it or download the head again"
        )
    return SpeculatorShape(
        kind=kind,
        hidden_size=head_size(config, "input_hidden_dim", 0, source),
        inner_sizes=inner_sizes[:1] if is_lstm else inner_sizes,
        num_token_layers=1 if is_lstm else len(widths["emb_dim"]),
        num_state_layers=1 if is_lstm else len(widths["proj_dim"]),
        ties_gates=is_lstm and bool(config.get("tie_lstm_embs", False)),
        **common,
    )


def _widths(config: Mapping[str, Any], key: str, source: ModelSource) -> tuple[int, ...]:
    """One after another: of 4096, "4096", "4096.2048" or a list."""
    value = config.get(key)
    written = value.split(".") if isinstance(value, str) else value if isinstance(value, list) else [value]
    parts = [str(part) for part in written]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be whole numbers >= 1, such as '4096' or "
            f"'4096.2048', got {value!r}; mend it or download the head again"
        )
    return tuple(map(int, parts))
