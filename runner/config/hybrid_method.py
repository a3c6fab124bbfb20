"""The method of two drafters: suffix decoding, and a model where no match is convincing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from runner.config.drafter_methods import (
    DflashMethod,
    DrafterMethod,
    DraftModelMethod,
    DsparkMethod,
    DynamicTreeMethod,
    Eagle3Method,
    EagleMethod,
    GrowthKeys,
    LayerIds,
    MedusaMethod,
    MlpSpeculatorMethod,
    MtpMethod,
    PardMethod,
)
from runner.config.method import MethodConfig
from runner.config.self_speculation_methods import (
    EarlyExitMethod,
    ExitLayer,
    NumRecentTokens,
    NumSinkTokens,
    SelfSpeculationMethod,
    SparseKVMethod,
)
from runner.config.suffix_method import MatchKeys

DRAFTERS: dict[str, type[DrafterMethod | SelfSpeculationMethod]] = {
    "draft_model": DraftModelMethod,
    "pard": PardMethod,
    "eagle": EagleMethod,
    "eagle3": Eagle3Method,
    "mtp": MtpMethod,
    "medusa": MedusaMethod,
    "mlp_speculator": MlpSpeculatorMethod,
    "dflash": DflashMethod,
    "dspark": DsparkMethod,
    "early_exit": EarlyExitMethod,
    "sparse_kv": SparseKVMethod,
}

CHAIN_OF_DRAFTER = 4  # tokens
# What not every drafter has.
KEYS_OF_SOME = (
    "model",
    "revision",
    "quantization",
    "max_model_len",
    "use_heterogeneous_vocab",
    "aux_hidden_state_layer_ids",
    "exit_layer",
    "num_sink_tokens",
    "num_recent_tokens",
    "speculative_token_tree",
)


class HybridMethod(MatchKeys, GrowthKeys, DynamicTreeMethod):
    """Suffix decoding where a match is convincing, a model drafter elsewhere (arXiv 2411.04975, "hybrid")."""

    drafter_key: ClassVar[str] = "method.drafter"

    method: Literal["hybrid"] = Field(
        default="hybrid", description="drafts copied from earlier text where a match is convincing, else a model's"
    )
    num_speculative_tokens: int = Field(
        default=8,
        ge=0,
        le=128,
        description="tokens of a match drafted per request and step at most, or nodes of a tree, in [0, 128]",
    )
    drafter: Literal[
        "draft_model",
        "pard",
        "eagle",
        "eagle3",
        "mtp",
        "medusa",
        "mlp_speculator",
        "dflash",
        "dspark",
        "early_exit",
        "sparse_kv",
    ] = Field(default="draft_model", description="what drafts where no match is convincing; `model` is its checkpoint")
    num_drafter_tokens: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None,
        description="tokens that the drafter drafts at most, in [1, 128], and no more than num_speculative_tokens; "
        "null: 4 in a chain, all nodes of a tree",
    )
    speculative_token_tree: Literal["dynamic"] | None = Field(
        default=None,
        description="null drafts chains; dynamic, with a drafter that drafts trees, a tree of its likeliest nodes with "
        "a match as a path of it, num_speculative_tokens nodes together at most",
    )
    use_heterogeneous_vocab: bool = Field(
        default=False, description="drafter=draft_model: it has another tokenizer than the target"
    )
    aux_hidden_state_layer_ids: LayerIds | None = Field(
        default=None,
        description="drafter=eagle3, dflash or dspark: hidden states of the target that it reads, i >= 0 is after i "
        "layers; null: as its checkpoint says",
    )
    exit_layer: ExitLayer | None = Field(
        default=None,
        description="drafter=early_exit: how many of the target's layers draft, in [1, all of them]; null: a quarter",
    )
    num_sink_tokens: NumSinkTokens | None = Field(
        default=None, description="drafter=sparse_kv: tokens at a text's beginning that it attends to, >= 0; null: 16"
    )
    num_recent_tokens: NumRecentTokens | None = Field(
        default=None, description="drafter=sparse_kv: tokens at a text's end that it attends to, >= 1; null: 512"
    )

    @property
    def drafter_name(self) -> str:
        return self.drafter

    @property
    def has_checkpoint(self) -> bool:
        return "model" in DRAFTERS[self.drafter].model_fields

    def drafter_method(self) -> DrafterMethod | SelfSpeculationMethod:
        """The half that drafts elsewhere, as a method by itself."""
        cls = DRAFTERS[self.drafter]
        own = {key for key in HybridMethod.model_fields if key in cls.model_fields}
        keys = self.model_dump(include=own - {*MethodConfig.model_fields}, exclude_none=True)
        return cls(
            num_speculative_tokens=self._num_drafter_tokens,
            draft_sample_method=self.draft_sample_method,
            **keys,
        )

    def notes(self) -> list[str]:
        own, notes = DRAFTERS[self.drafter].model_fields, super().notes()
        unread = {key: field.default for key, field in GrowthKeys.model_fields.items() if key not in own}
        ignored = [f"{key}={value}" for key, default in unread.items() if (value := getattr(self, key)) != default]
        return [*notes, f"drafter={self.drafter} ignores {', '.join(ignored)}"] if ignored else notes

    @property
    def _num_drafter_tokens(self) -> int:
        by_default = CHAIN_OF_DRAFTER if self.speculative_token_tree is None else self.num_speculative_tokens
        return min(self.num_drafter_tokens or by_default, self.num_speculative_tokens)

    @model_validator(mode="after")
    def _check_keys_of_drafters(self) -> Self:
        for key in KEYS_OF_SOME:
            value = getattr(self, key)
            if value is not None and value is not False and key not in DRAFTERS[self.drafter].model_fields:
                owners = " or ".join(name for name, method in DRAFTERS.items() if key in method.model_fields)
                raise ValueError(f"{key} is a key of drafter={owners}, got {value!r} with drafter={self.drafter}")
        return self
