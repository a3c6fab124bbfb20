"""Whether a drafter fits its target, by its first guesses, and guesses as far ahead as was asked: notes where not.

A head whose numbers of hidden states were meant otherwise than they are read, or that was made for another model of the
same sizes, loads without a word: SGLang and vLLM number what one key names differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.config import DrafterMethod, SelfSpeculationMethod, SpeculativeConfig
from runner.metrics import RequestRecord
from runner.workload import WorkloadItem, highest_temperature

MIN_DRAFTS = 100  # fewer say little
FEW = 0.3  # of the first guesses; the worst head of the tiny family has 36 % of them right, most have 60 to 80 %


def drafter_fit_notes(
    config: SpeculativeConfig, items: Sequence[WorkloadItem], records: Iterable[RequestRecord]
) -> list[str]:
    """One note where most first guesses of a trained drafter were wrong, at temperature 0 under a rule that judges.

    Sampled drafts say less: with noise of their own most are refused however well the drafter knows its target.
    """
    method = config.method
    is_judged = method.rejection_sample_method != "synthetic" and config.model.load_format != "dummy"
    if not isinstance(method, DrafterMethod | SelfSpeculationMethod) or not is_judged:
        return []
    if highest_temperature(items, config.sampler.temperature) > 0:
        return []
    own = (None, method.drafter_name)  # of several sources the drafter's alone
    accepted = [draft[-1] for record in records for source, draft in record.sourced_drafts if source in own]
    share = sum(count > 0 for count in accepted) / max(1, len(accepted))
    if len(accepted) < MIN_DRAFTS or share >= FEW:
        return []
    drafter = config.draft_model_config()
    name = "the target's own layer" if drafter is None else drafter.model
    remedy = "check that it was made for this target and for such texts"
    if method.drafter_name == "early_exit":
        name = "the target's first layers"
        remedy = "choose another method.exit_layer, or a target that was trained to exit early (LayerSkip's)"
    elif method.drafter_name == "sparse_kv":
        name = "the target over a part of its cache"
        remedy = "raise method.num_recent_tokens, or choose another method: these texts need what lies between"
    elif hasattr(method, "aux_hidden_state_layer_ids"):
        remedy += ", and that it reads the hidden states that it was trained on (method.aux_hidden_state_layer_ids)"
    return [f"only {share:.0%} of the first guesses of {name} were accepted at temperature 0; {remedy}"]


def cut_draft_notes(config: SpeculativeConfig, most: int) -> list[str]:
    """One note where a drafter guesses fewer tokens ahead than were asked of it; most: how many it does."""
    asked = config.method.num_speculative_tokens
    if config.method.method == "none" or most >= asked:
        return []
    return [
        f"{asked} tokens were asked of {config.method.method}, whose drafter guesses {most} ahead: so many are drafted"
    ]
