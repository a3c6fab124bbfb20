"""What goes to vLLM: every output fits the schema of its speculative_config, and comes back as the same method."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runner.config import MedusaMethod, MethodConfig, MlpSpeculatorMethod, SpeculativeConfig, parse_method
from runner.config.method_union import FIELDS, METHODS
from runner.config.to_vllm import to_vllm
from runner.config.vllm_keys import VLLM_VERSION
from runner.results import write_vllm_config
from tests.test_config import TINY

WITHOUT = (
    "none",
    "medusa",
    "mlp_speculator",
    "hybrid",
    "early_exit",
    "sparse_kv",
    "token_recycling",
    "suffix_recycling",
)  # methods without a counterpart
TREES = [None, "dynamic", [[0], [0, 0], [1]]]
Rate = Annotated[float, Field(ge=0, le=1)]
BatchSize = Annotated[int, Field(ge=1)]


class VllmSpeculativeConfig(BaseModel):
    """The user's fields of vLLM 0.33's SpeculativeConfig that a method of ours can fill: types, ranges, rules."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: Literal[
        "ngram", "ngram_gpu", "suffix", "draft_model", "custom_class", "eagle", "eagle3", "mtp", "dflash", "dspark"
    ]
    num_speculative_tokens: Annotated[int, Field(gt=0, le=128)]
    model: str | None = None
    revision: str | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    draft_tensor_parallel_size: Annotated[int, Field(ge=1)] | None = None
    use_heterogeneous_vocab: bool = False
    parallel_drafting: bool = False
    prompt_lookup_min: Annotated[int, Field(ge=1)] | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=1)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=0)] = 1.0
    suffix_decoding_min_token_prob: Rate = 0.1
    num_speculative_tokens_per_batch_size: list[list[int]] | None = None
    rejection_sample_method: Literal["standard", "synthetic", "block", "fly"] = "standard"
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    synthetic_acceptance_rates: list[Rate] | None = None
    synthetic_acceptance_length: float | None = None

    @model_validator(mode="after")
    def _check(self) -> VllmSpeculativeConfig:
        num_tokens = self.num_speculative_tokens
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        is_synthetic = self.rejection_sample_method == "synthetic"
        assert ((rates is None) + (length is None)) == (1 if is_synthetic else 2)
        if rates is not None:
            assert len(rates) == num_tokens
            assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
        if length is not None:
            assert 1 <= length <= num_tokens + 1
        if self.prompt_lookup_min is not None:
            assert self.prompt_lookup_max is not None
            assert self.prompt_lookup_min <= self.prompt_lookup_max
        if self.num_speculative_tokens_per_batch_size is not None:
            last = 0
            assert self.num_speculative_tokens_per_batch_size
            assert self.num_speculative_tokens_per_batch_size[0][0] == 1
            for start, end, count in self.num_speculative_tokens_per_batch_size:
                assert last < start <= end
                assert count >= 0
                last = end
        if self.method in ("draft_model", "custom_class", "eagle", "eagle3", "dflash", "dspark"):
            assert self.model is not None
        if self.use_heterogeneous_vocab:
            assert (self.method, self.draft_sample_method) == ("draft_model", "greedy")
        if self.parallel_drafting:
            assert self.method in ("draft_model", "eagle3", "dflash", "dspark")
        return self


@st.composite
def speculative_configs(draw: st.DrawFn, *, exact: bool = False) -> dict[str, Any]:
    """Values of a method node; `exact` draws only what has a counterpart in vLLM."""
    method = draw(st.sampled_from([name for name in METHODS if not (exact and name in WITHOUT)]))
    num_tokens = draw(st.integers(1 if exact else 0, 128))
    rules = ["probabilistic", "block", "synthetic"] + ([] if exact else ["strict", "typical"])
    rule = draw(st.sampled_from(rules))
    values: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": num_tokens,
        "rejection_sample_method": rule,
        # coupled under block is a question of its own: the two ways that vLLM knows suit every rule
        "draft_sample_method": draw(
            st.sampled_from(["greedy", "probabilistic"] + ([] if exact or rule == "block" else ["coupled", None]))
        ),
    }
    if rule == "synthetic":
        rate = draw(st.floats(0, 1))
        choices: list[dict[str, Any]] = [
            {"synthetic_acceptance_rates": sorted(draw(st.lists(st.floats(0, 1), min_size=num_tokens,
                                                                max_size=num_tokens)), reverse=True)},
            {"synthetic_acceptance_length": 1 + rate * num_tokens},
        ]  # fmt: skip
        values |= draw(st.sampled_from(choices if exact else [*choices, {"synthetic_acceptance_rate": rate}]))
    if draw(st.booleans()) and not (exact and method in ("suffix", "custom_class")):
        edges = sorted(draw(st.sets(st.integers(2, 600), max_size=6)))
        starts = [1, *edges]
        values["num_speculative_tokens_per_batch_size"] = [
            [start, draw(st.integers(start, end - 1)), draw(st.integers(0, 128))]
            for start, end in itertools.pairwise([*starts, 700])
        ]
    if not exact:
        values["disable_by_batch_size"] = draw(st.none() | st.integers(1, 600))
    if method.startswith("ngram"):
        bounds = sorted(draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
        values |= {"prompt_lookup_min": bounds[0], "prompt_lookup_max": bounds[1]}
    if method == "suffix":
        values |= {
            "suffix_decoding_max_tree_depth": draw(st.integers(1, 1024)),
            "suffix_decoding_max_cached_requests": (num_cached := draw(st.integers(0, 10**6))),
            "suffix_decoding_max_spec_factor": draw(st.floats(0, 8)),
            "suffix_decoding_min_token_prob": draw(st.floats(0, 1)),
            # Without room for responses a corpus is refused.
            "suffix_decoding_corpus": None if exact or num_cached == 0 else draw(st.none() | st.just("earlier.jsonl")),
        }
    keys = FIELDS[method]
    if method == "hybrid":
        values["drafter"] = "eagle3"  # others are refused with its keys
    if "speculative_token_tree" in keys and not exact:
        # A dynamic tree of drawn candidates is refused under a rule that judges by their distributions.
        is_judged = rule in ("probabilistic", "block") and values["draft_sample_method"] in ("probabilistic", "coupled")
        trees = [None, "dynamic"] if method in ("suffix", "token_recycling", "hybrid") else TREES
        if method not in ("suffix", "token_recycling"):
            trees = [tree for tree in trees if not is_judged or tree != "dynamic"]
        values["speculative_token_tree"] = draw(st.sampled_from(trees))
    if "aux_hidden_state_layer_ids" in keys and not exact:
        values["aux_hidden_state_layer_ids"] = draw(st.sampled_from([None, [1, 2, 3]]))
    if "revision" in keys:
        values |= {"model": "d", "revision": draw(st.none() | st.just("main"))}
        values["max_model_len"] = draw(st.none() | st.integers(1, 9999))
    if "use_heterogeneous_vocab" in keys and method != "hybrid":
        values["use_heterogeneous_vocab"] = draw(st.booleans()) and (
            not exact or values["draft_sample_method"] == "greedy"
        )
    if method == "custom_class":
        values["model"] = "a.B"
    return values


def method_of(values: dict[str, Any]) -> MethodConfig:
    return parse_method(values)[0]


@given(values=speculative_configs(), temperature=st.sampled_from([0.0, 0.7, 1.0]))
def test_everything_that_goes_to_vllm_fits_its_schema(values: dict[str, Any], temperature: float) -> None:
    config, notes = to_vllm(method_of(values), temperature=temperature)
    if values["method"] in WITHOUT or values["num_speculative_tokens"] == 0:
        assert config is None
        assert notes
    else:
        VllmSpeculativeConfig.model_validate(json.loads(json.dumps(config)))


@given(values=speculative_configs(exact=True))
def test_what_has_a_counterpart_survives_the_way_to_vllm_and_back(values: dict[str, Any]) -> None:
    method = method_of(values)
    config, _ = to_vllm(method)
    assert config is not None
    back, notes = parse_method(json.loads(json.dumps(config)))
    assert back.normalised() == method.normalised()
    read_as = ("'standard' is read as 'probabilistic'", "is read as method=pard")
    assert all(any(text in note for text in read_as) for note in notes)


@given(values=speculative_configs(exact=True))
def test_a_note_is_written_only_for_what_changes(values: dict[str, Any]) -> None:
    _, notes = to_vllm(method_of(values))
    assert all("needs vLLM's V2 model runner" in note or "custom_class has" in note for note in notes)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "medusa", "num_speculative_tokens": 4},
        {"method": "pard", "model": "d", "num_speculative_tokens": 4},
        {"method": "eagle", "num_speculative_tokens": 4},
        {"method": "eagle", "model": "h", "num_speculative_tokens": 4, "speculative_token_tree": "[(0,)]"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "strict"},
        {"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 4},
        {"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[2, 3, 1]]},
        {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2.0},
        {"method": "ngram", "num_speculative_tokens": 2, "use_heterogeneous_vocab": True},
        {
            "method": "draft_model",
            "model": "d",
            "num_speculative_tokens": 2,
            "use_heterogeneous_vocab": True,
            "draft_sample_method": "probabilistic",
        },
    ],
)
def test_the_schema_of_vllm_refuses_what_vllm_refuses(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VllmSpeculativeConfig.model_validate(config)


def test_strict_and_coupled_are_translated_with_a_note_each() -> None:
    config, notes = to_vllm(method_of({"method": "draft_model", "model": "d", "num_speculative_tokens": 3}))
    assert config == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        "draft_tensor_parallel_size": 1,
    }
    assert [note.split(" ")[0] for note in notes] == ["rejection_sample_method=strict", "draft_sample_method=coupled"]


def test_coupled_drafts_are_probabilistic_ones_when_requests_are_sampled() -> None:
    """Greedy drafts would be accepted less than the run measured, probabilistic ones are accepted no less."""
    values = {"model": TINY, "method": {"method": "draft_model"}, "sampler": {"temperature": 0.8}}
    config, _ = SpeculativeConfig.parse(values).to_vllm()
    assert config is not None
    assert config["draft_sample_method"] == "probabilistic"


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic", "coupled"])
def test_a_draft_of_another_vocabulary_drafts_greedily_in_vllm(drafting: str) -> None:
    values = {"method": "draft_model", "model": "d", "use_heterogeneous_vocab": True, "draft_sample_method": drafting}
    config, notes = to_vllm(method_of(values | {"rejection_sample_method": "probabilistic"}), temperature=1.0)
    assert config is not None
    assert (config["use_heterogeneous_vocab"], config["draft_sample_method"]) == (True, "greedy")
    expected = f"draft_sample_method={drafting} has no counterpart in vLLM with use_heterogeneous_vocab: "
    assert notes == ([] if drafting == "greedy" else [f"{expected}it drafts greedily there"])


def test_the_draft_of_the_model_group_is_named() -> None:
    config, notes = SpeculativeConfig.parse({"model": TINY, "method": {"method": "draft_model"}}).to_vllm()
    assert config is not None
    assert config["model"] == "tiny-draft"
    assert not any("speculative_config.model" in note for note in notes)


def test_pard_is_a_draft_model_that_drafts_in_one_pass() -> None:
    config, _ = to_vllm(method_of({"method": "pard", "model": "d"}))
    assert config is not None
    assert (config["method"], config["parallel_drafting"]) == ("draft_model", True)


def test_mtp_needs_no_model_there_either() -> None:
    config, notes = to_vllm(method_of({"method": "mtp", "rejection_sample_method": "probabilistic"}))
    assert config is not None
    assert "model" not in config
    assert notes == []


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (MedusaMethod(), "method=medusa has no counterpart in vLLM 0.33, which has removed it"),
        (MlpSpeculatorMethod(), "method=mlp_speculator has no counterpart in vLLM 0.33, which has removed it"),
        (
            MethodConfig(method="mine"),
            "method=mine has no counterpart in vLLM 0.33: its methods are ngram, ",
        ),
    ],
)
def test_methods_that_vllm_does_not_have_are_said_to_have_no_counterpart(method: MethodConfig, why: str) -> None:
    config, (note,) = to_vllm(method)
    assert config is None
    assert note.startswith(why)


@pytest.mark.parametrize(
    ("tree", "depth"), [("dynamic", 3), ([[0], [0, 0], [1], [0, 0, 0]], 3), ([[0], [1], [0, 0]], 2)]
)
def test_a_tree_becomes_a_chain_as_long_as_its_longest_branch(tree: Any, depth: int) -> None:
    values = {"method": "eagle", "model": "h", "num_speculative_tokens": 4, "tree_depth": 3}
    config, notes = to_vllm(method_of(values | {"speculative_token_tree": tree}))
    assert config is not None
    assert config["num_speculative_tokens"] == depth
    assert any(note.startswith("speculative_token_tree has no counterpart in vLLM") for note in notes)


@pytest.mark.parametrize(("keys", "depth"), [({}, 9), ({"selector_rank": 8}, 3)], ids=["DFlash", "DFlash 2"])
def test_tree_depth_bounds_a_tree_of_dflash_where_its_checkpoint_grows_one(
    tmp_path: Path, keys: dict[str, Any], depth: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dflash_config": {"mask_token_id": 1, **keys}}))
    tree = {"speculative_token_tree": "dynamic", "tree_depth": 3, "num_speculative_tokens": 9}
    config, notes = to_vllm(method_of({"method": "dflash", "model": str(tmp_path), **tree}))
    assert config is not None and config["num_speculative_tokens"] == depth
    assert any("a DFlash 2 drafter needs a release of vLLM that has it" in note for note in notes) == bool(keys)


def test_dflash_2_is_known_by_its_name_on_the_hub() -> None:
    config, notes = to_vllm(method_of({"method": "dflash", "model": "z-lab/Qwen3.8-27B-DFlash2"}))
    assert config is not None
    assert any("a DFlash 2 drafter needs a release of vLLM that has it" in note for note in notes)


@pytest.mark.parametrize(
    ("method", "stated", "said"),
    [
        ("pard", {"pard2": True}, "a PARD-2 draft model drafts without the target's states there"),
        ("dflash", {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "one of method=dspark there"),
    ],
)
def test_what_a_drafter_is_there_is_told(tmp_path: Path, method: str, stated: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **stated}))
    assert any(said in note for note in to_vllm(method_of({"method": method, "model": str(tmp_path)}))[1])


@pytest.mark.parametrize(
    "stated", [{"dflash_config": {"projector_type": "domino"}}, {"architectures": ["DominoDraftModel"]}]
)
def test_a_domino_drafter_has_no_counterpart(tmp_path: Path, stated: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated))
    why = [f"a Domino drafter has no counterpart in vLLM {VLLM_VERSION}"]
    assert to_vllm(method_of({"method": "dflash", "model": str(tmp_path)})) == (None, why)


def test_the_probabilistic_rule_loses_nothing() -> None:
    method = method_of({"method": "draft_model", "model": "d", "rejection_sample_method": "probabilistic"})
    config, notes = to_vllm(method)
    assert config is not None
    assert (config["rejection_sample_method"], config["draft_sample_method"]) == ("standard", "probabilistic")
    assert notes == []


def test_a_synthetic_rate_becomes_a_length() -> None:
    values = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"}
    config, notes = to_vllm(method_of(values | {"synthetic_acceptance_rate": 0.625}))
    assert config is not None
    assert config["synthetic_acceptance_length"] == 3.5
    assert notes == ["synthetic_acceptance_rate is given to vLLM as synthetic_acceptance_length"]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (None, [[1, 8, 4], [9, 9, 0]]),
        ([[1, 4, 6], [5, 16, 2]], [[1, 4, 6], [5, 8, 2], [9, 9, 0]]),
        ([[1, 2, 6], [20, 30, 1]], [[1, 2, 6], [9, 9, 0]]),
    ],
)
def test_a_limit_on_the_batch_becomes_a_last_range_without_drafts(
    ranges: list[list[int]] | None, expected: list[list[int]]
) -> None:
    values = {"method": "ngram", "num_speculative_tokens_per_batch_size": ranges, "disable_by_batch_size": 8}
    config, notes = to_vllm(method_of(values))
    assert config is not None
    assert config["num_speculative_tokens_per_batch_size"] == expected
    assert any(note.startswith("disable_by_batch_size=8 is given to vLLM as") for note in notes)


def test_methods_that_draft_alike_at_every_batch_size_in_vllm_say_so() -> None:
    config, notes = to_vllm(method_of({"method": "suffix", "disable_by_batch_size": 8}))
    assert config is not None
    assert "num_speculative_tokens_per_batch_size" not in config
    assert notes[-1] == "disable_by_batch_size left out: vLLM's method suffix drafts alike at every batch size"


def test_the_file_is_what_vllm_takes_and_the_text_says_what_changed(tmp_path: Path) -> None:
    config, notes = to_vllm(method_of({"method": "suffix"}))
    json_file, text_file = write_vllm_config(tmp_path, config, notes)
    assert json_file.name == "vllm_speculative_config.json"
    VllmSpeculativeConfig.model_validate(json.loads(json_file.read_text()))
    assert text_file.read_text().startswith("For vLLM 0.33:\nrejection_sample_method=strict has no")


def test_without_a_counterpart_there_is_only_the_reason(tmp_path: Path) -> None:
    (file,) = write_vllm_config(tmp_path, *to_vllm(method_of({"method": "none"})))
    assert file.name == "vllm_speculative_config.txt"
    assert file.read_text() == "For vLLM 0.33:\nmethod=none is vLLM without a speculative_config\n"
