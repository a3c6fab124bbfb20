"""Which modules a quantization_config excludes, by entries as checkpoints have them."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engine.errors import UserError
from runner.engine.unquantized_modules import UnquantizedModules

QUERIES = "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("stated", "is_excluded"),
    [
        ({"ignore": ["lm_head", QUERIES]}, True),
        ({"ignored_layers": ["model.layers.2.self_attn"]}, True),
        ({"modules_to_not_convert": ["self_attn"]}, True),
        ({"modules_to_not_convert": ["model.language_model.layers.2.self_attn.q_proj"]}, True),
        ({"ignore": ["language_model.model.layers.2*"]}, True),
        ({"exclude_modules": ["model.layers.2*"]}, True),
        ({"ignore": ["re:.*self_attn.*"]}, True),
        ({"ignore": ["lm_head", "re:.*mlp.*", "Linear"]}, False),
        ({"ignore": ["re:self_attn"]}, False),
        ({"exclude_modules": ["model.layers.20*", "model.layers.12.self_attn.q_proj"]}, False),
        ({"ignored_layers": ["model.layers.2.self_attn.q"]}, False),
        ({"ignore": None, "exclude_modules": "*", "ignored_layers": [1]}, False),
        ({}, False),
    ],
)
def test_an_entry_is_a_name_a_part_of_one_a_glob_or_a_regular_expression(
    stated: dict[str, Any], is_excluded: bool
) -> None:
    assert (QUERIES in UnquantizedModules(stated, "model.model=x")) == is_excluded


def test_an_entry_that_is_no_regular_expression_is_named() -> None:
    with pytest.raises(UserError, match=r"of model.model=x must name modules by .*, got 're:\(' .*; mend its config"):
        UnquantizedModules({"ignore": ["re:("]}, "model.model=x")
