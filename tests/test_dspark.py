"""DSpark: heads in their published layouts read as they are; logits, chains and trees those of a rewrite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proposers.heads.dspark import load_dspark_head
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens
from runner.engine.row_sampling import GREEDY_SHARPNESS
from runner.engine.schedule import Schedule
from runner.llm import LLM, SamplingParams, StructuredOutputsParams
from tests import test_dflash_trees
from tests.one_pass_reference import (
    HIDDEN_SIZE,
    MASK,
    NUM_LAYERS,
    VOCAB_SIZE,
    Target,
    context_of,
    passes_of_a_run,
    reference_logits,
)
from tests.one_pass_reference import save_target as save
from tests.test_dflash import (
    LAYERS,
    NUM_DRAFTED,
    SINKS,
    SPECULATORS,
    VOCABULARY,
    WINDOW,
    Tensors,
    over_all_tokens,
    reference_rows,
    save_head,
    tensors,
)
from tests.test_dflash_trees import trees_of_a_run
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64

BLOCK, RANK = 6, 5
ENDS = {"embed_tokens__weight": (VOCAB_SIZE, HIDDEN_SIZE), "lm_head__weight": (VOCAB_SIZE, HIDDEN_SIZE)}
DEEPSPEC = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention"] * LAYERS["num_hidden_layers"],
    "num_target_layers": NUM_LAYERS,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1],
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# For Nemotron 3.5: causal blocks with windows and sinks, whose first row guesses nothing.
NVIDIA = {
    **{key: value for key, value in DEEPSPEC.items() if not key.startswith(("num_", "enable", "confidence"))},
    "num_hidden_layers": LAYERS["num_hidden_layers"],
    "num_attention_heads": LAYERS["num_attention_heads"],
    "num_key_value_heads": LAYERS["num_key_value_heads"],
    "attention_sink_bias": True,
    "dflash_config": {
        "attention_sink_bias": True,
        "causal": True,
        "mask_token_id": MASK,
        "swa_window_size": WINDOW,
        "target_layer_ids": [0, 1],
        "use_swa": True,
        "sample_from_anchor": False,
    },
    "dspark_bonus_anchor": True,
    "dspark_fixup_head_type": "markov",
    "has_embed_tokens": True,
    "has_lm_head": False,
    "layer_types": ["sliding_attention"] * LAYERS["num_hidden_layers"],
    "sliding_window": WINDOW,
}
OF_NVIDIA = tensors(embed_tokens__weight=ENDS["embed_tokens__weight"], **SINKS)
PUT_INSIDE = ("mask_token_id", "target_layer_ids", "num_target_layers")
OF_SPECULATORS = {
    **SPECULATORS,
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def sequential(
    *, kind: str = "vanilla", num_drafted: int = VOCAB_SIZE, confidence: int = HIDDEN_SIZE + RANK
) -> dict[str, tuple[int, ...]]:
    """Shapes of what a head has beside its block; confidence: inputs of the confidence head, 0 for none."""
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head__markov_w1__weight": (VOCAB_SIZE, RANK),
        "markov_head__markov_w2__weight": (num_drafted, RANK),
    }
    if kind == "gated":
        shapes |= {
            "markov_head__gate_proj__weight": (RANK, HIDDEN_SIZE + RANK),
            "markov_head__gate_proj__bias": (RANK,),
        }
    if kind == "rnn":
        width = 2 * RANK + HIDDEN_SIZE
        shapes |= {
            "markov_head__joint_proj__weight": (3 * RANK, width),
            "markov_head__joint_proj__bias": (3 * RANK,),
        }
    if confidence:
        shapes |= {"confidence_head__proj__weight": (1, confidence), "confidence_head__proj__bias": (1,)}
    return shapes


LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "DeepSpec": (DEEPSPEC, tensors(**ENDS, **sequential())),
    "DeepSpec, gated": ({**DEEPSPEC, "markov_head_type": "gated"}, tensors(**ENDS, **sequential(kind="gated"))),
    "DeepSpec, rnn": ({**DEEPSPEC, "markov_head_type": "rnn"}, tensors(**ENDS, **sequential(kind="rnn"))),
    "DeepSpec, confidence of the state alone, vLLM's words": (
        {
            **{key: value for key, value in DEEPSPEC.items() if key not in ("block_size", "target_layer_ids")},
            "dspark_block_size": BLOCK,
            "dspark_target_layer_ids": [0, 1],
            "confidence_head_with_markov": False,
        },
        tensors(**ENDS, **sequential(confidence=HIDDEN_SIZE)),
    ),
    "SpecForge": (
        {
            **{key: value for key, value in DEEPSPEC.items() if not key.startswith(("markov", "enable", "confidence"))},
            "dflash_config": {
                "projector_type": "dspark",
                "mask_token_id": MASK,
                "target_layer_ids": [0, 1],
                "markov_rank": RANK,
                "markov_head_type": "vanilla",
            },
        },
        tensors(**ENDS, **sequential(confidence=0)),
    ),
    "LiquidAI": (
        {
            **{key: value for key, value in DEEPSPEC.items() if key not in PUT_INSIDE},
            "architectures": ["Lfm2DSparkDraftModel"],
            "rope_is_neox_style": False,
            "dflash_config": {key: DEEPSPEC[key] for key in PUT_INSIDE},
        },
        tensors(**sequential()),
    ),
    "NVIDIA": (NVIDIA, {**OF_NVIDIA, **tensors(**sequential(confidence=0))}),
    "NVIDIA, vLLM's word alone": (
        {**NVIDIA, "dflash_config": {k: v for k, v in NVIDIA["dflash_config"].items() if "anchor" not in k}},
        {**OF_NVIDIA, **tensors(**sequential(confidence=0))},
    ),
    "speculators": (OF_SPECULATORS, tensors(**sequential())),
    "speculators, the pending token does not guess": (
        {**OF_SPECULATORS, "sample_from_anchor": False},
        tensors(**sequential()),
    ),
    "speculators, the pending token does not guess, rnn": (
        {**OF_SPECULATORS, "sample_from_anchor": False, "markov_head_type": "rnn"},
        tensors(**sequential(kind="rnn")),
    ),
    "speculators, frequent tokens, rnn": (
        {**OF_SPECULATORS, "draft_vocab_size": NUM_DRAFTED, "markov_head_type": "rnn"},
        {
            **tensors(lm_head__weight=(NUM_DRAFTED, HIDDEN_SIZE), **sequential(kind="rnn", num_drafted=NUM_DRAFTED)),
            **VOCABULARY,
        },
    ),
}


class Reference:
    """A head as its paper and DeepSpec's code have it, in the target's dtype."""

    @torch.inference_mode()
    def __init__(self, layout: str, target: Any, token_ids: list[int], num_tokens: int) -> None:
        config, weights = LAYOUTS[layout]
        nested = config.get("dflash_config", {})
        told = {"sample_from_anchor": not config.get("dspark_bonus_anchor", False)} | config | nested
        self.num_silent = 0 if told["sample_from_anchor"] else 1
        self.rows = reference_rows(
            config, weights, target, token_ids, num_tokens + self.num_silent, [1, 2], num_silent=0
        )
        dtype = self.rows.dtype
        self.weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        self.base = self.rows @ self.weights.get("lm_head.weight", target.lm_head.weight).T
        self.kind = told["markov_head_type"]

    @torch.inference_mode()
    def logits(self, path: list[int]) -> Tensor:
        """[len(path), vocab]: of each place behind the tokens up to it, the pending one first.

        In training a pending token that does not guess goes over its own row, as if it stood before itself.
        """
        w = {name.removeprefix("markov_head."): tensor for name, tensor in self.weights.items()}
        state, found = torch.zeros(RANK, dtype=self.rows.dtype), []
        for place, before in enumerate([path[0]] * self.num_silent + path):
            latent, row = w["markov_w1.weight"][before], self.rows[place]
            if self.kind == "gated":
                latent = latent * torch.sigmoid(w["gate_proj.weight"] @ torch.cat((row, latent)) + w["gate_proj.bias"])
            elif self.kind == "rnn":
                mixed = w["joint_proj.weight"] @ torch.cat((state, latent, row)) + w["joint_proj.bias"]
                gate, candidate, output = mixed.view(3, RANK)
                gate = torch.sigmoid(gate)
                state, latent = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
            found.append(self.base[place] + w["markov_w2.weight"] @ latent)
        logits = torch.stack(found[self.num_silent :])
        return over_all_tokens(logits) if "d2t" in self.weights else logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_guess_has_the_logits_of_a_rewrite_behind_the_guess_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From its own cache: the context in chunks, after every way to accept, after preemption, over blocks' scratch."""
    check_passes(target, monkeypatch, layout, save_head(tmp_path / "head", *LAYOUTS[layout]))


def check_passes(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    head: str,  # its directory
    agree: Callable[[Tensor, Tensor, Tensor], None] = assert_as_accurate,
) -> None:
    method = {"method": "dspark", "model": head, "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    theirs = reference_logits(Reference, layout, target.model, passes)
    with KeepFloat64():
        exact = reference_logits(Reference, layout, in_float64(target.model), passes)
    ours, is_drafted = torch.cat([one.logits for one in passes]), torch.cat(exact).isfinite()
    agree(ours[is_drafted], torch.cat(theirs)[is_drafted], torch.cat(exact)[is_drafted])
    assert [one.drafted for one in passes] == [rows.argmax(dim=-1).tolist() for rows in exact]


@pytest.mark.parametrize(
    "layout",
    ["DeepSpec, rnn", "speculators, the pending token does not guess, rnn", "speculators, frequent tokens, rnn"],
)
def test_a_dynamic_tree_grows_by_what_each_node_says_behind_its_own_path(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS[layout])
    check_dynamic_trees(target, head, monkeypatch, "dspark", partial(Reference, layout))


def check_dynamic_trees(
    target: Target, head: str, monkeypatch: pytest.MonkeyPatch, method: str, rewrite: Callable[..., Any]
) -> None:
    """EAGLE-2's choice, by brute force over a float64 rewrite: the likeliest nodes of each level go on.

    rewrite: (target, committed tokens, depth) -> `logits` as Reference has them.
    """
    num_nodes, depth, top_k = 7, 4, 2
    keys = {"method": method, "tree_depth": depth, "tree_top_k": top_k}
    trees = trees_of_a_run(target, head, monkeypatch, num_nodes, "dynamic", keys=keys)
    model, depths = in_float64(target.model), set()
    for own in trees:
        with KeepFloat64():
            reference = rewrite(model, own.token_ids, min(depth, len(own.paths)))
            scores: dict[tuple[int, ...], float] = {}
            going: list[tuple[int, ...]] = [()]
            for _ in range(min(depth, len(own.paths))):
                level: dict[tuple[int, ...], float] = {}
                for path in going:
                    logits = reference.logits([own.token_ids[-1], *path])[-1]
                    log_probs = (GREEDY_SHARPNESS * logits).log_softmax(dim=-1)
                    found = log_probs.topk(top_k)
                    for score, token in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                        level[(*path, token)] = scores.get(path, 0.0) + score
                scores |= level
                going = sorted(level, key=level.__getitem__, reverse=True)[:top_k]
        assert set(own.paths) == set(sorted(scores, key=scores.__getitem__, reverse=True)[: len(own.paths)])
        depths.add(max(map(len, own.paths)))
    assert len(depths) > 1


@pytest.mark.parametrize("layout", ["DeepSpec, gated", "speculators, frequent tokens, rnn"])
def test_a_static_tree_holds_the_ranks_behind_each_nodes_own_path(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS[layout])
    check_static_trees(target, head, monkeypatch, "dspark", partial(Reference, layout))


def check_static_trees(
    target: Target, head: str, monkeypatch: pytest.MonkeyPatch, method: str, rewrite: Callable[..., Any]
) -> None:
    """rewrite: as check_dynamic_trees has it."""
    choices = test_dflash_trees.CHOICES
    trees = trees_of_a_run(target, head, monkeypatch, len(choices), choices, keys={"method": method})
    model = in_float64(target.model)
    for own in trees:
        named = choices[: len(own.paths)]
        with KeepFloat64():
            reference = rewrite(model, own.token_ids, max(map(len, named)))
            tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
            for choice in named:
                before = tokens[choice[:-1]]
                order = reference.logits([own.token_ids[-1], *before])[-1].argsort(descending=True)
                tokens[choice] = (*before, int(order[choice[-1]]))
        assert set(own.paths) == {tokens[choice] for choice in named}


@pytest.mark.parametrize(("layout", "most"), [("DeepSpec", 6), ("speculators, the pending token does not guess", 5)])
def test_more_tokens_than_a_block_holds_are_not_drafted(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, most: int
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS[layout])
    method = {"method": "dspark", "model": head, "num_speculative_tokens": 9}
    passes, _ = passes_of_a_run(target, monkeypatch, method, max_num_batched_tokens=41)
    assert max(len(one.drafted) for one in passes) == most


def test_a_tree_deeper_than_the_block_is_cut_with_a_word(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS["DeepSpec"])
    keys = {"method": "dspark", "tree_depth": 9, "tree_top_k": 2}
    trees = trees_of_a_run(target, head, monkeypatch, 12, "dynamic", keys=keys)
    assert max(len(path) for own in trees for path in own.paths) == BLOCK
    assert "method.tree_depth=9 is asked of" in caplog.text and "whose block holds 6 drafts" in caplog.text


def test_a_grammar_s_chain_guesses_with_the_rows_of_its_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a static tree whose first choices are shallower than the chain."""
    chain = {"method": "dspark", "num_speculative_tokens": 4}
    choices = ((0,), (1,), (2,), (3,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    bush = {**chain, "num_speculative_tokens": len(choices), "speculative_token_tree": choices}
    form = StructuredOutputsParams(regex="[a-z ]{60}")
    params = SamplingParams(max_tokens=30, structured_outputs=form, speculative_ratio=4)
    drafts = []
    for method in (chain, bush):
        llm = LLM("tiny", speculative_config=method, device="cpu", num_gpu_blocks_override=64)
        own = []
        monkeypatch.setattr(llm.engine.proposer, "propose", noting(llm.engine.proposer.propose, own))
        llm.generate("def parse(", params, use_tqdm=False)
        drafts.append(own)
    assert drafts[0] == drafts[1] and max(map(len, drafts[0])) == 4


def noting(propose: Callable[[Schedule], DraftTokens], drafts: list[list[int]]) -> Callable[[Schedule], DraftTokens]:
    def noting_propose(schedule: Schedule) -> DraftTokens:
        found = propose(schedule)
        drafts.append(found.token_ids.tolist())
        return found

    return noting_propose


def test_a_dummy_head_has_the_ends_that_its_layout_brings(target: Target) -> None:
    for layout, brings in (("DeepSpec", True), ("speculators", False)):
        source = ModelSource(model="", name="method.model", load_format="dummy", hf_config=LAYOUTS[layout][0])
        head = load_dspark_head(source, context_of(target), None, None)
        assert (head.embed_tokens is not None) == (head.lm_head is not None) == brings


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("DeepSpec", {"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
        ("DeepSpec", {"markov_rank": 0}, "must have a sequential head, got markov_rank=0"),
        ("speculators", {"final_logit_softcapping": 9.0}, "softcapping in its config must be that of .*, None, whose"),
        ("DeepSpec", {"markov_rank": -1}, "markov_rank in its config must be a whole number >= 1, got -1"),
        ("DeepSpec", {"block_size": None}, "block_size must be a whole number >= 1, got None"),
        ("DeepSpec", {"target_layer_ids": None}, "target_layer_ids must be a list of whole numbers, got None"),
        (
            "speculators",
            {"speculators_model_type": "dflash"},
            "must be a plain DSpark head, got speculators_model_type",
        ),
        ("speculators", {"projector_type": "domino"}, "must be a plain DSpark head, got projector_type='domino'"),
        (
            "DeepSpec",
            {"markov_head_type": "gated"},
            r"missing: markov_head\.gate_proj\.bias, markov_head\.gate_proj\.w",
        ),
        ("DeepSpec", {"enable_confidence_head": False}, r"unexpected: confidence_head\.proj\.bias, confid"),
        ("DeepSpec", {"confidence_head_with_markov": False}, r"confidence_head\.proj\.weight \[1, 37\] for \[1, 32\]"),
        ("DeepSpec", {"block_size": 0}, "block_size must be a whole number >= 1, got 0"),
    ],
)
def test_a_checkpoint_that_is_no_dspark_head_of_this_target_is_one_message(
    target: Target, tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    config, head = LAYOUTS[layout]
    source = ModelSource(model=save_head(tmp_path / "head", {**config, **changes}, head), name="method.model")
    with pytest.raises(UserError, match=message) as caught:
        load_dspark_head(source, context_of(target), None, None)
    assert "; " in str(caught.value)
