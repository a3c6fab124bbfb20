"""Small random checkpoints with an MTP module in each published layout, and an independent forward of the module.

The module's block is the last layer of a transformers model of one layer more than the target has; the wiring around
it is written out here, over whole sequences and without a cache.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.transformers_reference import INITIALIZER_RANGE, in_float64, random_model, save, save_tokenizer

VOCAB_SIZE = 96
HIDDEN_SIZE = 64
NUM_LAYERS = 2
OF_TARGET = "the target's norm"
BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# model_type of the target, and what else there is to say of it -> options beyond SHAPE
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "qwen3": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, run by transformers": {**DEEPSEEK, "hidden_act": "gelu"},
    # The module's block attends, behind a layer that does not.
    "qwen3_5_text": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
    # The module's block attends to latents, which are gated.
    "bailing_hybrid": {
        **{key: value for key, value in DEEPSEEK.items() if key not in ("n_routed_experts", "q_lora_rank")},
        "head_dim": 16,
        "num_experts": 8,
        "num_shared_experts": 1,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    # The last layer, which the module's block is taken from, has an MLP.
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": NUM_LAYERS - 1,
    },
    "hy_v3": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    # The module's block attends as the first layer does.
    "exaone4": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "mtp_layer_types": ["sliding_attention"],
    },
    "mellum": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mtp_layer_types": ["sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    },
    # The module's block is two layers, each of one thing; neither turns.
    "nemotron_h": {
        "head_dim": 16,
        "layers_block_type": ["mamba", "moe", "attention", "attention", "moe"],
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "moe_intermediate_size": 32,
        "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "time_step_min": 1e-30,  # as in tests/recurrent_families.py
    },
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """A layout as its makers describe it: names of tensors, order of the halves."""

    module: str
    block: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None  # None: the target's
    hidden_first: bool = False


LAYOUTS = {
    # vllm/model_executor/models/deepseek_mtp.py: cat(enorm(embedding), hnorm(state)); shared_head.norm before the head
    "deepseek": Names(
        module=f"model.layers.{NUM_LAYERS}.",
        block=f"model.layers.{NUM_LAYERS}.",
        token_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="shared_head.norm",
    ),
    # vllm/model_executor/models/mimo_mtp.py and XiaomiMiMo/MiMo modeling_mimo.py: cat(state, embedding)
    "mimo": Names(
        module="model.mtp_layers.0.",
        block="model.mtp_layers.0.",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
    ),
    # vllm/model_executor/models/hy_v3_mtp.py: cat(enorm(embedding), hnorm(state)); the target's head. So does Ling 3,
    # as megatron/bridge/models/bailing/bailing_moe3_bridge.py names its tensors.
    "hy": Names(
        module=f"model.layers.{NUM_LAYERS}.",
        block=f"model.layers.{NUM_LAYERS}.",
        token_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="final_layernorm",
    ),
    # vllm/model_executor/models/qwen3_next_mtp.py and exaone_moe_mtp.py: cat(embedding, state)
    "qwen3_next": Names(
        module="mtp.",
        block="mtp.layers.0.",
        token_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
    ),
    # vllm/model_executor/models/nemotron_h_mtp.py: cat(enorm(embedding), hnorm(state)), an attention, experts
    "nemotron": Names(
        module="mtp.",
        block="mtp.layers.",
        token_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        projection="layers.0.eh_proj",
        final_norm="layers.1.final_layernorm",
    ),
    # PaddlePaddle/ERNIE modeling of ernie4_5_moe: cat(embedding, state), and the model's own norm behind every depth
    "ernie": Names(
        module="model.",
        block="model.mtp_block.0.",
        token_norm="mtp_emb_norm.0",
        hidden_norm="mtp_hidden_norm.0",
        projection="mtp_linear_proj.0",
        final_norm=None,
    ),
    # speculators/models/mtp/model_definitions.py: cat(embedding, state)
    "speculators": Names(
        module="mtp_layers.0.",
        block="mtp_layers.0.",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
    ),
}
# (layout, model_type of the transformers model that target and block are taken from)
PUBLISHED = (
    ("deepseek", "deepseek_v3"),
    ("deepseek", "deepseek_v3, run by transformers"),
    ("deepseek", "glm4_moe"),
    ("deepseek", "llama"),
    ("ernie", "ernie4_5_moe"),
    ("hy", "bailing_hybrid"),
    ("hy", "hy_v3"),
    ("deepseek", "mistral"),
    ("mimo", "qwen2"),
    ("nemotron", "nemotron_h"),
    ("qwen3_next", "exaone4"),
    ("qwen3_next", "exaone_moe"),
    ("qwen3_next", "mellum"),
    ("qwen3_next", "qwen3"),
    ("qwen3_next", "qwen3_5_text"),
    ("qwen3_next", "qwen3_moe"),
    ("speculators", "qwen3"),
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A target with its module on disk, and both in memory."""

    directory: Path  # of the target
    head: Path | None  # of the module, where it has a directory of its own
    names: Names
    model: Any  # transformers', of the target's layers and the block's, in float32
    num_layers: int  # of the target
    tensors: dict[str, torch.Tensor]  # the module's, but for its block's

    def reference(self, dtype: torch.dtype) -> Reference:
        return Reference(self, dtype)


class Reference:
    """Target and module in one dtype; for float64 call it under KeepFloat64."""

    def __init__(self, written: Written, dtype: torch.dtype) -> None:
        self.names, self.dtype = written.names, dtype
        self.target = in_float64(written.model) if dtype is torch.float64 else copy.deepcopy(written.model)
        decoder = self.target.model
        self.block = decoder.layers[written.num_layers :]
        decoder.layers = decoder.layers[: written.num_layers]
        decoder.config.num_hidden_layers = written.num_layers
        self.rotary = getattr(decoder, "rotary_emb", None)
        self.eps = getattr(decoder.config, "rms_norm_eps" if self.rotary else "layer_norm_epsilon")
        self.embedding, self.head = decoder.get_input_embeddings().weight, self.target.lm_head.weight
        self.tensors = {name: tensor.to(dtype) for name, tensor in written.tensors.items()}
        self.added = _added_to_norms(decoder.config.model_type)
        # Of the block, where rotations differ by kind.
        self.kind = ("sliding_attention",) if decoder.config.model_type == "mellum" else ()
        if self.names.final_norm is None:
            self.tensors[OF_TARGET] = decoder.norm.weight

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """The target's states behind its final norm, [num_tokens, hidden]."""
        result: torch.Tensor = self.target.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return result

    @torch.inference_mode()
    def draft(self, token_ids: list[int], states: torch.Tensor, num_steps: int) -> tuple[list[int], torch.Tensor]:
        """Greedy drafts behind a text, states [num_tokens, hidden] of it, and their logits [num_steps, vocab]."""
        tokens, hidden = list(token_ids[1:]), states[: len(token_ids) - 1].to(self.dtype)
        logits: list[torch.Tensor] = []
        for _ in range(num_steps):
            normed = self._forward(torch.tensor(tokens), hidden)
            logits.append(F.linear(normed[-1], self.head))
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, normed[-1:]))
        return tokens[len(token_ids) - 1 :], torch.stack(logits)

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        names, num_rows = self.names, len(token_ids)
        token = self._norm(F.embedding(token_ids, self.embedding), names.token_norm)
        state = self._norm(hidden, names.hidden_norm)
        both = torch.cat((state, token) if names.hidden_first else (token, state), dim=1)
        rows = F.linear(both, self.tensors[names.projection])[None]
        positions = torch.arange(num_rows)
        distance = positions[:, None] - positions
        window = getattr(self.target.config, "sliding_window", None) or num_rows
        mask = torch.zeros(num_rows, num_rows, dtype=self.dtype)
        mask = mask.masked_fill((distance < 0) | (distance >= window), torch.finfo(self.dtype).min)
        turned = {"position_embeddings": self.rotary(rows, positions[None], *self.kind)} if self.rotary else {}
        for layer in self.block:
            output = layer(rows, attention_mask=mask[None, None], position_ids=positions[None], **turned)
            rows = output[0] if isinstance(output, tuple) else output
        return self._norm(rows[0], names.final_norm or OF_TARGET)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.tensors[name] + self.added)


def write(directory: Path, layout: str, model_type: str, **options: Any) -> Written:
    """Write a target with a module; options are more keys of the target's config."""
    from transformers import AutoConfig

    names = LAYOUTS[layout]
    family = model_type.partition(",")[0]
    model = random_model(AutoConfig.for_model(family, **{**SHAPE, **TARGETS[model_type]}))
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    values = json.loads((directory / "config.json").read_text())
    num_layers = NUM_LAYERS if layout != "nemotron" else len(model.model.layers) - 2
    values["num_hidden_layers"] = num_layers
    values |= {key: values[key][:num_layers] for key in BY_LAYER if key in values}
    if layout == "mimo":
        values |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    if layout in ("mimo", "deepseek", "ernie", "hy", "nemotron"):
        values["num_nextn_predict_layers"] = 1
    values |= options
    (directory / "config.json").write_text(json.dumps(values))

    saved = load_file(directory / "model.safetensors")
    block: dict[str, torch.Tensor] = {}
    for at, layer in enumerate(range(num_layers, len(model.model.layers))):
        last, own = (
            (f"backbone.layers.{layer}.", f"{names.block}{at}.")
            if layout == "nemotron"
            else (f"model.layers.{layer}.", names.block)
        )
        block |= {own + name.removeprefix(last): saved.pop(name) for name in list(saved) if name.startswith(last)}
    beside = _random_tensors(names, _added_to_norms(model_type))
    module = block | {f"{names.module}{name}.weight": tensor for name, tensor in beside.items()}
    head = None
    if layout == "speculators":
        head = directory / "head"
        head.mkdir()
        layer = {**values, "num_hidden_layers": NUM_LAYERS}
        config = {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "transformer_layer_config": layer,
        }
        (head / "config.json").write_text(json.dumps(config))
        save_file(module, head / "model.safetensors")
    else:
        saved |= module
    save_file(saved, directory / "model.safetensors", metadata={"format": "pt"})
    return Written(directory=directory, head=head, names=names, model=model, num_layers=num_layers, tensors=beside)


def _added_to_norms(model_type: str) -> float:
    """To their weights, as its makers write them."""
    return 1.0 if model_type.startswith("qwen3_5") else 0.0


def _random_tensors(names: Names, added: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    norms = (names.token_norm, names.hidden_norm, names.final_norm)
    tensors = {
        name: 1 - added + 0.2 * torch.randn(HIDDEN_SIZE, generator=generator) for name in norms if name is not None
    }
    projection = torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=generator)
    return tensors | {names.projection: INITIALIZER_RANGE * projection}
