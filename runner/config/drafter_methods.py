"""The methods whose drafts come from a model or from a head over the target's hidden states."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from runner.config.checkpoint_method import misfit
from runner.config.method import MethodConfig
from runner.config.quantization import NumbersOfWeights
from runner.engine.draft_trees import has_cousins

TreePaths = Annotated[
    tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)], ...], Strict(False), Field(min_length=1)
]
LayerIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False), Field(min_length=1)]


class DrafterMethod(MethodConfig):
    """What all of them share: a checkpoint of their own."""

    drafter_key: ClassVar[str] = "method"  # names what runs the checkpoint

    model: str | None = Field(
        default=None,
        min_length=1,
        description="directory or hub id of the drafter; null takes the one that belongs to the model group",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="branch, tag or commit of the drafter on the hub; null: default branch"
    )
    quantization: NumbersOfWeights = Field(
        default=None,
        description="fp8 or int8 holds what the drafter multiplies by in 8 bits: fewer drafts may be accepted, no "
        "token changes; null: dense, but for draft models whose checkpoint is quantized",
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest text the drafter sees, tokens, >= 1; longer requests get no drafts"
    )
    draft_tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="GPUs the drafter's layers are split over, in [1, 1]: it runs whole on each of the target's",
    )

    @property
    def drafter_name(self) -> str:
        """The method that runs the checkpoint by itself."""
        return self.method

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to be named."""
        return True

    @model_validator(mode="after")
    def _check_checkpoint(self) -> Self:
        if self.model is None or not self.has_checkpoint:
            return self
        if rule := misfit(self.model, self.drafter_name, key=self.drafter_key):
            raise ValueError(f"model {rule}")
        return self

    @field_validator("draft_tensor_parallel_size")
    @classmethod
    def _check_parallel_size(cls, value: int) -> int:
        if value > 1:
            raise ValueError(
                f"must be 1, got {value}; the drafter runs whole on each of the target's GPUs "
                "(hardware.tensor_parallel_size); set it to 1"
            )
        return value


class DynamicTreeMethod(DrafterMethod):
    """Drafters that can offer several continuations at once: the likeliest nodes."""

    speculative_token_tree: Literal["dynamic"] | None = Field(
        default=None, description="null drafts a chain; dynamic a tree of the likeliest nodes"
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_candidates(cls, values: Any) -> Any:
        """Candidates of a dynamic tree that a rule judges by probabilities are not drawn: their shape would be too."""
        if not isinstance(values, dict) or values.get("speculative_token_tree") != "dynamic":
            return values
        is_open = values.get("draft_sample_method") is None
        reads_probs = values.get("rejection_sample_method") in ("probabilistic", "standard", "block")
        return {**values, "draft_sample_method": "greedy"} if is_open and reads_probs else values

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        rule, drafting = self.rejection_sample_method, self.draft_sample_method
        is_judged = self.speculative_token_tree == "dynamic" and rule in ("probabilistic", "block")
        if is_judged and drafting != "greedy":
            raise ValueError(
                "draft_sample_method must be greedy for speculative_token_tree=dynamic under "
                f"rejection_sample_method={rule}, got {drafting!r}: the shape of the tree would depend on what was "
                "drawn; leave it null"
            )
        return self


class TreeDrafterMethod(DynamicTreeMethod):
    """Those whose trees may have a shape that is given, too."""

    guesses_at_once: ClassVar[bool] = False  # some of its heads know each place's distribution beforehand

    speculative_token_tree: Literal["dynamic"] | TreePaths | None = Field(  # type: ignore[assignment]
        default=None,
        description="null drafts a chain; [[0], [0, 0], [1], ...] the tree with these paths of child ranks (Medusa's "
        "choices), ranks >= 0; dynamic the likeliest num_speculative_tokens nodes",
    )

    @field_validator("speculative_token_tree", mode="before")
    @classmethod
    def _check_paths(cls, value: Any) -> Any:
        if value is None or value == "dynamic":
            return value
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"must be null, dynamic or paths of child ranks such as [[0], [0, 0], [1]], got {value!r}")
        paths = [tuple(path) if isinstance(path, list | tuple) else path for path in value]
        known: set[Any] = {()}
        for path in paths:
            if not isinstance(path, tuple) or not path or not all(type(rank) is int for rank in path):
                raise ValueError(f"must hold paths of child ranks, such as [[0], [0, 0], [1]], got {path!r}")
            if path in known:
                raise ValueError(f"must hold every path once, got {list(path)} twice")
            if path[:-1] not in known:
                raise ValueError(f"must name a node's parent before it, got {list(path)} without {list(path[:-1])}")
            known.add(path)
        return value

    def notes(self) -> list[str]:
        tree = self.speculative_token_tree
        notes = super().notes()
        if isinstance(tree, tuple) and len(tree) != self.num_speculative_tokens:
            kept = min(len(tree), self.num_speculative_tokens)
            notes.append(
                f"speculative_token_tree has {len(tree)} nodes and num_speculative_tokens is "
                f"{self.num_speculative_tokens}: the first {kept} nodes are drafted"
            )
        drafted = tree[: self.num_speculative_tokens] if isinstance(tree, tuple) else ()
        is_drawn = self.rejection_sample_method == "block" and self.draft_sample_method != "greedy"
        if self.guesses_at_once and is_drawn and has_cousins(drafted):
            notes.append(
                "a head that guesses all places at once has one list of candidates for several nodes, which "
                "rejection_sample_method=block cannot judge as draws: its likeliest are drafted, as by "
                "draft_sample_method=greedy"
            )
        return notes


class GrowthKeys(DrafterMethod):
    """What bounds trees that grow level by level."""

    tree_depth: int = Field(default=5, ge=1, le=128, description="dynamic tree: levels at most, in [1, 128]")
    tree_top_k: int = Field(
        default=4,
        ge=1,
        le=32,
        description="dynamic tree: nodes that go on at each level, and children of each, in [1, 32]",
    )

    def notes(self) -> list[str]:
        changed = [
            f"{key}={value}"
            for key in ("tree_depth", "tree_top_k")
            if (value := getattr(self, key)) != GrowthKeys.model_fields[key].default
        ]
        if not changed or getattr(self, "speculative_token_tree", None) == "dynamic":
            return super().notes()
        return [*super().notes(), f"without speculative_token_tree=dynamic nothing grows by {', '.join(changed)}"]


class GrownTreeMethod(GrowthKeys, TreeDrafterMethod):
    """Heads that grow their tree level by level."""


class DraftModelMethod(DrafterMethod):
    """A smaller model drafts token by token."""

    method: Literal["draft_model"] = Field(default="draft_model", description="a smaller model drafts")
    use_heterogeneous_vocab: bool = Field(
        default=False,
        description="the draft has another tokenizer than the target: it drafts the tokens that both have",
    )


class PardMethod(DrafterMethod):
    """A smaller model that was trained to draft all tokens in one pass, over mask tokens (arXiv 2504.18583).

    A PARD-2 checkpoint (2605.08632) reads the target's hidden states too.
    """

    method: Literal["pard"] = Field(default="pard", description="a smaller model drafts all tokens in one pass")


class EagleMethod(GrownTreeMethod):
    """A layer that continues the target's last hidden states (arXiv 2401.15077, 2406.16858)."""

    method: Literal["eagle"] = Field(default="eagle", description="a layer that continues the target's hidden states")


class Eagle3Method(GrownTreeMethod):
    """A layer over hidden states from three depths of the target (arXiv 2503.01840)."""

    method: Literal["eagle3"] = Field(
        default="eagle3", description="a layer over hidden states from three depths of the target"
    )
    aux_hidden_state_layer_ids: LayerIds | None = Field(
        default=None,
        description="hidden states of the target that the head reads: i >= 0 is after i layers; null: as its "
        "checkpoint says",
    )


class MtpMethod(GrownTreeMethod):
    """The multi-token-prediction layer that the target was trained with (arXiv 2412.19437)."""

    method: Literal["mtp"] = Field(default="mtp", description="the target's own multi-token-prediction layer")


class MedusaMethod(TreeDrafterMethod):
    """Heads that each guess one of the next tokens from the last hidden state (arXiv 2401.10774)."""

    guesses_at_once = True

    method: Literal["medusa"] = Field(default="medusa", description="heads over the target's last hidden state")


class MlpSpeculatorMethod(DrafterMethod):
    """A recurrent MLP or LSTM over the last hidden state (arXiv 2404.19124)."""

    method: Literal["mlp_speculator"] = Field(
        default="mlp_speculator",
        description="a recurrent MLP or LSTM over the target's last hidden state (IBM, Arctic)",
    )


class BlockMethod(DrafterMethod):
    """Drafters that go over a block of mask tokens behind the target's hidden states."""

    num_speculative_tokens: int = Field(
        default=7, ge=0, le=128, description="tokens drafted per request and step at most, in [0, 128]; 0: none"
    )
    aux_hidden_state_layer_ids: LayerIds | None = Field(
        default=None,
        description="hidden states of the target that the head reads: i >= 0 is after i layers; null: as its "
        "checkpoint says",
    )


class DflashMethod(BlockMethod, GrownTreeMethod):
    """A block-diffusion drafter: all tokens in one pass over the target's hidden states (arXiv 2602.06036).

    Trees of heads that go through the block token by token (DFlash 2, Domino) grow level by level.
    """

    guesses_at_once = True

    method: Literal["dflash"] = Field(default="dflash", description="a block of tokens in one pass (z-lab)")


class DsparkMethod(BlockMethod, GrownTreeMethod):
    """A block in one pass, whose logits a small head goes through token by token (arXiv 2607.05147)."""

    method: Literal["dspark"] = Field(
        default="dspark", description="a block in one pass, then token by token through its logits (DeepSeek)"
    )
