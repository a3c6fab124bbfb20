"""The family's architecture: Llama from transformers, sized for two CPU cores, written and read as a plain directory.

`ModelShape` is what the recipe chooses; everything else of the configuration is fixed here, for target and draft alike.
Checkpoints are stored in bfloat16 and used in float32, so `load_model` returns what a run of the engine will see.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from runner.tiny.tokenizer import END_OF_TEXT_ID

MAX_POSITION_EMBEDDINGS = 1024
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model; hidden and intermediate are multiples of 32, heads have 64 dimensions."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_kv_heads: int


def build_model(shape: ModelShape, *, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Freshly initialised float32 model; the same seed gives the same weights, the global generator is left alone."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // HEAD_DIM,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    nn.Module.to(model, torch.float32)
    return model


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied weights count once


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes the plain layout, weights in bfloat16, tokenizer included; `model` itself stays as it is."""
    stored = LlamaForCausalLM(model.config)
    nn.Module.to(stored, torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    stored.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only
    save_tokenizer(tokenizer, directory)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release of transformers resolves
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_model(directory: Path, device: torch.device) -> LlamaForCausalLM:
    """The stored weights in float32, ready for evaluation."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    nn.Module.to(model, device)
    nn.Module.eval(model)
    return model
