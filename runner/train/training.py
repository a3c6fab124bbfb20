"""From a configuration to a measured head: the target writes, the head learns, the engine runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernels.reference.act_and_mul import LimitedSilu
from runner.config import DrafterMethod, SpeculativeConfig
from runner.engine.checkpoint import resolve_directory, stated_quantization
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.layers import DecoderLayer
from runner.engine.memory import release_unused
from runner.llm import LLM
from runner.measure import measure
from runner.model_files import model_source
from runner.recording import check_record, open_run
from runner.results import write_metrics
from runner.train.directory import replaced_directory
from runner.train.fit import fit_head, load_frozen, read_states
from runner.train.heads.for_target import head_for
from runner.train.heads.head import Head
from runner.train.loop import ReportProgress
from runner.train.optimizer import OptimizerSettings
from runner.train.options import TrainingOptions
from runner.train.progress import stage_bars
from runner.train.texts import Texts, write_texts
from runner.workload import WorkloadItem

logger = logging.getLogger(__name__)

RECORD_FILE = "training.json"
TRACKED = ("steps", "tokens", "final_training_loss", "learning_rate", "parameters", "seconds")  # of the record


def train(
    config: SpeculativeConfig,  # the run that the head is for: method.model is the directory to fill
    options: TrainingOptions,
    items: Sequence[WorkloadItem],  # to learn from
    held_out: Sequence[WorkloadItem],  # to measure it by
) -> tuple[dict[str, Any], str | None]:
    """Trains a head, measures it and records both as one run.

    Returns the record that lies beside the head, and where the run is recorded; `held_out` in the record is the summary
    of the run over the held-out prompts.

    Raises:
        UserError: the target or its answers are not what a head can learn from; nothing is saved then.
    """
    assert isinstance(config.method, DrafterMethod) and config.method.model is not None
    output, started = Path(config.method.model), time.perf_counter()
    check_record(config)
    llm = _load_target(config, options)
    run_name = config.run_name or f"{Path(config.model.model).name}-{config.method.method}-training"
    with open_run(config, llm.engine, held_out, run_name=run_name) as tracker:
        tracker.log_params({**config.model_dump(mode="json"), "training": asdict(options)})
        device, dtype = llm.engine.device, llm.engine.dtype
        with stage_bars() as report_of:
            params, report = config.sampler.to_sampling_params(), report_of("target writes")
            texts = write_texts(llm, items, params, num_texts=options.texts, length=options.length, report=report)
            del llm  # the head is trained in its memory
            head, fitted = _fit(config, options, texts, device, dtype, report_of(config.method.method))
        record = {
            **fitted,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "seconds": round(time.perf_counter() - started, 1),
            "options": asdict(options),
            "config": config.model_dump(mode="json"),
        }
        with replaced_directory(output) as new:
            head.save(new)
            write_metrics(new / RECORD_FILE, record)
        del head
        release_unused()
        summary = measure(LLM.from_config(config), held_out).summary
        tracker.log_summary({**summary, "training": {key: record[key] for key in TRACKED}})
        record["held_out"] = summary
        write_metrics(output / RECORD_FILE, record)
        tracker.log_artifacts([output / RECORD_FILE])
    return record, tracker.location


def _load_target(config: SpeculativeConfig, options: TrainingOptions) -> LLM:
    stated = stated_quantization(model_source(config.model, "model.model"))
    if stated is not None and stated.get("quant_method") != "mxfp4":  # which is read
        raise UserError(
            f"model.model={config.model.model} must be a dense checkpoint to train a head for, got a quantized one "
            f"({stated.get('quant_method')}); name the checkpoint that it was made from, with model.quantization=fp8 "
            "for texts of a target in 8 bits"
        )
    if config.model.quantization is not None:
        logger.warning("texts are the target's in %s; states are the dense one's", config.model.quantization)
    # A window holds a token to guess behind the pending one of every place that a head guesses from.
    if options.length < (shortest := config.method.num_speculative_tokens + 2):
        raise UserError(
            f"--length must be >= {shortest}, method.num_speculative_tokens + 2, got {options.length}; raise it"
        )
    llm = LLM.from_config(SpeculativeConfig.parse({**config.model_dump(), "method": {"method": "none"}}))
    if isinstance(model := llm.engine.target.model, Decoder) and any(map(_is_limited, model.layers)):
        raise UserError(
            "model.model must not cut off what its layers gate: the states that heads learn from are those of "
            "transformers' code, which does not; choose another target"
        )
    longest = llm.engine.target_info.max_model_len
    if options.length > longest:
        raise UserError(f"--length must be <= {longest}, the target's max_model_len, got {options.length}; lower it")
    return llm


def _is_limited(layer: DecoderLayer) -> bool:
    return any(isinstance(own, LimitedSilu) for own in layer.mlp.activations)


def _fit(
    config: SpeculativeConfig,
    options: TrainingOptions,
    texts: Texts,
    device: torch.device,
    dtype: torch.dtype,
    report: ReportProgress,
) -> tuple[Head, dict[str, Any]]:
    """The trained head, and what fit_head says of it."""
    release_unused()
    directory = resolve_directory(model_source(config.model, "model.model"))
    target = load_frozen(directory, device=device, dtype=dtype, trust_remote_code=config.model.trust_remote_code)
    head = head_for(
        config.method.method,
        target,
        num_speculative_tokens=config.method.num_speculative_tokens,
        token_counts=texts.token_counts,
        states=read_states(target, texts.windows[:1]),
        seed=config.seed,
    )
    rate = options.rate_at(target.config.hidden_size)
    settings = OptimizerSettings(
        matrix_lr=rate,
        embedding_lr=0.4 * rate,
        warmup_steps=min(10, options.steps),
        decay_share=0.7,
        float32_muon=device.type == "cpu",
    )
    fitted = fit_head(
        head,
        texts.windows,
        num_steps=options.steps,
        num_rows=options.rows,
        optimizer=settings,
        seed=config.seed,
        report=report,
    )
    return head, {**fitted, "learning_rate": rate}
