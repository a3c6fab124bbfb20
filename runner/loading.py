"""An engine and its workload, from a configuration."""

from __future__ import annotations

from runner.config import SpeculativeConfig, SyntheticWorkload
from runner.earlier_points import EarlierPoints
from runner.llm import LLM
from runner.report import open_console
from runner.workload import WorkloadItem, read_workload, synthetic_workload


def load(config: SpeculativeConfig, earlier: EarlierPoints | None = None) -> tuple[LLM, list[WorkloadItem]]:
    """Weights, a corpus or the first compilation of a method may take a while: the terminal says what is loaded.

    Args:
        earlier: the points of the same sweep that this process has run, whose weights are shared.

    Raises:
        UserError: a file or a checkpoint cannot be used.
    """
    workload = config.workload
    if isinstance(workload, SyntheticWorkload):
        llm = _load(config, earlier)
        return llm, synthetic_workload(workload, llm.engine.target_info.model.vocab_size)
    items = read_workload(workload)  # before a model is loaded, so that a wrong path shows at once
    return _load(config, earlier), items


def _load(config: SpeculativeConfig, earlier: EarlierPoints | None) -> LLM:
    with open_console(stderr=True).status(f"loading {config.model.model} and method={config.method.method}"):
        held = earlier.target_for(config) if earlier else None
        llm = LLM.from_config(config) if held is None else LLM.from_config(config, held.info, held.ranks)
    if earlier is not None:
        earlier.keep_target(config, llm.engine.target_info, llm.ranks)
    return llm
