"""Which method a drafter's checkpoint is made for, read from its own files: no tensor is loaded, no pickle is run.

A local directory is judged by its config.json, and by the names of its tensors where that leaves EAGLE's layers in
doubt; a hub id by its name, as in vLLM, which goes for Medusa's, IBM's and Arctic's heads too. Layouts: the projects'
own, `speculators`, vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.tensor_names import tensor_names
from runner.config.vllm_keys import HUB_MARKS, NAME_MARKS
from runner.engine.json_object import read_json
from runner.engine.mtp_layout import ASSISTANTS, NUM_MODULES_KEYS
from runner.tiny import HEAD_NAMES

# What the checkpoint of a method is called.
KINDS = {
    "draft_model": "a draft model of the same vocabulary",
    "pard": "a PARD draft model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "mtp": "a multi-token-prediction layer",
    "medusa": "a set of Medusa heads",
    "mlp_speculator": "an MLP or LSTM speculator",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
}
# And of some that a method runs beside these.
DFLASH2, DOMINO = "a DFlash 2 drafter", "a Domino drafter"
DEEPSPECS_DFLASH, PARD2 = "a DFlash drafter of DeepSpec's", "a PARD-2 draft model"


def kind_of(method: str) -> str:
    """What a method's checkpoint is called; a method that is new here has no name for its own yet."""
    return KINDS.get(method, f"a drafter for method={method}")


# Keys of config.json, or of the dflash_config in it, that mark a drafter which no method here runs.
_FOREIGN_KEYS = {
    "xpress_rank": "an XPress drafter",
}
_SPECULATORS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
}
_RECURRENT = ("mlpspeculator", "lstmspeculator", "mlpvariantspeculator")
_EAGLE3_KEYS = {"draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"}


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """What a checkpoint says that it is."""

    kind: str  # "an EAGLE-3 head"
    method: str | None  # the method that runs it; None: none does
    is_model: bool = False  # a language model too: it can also draft token by token


def method_of_model(model: str) -> str:
    """The method that `model` means when none is named; where vLLM goes by the name alone, local files speak first.

    Raises:
        ValueError: a local checkpoint that no method here runs.
    """
    if is_dotted_path(model):
        return "custom_class"
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if (drafter := drafter_of(model)) is not None:
        if drafter.method is None:
            raise ValueError(f"model {_unavailable(model, drafter)}")
        return drafter.method
    marks = NAME_MARKS if Path(model).expanduser().is_dir() else (*NAME_MARKS, *HUB_MARKS)
    return next((method for mark, method in marks if mark in model.lower()), "draft_model")


def tokens_of_model(model: str, method: str) -> int | None:
    """The num_speculative_tokens that the config.json of a local checkpoint means; None where it means none.

    As in vLLM: what the first proposal method of a speculators config says, else n_predict (IBM's and Arctic's), which
    for method mtp is the number of modules; for dspark instead the rows of its block that guess.
    """
    directory = Path(model).expanduser()
    config = read_json(directory / "config.json") if directory.is_dir() else {}
    if method == "dspark":
        sizes = _with_nested(config)
        found = [sizes.get(key) for key in ("block_size", "dspark_block_size")]
        if config.get("sample_from_anchor") is False:  # one row guesses nothing
            found = [size - 1 if type(size) is int else None for size in found]
    else:
        found = [config.get(key) for key in ("n_predict", *(NUM_MODULES_KEYS if method == "mtp" else ()))]
    match config.get("speculators_config"):
        case {"proposal_methods": [{"speculative_tokens": tokens}, *_]}:
            found = [tokens]
    return next((tokens for tokens in found if type(tokens) is int and tokens > 0), None)


def is_dotted_path(model: str) -> bool:
    """Whether `model` reads as package.module.Class."""
    return "." in model and all(part.isidentifier() for part in model.split("."))


def misfit(model: str, method: str, *, key: str = "method") -> str | None:
    """Why a method cannot run a local checkpoint, as a rule with its remedy; None when nothing speaks against it.

    key: where the method was named.
    """
    drafter = drafter_of(model)
    if drafter is None or drafter.method == method or (drafter.is_model and method == "draft_model"):
        return None
    if drafter.method is None:
        return _unavailable(model, drafter)
    remedy = f"set {key}={drafter.method}, or name {kind_of(method)}"
    return f"{model!r} is {drafter.kind}, got {key}={method}; {remedy}"


def drafter_of(model: str) -> Drafter | None:
    """What a name of the tiny family or a local checkpoint says of itself; None: a plain model, or nothing local."""
    for method, name in HEAD_NAMES.items():
        if model == name:
            return Drafter(kind=KINDS[method], method=method, is_model=method == "pard")
    directory = Path(model).expanduser()
    return _drafter_in(directory) if directory.is_dir() else None


def _unavailable(model: str, drafter: Drafter) -> str:
    return f"{model!r} is {drafter.kind}, which is not available; name a drafter of {', '.join(KINDS)}"


def _drafter_in(directory: Path) -> Drafter | None:
    config = read_json(directory / "config.json")
    values = _with_nested(config)
    for key, kind in _FOREIGN_KEYS.items():
        if values.get(key):  # null and 0 switch such parts off
            return Drafter(kind=kind, method=None)
    # DeepSpec's DFlash heads are its DSpark model without a sequential head.
    is_dspark = values.get("markov_rank", "dspark" in _architectures(config))
    if is_dspark or values.get("projector_type") == "dspark":
        return Drafter(kind=KINDS["dspark"], method="dspark")
    if values.get("selector_rank") or values.get("conv_kernel_size"):
        return Drafter(kind=DFLASH2, method="dflash")
    # Speculators writes the other keys of such projectors (Domino's gru_hidden_dim) with every DFlash head.
    projector = values.get("projector_type", "domino" if "dominodraftmodel" in _architectures(config) else None)
    if projector == "domino" and "speculators_model_type" not in config:
        return Drafter(kind=DOMINO, method="dflash")
    if projector not in (None, "dflash"):
        return Drafter(kind=f"a DFlash drafter with projector_type={projector}", method=None)
    if (speculator := config.get("speculators_model_type")) is not None:
        method = _SPECULATORS.get(str(speculator))
        kind = KINDS[method] if method else f"a {speculator} drafter of the speculators format"
        return Drafter(kind=kind, method=method)
    method = _method_of_config(config) or _method_of_files(directory)
    if method is None:
        return None
    is_model = method == "pard" or (method == "mtp" and not _is_mtp_only(config))
    kind = KINDS[method]
    if method == "pard" and (config.get("spd_type") == "pard2" or config.get("pard2")):
        kind = PARD2
    elif method == "dflash" and "dspark" in _architectures(config):
        kind = DEEPSPECS_DFLASH
    return Drafter(kind=kind, method=method, is_model=is_model)


def _with_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what stands in a dflash_config, as the loaders read it."""
    nested = config.get("dflash_config")
    return {**config, **(nested if isinstance(nested, Mapping) else {})}


def _method_of_config(config: Mapping[str, Any]) -> str | None:
    architectures, family = _architectures(config), str(config.get("model_type"))
    marks = {
        "dflash": "dflash_config" in config
        or family == "muse_glimmer_assistant"
        or any(name in architectures for name in ("dflash", "dspark", "museglimmerassistant")),
        "eagle3": "eagle3" in architectures or not _EAGLE3_KEYS.isdisjoint(config),
        "medusa": "medusa_num_heads" in config or family == "medusa" or "medusa" in architectures,
        "mlp_speculator": family == "mlp_speculator" or any(name in architectures for name in _RECURRENT),
        "pard": config.get("spd_type") in ("pard", "pard2") or "pard_token" in config or bool(config.get("pard2")),
        "eagle": family == "eagle" or "eagle" in architectures,
        "mtp": _is_mtp_only(config) or any(config.get(key) for key in NUM_MODULES_KEYS),
    }
    return next((method for method, is_marked in marks.items() if is_marked), None)


def _architectures(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    return " ".join(map(str, listed)).lower() if isinstance(listed, list) else ""


def _is_mtp_only(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint holds the layer alone, not the model that it belongs to."""
    family = str(config.get("model_type"))
    return family.endswith("_mtp") or family in ASSISTANTS


def _method_of_files(directory: Path) -> str | None:
    """The original EAGLE repositories write the config of a small Llama; the tensors tell it from one."""
    if any((directory / f"medusa_lm_head.{suffix}").is_file() for suffix in ("pt", "safetensors")):
        return "medusa"
    names = tensor_names(directory)
    if any(name.startswith("midlayer.") or name.endswith("layers.0.hidden_norm.weight") for name in names):
        return "eagle3"
    return "eagle" if "fc.weight" in names else None
