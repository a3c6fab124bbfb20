"""The files of an MTP module: what its config describes, which layout its tensors are named in, and the tensors.

A module lies in its target's checkpoint, or in a directory of its own: a target's whose other tensors are left alone,
or one in the `speculators` format. Of several modules the first is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from proposers.heads.head_sizes import require_target_sizes
from runner.engine.architecture import Architecture, read_architecture
from runner.engine.checkpoint import ModelSource, load_config, read_tensors
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.expert_stacks import split_stacks
from runner.engine.fused_tensors import split_fused
from runner.engine.head_checkpoint import HeadTensor, as_read, head_architecture, read_head_config
from runner.engine.head_order import in_our_order
from runner.engine.loader import LoadedModel
from runner.engine.mtp_layout import (
    DEEPSEEK,
    ERNIE,
    HY,
    MIMO,
    NUM_MODULES_KEYS,
    OF_FAMILIES,
    QWEN3_NEXT,
    SPECULATORS,
    MtpLayout,
    layouts_of,
    num_modules,
)
from runner.engine.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

# A target's own tensors; the number is a layer's.
_OF_A_TARGET = re.compile(r"(?:lm_head|model\.embed_tokens|model\.norm|model\.layers\.(\d+))\.")
_EMBEDDINGS, _HEADS = ("model.embed_tokens.weight", "embed_tokens.weight"), ("lm_head.weight",)
_BLOCKS = ["full_attention", "moe"]
# By a config's model_type.
_STATED = {"mimo": MIMO, "ernie4_5_moe": ERNIE, "hy_v3": HY} | OF_FAMILIES
_REMEDY = (
    "choose a target that was trained with one, name the directory of a module made for this target "
    "(method.model=<directory>), or choose another method"
)


@dataclass(frozen=True, kw_only=True)
class MtpModule:
    """What a config says of a module."""

    layouts: Sequence[MtpLayout]  # that its tensors may be named in
    arch: Architecture | None  # of its block; None: of the target's layers, which transformers runs
    config: Any  # as transformers reads it, of the target or of the block

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class MtpTensors:
    """The tensors of a module, by their names in the checkpoint; none when weights are dummies."""

    layout: MtpLayout
    prefix: str
    tensors: dict[str, HeadTensor] = field(default_factory=dict)
    own_embedding: str = ""  # name of the embedding, where it is not the target's
    own_head: str = ""

    @property
    def block_prefix(self) -> str:
        return self.prefix + self.layout.block.format(index=0)


def describe_module(source: ModelSource, target: LoadedModel) -> MtpModule:
    """Read the config of a module.

    Raises:
        UserError: no config, one of a head of another kind, or of a module that does not fit the target.
    """
    if source.has_files_of(target.source):
        config = target.hf_config
        return MtpModule(layouts=layouts_of(config), arch=_layer(config, source), config=config)
    values = read_head_config(source)
    kind = values.get("speculators_model_type")
    if kind is not None:
        arch, config = head_architecture(_speculators_layer(values, source), source)
        module = MtpModule(layouts=(SPECULATORS,), arch=arch, config=config)
    else:
        config = load_config(source)
        module = MtpModule(layouts=layouts_of(config), arch=_layer(config, source), config=config)
        is_targets = config.model_type == target.hf_config.model_type
        if module.arch is None:
            fits = is_targets and isinstance(target.model, TransformersModel)
        else:
            fits = is_targets or module.arch.experts is None
        if not fits:
            raise UserError(
                f"{source.name}={source.model}: model_type must be {target.hf_config.model_type!r}, the target's, or "
                f"a dense family of ours, got {config.model_type!r}; choose a module that was made for this target"
            )
    require_target_sizes(source, target, hidden_size=int(config.hidden_size), vocab_size=int(config.vocab_size))
    return module


def _layer(config: Any, source: ModelSource) -> Architecture | None:
    """The decoder layer of a module, None where transformers' own code runs the target.

    Raises:
        UserError: one that modules are not built of here.
    """
    arch = read_architecture(config)
    if arch is not None and not arch.has_plain_layers and config.model_type not in OF_FAMILIES:
        raise UserError(
            f"{source.name}={source.model}: an MTP module must have a layer like Llama's or Qwen3-MoE's, got "
            f"model_type {arch.family!r}; choose another method"
        )
    blocks = getattr(config, "mtp_layers_block_type", None)  # of Nemotron's
    if blocks not in (None, _BLOCKS):
        raise UserError(
            f"{source.name}={source.model}: mtp_layers_block_type must be {_BLOCKS}, which a module is built of here, "
            f"got {blocks}; choose another method"
        )
    return arch


def read_module(source: ModelSource, module: MtpModule, target: LoadedModel) -> MtpTensors:
    """Read the first module's tensors; copies of the target's embedding and head are left out.

    Raises:
        UserError: there is no module.
    """
    layout = (
        _stated_layout(source, module)
        if source.is_dummy
        else _layout_of([_plain(name, module) for name, _ in read_tensors(source)], source, module)
    )
    if layout.final_norm is None and not isinstance(target.model, Decoder):
        raise UserError(
            f"{source.name}={source.model}: an MTP module in {layout.title} layout ends with the norm of its target, "
            f"which must run on our own decoder; this {target.hf_config.model_type} runs through transformers' code; "
            "choose another method"
        )
    if source.is_dummy:
        return MtpTensors(layout=layout, prefix=layout.prefix_of(0, module.num_layers))
    is_targets = source.has_files_of(target.source)
    count = num_modules(module.config) if layout is not SPECULATORS else 1
    if count > 1:
        logger.info("%s: the first of %d MTP modules drafts every token", source.model, count)

    prefix = layout.prefix_of(0, module.num_layers)
    unread = {f"{prefix}{name}.weight" for name in layout.unread}

    def belongs(name: str) -> bool:
        """To the first module, or to nobody we know, which is refused with the rest."""
        if name.endswith("rotary_emb.inv_freq"):  # derived from the config
            return False
        if layout.holds(name, 0, module.num_layers, None):
            return name not in unread
        if is_targets or any(layout.holds(name, index, module.num_layers, None) for index in range(1, count)):
            return False  # what the target's loader let through is its own
        own = _OF_A_TARGET.match(name)
        of_a_target = own is not None and (own[1] is None or int(own[1]) < module.num_layers)
        return not of_a_target or name in (*_EMBEDDINGS, *_HEADS)

    found: Iterable[tuple[str, Any]] = read_tensors(source)
    if module.arch is not None:
        found = split_fused(split_stacks(found, module.arch.experts), module.arch.fused_tensors)
        # A module's block attends, wherever layers of the target do not.
        found = in_our_order(found, replace(module.arch, delta=None).head_orders)
    tensors = {plain: as_read(tensor) for name, tensor in found if belongs(plain := _plain(name, module))}
    copies = [f"{prefix}{name}.weight" for name in (layout.embedding, layout.head) if name is not None]
    return MtpTensors(
        layout=layout,
        prefix=prefix,
        tensors=tensors,
        own_embedding=_differing(tensors, (*copies[:1], *_EMBEDDINGS), lambda: target.model.embed_tokens),
        own_head=_differing(tensors, (*copies[1:], *_HEADS), target.model.whole_head),
    )


def _speculators_layer(values: Mapping[str, Any], source: ModelSource) -> Mapping[str, Any]:
    """The config of the decoder block in a config of the speculators format."""
    kind = values["speculators_model_type"]
    layer: Mapping[str, Any] | None = values.get("transformer_layer_config")  # as read_head_config sees to
    if kind != "mtp":
        raise UserError(
            f"{source.name}={source.model}: speculators_model_type must be 'mtp' with method=mtp, got {kind!r}; "
            "name the method that the head was made for"
        )
    if layer is None:
        raise UserError(
            f"{source.name}={source.model}: config.json must hold transformer_layer_config, a mapping, got none; "
            "download the head again"
        )
    return layer


def _plain(name: str, module: MtpModule) -> str:
    """A tensor's name; the speculators format may write `model.` before all of its."""
    return name.removeprefix("model.") if SPECULATORS in module.layouts else name


def _layout_of(names: list[str], source: ModelSource, module: MtpModule) -> MtpLayout:
    def own(layout: MtpLayout) -> set[str]:
        prefix = layout.prefix_of(0, module.num_layers)
        return {f"{prefix}{name}" for name in layout.own_names(0)}

    best = max(module.layouts, key=lambda layout: len(own(layout).intersection(names)))  # some share names
    if not own(best).intersection(names):
        looked_for = dict.fromkeys(
            f"{layout.prefix_of(0, module.num_layers)}{layout.projection.format(index=0)}.weight"
            for layout in module.layouts
        )
        raise UserError(
            f"{source.name}={source.model}: method=mtp needs a multi-token-prediction module, and the checkpoint holds "
            f"none: looked for {', '.join(looked_for)}; {_REMEDY}"
        )
    return best


def _stated_layout(source: ModelSource, module: MtpModule) -> MtpLayout:
    """The layout that a config tells, when there are no tensors to tell it."""
    if SPECULATORS in module.layouts:
        return SPECULATORS
    if num_modules(module.config) == 0:
        raise UserError(
            f"{source.name}={source.model}: method=mtp needs a multi-token-prediction module, and the config states "
            f"none: looked for {' and '.join(NUM_MODULES_KEYS)}; {_REMEDY}"
        )
    if module.config.model_type in _STATED:
        return _STATED[module.config.model_type]
    return QWEN3_NEXT if getattr(module.config, "mtp_num_hidden_layers", None) else DEEPSEEK


def _differing(tensors: dict[str, HeadTensor], names: Sequence[str], of_target: Callable[[], torch.Tensor]) -> str:
    """The first of these tensors, by name, unless it is a copy of the target's; the copies are taken out."""
    found = [name for name in names if name in tensors]
    for name in found[1:]:
        del tensors[name]
    if not found:
        return ""
    shared = of_target()
    if torch.equal(tensors[found[0]][...].to(shared), shared):
        del tensors[found[0]]
        return ""
    return found[0]
