"""Tables of rotary cosines and sines, one row a position, built by transformers' own initialisers.

Only frequencies that do not depend on the batch are allowed, or a request's tokens would depend on its neighbours.
`dynamic` ones change with the longest sequence present where it passes max_position_embeddings, and none here does
(`num_positions`). `longrope` has two factor sets; `max_model_len` picks one for the whole run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kernels.reference.rope import RopeTable
from runner.engine.errors import UserError
from runner.engine.families import FAMILIES
from runner.engine.family import named

logger = logging.getLogger(__name__)

RopeKey = str | float  # of a config's rotations: a kind of layers, the base of some, or
ONE_ROPE = ""  # where all its layers have the same
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Which elements of a query or key head turn together."""

    head_dim: int
    num_rotated: int  # elements of a head that turn, the first ones
    is_interleaved: bool  # neighbours turn together (GLM, ERNIE); else one of their first half with one of the second

    @property
    def order(self) -> list[int] | None:
        """Of the checkpoint's elements in ours, in which each turns with the one half a head on; None: the same.

        A head's elements are added up, so queries and keys may have any order, if they have the same.
        """
        turned, half = self.num_rotated // 2, self.head_dim // 2
        if turned == half and not self.is_interleaved:
            return None
        firsts = range(0, 2 * turned, 2) if self.is_interleaved else range(turned)
        seconds = range(1, 2 * turned, 2) if self.is_interleaved else range(turned, 2 * turned)
        others = range(2 * turned, self.head_dim)
        return [*firsts, *others[: half - turned], *seconds, *others[half - turned :]]


@dataclass(frozen=True, kw_only=True)
class RopeRows:
    """A launch's rotations; the same for every layer, or for all of a kind."""

    table: RopeTable
    positions: torch.Tensor  # [num_rows] int64
    query_factors: torch.Tensor | None = None  # [max_model_len, 1], of turned queries; None: they stay as they are

    @cached_property
    def whole_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What kernels.reference.rope.apply_rope takes for whole rows of the fused projection."""
        return (*self.table.rows(self.positions), self.table.partner)

    def up_to(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for rows of the first `width` columns alone, which are whole heads."""
        cos, signed_sin, partner = self.whole_rows
        return cos[:, :width], signed_sin[:, :width], partner[:width]

    def behind(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for rows of the last `width` columns alone."""
        cos, signed_sin, partner = self.whole_rows
        missing = len(partner) - width
        return cos[:, missing:], signed_sin[:, missing:], partner[missing:] - missing


class Rope:
    """Rotations of a model's layers; their table is built at the first launch, when it is known where weights live."""

    def __init__(
        self,
        hf_config: Any,
        key: RopeKey | None,  # None: layers do not turn
        layout: HeadLayout,
        *,
        num_heads: int,
        num_kv_heads: int,
        max_model_len: int,
    ) -> None:
        if isinstance(key, str):
            rope_parameters(hf_config, key)  # there are some, or nothing is loaded
        self._source = (hf_config, key, layout, max_model_len)
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._table: RopeTable | None = None
        self._query_factors = query_factors(hf_config, key, max_model_len)

    def __call__(self, positions: torch.Tensor, like: torch.Tensor) -> RopeRows:
        """Rotations of the rows at positions [num_rows] int64, on the device and in the dtype of `like`."""
        if self._table is None:
            cos, signed_sin = (table.to(like) for table in rope_tables(*self._source))
            values = self._num_kv_heads * cos.shape[1]
            if self._query_factors is not None:
                self._query_factors = self._query_factors.to(like)
            # Last: engines of other threads may have the same rotations.
            self._table = RopeTable(cos, signed_sin, self._num_heads + self._num_kv_heads, values)
        return RopeRows(table=self._table, positions=positions, query_factors=self._query_factors)


def rope_parameters(config: Any, key: str) -> dict[str, Any]:
    """Of a kind of layers.

    Raises:
        UserError: the config has none.
    """
    parameters = config.rope_parameters if key == ONE_ROPE else config.rope_parameters.get(key)
    if not isinstance(parameters, dict):
        raise UserError(
            f"rope_parameters of a {config.model_type} checkpoint must have those of each of its layer_types, got none "
            f"of {key}; mend its config"
        )
    return parameters


def rope_types(config: Any) -> list[str]:
    """The rope type of a config, or of each of its layer types (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(value.get("rope_type", "default")) for value in nested or [parameters]]


def num_positions(config: Any) -> int | None:
    """Tokens of the longest text that a config's rotations are made for; None when it states none.

    A yarn or linear config states in max_position_embeddings what the model had before its rope was extended, or what
    it has since (vLLM reads it the same way). One with rotations by layer type (Gemma 3) states the whole length.
    """
    stated: int | None = getattr(config, "max_position_embeddings", None) or None
    parameters = getattr(config, "rope_parameters", None) or {}
    kind, factor = parameters.get("rope_type"), parameters.get("factor")
    if stated is None or factor is None or kind not in ("yarn", "linear"):
        return stated
    before = parameters.get("original_max_position_embeddings") if kind == "yarn" else None
    with _reading_parameters(config):
        return max(stated, int((before or stated) * factor))


@contextmanager
def _reading_parameters(config: Any) -> Iterator[None]:
    """Around what computes with rope_parameters, which transformers takes with anything in them."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason, got = " ".join(str(error).split())[:120], str(config.rope_parameters)[:200]
        raise UserError(
            f"rope_parameters of a {config.model_type} checkpoint{named(config)} must be numbers that rotations can "
            f"be computed by, got {got} ({type(error).__name__}: {reason}); mend its config"
        ) from error


def warn_of_unread_rope(config: Any, model: str) -> None:
    """Logs the key of a yarn config that transformers, whose initialisers we use, does not read."""
    scale = (getattr(config, "rope_parameters", None) or {}).get("attn_factor")
    if scale not in (None, 1):
        logger.warning(
            "%s: attn_factor=%s in its rope parameters is not read, as in transformers; vLLM and SGLang scale by it, "
            "so their logits differ",
            model,
            scale,
        )
    if config.model_type == "mistral4" and (config.rope_parameters or {}).get("mscale_all_dim"):
        logger.warning(
            "%s: logits of attention are scaled by mscale, as in transformers; engines that go by its makers' "
            "params.json, which says apply_scale=false, do not scale them, so their logits differ",
            model,
        )


def require_static_rope(config: Any) -> None:
    """Raises UserError when the rope frequencies depend on the batch, or are of a type that is not known here."""
    kinds = rope_types(config)
    for kind in kinds:
        if kind not in STATIC_ROPE_TYPES:
            raise UserError(
                f"rope type must be one of {', '.join(STATIC_ROPE_TYPES)}, got {kind!r}: its frequencies are not known "
                "here; use a checkpoint with one of them"
            )
        # One factor set can be pinned for a whole model, not yet one for each of its layer types.
        if kind == "longrope" and len(kinds) > 1:
            raise UserError(
                f"rope type of a {config.model_type} model must not be 'longrope' for one type of its layers: its "
                "frequencies depend on the longest sequence in the batch, so no request's output would be its own; "
                "use a checkpoint with static rope"
            )


def rope_tables(
    config: Any, key: RopeKey | None, layout: HeadLayout, max_model_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, signed_sin), each [max_model_len, head_dim] float32; see kernels.reference.rope for the sign.

    Raises:
        UserError: rotations that are none of ours, or that cannot be computed by the config's numbers.
    """
    require_static_rope(config)
    with _reading_parameters(config):
        return _tables(config, key, layout, max_model_len)


def _tables(
    config: Any, key: RopeKey | None, layout: HeadLayout, max_model_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    half, scaling = layout.head_dim // 2, 1.0
    if key is None:
        inv_freq = torch.zeros(0)
    else:
        if isinstance(key, float):
            own_base, config, key = {**config.rope_parameters, "rope_theta": key}, copy(config), ONE_ROPE
            config.rope_parameters = own_base
        family = FAMILIES.get(config.model_type)
        if family is not None and family.ignores_rotary_factor:
            of_all, config = config.rope_parameters, copy(config)
            config.rope_parameters = {name: own for name, own in of_all.items() if name != "partial_rotary_factor"}
        parameters = rope_parameters(config, key)
        kind = parameters.get("rope_type", "default")
        stretched = _stretched_theta(config, parameters, layout.num_rotated)
        if kind == "default" or stretched is not None:
            steps = torch.arange(0, layout.num_rotated, 2, dtype=torch.float32)
            theta = parameters["rope_theta"] if stretched is None else stretched
            inv_freq = 1.0 / (theta ** (steps / layout.num_rotated))
        else:
            of_kind = {"layer_type": key} if key else {}
            own = config.per_layer_config[key] if key else config  # whose heads may be others (Gemma 4)
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](own, torch.device("cpu"), seq_len=max_model_len, **of_kind)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq.float()
    # What does not turn has a cosine of 1 and a sine of 0.
    unturned = (0, half - len(inv_freq))
    cos = F.pad(angles.cos() * scaling, unturned, value=1.0)
    sin = F.pad(angles.sin() * scaling, unturned)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _reads(config: Any, key: str) -> bool:
    """Whether the key means something to a model of ours."""
    family = FAMILIES.get(config.model_type)
    return family is not None and key in family.reads


def _stretched_theta(config: Any, parameters: Mapping[str, Any], num_rotated: int) -> float | None:
    """Of rotations that a fixed factor stretches, as in NTK-aware scaling, which Hunyuan's configs call dynamic."""
    alpha = parameters.get("alpha") if _reads(config, "alpha") else None
    if alpha is None or parameters.get("rope_type") != "dynamic":
        return None
    return float(parameters["rope_theta"] * alpha ** (num_rotated / (num_rotated - 2)))


def query_factors(config: Any, key: RopeKey | None, max_model_len: int) -> torch.Tensor | None:
    """What queries are multiplied by at each position [max_model_len, 1] float32 (Ministral 3, Llama 4).

    None where it is 1 at all of them: up to the length that the model was trained with first, it is. key: as Rope's; of
    Llama 4 queries that do not turn are multiplied.
    """
    if _reads(config, "attn_temperature_tuning"):
        if key is not None or not config.attn_temperature_tuning or max_model_len < config.floor_scale:
            return None
        chunks = (torch.arange(max_model_len) + 1) // config.floor_scale
        of_unturned: torch.Tensor = 1 + config.attn_scale * torch.log1p(chunks.float())
        return of_unturned.unsqueeze(1)
    parameters = getattr(config, "rope_parameters", None) or {}
    beta = parameters.get("llama_4_scaling_beta")
    if beta is None or max_model_len <= parameters["original_max_position_embeddings"]:
        return None
    spans = torch.arange(max_model_len) // parameters["original_max_position_embeddings"]
    factors: torch.Tensor = 1 + beta * torch.log(1 + spans.float())
    return factors.unsqueeze(1)


def pin_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Fix those of a transformers model, which would choose a factor set by the longest sequence of each launch.

    Dynamic ones stay what they are at first: no sequence is long enough to change them, and none has to be measured.

    Raises:
        UserError: the model's own code chooses by length all the same.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            kind.update({name: "default" for name, own in kind.items() if own == "dynamic"})
        elif kind == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
        if kind != "longrope":
            continue
        config: Any = module.config
        inv_freq = module.get_buffer("inv_freq")
        inv_freq.copy_(ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=max_model_len)[0])
        module.rope_type = "default"  # type: ignore[assignment]
        behind_switch = config.rope_parameters["original_max_position_embeddings"] + 1
        positions = torch.tensor([[1, behind_switch]], device=inv_freq.device)
        alone, beside = (module(inv_freq, positions[:, :count])[0][:, :1] for count in (1, 2))
        if not torch.equal(alone, beside):
            raise UserError(
                f"rope type of a {config.model_type} model must not be 'longrope': its own code changes the rotation "
                "of every sequence with the longest one in the batch; use a checkpoint with static rope"
            )
