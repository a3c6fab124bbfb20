"""What a mixture of experts is in a family: names in checkpoints, keys of configs, and what its code fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.reference.experts import Scores


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A family's mixture of experts: names in the checkpoint, within a layer, and keys of the config."""

    block: str  # "": its tensors lie in the layer
    is_there: bool | str = True  # or: the config's key says so
    is_beside_mlp: bool = False  # the layer has an MLP, too; else experts stand in its place
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # gate, where there is one, up, down
    router: str = "gate"
    router_digits: Literal["of rows", "of checkpoint", "float32"] = "of rows"  # the dtype that it has
    count_key: str = "num_experts"
    choices_key: str = "num_experts_per_tok"  # experts that a row goes to
    size_key: str = "moe_intermediate_size"  # of an expert
    latent_key: str | None = None  # of the config, where experts may read a latent of a row (arXiv 2604.12374)
    scores: Scores = "softmax"
    is_normalized: bool | str = True  # the weights of a row's experts add up to 1, or: the config's key says so
    scale_key: str | None = None  # of those weights; None: they are not scaled
    scales_inputs: bool = False  # a row's one expert reads it times the sigmoid of its logit, and has no weight
    factors: str | None = None  # name in the checkpoint, within the block, of what each expert's are multiplied by
    has_groups: bool = False  # of experts, as the config's n_group says: a row goes to those of the best topk_group
    corrections: str | None = None  # name in the checkpoint, within the block, of what scores are corrected by
    corrections_have_rows: bool = False  # in the checkpoint [1, num_experts]
    shared: str | None = None  # name of the MLP beside the experts, within the block, which all rows go to
    shared_count_key: str = ""  # how many experts' size it has, or:
    shared_size_key: str = ""  # its size
    # Of the config: each layer's limit of what is gated (LimitedSilu), of experts and of the MLP beside them.
    limits_key: str | None = None
    shared_limits_key: str | None = None
    shared_gate: str | None = None  # name, within the block, of what it is gated by, one number a row
    # That have a mixture, as the config says it.
    layers: Literal["all", "behind_dense", "behind_first", "by_block", "by_step", "by_type", "in_range", "listed"] = (
        "all"
    )
    has_biases: bool = False
    # One tensor may hold all experts' weights, each with a row for every output (Qwen3.5) or input (Qwen3-VL, where its
    # sizes do not say that it is the former), up behind gate, or with the two in turns (gpt-oss).
    stacks: Literal["none", "by_output", "by_input", "by_input_in_turns"] = "none"
    stack_names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # within the block

    def named(self, name: str) -> str:
        """Within the layer, of what has this name within the block."""
        return f"{self.block}.{name}" if self.block else name
