"""How checkpoints name and wire their multi-token-prediction (MTP) modules: the layouts that are published.

A module norms the embedding of a token and the target's state of the position before it, projects both side by side
to one hidden state, runs a decoder block and a final norm; the target's head reads the result, and so does the next
step, as the first one reads the target's behind its norm: later tokens of GLM-5 and DeepSeek-R1 were accepted less
often where the state before it was fed back (vllm-project/vllm#46075, ROCm/ATOM#1764). Targets carry modules beside
their layers, so the loader must know their tensors whatever the method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from runner.engine.errors import UserError

# Config keys that state how many modules there are, as DeepSeek, GLM, MiMo, ERNIE and Hunyuan name it, and Qwen3.5.
NUM_MODULES_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# model_type of drafters that are no modules: layers over the target's keys and values, in checkpoints of their own.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """Names of one layout's tensors, without their `.weight`, and the choices that layouts differ in."""

    title: str  # as errors call it
    # Of a module. In this and in names {index} counts modules; here {layer} goes on counting the target's layers.
    prefix: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None  # None: the target's own
    block: str = ""  # of the decoder block's tensors, behind the prefix
    has_mlp: bool = False  # the block has one, where layers of the target have experts
    # What the block attends to: to all, or what the config's mtp_layer_types says, and this where it says nothing.
    attends: Literal["to all", "as the first layer", "to a window"] = "to all"
    embedding: str | None = None  # copies that a module may bring with it
    head: str | None = None
    unread: tuple[str, ...] = ()  # tensors that lie with a module's, and that its makers' code does not read
    is_hidden_first: bool = False  # of the two halves that are projected

    @property
    def is_further_layer(self) -> bool:
        """By its name a module may be one of the target's layers."""
        return "{layer}" in self.prefix

    def prefix_of(self, index: int, num_layers: int) -> str:
        return self.prefix.format(index=index, layer=num_layers + index)

    def own_names(self, index: int) -> frozenset[str]:
        """Behind the prefix: every tensor of module `index` but the block's."""
        copies = (self.embedding, self.head, *self.unread)
        names = (self.token_norm, self.hidden_norm, self.projection, self.final_norm, *copies)
        return frozenset(f"{name.format(index=index)}.weight" for name in names if name is not None)

    def holds(self, name: str, index: int, num_layers: int, block_names: Collection[str] | None) -> bool:
        """Whether a tensor is one of module `index`; block_names None takes any for the block's."""
        prefix, block = self.prefix_of(index, num_layers), self.block.format(index=index)
        rest = name.removeprefix(prefix)
        if rest == name:
            return False
        in_block = rest.removeprefix(block)
        return rest in self.own_names(index) or (
            (not block or in_block != rest) and (block_names is None or in_block in block_names)
        )


# DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5. Each module is one more layer.
DEEPSEEK = MtpLayout(
    title="DeepSeek-V3's",
    prefix="model.layers.{layer}.",
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    embedding="embed_tokens",
    head="shared_head.head",
)
# Hunyuan 3, as Tencent's code and vLLM run it: a head lies there that is not read, the target's takes its place.
HY = MtpLayout(
    title="Hunyuan 3's",
    prefix="model.layers.{layer}.",
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="final_layernorm",
    unread=("embed_tokens", "shared_head", "shared_head.head"),
)
# Ling 3, as its makers' code in vLLM runs it.
LING = replace(HY, title="Ling 3's", unread=())
# arXiv 2505.07608.
MIMO = MtpLayout(
    title="MiMo's",
    prefix="model.mtp_layers.{index}.",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    is_hidden_first=True,
)
# Qwen3-Next and Qwen3.5. The modules share everything but their blocks.
QWEN3_NEXT = MtpLayout(
    title="Qwen3-Next's",
    prefix="mtp.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    block="layers.{index}.",
)
# EXAONE 4.5 and K-EXAONE, as LG's code in vLLM runs them: Qwen3-Next's names.
EXAONE = replace(QWEN3_NEXT, title="EXAONE's", has_mlp=True, attends="as the first layer")
# Mellum 2, as transformers runs it: Qwen3-Next's names, too.
MELLUM = replace(QWEN3_NEXT, title="Mellum's", attends="to a window")
# Nemotron 3, as NVIDIA's code in vLLM runs it; what follows the projection are two layers there, and a block here
# (runner/engine/decoder_names.py).
NEMOTRON = MtpLayout(
    title="Nemotron's",
    prefix="mtp.",
    token_norm="layers.0.enorm",
    hidden_norm="layers.0.hnorm",
    projection="layers.0.eh_proj",
    final_norm="layers.1.final_layernorm",
    block="block.",
)
# ERNIE 4.5, as Baidu's FastDeploy runs it: the norm of the target is its modules' too, and they take what is behind it.
# vLLM norms nothing behind a module.
ERNIE = MtpLayout(
    title="ERNIE 4.5's",
    prefix="model.",
    token_norm="mtp_emb_norm.{index}",
    hidden_norm="mtp_hidden_norm.{index}",
    projection="mtp_linear_proj.{index}",
    final_norm=None,
    block="mtp_block.{index}.",
    has_mlp=True,
)
# The `speculators` format: MiMo's names in a directory of their own, and Qwen3-Next's wiring.
SPECULATORS = MtpLayout(
    title="the speculators format's",
    prefix="mtp_layers.{index}.",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
)
_IN_TARGETS = (QWEN3_NEXT, MIMO, ERNIE, DEEPSEEK, HY)
# By the model_type of targets whose modules have a layout to themselves.
OF_FAMILIES = {
    "bailing_hybrid": LING,
    "exaone4": EXAONE,
    "exaone_moe": EXAONE,
    "mellum": MELLUM,
    "nemotron_h": NEMOTRON,
}


def layouts_of(config: Any) -> tuple[MtpLayout, ...]:
    """That the modules of a target of this config may be in."""
    own = OF_FAMILIES.get(config.model_type)
    return _IN_TARGETS if own is None else (own,)


def num_modules(config: Any) -> int:
    """How many modules a target's config states; 0 when it says nothing.

    Raises:
        UserError: it states something else.
    """
    stated = {key: getattr(config, key, None) or 0 for key in NUM_MODULES_KEYS}
    for key, count in stated.items():
        if type(count) is not int or count < 0:
            of = f"of a {config.model_type} checkpoint"
            raise UserError(f"{key} {of} must be a whole number >= 0, got {count!r}; mend its config")
    return max(stated.values())


def modules_of(config: Any) -> Iterator[tuple[MtpLayout, int]]:
    """(layout, index) of every module that a target of this config may carry.

    A further layer is a module only where the config says so; the other layouts' names leave no doubt.
    """
    stated = num_modules(config)
    for layout in layouts_of(config):
        for index in range(stated if layout.is_further_layer else max(1, stated)):
            yield layout, index


def is_mtp_tensor(name: str, config: Any, block_names: Collection[str] | None = None) -> bool:
    """Whether a tensor of a target's checkpoint belongs to an MTP module.

    block_names: those of a decoder layer's tensors, without the layer's prefix; None takes any name for one.
    """
    return any(
        layout.holds(name, index, int(config.num_hidden_layers), block_names) for layout, index in modules_of(config)
    )
