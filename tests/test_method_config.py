"""The method node: which method a mapping means, what each accepts, and synthetic schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config import (
    ConfigError,
    CustomClassMethod,
    DraftModelMethod,
    MethodConfig,
    ModelConfig,
    NgramMethod,
    NoneMethod,
    SpeculativeConfig,
    parse_method,
)
from runner.config.method_union import METHODS, AnyMethod
from runner.config.problem import node_classes, union_tag
from tests.test_config import TINY, problems

DRAWING = [union_tag(node) for node in node_classes(AnyMethod) if "draft_sample_method" not in node.ignored_keys]


def method_of(values: dict[str, Any]) -> Any:
    """The method node of a speculative_config."""
    return parse_method(values)[0]


# --- methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "ngram"}, NgramMethod),
        ({"model": "[ngram]"}, NgramMethod),
        ({"method": "ngram", "model": "ngram"}, NgramMethod),
        ({"model": "my_package.proposers.Mine"}, CustomClassMethod),
        ({"model": "meta-llama/Llama-3.2-1B-Instruct"}, DraftModelMethod),
        ({"model": "./drafts/small"}, DraftModelMethod),
        ({"model": "tiny-draft"}, DraftModelMethod),
        ({"method": None, "model": "tiny-draft"}, DraftModelMethod),
        ({"method": "none"}, NoneMethod),
    ],
)
def test_a_missing_method_is_inferred_as_vllm_infers_it(values: dict[str, Any], expected: type) -> None:
    assert isinstance(method_of(values), expected)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("x/EAGLE-llama", "eagle"),
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("z-lab/Qwen3.8-27B-DFlash2", "dflash"),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark"),
        ("FasterDecoding/medusa-vicuna-7b-v1.3", "medusa"),
        ("google/gemma-4-E2B-it-assistant", "mtp"),
        ("meta-models/Muse-Glimmer-30B-assistant", "dflash"),
        ("poolside/Laguna-XS-2.1-DFlash", "dflash"),
        ("ibm-ai-platform/llama3-8b-accelerator", "mlp_speculator"),
        ("x/llama-mlp-speculator", "mlp_speculator"),
        ("Snowflake/Arctic-LSTM-Speculator-gpt-oss-120b", "mlp_speculator"),
    ],
)
def test_a_head_on_the_hub_is_known_by_its_name(model: str, method: str) -> None:
    assert method_of({"model": model}).method == method
    assert isinstance(method_of({"method": "draft_model", "model": model}), DraftModelMethod)


def test_a_method_without_name_and_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config\.method is required when model is null"):
        method_of({"num_speculative_tokens": 4})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"min": 3}, (3, 3)),
        ({"max": 7}, (7, 7)),
        ({"min": 2, "max": 4}, (2, 4)),
        ({"min": None, "max": None}, (5, 5)),
    ],
)
def test_ngram_bounds_follow_vllm(given: dict[str, int | None], expected: tuple[int, int]) -> None:
    method = method_of({"method": "ngram"} | {f"prompt_lookup_{key}": value for key, value in given.items()})
    assert isinstance(method, NgramMethod)
    assert (method.prompt_lookup_min, method.prompt_lookup_max) == expected


def test_ngram_bounds_are_ordered() -> None:
    text = problems(method={"method": "ngram", "prompt_lookup_min": 7, "prompt_lookup_max": 5})
    assert text == "method.prompt_lookup_min must be <= prompt_lookup_max (5), got 7"


@pytest.mark.parametrize(
    ("rule", "given", "expected"),
    [
        ("strict", None, "coupled"),
        ("probabilistic", None, "probabilistic"),
        ("standard", None, "probabilistic"),
        ("strict", "greedy", "greedy"),
        ("probabilistic", "coupled", "coupled"),
    ],
)
def test_draft_sampling_suits_the_rule_unless_it_is_named(rule: str, given: str | None, expected: str) -> None:
    method = method_of({"method": "draft_model", "rejection_sample_method": rule, "draft_sample_method": given})
    assert method.draft_sample_method == expected
    assert method.rejection_sample_method != "standard"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["strict", "probabilistic", "typical", "synthetic"])
@pytest.mark.parametrize("drafting", ["greedy", "probabilistic", "coupled"])
def test_any_cross_product_of_common_keys_composes(method: str, rule: str, drafting: str) -> None:
    values: dict[str, Any] = {"method": method, "rejection_sample_method": rule, "draft_sample_method": drafting}
    values |= {"synthetic_acceptance_rate": 0.5} if rule == "synthetic" else {}
    values |= {"model": "a.B"} if method == "custom_class" else {}
    assert method_of(values).method == method


@pytest.mark.parametrize("method", METHODS)
def test_block_refuses_coupled_drafts_of_methods_that_draw_drafts(method: str) -> None:
    """It would look at the noise of target tokens to come: measured in tests/test_block_over_steps.py."""
    values = {"method": method, "rejection_sample_method": "block", "draft_sample_method": "coupled"}
    values |= {"model": "a.B"} if method == "custom_class" else {}
    if method not in DRAWING:
        assert method_of(values).rejection_sample_method == "block"
    else:
        with pytest.raises(ConfigError, match="must be probabilistic or greedy under rejection_sample_method=block"):
            method_of(values)


@pytest.mark.parametrize(
    ("rule", "at_zero", "sampled"),
    [
        ("strict", "tokens", "tokens"),
        ("probabilistic", "tokens", "distribution"),
        ("standard", "tokens", "distribution"),
        ("block", "tokens", "distribution"),
        ("typical", False, False),
        ("synthetic", False, False),
    ],
)
def test_a_rule_says_what_it_keeps_of_plain_decodings_text(rule: str, at_zero: Any, sampled: Any) -> None:
    key = {"synthetic_acceptance_rate": 0.5} if rule == "synthetic" else {}
    method = method_of({"method": "ngram", "rejection_sample_method": rule} | key)
    assert (method.lossless(0.0), method.lossless(0.7)) == (at_zero, sampled)
    assert method_of({"method": "none", "rejection_sample_method": rule} | key).lossless(0.7) == "tokens"


def test_none_ignores_the_common_keys_with_a_note() -> None:
    method = method_of({"method": "none", "num_speculative_tokens": 8, "draft_sample_method": "greedy"})
    assert method.notes() == ["method=none ignores num_speculative_tokens=8, draft_sample_method=greedy"]
    assert method.normalised() == NoneMethod()
    assert method_of({"method": "none"}).notes() == []


def test_ngram_ignores_only_how_a_model_would_draft() -> None:
    method = method_of({"method": "ngram", "num_speculative_tokens": 8, "draft_sample_method": "greedy"})
    assert method.notes() == ["method=ngram ignores draft_sample_method=greedy"]
    assert method.normalised().num_speculative_tokens == 8


def test_a_rule_says_which_keys_it_does_not_read() -> None:
    method = method_of({"method": "ngram", "posterior_threshold": 0.2})
    assert method.notes() == ["rejection_sample_method=strict ignores posterior_threshold=0.2"]
    assert method.normalised() == method_of({"method": "ngram"}).normalised()
    typical = method_of({"method": "ngram", "posterior_threshold": 0.2, "rejection_sample_method": "typical"})
    assert (
        len(typical.notes()) == 1 and "lossy" in typical.notes()[0] and typical.normalised().posterior_threshold == 0.2
    )
    assert method_of({"method": "none", "posterior_alpha": 0.2}).notes() == ["method=none ignores posterior_alpha=0.2"]


def test_a_load_cannot_raise_the_number_of_tokens_and_the_run_says_so() -> None:
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 2, 8], [3, 64, 2]]}
    (note,) = method_of({"method": "ngram", "num_speculative_tokens": 4} | ranges).notes()
    assert "asks for 8 tokens; no load gives more than num_speculative_tokens=4" in note
    assert method_of({"method": "ngram", "num_speculative_tokens": 8} | ranges).notes() == []


def test_ranges_may_come_in_any_order_as_in_vllm() -> None:
    config = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[9, 64, 2], [1, 8, 4]]}
    assert method_of(config).num_speculative_tokens_per_batch_size == ((1, 8, 4), (9, 64, 2))


@pytest.mark.parametrize("ranges", ["[[1, 2, 8]]", 4, [[1, 4]], [1, 2, 3]])
def test_ranges_of_another_shape_are_answered_with_the_shape(ranges: Any) -> None:
    text = problems(method={"method": "ngram", "num_speculative_tokens_per_batch_size": ranges})
    assert "method.num_speculative_tokens_per_batch_size must be a list of [start, end, K], such as [[1, 8, 4]" in text
    assert repr(ranges) in text


@pytest.mark.parametrize(
    ("key", "value", "messages"),
    [
        ("num_speculative_tokens_per_batch_size", [[1, 4, 200]], ["0.2 must be <= 128, got 200"]),
        (
            "num_speculative_tokens_per_batch_size",
            [[1, 8, -1], [9, "64", 2]],
            ["0.2 must be >= 0, got -1", "1.1 must be an integer, got '64'"],
        ),
        ("speculative_token_tree", [[0], [-1]], ["1.0 must be >= 0, got -1"]),
    ],
)
@pytest.mark.parametrize("node", ["method", "speculative_config"])
def test_a_bad_entry_of_a_list_is_named_by_its_place(node: str, key: str, value: Any, messages: list[str]) -> None:
    """Pydantic's names of types stood before the place, and the list was said to be no auto, or not dynamic, too."""
    text = problems(**{node: {"method": "eagle3", "model": "h", key: value}})
    lines = [line.partition(";")[0] for line in text.splitlines()]
    assert lines == [f"{node}.{key}.{message}" for message in messages]


def test_custom_class_takes_a_dotted_path() -> None:
    text = problems(method={"method": "custom_class", "model": "mine"})
    assert text == "method.model must be a dotted path to a class, such as my_package.MyProposer, got 'mine'"


# --- drafts -------------------------------------------------------------------------------------------------------


def test_a_target_without_a_known_draft_needs_one_named() -> None:
    text = problems(model={"model": "some/model"}, method={"method": "draft_model"})
    assert text == (
        "method.model is required: model 'some/model' comes without a draft model of the same vocabulary; give "
        "method.model=<directory or hub id of a draft model of the same vocabulary>, or choose method=ngram"
    )


def test_a_target_that_comes_with_another_drafter_says_so() -> None:
    model = {"model": "some/model", "heads": {"eagle3": {"model": "some/head"}}}
    text = problems(model=model, method={"method": "draft_model"})
    assert text.endswith("draft model of the same vocabulary>, or choose method=eagle3")


def test_a_target_without_a_known_head_needs_one_named_but_for_mtp_which_may_be_inside() -> None:
    text = problems(model={"model": "some/model"}, method={"method": "eagle3"})
    assert "comes without an EAGLE-3 head; give method.model=<directory or hub id of an EAGLE-3 head>" in text
    config = SpeculativeConfig.parse({"model": {"model": "some/model"}, "method": {"method": "mtp"}})
    assert config.draft_model_config() is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("deep", "must be null, dynamic or paths of child ranks such as [[0], [0, 0], [1]], got 'deep'"),
        ([], "must be null, dynamic or paths"),
        ([[0], 1], "must hold paths of child ranks, such as [[0], [0, 0], [1]], got 1"),
        ([[0], [0]], "must hold every path once, got [0] twice"),
        ([[0, 0], [0]], "must name a node's parent before it, got [0, 0] without [0]"),
    ],
)
def test_a_tree_is_told_what_it_should_be(tree: Any, message: str) -> None:
    text = problems(method={"method": "eagle", "model": "h", "speculative_token_tree": tree})
    assert text.startswith(f"method.speculative_token_tree {message}")


@pytest.mark.parametrize("tree", [None, [[0], [1]], "dynamic"])
def test_what_bounds_trees_that_grow_is_told_where_none_does(tree: Any) -> None:
    values = {"method": "eagle", "model": "h", "num_speculative_tokens": 2, "speculative_token_tree": tree}
    assert method_of(values).notes() == []
    note = "without speculative_token_tree=dynamic nothing grows by tree_depth=7, tree_top_k=9"
    assert method_of({**values, "tree_depth": 7, "tree_top_k": 9}).notes() == [note] * (tree != "dynamic")


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
@pytest.mark.parametrize("method", ["eagle", "medusa", "dflash"])
def test_a_tree_whose_shape_follows_from_draws_is_refused_by_a_rule_that_reads_draft_probs(
    method: str, rule: str
) -> None:
    values = {"method": method, "model": "h", "speculative_token_tree": "dynamic", "rejection_sample_method": rule}
    config = SpeculativeConfig.parse({"model": {"model": "t"}, "method": values})
    assert config.method.draft_sample_method == "greedy"
    text = problems(method={**values, "draft_sample_method": "probabilistic"})
    assert (
        f"draft_sample_method must be greedy for speculative_token_tree=dynamic under rejection_sample_method={rule}"
        in text
    )
    paths = {**values, "speculative_token_tree": [[0], [1]]}
    assert SpeculativeConfig.parse({"model": {"model": "t"}, "method": paths}).method.draft_sample_method != "greedy"


def test_the_draft_inherits_how_the_target_is_loaded() -> None:
    model = {"model": "t", "load_format": "dummy", "max_model_len": 64, "trust_remote_code": True}
    model["draft"] = {"model": "d", "hf_config": {"model_type": "llama"}}
    default = SpeculativeConfig.parse({"model": model, "method": {"method": "draft_model"}}).draft_model_config()
    assert default == ModelConfig(
        model="d", load_format="dummy", trust_remote_code=True, hf_config={"model_type": "llama"}
    )
    named = SpeculativeConfig.parse(
        {"model": model, "method": {"method": "draft_model", "model": "other", "revision": "v1", "max_model_len": 32}}
    ).draft_model_config()
    assert named == ModelConfig(model="other", revision="v1", load_format="dummy", trust_remote_code=True)


def test_a_draft_cannot_see_more_than_the_target() -> None:
    text = problems(model=TINY | {"max_model_len": 64}, method={"method": "draft_model", "max_model_len": 65})
    assert text == "method.max_model_len must be <= model.max_model_len (64), got 65"


# --- synthetic acceptance -----------------------------------------------------------------------------------------


def synthetic(num_tokens: int, **key: Any) -> MethodConfig:
    return method_of(
        {"method": "ngram", "num_speculative_tokens": num_tokens, "rejection_sample_method": "synthetic"} | key
    )


def test_synthetic_length_gives_vllms_schedule() -> None:
    assert synthetic(4, synthetic_acceptance_length=3.25).synthetic_rates() == [1.0, 1.0, 0.25, 0.0]
    assert synthetic(4, synthetic_acceptance_length=1).synthetic_rates() == [0.0] * 4
    assert synthetic(4, synthetic_acceptance_length=5).synthetic_rates() == [1.0] * 4
    assert synthetic(4, synthetic_acceptance_length=3.25).synthetic_conditional_rates() == [1.0, 1.0, 0.25, 0.0]


@given(num_tokens=st.integers(1, 128), share=st.floats(0, 1), by_length=st.booleans())
def test_a_synthetic_schedule_accepts_what_was_asked_for_with_the_least_variance(
    num_tokens: int, share: float, by_length: bool
) -> None:
    length = 1 + share * num_tokens
    key = {"synthetic_acceptance_length": length} if by_length else {"synthetic_acceptance_rate": share}
    rates = synthetic(num_tokens, **key).synthetic_rates()
    assert len(rates) == num_tokens
    assert sum(rates) == pytest.approx(length - 1, abs=1e-9)
    assert rates == sorted(rates, reverse=True)
    assert sum(0 < rate < 1 for rate in rates) <= 1  # at most two neighbouring lengths occur


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16))
def test_conditional_rates_multiply_to_the_unconditional_ones(rates: list[float]) -> None:
    rates = sorted(rates, reverse=True)
    method = synthetic(len(rates), synthetic_acceptance_rates=rates)
    reached = 1.0
    for rate, conditional in zip(rates, method.synthetic_conditional_rates(), strict=True):
        assert 0 <= conditional <= 1
        reached *= conditional
        assert reached == pytest.approx(rate, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "synthetic_acceptance_rates must be non-increasing"),
        (
            {"synthetic_acceptance_rates": [0.5]},
            "synthetic_acceptance_rates must have num_speculative_tokens (2) entries",
        ),
        ({"synthetic_acceptance_rates": [2.0, 0.5]}, "synthetic_acceptance_rates.0 must be <= 1"),
        ({"synthetic_acceptance_length": 3.5}, "synthetic_acceptance_length must be <= num_speculative_tokens + 1 (3)"),
        ({"synthetic_acceptance_length": 0.5}, "synthetic_acceptance_length must be >= 1"),
        ({"synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate must be <= 1"),
        ({}, "rejection_sample_method synthetic needs exactly one of"),
        ({"synthetic_acceptance_rate": 0.5, "synthetic_acceptance_length": 2}, "needs exactly one of"),
        (
            {"rejection_sample_method": "strict", "synthetic_acceptance_rate": 0.5},
            "synthetic_acceptance_rate must be null",
        ),
    ],
)
def test_synthetic_values_that_make_no_schedule_are_refused(values: dict[str, Any], message: str) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"} | values
    assert message in problems(method=method)


def test_a_corpus_needs_room_for_responses() -> None:
    text = problems(
        method={"method": "suffix", "suffix_decoding_corpus": "a.jsonl", "suffix_decoding_max_cached_requests": 0}
    )
    assert "suffix_decoding_corpus must be null with suffix_decoding_max_cached_requests=0" in text
