"""What a run keeps of plain decoding's text, and why it may be less than every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runner.assembly import Assembly
from runner.config import SpeculativeConfig, SuffixKeys
from runner.engine.transformers_model import TransformersModel
from runner.workload import WorkloadItem, highest_temperature


def kept_by_rule(config: SpeculativeConfig, items: Sequence[WorkloadItem]) -> Literal["tokens", "distribution", False]:
    """What the verification rule keeps by itself; a line of the workload may have a temperature of its own."""
    return config.method.lossless(highest_temperature(items, config.sampler.temperature))


def kept_by_run(
    config: SpeculativeConfig, engine: Assembly, items: Sequence[WorkloadItem]
) -> Literal["tokens", "unguaranteed", "distribution", False]:
    """The same on this engine: tokens that the rule keeps are unguaranteed where rows depend on the batch."""
    kept = kept_by_rule(config, items)
    return "unguaranteed" if kept == "tokens" and not engine.target.is_row_invariant else kept


def promise_notes(config: SpeculativeConfig, engine: Assembly, items: Sequence[WorkloadItem]) -> list[str]:
    """Why the bitwise promise is off in this run, if it is."""
    notes = []
    rule = f"rejection_sample_method={config.method.rejection_sample_method}"
    if kept_by_rule(config, items) == "distribution":
        notes.append(f"{rule} keeps the distribution of plain decoding's tokens, not the very tokens")
        if isinstance(config.method, SuffixKeys) and config.sampler.seed is not None:
            # What a request remembers of another was accepted by the very noise that judges it there.
            notes.append(
                f"{rule} keeps it only roughly: with sampler.seed all requests share the noise that suffix "
                "decoding's memory was accepted by; leave sampler.seed null, or choose strict"
            )
    if not config.hardware.batch_invariant:
        notes.append("bitwise promise off: hardware.batch_invariant=false")
    elif not engine.target.is_row_invariant and isinstance(engine.target.model, TransformersModel):
        found = ", as a check at the start found" if engine.target.model.keeps_rows else ""
        notes.append(
            "bitwise promise off: this architecture runs through transformers' modelling code, whose rows depend on "
            f"the batch{found}"
        )
    elif not engine.target.is_row_invariant:
        what = "CPU's matrix products" if engine.device.type == "cpu" else "GPU's kernels"
        notes.append(f"bitwise promise off: this {what} depend on a row's place, as a check at the start found")
    return notes
