"""The texts that a head learns from: what the target itself says to the prompts of a workload.

A drafter is asked to guess what the target writes, not what people wrote. Every prompt is answered greedily once, and
at temperature 1 as often as is asked for beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.train.loop import ReportProgress
from runner.workload import WorkloadItem, params_of

HELD_OUT_EVERY = 10  # prompts


@dataclass(frozen=True, kw_only=True)
class Texts:
    windows: Tensor  # [num_windows, length] int64: prompts and answers one behind the other, cut
    token_counts: Tensor  # [vocab] int64: how often the windows hold each token


def split_prompts(items: Sequence[WorkloadItem]) -> tuple[list[WorkloadItem], list[WorkloadItem]]:
    """(to learn from, held out), every tenth of them and at least one.

    Raises:
        UserError: there is one prompt only.
    """
    if len(items) < 2:
        raise UserError(f"the workload must hold at least 2 prompts, one to be held out, got {len(items)}; add prompts")
    every = min(HELD_OUT_EVERY, len(items))
    held_out = range(every // 2, len(items), every)
    return [item for index, item in enumerate(items) if index not in held_out], [items[index] for index in held_out]


def write_texts(
    llm: LLM,  # of plain decoding
    items: Sequence[WorkloadItem],
    params: SamplingParams,  # max_tokens and what ends an answer, where an item has none of its own
    *,
    num_texts: int,  # a prompt
    length: int,
    report: ReportProgress,
) -> Texts:
    """
    Raises:
        UserError: the texts do not fill one window, or an item contradicts the parameters.
    """
    prompts, asked = list[object](), list[SamplingParams]()
    for item in items:
        own = params_of(item, params)
        prompts.append(item.prompt)
        asked.append(replace(own, temperature=0.0, n=1))
        if num_texts > 1:
            prompts.append(item.prompt)
            asked.append(replace(own, temperature=1.0, n=num_texts - 1))
    total = len(items) * num_texts

    def observe(metrics: MetricsCollector) -> None:
        report(len(metrics.records), total, "answers")

    outputs = llm.generate(prompts, asked, observer=observe)  # type: ignore[arg-type]
    tokens = [
        token
        for output in outputs
        for completion in output.outputs
        for token in (*(output.prompt_token_ids or ()), *completion.token_ids)
    ]
    if len(tokens) < length:
        raise UserError(
            f"the target's answers and their prompts are {len(tokens)} tokens, and --length {length} asks for more; "
            "add prompts, raise --texts or sampler.max_tokens, or lower --length"
        )
    windows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    counts = torch.bincount(windows.flatten(), minlength=llm.engine.target_info.model.vocab_size)
    return Texts(windows=windows, token_counts=counts)
