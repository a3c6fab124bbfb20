"""A draft head's files: its config as plain values, and its tensors, safetensors or pickled.

Head repositories carry configs that transformers does not know and, some of them, pickled weights. Pickles are read
with weights_only, so they can hold tensors and plain values, and run nothing. Filling is strict as a target's is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runner.engine.architecture import Architecture, are_names, read_architecture
from runner.engine.checkpoint import (
    ModelSource,
    read_tensors,
    register_configs,
    resolve_directory,
    unreadable_config,
)
from runner.engine.errors import UserError, first_of
from runner.engine.families import GEMMA4_FAMILIES, HEAD_FAMILIES
from runner.engine.idle_bias import is_idle_bias
from runner.engine.json_object import require_json
from runner.engine.linear import WeightTarget
from runner.engine.quantized_tensors import QuantizedTensor
from runner.engine.rope import warn_of_unread_rope
from runner.engine.stored_quantization import tell_expanded
from runner.engine.weight_filling import draw_weight, fill_weight

HeadTensor = torch.Tensor | QuantizedTensor
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
# Keys that heads of several kinds have, and their layers; null is as good as no key, but where layers should stand.
_LAYERS = "transformer_layer_config"
_NAMES = ("architectures", "layer_types")
_MAPPINGS = ("rope_parameters", "rope_scaling", "dflash_config", "eagle_config", _LAYERS)


def read_head_config(source: ModelSource) -> dict[str, Any]:
    """config.json of a head, or the hf_config that stands in for it when load_format is dummy.

    Raises:
        UserError: no such head, no JSON object there, or something else in it where heads have names or mappings.
    """
    values = _read_values(source)
    for part in (values, values.get(_LAYERS)):
        if isinstance(part, Mapping):
            _require_kinds(part, source)
    return values


def _read_values(source: ModelSource) -> dict[str, Any]:
    if source.is_dummy and source.hf_config is not None:
        return dict(source.hf_config)
    directory = resolve_directory(source, weights=not source.is_dummy, pickles=PICKLES)
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(
            f"{source.name} must hold a config.json, got {directory}, which has none; point to the head's directory"
        )
    return require_json(file, source.name)


def _require_kinds(values: Mapping[str, Any], source: ModelSource) -> None:
    for key in (*_NAMES, *_MAPPINGS):
        value = values.get(key)
        is_right = are_names(value) if key in _NAMES else isinstance(value, Mapping)
        if is_right or key not in values or (value is None and key != _LAYERS):
            continue
        rule = "a list of names" if key in _NAMES else "a mapping"
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be {rule}, got {value!r}; mend it or download the "
            "head again"
        )


def read_head_tensors(source: ModelSource) -> dict[str, HeadTensor]:
    """Every tensor of a head, by its name in the checkpoint, on the CPU; none when load_format is dummy.

    Raises:
        UserError: no weights, or a file that holds something else.
    """
    if source.is_dummy:
        return {}
    directory = resolve_directory(source, pickles=PICKLES)
    pickled = [directory / name for name in PICKLES if (directory / name).is_file()]
    if any(directory.glob("*.safetensors")) or not pickled:
        tensors = {name: as_read(tensor) for name, tensor in read_tensors(source)}
        _require_dense(tensors, source)
        return tensors
    tensors = {}
    for file in pickled:
        tensors |= _unpickle(file, source)
    return tensors


def as_read(tensor: Any) -> HeadTensor:
    """A safetensors slice: a quantized weight as it is, what else there is read."""
    read: HeadTensor = tensor if isinstance(tensor, QuantizedTensor) else tensor[...]
    return read


def read_pickle_beside(source: ModelSource, name: str, remedy: str) -> dict[str, torch.Tensor]:
    """Tensors by their names, of a pickle beside a model's safetensors; none when load_format is dummy.

    Raises:
        UserError: no such file, which ends with the remedy, or one that holds something else.
    """
    if source.is_dummy:
        return {}
    directory = resolve_directory(source, pickles=(name,))
    if not (directory / name).is_file():
        raise UserError(f"{source.name}={source.model} must hold a {name}, got {directory}, which has none; {remedy}")
    return _unpickle(directory / name, source)


def head_architecture(
    values: Mapping[str, Any], source: ModelSource, families: Collection[str] = HEAD_FAMILIES
) -> tuple[Architecture, Any]:
    """The decoder layer that a head's config describes, and the transformers config of it (for its rotations).

    families: those that such heads may be built of.

    Raises:
        UserError: a family that our decoder layer is not built for, or a config that transformers cannot read.
    """
    values = dict(values)
    family = str(values.pop("model_type", "llama"))
    if family not in families:
        raise UserError(
            f"{source.name}={source.model}: model_type must be one of {', '.join(families)}, got {family!r}; "
            "choose a head whose layer is of one of these families"
        )
    for key in ("auto_map", "is_causal"):  # what a head's rows see is up to its method
        values.pop(key, None)
    values["architectures"] = [f"{family.capitalize()}ForCausalLM"]
    config = read_own_config(family, values, source)
    warn_of_unread_rope(config, f"{source.name}={source.model}")
    arch = read_architecture(config)
    if family in GEMMA4_FAMILIES:
        if arch is None or not arch.is_dense_gemma4:
            raise UserError(
                f"{source.name}={source.model}: the layers of its config.json must be Gemma 4's with hidden_activation "
                "'gelu_pytorch_tanh' that see all (layer_types), without experts (enable_moe_block), inputs of their "
                "own (hidden_size_per_layer_input) and keys of others (num_kv_shared_layers); choose such a head"
            )
    elif arch is None or not arch.is_plain:
        raise UserError(
            f"{source.name}={source.model}: the layer of its config.json must be like Llama's, with hidden_act 'silu' "
            "and rotations of whole heads; choose a head whose layer is"
        )
    return arch, config


def read_own_config(model_type: str, values: Mapping[str, Any], source: ModelSource) -> Any:
    """The transformers config of a head, from values of its config.json.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    register_configs()
    own = {key: value for key, value in values.items() if key not in ("model_type", "_name_or_path")}
    own["name_or_path"] = source.model  # what errors about its sizes name
    try:
        return AutoConfig.for_model(model_type, **own)
    except unreadable_config() as error:
        raise UserError(
            f"{source.name}={source.model}: its config.json cannot be read as a {model_type} config: "
            f"{' '.join(str(error).split())}; mend it or download the head again"
        ) from error


def fill_head(
    targets: Mapping[str, WeightTarget],
    tensors: Mapping[str, HeadTensor],
    source: ModelSource,
    kind: str,  # as people call it: "an EAGLE-3 head"
    repeated: Mapping[str, str] | None = None,  # places that take the tensor of another, and whose
) -> None:
    """Copy tensors into their places, every one of them; random weights when load_format is dummy.

    Raises:
        UserError: missing or surplus tensors, or one of another shape or kind; all of them in one message.
    """
    origins = repeated or {}
    own = {name: target for name, target in targets.items() if name not in origins}
    if source.is_dummy:
        _fill_randomly(own)
        for name in targets.keys() - own.keys():
            _repeat(own[origins[name]], targets[name])
        return
    problems = {
        "unexpected": sorted(
            name
            for name, tensor in tensors.items()
            if name not in own and not is_idle_bias(name, tensor, own.__contains__)
        ),
        "missing": sorted(name for name in own if name not in tensors),
        "of another shape": [
            f"{name} {list(tensors[name].shape)} for {list(target.shape)}"
            for name, target in sorted(own.items())
            if name in tensors and tensors[name].shape != target.shape
        ],
        "of another kind": [
            f"{name} {str(tensor.dtype)[6:]} for {str(own[name].view.dtype)[6:]}"
            for name, tensor in sorted(tensors.items())
            if name in own and isinstance(tensor, torch.Tensor) and not _converts(tensor.dtype, own[name].view.dtype)
        ],
    }
    found = [f"{what}: {first_of(names)}" for what, names in problems.items() if names]
    if found:
        raise UserError(
            f"{source.name}={source.model}: the tensors are not those of {kind} with its config.json; "
            f"{'; '.join(found)}; download it again, or name the method that it was made for"
        )
    for name, target in targets.items():
        fill_weight(target, tensors[origins.get(name, name)], name, source)
    quantized = [name for name, tensor in tensors.items() if isinstance(tensor, QuantizedTensor)]
    tell_expanded((name.removesuffix(".weight") for name in quantized), targets, source)


def _repeat(origin: WeightTarget, target: WeightTarget) -> None:
    target.view.copy_(origin.view)
    if target.quantized is not None and origin.quantized is not None:
        for name, tensor in origin.quantized.tensors.items():
            target.quantized.tensors[name].copy_(tensor)


def _converts(stored: torch.dtype, held: torch.dtype) -> bool:
    """Whether its numbers may be held as such: weights are no whole numbers, and nothing of a head is complex."""
    return not stored.is_complex and (stored.is_floating_point or not held.is_floating_point)


def _fill_randomly(targets: Mapping[str, WeightTarget]) -> None:
    """Random weights of the scale that keeps activations finite, the same in every run."""
    generator: torch.Generator | None = None
    for name, target in targets.items():
        if target.quantized is None and not target.view.is_floating_point():
            target.view.zero_()
        elif "norm" in name or "ln." in name:
            target.view.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = generator or torch.Generator(target.view.device).manual_seed(0)
            draw_weight(target, generator)


def _unpickle(file: Path, source: ModelSource) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        tensors = dict(_flatten(loaded)) if isinstance(loaded, Mapping) else {}
    except Exception as error:  # torch raises any over garbage, and mappings may be within themselves
        raise UserError(
            f"{source.name}: {file} is corrupt or holds more than tensors ({' '.join(str(error).split())[:200]}); "
            "download it again"
        ) from error
    if not tensors:
        raise UserError(f"{source.name}: {file} must hold tensors by their names; download it again")
    _require_dense(tensors, source)
    return tensors


def _require_dense(tensors: Mapping[str, HeadTensor], source: ModelSource) -> None:
    """Raises UserError where a tensor cannot be copied into a head's weights, or is a number without a size."""
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedTensor):
            continue
        is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        if not is_dense or tensor.ndim == 0:
            got = "a single number" if is_dense else "a sparse, nested or quantized one, or one without its numbers"
            raise UserError(
                f"{source.name}={source.model}: {name} must be a dense tensor, got {got}; download it again"
            )


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value.detach()
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
