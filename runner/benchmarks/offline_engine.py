"""This engine and vLLM behind one face, each to be built in a process of its own: both have the shape of vLLM's LLM.

vLLM runs as it comes (torch.compile, its own defaults), in the process that asks, without a second one for its core. It
is imported when it is built, never before. Both forget their prefix caches before every batch, since rounds repeat
their prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.benchmarks.compared_model import has_weights, model_directory
from runner.engine.checkpoint import ModelSource, stated_quantization

CACHE_TOKENS = 16_384  # room for every request of a batch
BLOCK_SIZE = 16  # tokens
VLLM_CACHE_BYTES = {True: 2**28, False: 2**31}  # is it the tiny target? More than CACHE_TOKENS of it
# vLLM refuses to start on a device of which less is free, and several engines share it here.
VLLM_MEMORY_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts to be completed, batch_size at a time; at a temperature above 0 a prompt's seed is its index."""

    prompts: Sequence[Sequence[int]]
    batch_size: int
    output_len: int  # tokens, whatever eos says
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    seconds: float
    texts: Sequence[tuple[int, ...]]  # a prompt's each, as token ids
    num_drafts: int  # 0 of an engine that does not count
    num_accepted_tokens: int
    num_threads: int  # of torch, after the work

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.texts)) / self.seconds

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, as in a run's summary; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


class OfflineEngine:
    """An LLM and the class of its sampling parameters."""

    def __init__(self, llm: Any, sampling_params: Any, device: str, *, counts_drafts: bool) -> None:
        self._llm, self._sampling_params, self._counts_drafts = llm, sampling_params, counts_drafts
        self.device = device  # its type: cpu or cuda

    def complete(self, batch: Batch) -> Answer:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in batch.prompts]
        params = [
            self._sampling_params(
                temperature=batch.temperature,
                seed=index if batch.temperature > 0 else None,
                max_tokens=batch.output_len,
                ignore_eos=True,
            )
            for index in range(len(prompts))
        ]
        self._llm.reset_prefix_cache()
        before = self._draft_counts()
        outputs = []
        started = time.perf_counter()
        for start in range(0, len(prompts), batch.batch_size):
            those = slice(start, start + batch.batch_size)
            outputs += self._llm.generate(prompts[those], params[those], use_tqdm=False)
        seconds = time.perf_counter() - started
        num_drafts, num_accepted_tokens = (now - then for now, then in zip(self._draft_counts(), before, strict=True))
        return Answer(
            seconds=seconds,
            texts=[tuple(output.outputs[0].token_ids) for output in outputs],
            num_drafts=num_drafts,
            num_accepted_tokens=num_accepted_tokens,
            num_threads=torch.get_num_threads(),
        )

    def _draft_counts(self) -> tuple[int, int]:
        """Drafts and accepted tokens since the start; vLLM has no such counters where it drafts nothing."""
        if not self._counts_drafts:
            return 0, 0
        counters = {metric.name: metric for metric in self._llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafts, accepted = (counters[name].value if name in counters else 0 for name in names)
        return drafts, accepted


def open_this_engine(
    *,
    model: str | None,
    max_model_len: int,
    speculative_config: Mapping[str, Any] | None,
    dtype: str,
    num_threads: int,
    counts_drafts: bool,
) -> OfflineEngine:
    """
    Args:
        model: a directory whose config.json is read, for random weights of its shape; None: the tiny target.
        counts_drafts: it always does.
    """
    from runner.llm import LLM, SamplingParams

    weights: dict[str, Any] = {**_weights(model)}
    if "load_format" in weights:  # a config that is given needs no tokenizer beside it
        weights["hf_config"] = _config(weights["model"])
    llm = LLM(
        **weights,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        dtype=dtype,
        num_threads=num_threads,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=CACHE_TOKENS // BLOCK_SIZE,
    )
    return OfflineEngine(llm, SamplingParams, llm.engine.device.type, counts_drafts=True)


def open_vllm(
    *,
    model: str | None,
    max_model_len: int,
    speculative_config: Mapping[str, Any] | None,
    dtype: str,
    num_threads: int,
    counts_drafts: bool,
) -> OfflineEngine:
    """
    Args:
        model: as `open_this_engine` takes it.
        num_threads: has come by OMP_NUM_THREADS, vLLM takes it from nowhere else.
        counts_drafts: vLLM's statistics, off by default, which take up to 5 % of the tiny target's time.
    """
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        **_weights(model),
        skip_tokenizer_init=model is not None,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        dtype=dtype,
        disable_log_stats=not counts_drafts,
        kv_cache_memory_bytes=VLLM_CACHE_BYTES[model is None],
        gpu_memory_utilization=VLLM_MEMORY_SHARE,
    )
    return OfflineEngine(llm, SamplingParams, current_platform.device_type, counts_drafts=counts_drafts)


def _config(directory: str) -> dict[str, Any]:
    """With what a file beside it may say of quantized weights, which vLLM reads there."""
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    quantization = stated_quantization(ModelSource(model=directory, load_format="dummy"))
    return config if quantization is None else {**config, "quantization_config": dict(quantization)}


def _weights(model: str | None) -> dict[str, str]:
    """None: the tiny target. Without files each engine draws its own, and the scale of vLLM's is a thousandth."""
    directory = model_directory(None if model is None else Path(model))
    return {"model": str(directory), **({} if has_weights(directory) else {"load_format": "dummy"})}
