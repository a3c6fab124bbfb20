"""Where the run computes and how much of it is in flight at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from runner.config.node import Node


class HardwareConfig(Node):
    """Device, arithmetic and budgets of the engine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes a CUDA GPU when there is one, else the CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of weights and activations; auto is the checkpoint's own, but float32 for tiny and "
        "on a CPU that does not multiply bfloat16",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="of keys and values in the cache; auto is dtype, fp8 (e4m3) takes half of bfloat16's memory, with "
        "the checkpoint's k_scale and v_scale, or 1. Texts are identical for every method, but others than auto's",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="requests in one step at most, in [1, 4096]")
    max_num_batched_tokens: int = Field(
        default=4096,
        ge=1,
        le=2**18,
        description="tokens in one step at most, in [1, 2**18]; at least max_num_seqs * (1 + num_speculative_tokens), "
        "so that every running request can verify all its drafts in every step",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="split prompts over steps; without it a prompt must fit max_num_batched_tokens"
    )
    enable_prefix_caching: bool = Field(
        default=True, description="prompts that begin alike share KV blocks, also over calls of generate"
    )
    enforce_eager: bool = Field(default=False, description="capture no CUDA graphs; on a CPU, record nothing")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of the device's memory for weights and KV cache, in (0, 1]"
    )
    block_size: int = Field(
        default=16, ge=16, le=256, multiple_of=16, description="tokens per KV block, a multiple of 16 in [16, 256]"
    )
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=1, description="KV blocks, >= 1 (vLLM's name, also on the CPU); null: as many as memory holds"
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs (on a CPU, processes) that share the target's layers, in [1, 64]; drafters are whole. "
        "Another number rounds otherwise, and may give other tokens",
    )
    batch_invariant: bool = Field(
        default=True, description="a token's bits do not depend on what shares its launch; needed for the same text"
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of torch in each process, in [1, 1024]; null: torch's choice, shared by all processes",
    )

    @model_validator(mode="after")
    def _check_budgets(self) -> HardwareConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be >= max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}; raise it or lower hardware.max_num_seqs"
            )
        return self
