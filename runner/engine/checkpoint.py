"""A model's files: where they are, what config they carry, and their tensors one by one.

Accepts a directory in Hugging Face layout or a hub id. Reads safetensors only, never pickles, and runs no code
of a checkpoint unless trust_remote_code is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from kernels.quantized_weight import FLOAT8
from kernels.words import Kind
from runner.engine.architecture import are_names
from runner.engine.config_overrides import overridden, require_overridable
from runner.engine.decoder_names import decoder_tensors
from runner.engine.errors import UserError, first_of
from runner.engine.json_object import read_json, require_json
from runner.engine.mxfp4_tensors import stack_mxfp4
from runner.engine.packed_tensors import unpack_tensors
from runner.engine.quantization import read_scheme
from runner.engine.quantized_tensors import EIGHT_BITS, OF_ATTENTION, WORDS, require_plain
from runner.engine.scaled_stacks import take_scaled_stacks
from runner.engine.text_part import text_config, text_tensors


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model to load, and how."""

    model: str  # directory or hub id
    revision: str | None = None
    load_format: str = "auto"  # auto | safetensors: from files; dummy: random weights of the config's shape
    trust_remote_code: bool = False
    hf_config: Mapping[str, Any] | None = None  # stands in for config.json when load_format is dummy
    hf_overrides: Mapping[str, Any] | None = None  # values in place of those of either
    quantization: Kind | None = None  # fp8 | int8: what decoder layers multiply by is held so; None: as it is stored
    quantizes_head: bool = False  # and what their states are multiplied by
    name: str = "model.model"  # the option to name in errors

    @property
    def quantization_option(self) -> str:
        """That says how its weights are to be held."""
        return self.name.replace(".model", ".quantization")

    def has_files_of(self, other: ModelSource) -> bool:
        """Whether both name the same checkpoint, whichever option each is of and however it holds its weights."""
        apart = {key: getattr(other, key) for key in ("hf_overrides", "quantization", "quantizes_head", "name")}
        return replace(self, **apart) == other

    @property
    def is_dummy(self) -> bool:
        return self.load_format == "dummy"


def resolve_directory(source: ModelSource, *, weights: bool = True, pickles: tuple[str, ...] = ()) -> Path:
    """The local directory of a checkpoint, downloaded from the hub if need be.

    pickles: names of pickled weights to download too, for layouts that have no others.
    """
    path = Path(source.model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or source.model.startswith((".", "/", "~")) or source.model.count("/") > 1:
        raise UserError(
            f"{source.name} must be a directory in Hugging Face layout or a hub id, got {source.model!r}, where "
            "there is no directory; check the path"
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "tokenizer*"]
    patterns += ["*.safetensors", *pickles] if weights else []
    patterns += ["*.py"] if source.trust_remote_code else []
    try:
        return Path(
            huggingface_hub.snapshot_download(
                source.model,
                revision=source.revision,
                allow_patterns=patterns,
                ignore_patterns=["original/*", "consolidated*"],  # the same weights in their makers' own layout
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = _one_line(error)
        raise UserError(
            f"{source.name}={source.model}: cannot be downloaded from the hub ({type(error).__name__}: {reason}); "
            f"check the id, the network and HF_TOKEN, or {_without_hub(source)}"
        ) from error


def _without_hub(source: ModelSource) -> str:
    if source.name != "model.model":  # a drafter
        return f"point to a local directory with {source.name}=<directory>"
    if source.is_dummy:
        return "give the shape as model.hf_config, or point to a directory with a config.json"
    return (
        "point to a local directory (model=hf model.model=<directory>), or try the speed of its shape before the "
        "download: model.load_format=dummy, where the config is in the cache or given as model.hf_config"
    )


def load_config(source: ModelSource) -> Any:
    """The transformers config of a model; of one that takes more than text, of its language model where we have it.

    Raises:
        UserError: no such model, or a config that cannot be read.
    """
    from transformers import AutoConfig

    register_configs()
    unreadable = unreadable_config()
    if source.is_dummy and source.hf_config is not None:
        values = dict(source.hf_config)
        name = source.name.replace(".model", ".hf_config")
        if "model_type" not in values:
            raise UserError(f"{name} must have a model_type, got {sorted(values)}; add one, such as model_type: llama")
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            read = partial(AutoConfig.for_model, config.model_type)
            return text_config(_overridden(config, values, source, lambda changed: read(**changed)), None)
        except unreadable as error:
            raise UserError(f"{name} must be a config that transformers reads: {_one_line(error)}; mend it") from error
    directory = resolve_directory(source, weights=not source.is_dummy)
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(
            f"{source.name} must hold a config.json, got {directory}, which has none; "
            "point to the directory that `save_pretrained` wrote"
        )
    of_code = (ImportError,) if source.trust_remote_code else ()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=source.trust_remote_code)
        path = config.name_or_path
        config = _overridden(config, read_json(file), source, type(config).from_dict)
        config.name_or_path = path
    except (*unreadable, *of_code) as error:
        problem = _unread_family(file, source, error) or (
            f"cannot be read: {_one_line(error)}; mend it or download the checkpoint again"
        )
        raise UserError(f"{source.name}: {file} {problem}") from error
    return text_config(config, None if source.is_dummy else lambda: _slices(source))


def _overridden(
    config: Any, values: Mapping[str, Any], source: ModelSource, read: Callable[[dict[str, Any]], Any]
) -> Any:
    """The config of these values, or what is read of them where the source has others in their places."""
    if not source.hf_overrides:
        return config
    name = source.name.replace(".model", ".hf_overrides")
    require_overridable(values, config, source.hf_overrides, name)
    try:
        return read(overridden(values, config, source.hf_overrides))
    except unreadable_config() as error:
        raise UserError(f"{name} must have values that transformers reads: {_one_line(error)}; mend them") from error


def unreadable_config() -> tuple[type[Exception], ...]:
    """What transformers raises over a config that has something else where it looks for numbers, names or mappings."""
    from huggingface_hub.errors import StrictDataclassError

    of_lookups = (KeyError, IndexError, AttributeError)
    others = (ValueError, TypeError, OSError, ArithmeticError, NotImplementedError, RecursionError)
    return (*others, *of_lookups, StrictDataclassError)


def _unread_family(file: Path, source: ModelSource, error: Exception) -> str | None:
    """What to do about a config of a family that transformers does not have; None: it is another error's turn."""
    from transformers import CONFIG_MAPPING
    from transformers import __version__ as version

    values = read_json(file)
    family, code = values.get("model_type"), (_mapping(values.get("auto_map")) or {}).get("AutoConfig")
    if not isinstance(family, str | None):
        return f"must have a model_type that is a name, got {family!r}; mend it or download the checkpoint again"
    if code is not None and not source.trust_remote_code:
        if family in CONFIG_MAPPING:
            return None
        remedy = "read that code, and to run it set model.trust_remote_code=true"
        return f"wants Python code that comes with the checkpoint ({code}), and none is run unasked; {remedy}"
    if code is not None and isinstance(error, ImportError | OSError):
        remedy = "bring the checkpoint's *.py files there, and install what they import"
        return f"wants Python code that comes with the checkpoint ({code}): {_one_line(error)}; {remedy}"
    if code is None and family is not None and family not in CONFIG_MAPPING:
        remedy = "choose another model, or a newer transformers that has it (pip install -U transformers)"
        return f"has model_type {family!r}, which transformers {version} does not know; {remedy}"
    return None


def register_configs() -> None:
    """Tell transformers the families of ours that it does not know, or knows by another name.

    MiMo is Qwen2 with MTP modules, Kimi K2 DeepSeek-V3, InternLM3 Llama.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, DeepseekV3Config, LlamaConfig, Qwen2Config

    if "mimo" not in CONFIG_MAPPING:

        class MiMoConfig(Qwen2Config):  # type: ignore[no-untyped-call]
            model_type = "mimo"

        AutoConfig.register("mimo", MiMoConfig)

    if "kimi_k2" not in CONFIG_MAPPING:

        class KimiK2Config(DeepseekV3Config):  # type: ignore[no-untyped-call]
            model_type = "kimi_k2"

        AutoConfig.register("kimi_k2", KimiK2Config)

    if "internlm3" not in CONFIG_MAPPING:  # before 5.24

        class InternLM3Config(LlamaConfig):  # type: ignore[no-untyped-call]
            model_type = "internlm3"
            attribute_map: ClassVar[dict[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

        AutoConfig.register("internlm3", InternLM3Config)


def checkpoint_files(source: ModelSource) -> list[Path]:
    """The safetensors files of a checkpoint, from its index when it is sharded."""
    directory = resolve_directory(source)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in _shards_of(index, source)]
    elif (file := directory / "model.safetensors").is_file():
        files = [file]
    else:
        files = sorted(directory.glob("*.safetensors"))
    # A directory may have the name, an interrupted download leaves a link to nothing, and an index names anything.
    if missing := [file.name[:100] for file in files if not os.path.isfile(file)]:
        raise UserError(f"{source.name}: {directory} has no file {first_of(missing)}; download the checkpoint again")
    if not files:
        raise UserError(
            f"{source.name}: {directory} holds no *.safetensors file; convert the checkpoint with "
            "`save_pretrained(safe_serialization=True)` (pickled weights are not loaded)"
        )
    return files


def _shards_of(index: Path, source: ModelSource) -> list[str]:
    weight_map = require_json(index, source.name).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not are_names(names):
        raise UserError(
            f"{source.name}: {index} is not a safetensors index: its weight_map must name the file of every tensor, "
            f"got {str(weight_map)[:60]}; download it again"
        )
    return sorted(set(names))


def read_tensors(source: ModelSource) -> Iterator[tuple[str, Any]]:
    """(name, safetensors slice) of every tensor; a slice is read only where it is indexed, but for small ones of GPTQ.

    Of a checkpoint that takes more than text these are its language model's, named as one alone names them; those of
    families that name them otherwise are named as other decoders'.
    A quantized weight comes under the name that it would have dense, as a QuantizedTensor, which is dense where it is
    indexed, or with those of other experts as an Mxfp4Stack or a ScaledStack.
    """
    slices = stored_tensors(source)
    stated, of = stated_quantization(source), f"{source.name}={source.model}"
    is_quantized = any(tensor.get_dtype() in (*EIGHT_BITS, WORDS) for tensor in slices.values())
    if stated is None or not is_quantized:  # a head may only repeat what its target says
        if stated is not None:  # of keys and values alone, it may be
            slices = {name: tensor for name, tensor in slices.items() if name.rpartition(".")[2] not in OF_ATTENTION}
        yield from ((name, require_plain(tensor, name, of)) for name, tensor in slices.items())
        return
    scheme = read_scheme(stated, of, source.quantization_option)
    if scheme.packing == "mxfp4":
        yield from stack_mxfp4(slices, of)
        return
    stacks, others = take_scaled_stacks(slices, scheme, of)
    yield from stacks.items()
    yield from unpack_tensors(others, scheme, of)


def stored_tensors(source: ModelSource) -> dict[str, Any]:
    """The safetensors slices of a language model, whatever they are, by the names of read_tensors."""
    return decoder_tensors(text_tensors(_slices(source)))


def _slices(source: ModelSource) -> dict[str, Any]:
    """As they lie in the files."""
    from safetensors import SafetensorError, safe_open

    slices: dict[str, Any] = {}
    for file in checkpoint_files(source):
        try:
            with safe_open(str(file), framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                    if name in slices:
                        raise UserError(f"{source.name}: {file} holds {name} once more; download the checkpoint again")
                    slices[name] = handle.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{source.name}: {file} is corrupt ({error}); download it again") from error
    return slices


def stated_quantization(source: ModelSource) -> Mapping[str, Any] | None:
    """The quantization_config that comes with a checkpoint, ModelOpt's too; None: its tensors are what they seem.

    That of a language model inside another may stand in its own config, as Kimi K2.5's does.
    """
    if source.is_dummy and source.hf_config is not None:
        return _quantization_in(source.hf_config)
    directory = resolve_directory(source, weights=not source.is_dummy)
    stated = _quantization_in(read_json(directory / "config.json"))
    if stated is None and (file := directory / "hf_quant_config.json").is_file():
        stated = {"quant_method": "modelopt", **(_mapping(read_json(file).get("quantization")) or {})}
    return stated


def _quantization_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    texts = _mapping(config.get("text_config")) or {}
    stated = (part.get(key) for part in (config, texts) for key in ("quantization_config", "compression_config"))
    return next((found for found in map(_mapping, stated) if found), None)


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def require_finite(weight: torch.Tensor, name: str, source: ModelSource) -> None:
    """Raises UserError where a loaded weight holds NaN or infinity: every text would come out, and mean nothing."""
    if weight.dtype == FLOAT8:
        is_finite = not (weight.view(torch.uint8) & 0x7F == 0x7F).any()
    else:
        is_finite = not weight.is_floating_point() or bool(weight.sum(dtype=torch.float32).isfinite())
    if not is_finite:
        raise UserError(
            f"{source.name}={source.model}: {name} must hold finite numbers in {str(weight.dtype)[6:]}, but some are "
            "NaN or infinite; download the checkpoint again, or choose another hardware.dtype"
        )


def _one_line(error: Exception) -> str:
    """What a library says, its first paragraph in one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split()).rstrip(".")


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
