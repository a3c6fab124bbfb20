"""The language model inside a checkpoint that takes more than text, read as one that takes nothing else.

Its layers are those of one of our families; encoders of images and sound, and what leads from them into it, are left.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from runner.engine.families import FAMILIES

logger = logging.getLogger(__name__)
Tensor = TypeVar("Tensor")

# model_type of those whose language model sees a prompt of text as it would alone (PaliGemma's sees all of it at once).
WITH_TEXT_PART = (
    *("exaone4_5", "gemma3", "gemma4", "gemma4_unified", "internvl", "kimi_k25", "lfm2_vl", "lfm3_vl", "llama4"),
    *("llava", "llava_next", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm"),
)
_TEXT_PART = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\.")
_ENCODER = re.compile(r"^(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower)\.")
_BEHIND_IT = re.compile(
    r"^(?:model\.)?(?:(?:(?:multi_modal|mm)_projector|connector|embed_(?:vision|audio))\."
    r"|vision_(?:adapter|embedder|projection)\.|image_newline$)"
)


def text_config(config: Any, read_names: Callable[[], Collection[str]] | None) -> Any:
    """The config of a language model inside another, as it would be in a checkpoint of its own; any other as it is.

    read_names: those of the checkpoint's tensors, None where there are none. They say whether the head is tied to the
    embedding: of the two configs each has a default of its own, and few state it.
    """
    if config.model_type not in WITH_TEXT_PART:
        return config
    text = config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        return config
    logger.info("%s: only its language model is read; prompts are text", config.name_or_path or config.model_type)
    text.architectures = [f"{text.model_type.capitalize()}ForCausalLM"]
    text.name_or_path = config.name_or_path
    text.dtype = text.dtype or config.dtype
    ends = getattr(config, "eos_token_id", None)
    text.eos_token_id = getattr(text, "eos_token_id", None) if ends is None else ends
    stated = next(own.tie_word_embeddings for own in (text, config) if hasattr(own, "tie_word_embeddings"))
    text.tie_word_embeddings = stated if read_names is None else not any(map(_HEAD.match, read_names()))
    return text


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors of a checkpoint; where a language model is a part of it, that one's, by the names of one alone."""
    if not any(_TEXT_PART.match(name) or _ENCODER.match(name) for name in tensors):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        if _HEAD.match(name):
            found[_HEAD.sub("lm_head.", name)] = tensor
        elif _TEXT_PART.match(name):
            found[_TEXT_PART.sub("model.", name)] = tensor
        elif not (_ENCODER.match(name) or _BEHIND_IT.match(name)):
            found[name] = tensor
    return found
