"""Names of the tensors of Nemotron-H's backbone, whose layers are one thing each, and of others, as most have them.

And of norms of OLMo Hybrid's layers with states, and of Kimi Linear's dense layers, which transformers saves by the
name of the others' experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

Tensor = TypeVar("Tensor")

_BESIDE_LAYERS = {"embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER = re.compile(r"^(layers\.\d+)\.mixer\.(\w+)")
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_STATES = ("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias")
_NORM = re.compile(r"^(layers\.\d+)\.norm\.")
_OF_LING = re.compile(r"^model\.layers\.\d+\.attention\.")  # or Sarvam; a module may lie there alone
_LING = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.query_key_value.": ".self_attn.qkv_proj.",
    ".self_attn.query_layernorm.": ".self_attn.q_norm.",
    ".self_attn.key_layernorm.": ".self_attn.k_norm.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
# Of OLMo Hybrid and Flint, and in no other family.
_OTHERS = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".self_attn.softmax_offset": ".self_attn.sinks",
}
_DENSE = re.compile(r"^(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj)\.")
# Of a multi-token-prediction module, whose two layers are what another's one block is.
_MTP_NORM = "mtp.layers.0.enorm.weight"  # in no other layout, and dense in every checkpoint
_MTP_BLOCK = {
    "mtp.layers.0.norm.": "mtp.block.input_layernorm.",
    "mtp.layers.0.mixer.": "mtp.block.self_attn.",
    "mtp.layers.1.norm.": "mtp.block.post_attention_layernorm.",
    "mtp.layers.1.mixer.": "mtp.block.mlp.",
}
_LFM2_NORM = "model.embedding_norm.weight"  # behind all layers, and in no other family
_LFM2 = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


def decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors of a checkpoint, by the names that most decoders have for them."""
    rename = _name
    if _LFM2_NORM in tensors:
        rename = partial(_replaced, _LFM2)
    elif any(map(_OF_LING.match, tensors)):
        rename = partial(_replaced, _LING)
    found = {rename(name): tensor for name, tensor in tensors.items()}
    return {_replaced(_MTP_BLOCK, name): own for name, own in found.items()} if _MTP_NORM in found else found


def _replaced(parts: Mapping[str, str], name: str) -> str:
    for theirs, own in parts.items():
        name = name.replace(theirs, own)
    return name


def _name(name: str) -> str:
    own = name.removeprefix("backbone.")
    if own == name:
        return _DENSE.sub(r"\1.mlp.\2.", _replaced(_OTHERS, name))
    first, _, rest = own.partition(".")
    if first in _BESIDE_LAYERS:
        return f"model.{_BESIDE_LAYERS[first]}.{rest}"
    own = _NORM.sub(r"\1.input_layernorm.", own)
    found = _MIXER.match(own)
    if found is not None:
        part = found[2]
        kind = "self_attn" if part in _OF_ATTENTION else "mamba" if part in _OF_STATES else "mlp"
        own = f"{found[1]}.{kind}.{own.removeprefix(f'{found[1]}.mixer.')}"
    return f"model.{own}"
