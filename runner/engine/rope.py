"""Tables of rotary cosines and sines, one row a position, built by transformers' own initialisers.

Only frequencies that do not depend on the batch are allowed: `dynamic` recomputes them from the longest
sequence present, which would make a request's tokens depend on its neighbours. `longrope` has two factor sets;
`max_model_len` picks one for the whole run.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.engine.errors import UserError

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def require_static_rope(config: Any) -> None:
    """Raises UserError when the rope frequencies depend on the batch."""
    kind = rope_type(config)
    if kind not in STATIC_ROPE_TYPES:
        raise UserError(
            f"rope type must be one of {', '.join(STATIC_ROPE_TYPES)}, got {kind!r}: its frequencies depend on the "
            "longest sequence in the batch, so no request's output would be its own; use a checkpoint with static rope"
        )


def rope_tables(config: Any, head_dim: int, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, signed_sin), each [max_model_len, 1, head_dim] float32; see kernels.reference.rope for the sign."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    require_static_rope(config)
    kind = rope_type(config)
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        scaling = 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq.float()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)
