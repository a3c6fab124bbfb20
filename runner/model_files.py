"""What a model node of the configuration names: its directory, its tokenizer, its end-of-text tokens."""

from __future__ import annotations

from typing import Any

from runner.config import ModelConfig
from runner.engine.checkpoint import ModelSource, resolve_directory
from runner.engine.errors import UserError
from runner.engine.json_object import require_json
from runner.engine.loader import LoadedModel
from runner.tiny import BUILT_IN_MODELS
from runner.tokenizer import Tokenizer


def model_path(name: str) -> str:
    """A model's directory or hub id."""
    return str(BUILT_IN_MODELS.get(name, name))


def model_source(model: ModelConfig, name: str) -> ModelSource:
    return ModelSource(
        model=model_path(model.model),
        revision=model.revision,
        load_format=model.load_format,
        trust_remote_code=model.trust_remote_code,
        hf_config=model.hf_config,
        hf_overrides=model.hf_overrides,
        quantization=model.quantization,
        name=name,
    )


def load_tokenizer(model: ModelConfig, source: ModelSource) -> Tokenizer:
    if model.tokenizer is None:
        return own_tokenizer(source, "model.tokenizer")
    path, trusts = model_path(model.tokenizer), model.trust_remote_code
    return own_tokenizer(ModelSource(model=path, trust_remote_code=trusts, name="model.tokenizer"))


def own_tokenizer(source: ModelSource, name: str | None = None) -> Tokenizer:
    """The tokenizer that comes with a model; name: the option to set when there is none."""
    if source.is_dummy and source.hf_config is not None:
        return Tokenizer(None)
    directory = resolve_directory(source, weights=False)
    return Tokenizer(directory, trust_remote_code=source.trust_remote_code, name=name or source.name)


def find_eos_token_ids(source: ModelSource, info: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those of hf_overrides, else generation_config.json's, config.json's or the tokenizer's; those the model can say.

    Raises:
        UserError: they are no token ids.
    """
    found: Any = None
    is_overridden = "eos_token_id" in (source.hf_overrides or {})
    if not is_overridden and not (source.is_dummy and source.hf_config is not None):
        file = resolve_directory(source, weights=False) / "generation_config.json"
        if file.is_file():
            found = require_json(file, source.name).get("eos_token_id")
    if found is None:
        found = getattr(info.hf_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    listed = found if isinstance(found, list | tuple) else [] if found is None else [found]
    if not all(type(token_id) is int for token_id in listed):
        raise UserError(
            f"{source.name}={source.model}: its eos_token_id must be a token id or a list of them, got "
            f"{str(found)[:60]}; mend its generation_config.json or config.json, or download them again"
        )
    # Some configurations name an id that the head has no row for, or -1 for none.
    return tuple(token_id for token_id in listed if 0 <= token_id < info.model.vocab_size)
