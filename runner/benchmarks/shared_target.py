"""One target with random weights, and the engines over it that a benchmark compares: built when first asked for.

Every engine has a KV cache of its own, large enough for its batch; the weights are in memory once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from runner.benchmarks.steady_steps import decode_steadily, longest_output, synchronize
from runner.config import ModelConfig, SpeculativeConfig
from runner.engine.checkpoint import ModelSource, load_config, resolve_directory
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel
from runner.llm import LLM
from runner.model_files import model_path, model_source
from runner.target import load_target, resolve_device

DRAFT_VOCAB_SIZE = 32_000
START_TOKENS = 4  # of the prompt's pass, one made kernel by kernel, one captured and one replayed
BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    assemble_s: float  # from weights in memory to an engine
    first_steps_s: float  # of its first few tokens at batch 1: what is compiled or captured late shows here
    num_compiled_kernels: int | None  # that the Triton cache lacked; None where there are no kernels

    @property
    def total_s(self) -> float:
        return self.assemble_s + self.first_steps_s


class SharedTarget:
    def __init__(
        self,
        model: str,
        *,
        device: str,
        prompt_tokens: int,
        new_tokens: int,
        max_batch_size: int,
        dtype: str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """
        Args:
            model: an option of conf/model, a directory or a hub id; only its config is read.
            device: auto, cpu or cuda.
            dtype: of the weights; None: bfloat16 on a GPU, float32 on a CPU.
            quantization: fp8, int8 or none for the weights of the target's layers; None: as the model's option says.
            kv_cache_dtype: fp8, or auto: as dtype.

        Raises:
            UserError: no such model or device.
        """
        self.device = resolve_device(device)
        self.dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        self.kv_cache_dtype = kv_cache_dtype
        self.prompt_tokens, self.new_tokens, self.max_batch_size = prompt_tokens, new_tokens, max_batch_size
        read = _read_model(model)
        if quantization is not None:
            read = read.model_copy(update={"quantization": None if quantization == "none" else quantization})
        self.model = _with_random_weights(read)
        self._engines: dict[str, LLM] = {}

    @cached_property
    def weights(self) -> LoadedModel:
        """Raises UserError when they do not fit, or when the texts would outgrow the model."""
        loaded = load_target(self._config(None, {}))
        synchronize(self.device)
        return loaded

    @property
    def longest_prompt(self) -> int:
        """Tokens that the cache of a plain engine has room for, and one behind them."""
        return self.prompt_tokens + longest_output(self.new_tokens, 0) - 1

    def longest_text(self, num_draft_tokens: int) -> int:
        """Tokens of a request with its prompt.

        Raises:
            UserError: the model has no room for so many.
        """
        longest = self.prompt_tokens + longest_output(self.new_tokens, num_draft_tokens)
        if longest > (most := self.weights.max_model_len):
            raise UserError(
                f"--prompt-tokens and --new-tokens must be {most - longest + self.prompt_tokens + self.new_tokens} "
                f"together at most (the model takes {most}), got {self.prompt_tokens} + {self.new_tokens}; lower one "
                "of them"
            )
        return longest

    def engine(self, method: Mapping[str, Any] | None, batch_size: int, *, batch_invariant: bool = True) -> LLM:
        """The engine of a method, keys of the `method` group, with a cache for batch_size requests; None: plain."""
        key = f"{batch_size} {batch_invariant} {sorted((method or {}).items())}"
        if key not in self._engines:
            drafts = 0 if method is None else int(method["num_speculative_tokens"])
            longest = self.longest_text(drafts)
            blocks = batch_size * -(-longest // BLOCK_SIZE)
            config = self._config(method, {"num_gpu_blocks_override": blocks, "batch_invariant": batch_invariant})
            self._engines[key] = LLM.from_config(config, self.weights)
        return self._engines[key]

    def prompts(self, count: int, num_tokens: int | None = None) -> list[list[int]]:
        """Random token ids, the same in every run; prompt_tokens of them unless told."""
        generator = torch.Generator().manual_seed(0)
        size = (count, self.prompt_tokens if num_tokens is None else num_tokens)
        ids: list[list[int]] = torch.randint(self.weights.model.vocab_size, size, generator=generator).tolist()
        return ids

    def time_start(self) -> StartTimes:
        """Starts an engine as a run does, the search for its cache's size included, and drops it."""
        weights, known = self.weights, _num_compiled_kernels(self.device)
        started = time.perf_counter()
        llm = LLM.from_config(self._config(None, {}), weights)
        synchronize(self.device)
        assembled = time.perf_counter()
        decode_steadily(llm, self.prompts(1), num_new_tokens=START_TOKENS, seed=0)
        finished = time.perf_counter()
        compiled = _num_compiled_kernels(self.device)
        return StartTimes(
            assemble_s=assembled - started,
            first_steps_s=finished - assembled,
            num_compiled_kernels=None if known is None or compiled is None else compiled - known,
        )

    def _config(self, method: Mapping[str, Any] | None, hardware: Mapping[str, Any]) -> SpeculativeConfig:
        return SpeculativeConfig.parse(
            {
                "model": self.model.model_dump(),
                "method": {"method": "none"} if method is None else dict(method),
                "hardware": {
                    "device": self.device.type,
                    "dtype": self.dtype,
                    "kv_cache_dtype": self.kv_cache_dtype,
                    "block_size": BLOCK_SIZE,
                    "enable_prefix_caching": False,  # rounds repeat their prompts
                    "max_num_seqs": self.max_batch_size,
                    **hardware,
                },
            }
        )


def _read_model(name: str) -> ModelConfig:
    option = files("conf") / "model" / f"{name}.yaml"  # read without Hydra, which a machine for benchmarks may lack
    if option.is_file():
        return ModelConfig.model_validate(yaml.safe_load(option.read_text(encoding="utf-8")))
    return ModelConfig(model=name)


def _with_random_weights(model: ModelConfig) -> ModelConfig:
    """The same shape without a checkpoint or a tokenizer, and an EAGLE-3 head of the published layout over it."""
    source = model_source(model, "--model")
    hf_config = model.hf_config
    if hf_config is None:
        file = resolve_directory(source, weights=False) / "config.json"
        if not file.is_file():
            raise UserError(f"--model must hold a config.json, got {model_path(model.model)}, which has none")
        hf_config = json.loads(file.read_text(encoding="utf-8"))
    return ModelConfig.model_validate(
        {
            "model": model.model,
            "load_format": "dummy",
            "quantization": model.quantization,
            "max_model_len": model.max_model_len,
            "hf_config": hf_config,
            "heads": {"eagle3": {"model": "random-eagle3", "hf_config": _eagle3_head(hf_config)}},
        }
    )


def _eagle3_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """One Llama layer of the target's sizes, over a vocabulary of DRAFT_VOCAB_SIZE."""
    target = load_config(ModelSource(model="target", load_format="dummy", hf_config=hf_config))
    num_layers = target.num_hidden_layers
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        **{key: value for key in sizes if (value := getattr(target, key, None)) is not None},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "draft_vocab_size": min(DRAFT_VOCAB_SIZE, target.vocab_size),
        "eagle_aux_hidden_state_layer_ids": [min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)],
    }


def _num_compiled_kernels(device: torch.device) -> int | None:
    """Kernels in the Triton cache."""
    if device.type != "cuda":
        return None
    from triton import knobs

    return sum(1 for _ in Path(knobs.cache.dir).rglob("*.cubin"))
