"""`speculative_config=` on the command line: files, JSON as vLLM takes it, Hydra's mappings, sweeps and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.cli.speculative_config import quote_json
from tests.command_line import CommandLine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}


@pytest.fixture
def cli(cli: CommandLine, tmp_path: Path) -> CommandLine:
    (tmp_path / "ngram.json").write_text(json.dumps(NGRAM))
    (tmp_path / "suffix.json").write_text(json.dumps(SUFFIX))
    return cli


def methods(cli: CommandLine, *argv: str) -> list[tuple[str, int]]:
    ending = cli(*argv, "tracking=none")
    assert ending.status == 0, ending.err
    return [(config.method.method, config.method.num_speculative_tokens) for config, _ in ending.jobs]


@pytest.mark.parametrize(
    "argument",
    [
        "speculative_config=ngram.json",
        "speculative_config=./ngram.json",
        json.dumps(NGRAM).join(["speculative_config=", ""]),  # as one writes it for vllm serve
        """speculative_config='{"method": "ngram", "num_speculative_tokens": 3}'""",
        r'speculative_config="{\"method\": \"ngram\", \"num_speculative_tokens\": 3}"',
        "speculative_config={method:ngram,num_speculative_tokens:3}",
    ],
)
def test_every_way_of_writing_it_means_the_same(cli: CommandLine, argument: str) -> None:
    assert methods(cli, argument) == [("ngram", 3)]


def test_an_absolute_path_and_a_byte_order_mark_are_fine(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "bom.json").write_text("\ufeff" + json.dumps(NGRAM), encoding="utf-8")
    assert methods(cli, f"speculative_config={tmp_path / 'bom.json'}") == [("ngram", 3)]


def test_values_inside_json_arrive_as_they_are(cli: CommandLine) -> None:
    values: dict[str, Any] = {"model": 'it\'s a "draft"\\path', "num_speculative_tokens": 2, "max_model_len": None}
    ((config, _),) = cli(f"speculative_config={json.dumps(values)}", "tracking=none").jobs
    assert config.speculative_config == values
    assert config.method.model == values["model"]


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), min_size=1), min_size=1, max_size=3))
def test_bare_json_passes_hydras_grammar_whatever_is_in_it(objects: list[dict[str, Any]]) -> None:
    argument = f"speculative_config={', '.join(map(json.dumps, objects))}"
    (quoted,) = quote_json([argument])
    override = OverridesParser.create().parse_override(quoted)
    values = override.value().list if override.is_sweep_override() else [override.value()]
    assert [json.loads(getattr(value, "text", value)) for value in values] == objects


def test_other_arguments_are_left_alone() -> None:
    arguments = [
        "-m",
        "speculative_config={method:ngram}",
        "speculative_config=a.json",
        'run_name={"a":1}',
        "method=ngram",
    ]
    assert quote_json(arguments) == arguments


def test_paths_start_where_the_command_was_given(cli: CommandLine) -> None:
    assert methods(cli, "speculative_config=ngram.json", "hydra.job.chdir=true") == [("ngram", 3)]


def test_a_sweep_takes_files_and_objects(cli: CommandLine) -> None:
    assert methods(cli, "-m", "speculative_config=ngram.json,suffix.json") == [("ngram", 3), ("suffix", 5)]
    cli.jobs.clear()
    argument = f"speculative_config={json.dumps(NGRAM)}, {json.dumps(SUFFIX)}"
    assert methods(cli, "-m", argument) == [("ngram", 3), ("suffix", 5)]
    cli.jobs.clear()
    assert methods(cli, "-m", "speculative_config=ngram.json,null", "seed=1") == [("ngram", 3), ("draft_model", 4)]


def test_two_spellings_of_one_method_run_once_in_a_sweep(cli: CommandLine) -> None:
    ending = cli("-m", f"speculative_config=ngram.json,{{{'method:ngram,num_speculative_tokens:3'}}}", "tracking=none")
    assert ending.status == 0, ending.err
    assert len(ending.jobs) == 1


def test_one_file_that_is_not_there_stops_a_sweep_before_anything_runs(cli: CommandLine) -> None:
    ending = cli("-m", "speculative_config=ngram.json,sufix.json")
    assert (ending.status, ending.jobs, ending.out) == (2, [], "")
    assert ending.err.startswith("error: 1 of 2 points of this sweep is invalid; nothing was run")
    assert "did you mean 'suffix.json'?" in ending.err


@pytest.mark.parametrize(
    "argv",
    [
        ["method=ngram"],
        ["method.num_speculative_tokens=2"],
        ["+method.foo=2"],
        ["~method"],
        ["-m", "method=ngram,suffix"],
        ["experiment=compare_methods"],
    ],
)
def test_it_excludes_a_method_named_beside_it(cli: CommandLine, argv: list[str]) -> None:
    ending = cli(*argv, "speculative_config=ngram.json")
    assert (ending.status, ending.jobs) == (2, [])
    assert "Traceback" not in ending.err
    if argv[0] != "+method.foo=2":  # Hydra says first that there is no such key
        assert "speculative_config excludes " in ending.err
        assert argv[-1].split("=")[0].split(".")[0] in ending.err


def test_it_excludes_an_experiment_that_chooses_a_method(cli: CommandLine, tmp_path: Path) -> None:
    """The experiment's method would be replaced without a word."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    file = tmp_path / "mine" / "experiment" / "mine.yaml"
    argv = ["--config-dir", "mine", "experiment=mine", "speculative_config=ngram.json", "tracking=none"]
    file.write_text("# @package _global_\nmethod:\n  num_speculative_tokens: 2\n")
    ending = cli(*argv)
    assert (ending.status, ending.jobs) == (2, [])
    assert "speculative_config excludes experiment=mine" in ending.err
    file.write_text("# @package _global_\nseed: 7\n")
    ((config, _),) = cli(*argv).jobs
    assert (config.method.method, config.seed) == ("ngram", 7)


def test_the_screen_names_both_and_the_way_out(cli: CommandLine) -> None:
    ending = cli("speculative_config=ngram.json", "method=suffix", "method.num_speculative_tokens=2")
    assert ending.err.splitlines()[2:] == [
        "  speculative_config excludes method=suffix and method.num_speculative_tokens=2: "
        "each says which method to run",
        "      leave out one of them, or set speculative_config=null",
    ]


def test_null_leaves_the_method_group_in_force(cli: CommandLine) -> None:
    assert methods(cli, "speculative_config=null", "method=suffix", "method.num_speculative_tokens=2") == [
        ("suffix", 2)
    ]


@pytest.mark.parametrize(
    ("value", "content", "text"),
    [
        ("nope.json", None, "must be a JSON object or the path of a file with one (No such file or directory), got"),
        ("ngrm.json", None, "did you mean 'ngram.json'?"),
        ("ngram", None, "for the method alone write method=ngram"),
        (".", None, "(Is a directory)"),
        ("", None, "must be a JSON object, got ''"),
        ("{'method': 'suffix'}", None, """write speculative_config='{"method": "ngram","""),
        ("bad.json", '{"method": "ngram",\n "num": 1,}', "must be valid JSON: bad.json, line 2, column "),
        ("bad.json", "[1, 2]", "must be a JSON object: bad.json, found a list"),
        ("bad.json", "3", "must be a JSON object: bad.json, found a number"),
        ("bad.json", "", "must be valid JSON: bad.json, line 1, column 1: Expecting value"),
        ("bad.json", '{"model": "a", "model": "b"}', "speculative_config.model is there twice"),
        ("bad.json", b"\xff\xfe{", "must be the path of a JSON file in UTF-8, got 'bad.json'"),
        ("bad.json", '{"method": "extract_hidden_states", "model": "x"}', "speculative_config.method 'extract_hid"),
        ("bad.json", '{"model": "tiny-draft", "temperature": 1}', "speculative_config.temperature is a sampling par"),
        ('{"method": "ngram",}', None, "must be valid JSON: line 1, column "),
        ('{"method": "ngram"} x', None, "must be valid JSON: line 1, column 21: Extra data"),
        ("[1,2]", None, "speculative_config must be a JSON object, got [1, 2]"),
        ("{}", None, "speculative_config.method is required when model is null"),
        ("3", None, "speculative_config must be a JSON object, got 3"),
    ],
)
def test_mistakes_end_in_one_screen_with_the_place_and_the_remedy(
    cli: CommandLine, tmp_path: Path, value: str, content: str | bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    ending = cli(f"speculative_config={value}")
    assert (ending.status, ending.jobs, ending.out) == (2, [], "")
    assert "Traceback" not in ending.err
    assert text in ending.err


def test_mistakes_elsewhere_are_listed_too(cli: CommandLine) -> None:
    ending = cli("speculative_config=nope.json", "seed=-1", "hardwar=cpu")
    assert ending.err.startswith("error: 3 problems in the configuration")
