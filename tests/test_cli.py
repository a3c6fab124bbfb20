"""The command line: what reaches the run, and that whatever a user can cause ends in one screen."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra.core.utils
import pytest
from omegaconf import OmegaConf

from runner.cli import usage
from runner.config import SpeculativeConfig
from runner.config.method_union import METHODS
from runner.config.problem import node_classes
from runner.config.vllm_keys import UNAVAILABLE_METHODS
from runner.engine.errors import UserError
from tests.command_line import CommandLine

ROOT = Path(__file__).parent.parent


# --- what runs ----------------------------------------------------------------------------------------------------


def test_no_arguments_run_the_defaults_in_a_directory_of_their_own(cli: CommandLine, tmp_path: Path) -> None:
    ending = cli()
    assert (ending.status, ending.err) == (0, "")
    ((config, output_dir),) = ending.jobs
    assert (config.model.model, config.method.method, config.sampler.temperature) == ("tiny", "draft_model", 0)
    assert output_dir.is_dir()
    assert output_dir.is_relative_to(tmp_path / "runs")


def test_overrides_reach_the_run(cli: CommandLine) -> None:
    ending = cli("method=ngram", "method.num_speculative_tokens=2", "sampler=sampled", "sampler.stop=[a, b]", "seed=7")
    ((config, _),) = ending.jobs
    assert (config.method.method, config.method.num_speculative_tokens, config.seed) == ("ngram", 2, 7)
    assert (config.sampler.temperature, config.sampler.stop) == (0.8, ("a", "b"))


@pytest.mark.parametrize("argv", ["seed=1 -m method=ngram,none", "method=ngram,none --multirun seed=1"])
def test_overrides_stand_on_either_side_of_a_flag(cli: CommandLine, argv: str) -> None:
    """Those behind one were unrecognized arguments, where others stood before it."""
    ending = cli(*argv.split(), "tracking=none")
    assert ending.status == 0, ending.err
    assert [(config.seed, config.method.method) for config, _ in ending.jobs] == [(1, "ngram"), (1, "none")]


def test_a_flags_value_stays_with_its_flag_among_overrides(cli: CommandLine) -> None:
    ending = cli("method=ngram", "--cfg", "job", "sampler=sampled", "--package", "sampler", "seed=1")
    assert (ending.status, ending.jobs) == (0, [])
    assert OmegaConf.create(ending.out).temperature == 0.8


def test_mappings_can_be_given_on_the_command_line(cli: CommandLine) -> None:
    """`logit_bias: {}` in the YAML made Hydra refuse every bias: an empty mapping is closed, null is not."""
    ((config, _),) = cli("sampler.logit_bias={5: 1, 7: -2.5}", "model.hf_config={model_type: llama}").jobs
    assert config.sampler.logit_bias == {5: 1.0, 7: -2.5}
    assert config.model.hf_config == {"model_type": "llama"}


def test_two_runs_in_the_same_second_do_not_share_a_directory(cli: CommandLine) -> None:
    cli()
    cli()
    first, second = (output_dir for _, output_dir in cli.jobs)
    assert first != second


def test_options_of_ones_own_come_from_a_config_directory(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine" / "method").mkdir(parents=True)
    text = (ROOT / "conf" / "method" / "ngram.yaml").read_text()
    (tmp_path / "mine" / "method" / "short.yaml").write_text(f"{text}num_speculative_tokens: 1\n")
    ending = cli("--config-dir", "mine", "method=short")
    assert [config.method.num_speculative_tokens for config, _ in ending.jobs] == [1]


# --- what cannot run ----------------------------------------------------------------------------------------------


def screen(cli: CommandLine, *argv: str) -> list[str]:
    """The lines of the screen that these arguments end in; nothing was run and nothing left behind."""
    ending = cli(*argv)
    assert ending.status == 2, ending.out
    assert ending.jobs == []
    assert ending.out == ""
    assert "Traceback" not in ending.err
    assert ending.err.startswith("error: ")
    assert list(Path.cwd().iterdir()) == []
    return ending.err.splitlines()


def test_a_typo_in_an_option_names_the_options(cli: CommandLine) -> None:
    assert screen(cli, "method=ngrm") == [
        "error: 1 problem in the configuration; nothing was run",
        "",
        f"  method must be one of {', '.join(sorted(METHODS))}, got 'ngrm'",
        "      did you mean 'ngram'?",
    ]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_unknown_key_gets_the_same_screen_with_and_without_plus(cli: CommandLine, prefix: str) -> None:
    assert screen(cli, f"{prefix}method.num_speculative_token=3")[2:] == [
        "  method.num_speculative_token is an unknown key, got 3",
        "      did you mean 'num_speculative_tokens'?",
    ]


def test_a_typo_in_a_group_is_an_unknown_key(cli: CommandLine) -> None:
    assert screen(cli, "metod=ngram")[2:] == [
        "  metod is an unknown key, got 'ngram'",
        "      did you mean 'method'?",
    ]


@pytest.mark.parametrize(
    ("written", "name", "option"),
    [
        ("method={method: suffix}", "method.method", "suffix"),
        ("method.method=medusa", "method.method", "medusa"),
        ("workload={name: jsonl, path: prompts.jsonl}", "workload.name", "jsonl"),
    ],
)
def test_an_option_within_its_group_is_told_where_it_belongs(
    cli: CommandLine, written: str, name: str, option: str
) -> None:
    """The keys of the default option, which nobody had written, were called unknown."""
    group = name.partition(".")[0]
    assert screen(cli, written, "seed=-1") == [
        "error: 2 problems in the configuration; nothing was run",
        "",
        f"  {name} does not choose the {group}, got '{option}'",
        f"      write {group}={option}, and keys of it as {group}.<key>=<value>",
        "  seed must be >= 0, got -1",
        "      seed of requests without one of their own, in [0, 2**64 - 1]",
    ]


def test_the_chosen_option_may_be_named_once_more(cli: CommandLine) -> None:
    assert "must be >= 0" in screen(cli, "method={method: draft_model, num_speculative_tokens: -1}")[2]
    ((config, _),) = cli("method=suffix", "method.method=suffix", "method.num_speculative_tokens=3").jobs
    assert (config.method.method, config.method.num_speculative_tokens) == ("suffix", 3)


def test_a_value_out_of_range_says_the_range(cli: CommandLine) -> None:
    assert screen(cli, "method.num_speculative_tokens=-1")[2:] == [
        "  method.num_speculative_tokens must be >= 0, got -1",
        "      tokens drafted per request and step at most, in [0, 128]; 0: none",
    ]


def test_a_missing_value_says_how_to_give_it(cli: CommandLine) -> None:
    lines = screen(cli, "model=hf", "workload=jsonl", "method=custom_class")
    assert [line for line in lines if "required" in line] == [
        "  model.model is required",
        "  method.model is required",
        "  workload.path is required",
    ]
    assert "      add workload.path=<path of a .jsonl file, one JSON object a line>" in lines


def test_mistakes_of_different_kinds_are_listed_together(cli: CommandLine) -> None:
    lines = screen(cli, "method=ngrm", "method.prompt_lookup_max=3", "hardwar=cpu", "sampler.topp=1", "seed=-1")
    assert lines[0] == "error: 4 problems in the configuration; nothing was run"
    names = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert sorted(names) == ["hardwar", "method", "sampler.topp", "seed"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["foo"], "foo is not of the form key=value"),
        (["ngram"], "write method=ngram"),
        (["=foo"], "=foo is not of the form key=value\n      a key is missing before the =; --help shows"),
        (["method=custom_class", "method.options=[1]"], "method.options must be a mapping, got '[1]'"),
        (["help"], "--help shows every group and key"),
        (["seed=[1,"], "seed must be a value that Hydra can read, got '[1,'"),
        (["workload.path=~/x.jsonl"], "quote it twice: 'workload.path=\"~/x.jsonl\"'"),
        (["run_name=a,b"], "or 'run_name=\"a,b\"' for one text"),
        (["model=meta-llama/Llama-3.1-8B"], "is model=hf model.model=meta-llama/Llama-3.1-8B"),
        (["model=/tmp"], "is model=hf model.model=/tmp"),
        (["hardware=gpu"], "did you mean 'cuda'?"),
        (["hardware.dtype=half"], "did you mean 'float16'?"),
        (["~foo"], "'foo' does not exist"),
        (["~model"], "model is required"),
        (["+method=ngram"], "write method=ngram"),
        (["+seed=1"], "write seed=1"),
        (["method=null"], "method must be one of"),
        (["method=ngram,none"], "add -m to run every one of them"),
        (["hydra.foo=1"], "Could not override 'hydra.foo'"),
        (["hydra/launcher=nope"], "hydra/launcher must be one of"),
        (
            ["experiment=nope"],
            "experiment must be one of compare_learned_methods, compare_methods, synthetic_acceptance",
        ),
        (["run_name=${oc.env:SURELY_NOT_SET}"], "run_name cannot be resolved"),
        (["seed=${sed}"], "seed cannot be resolved"),
        (["speculative_config=${nope}"], "speculative_config cannot be resolved"),
        (["model={model: x}", "seed.x=1"], "seed must be an integer, got {'x': 1}"),
        (["--cfg", "job", "method.foo=1"], "method.foo is an unknown key"),
        (["method=suffix", "method.quantization=fp8"], "only method=draft_model or"),  # not a key of the target
        (["method=ngram", "method.model=null"], "method.model is an unknown key"),  # which vLLM's JSON may hold
        (["--cfg", "job", "-m", "method=ngram,none"], "leave out -m"),
        (["--config-dir", "nowhere"], "--config-dir must be a directory, got 'nowhere'"),
        (["--config-name", "nope"], "nope"),
        (["method.draft_tensor_parallel_size=2"], "the drafter runs whole on each"),
        (["method.tensor_parallel_size=2"], "pass 'draft_tensor_parallel_size' instead"),
    ],
)
def test_hydras_complaints_come_out_as_our_screen(cli: CommandLine, argv: list[str], text: str) -> None:
    assert text in "\n".join(screen(cli, *argv))


def test_an_error_the_user_can_mend_ends_the_run_with_one_screen(cli: CommandLine) -> None:
    def fail(_: SpeculativeConfig) -> None:
        raise UserError("model.model must be a directory or a hub id, got 'x'; check the path")

    cli.on_job = fail
    ending = cli("tracking=none")
    assert ending.status == 2
    assert ending.err == "error: model.model must be a directory or a hub id, got 'x'; check the path\n"


def test_a_bug_keeps_its_traceback(cli: CommandLine) -> None:
    def fail(_: SpeculativeConfig) -> None:
        raise ZeroDivisionError("a bug")

    cli.on_job = fail
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli()


@pytest.mark.parametrize("mode", [[], ["-m"]])
def test_a_disk_that_is_full_when_a_job_starts_is_one_screen(
    cli: CommandLine, mode: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra's own writing of .hydra/config.yaml ended in a traceback."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(hydra.core.utils, "_save_config", fail)
        ending = cli(*mode, "method=none", "tracking=none")
    full = "error: the .hydra directory of the run cannot be written (No space left on device); make room, or set"
    assert ending.status == 2 and ending.err.startswith(full) and "Traceback" not in ending.err
    cli.on_job = fail
    if not mode:
        with pytest.raises(OSError, match="No space left"):  # a job's own is a bug: it tells what it cannot write
            cli("method=none", "tracking=none")


@pytest.mark.parametrize("argv", [("hydra.run.dir=taken/x",), ("-m", "hydra.sweep.dir=taken", "seed=0,1")])
def test_a_directory_that_cannot_be_made_is_one_screen(cli: CommandLine, tmp_path: Path, argv: tuple[str, ...]) -> None:
    """Hydra makes it, and crashed with a traceback."""
    (tmp_path / "taken").write_text("a file")
    ending = cli(*argv)
    assert (ending.status, ending.jobs) == (2, [])
    assert ".dir must be a directory that can be made, got" in ending.err
    assert f"{tmp_path / 'taken'} is no directory; set hydra." in ending.err


NO_ROOM = {
    "/proc/x": "writing to /proc fails: No such file or directory",
    f"runs/{'x' * 300}": "fails: File name too long",
    "": "it is empty",
}


@pytest.mark.skipif(sys.platform != "linux", reason="that /proc takes no files is Linux's")
@pytest.mark.parametrize(("path", "reason"), NO_ROOM.items())
@pytest.mark.parametrize("name", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_directory_is_tried_before_anything_runs(cli: CommandLine, name: str, path: str, reason: str) -> None:
    """os.access grants root everything: Hydra made the directory, and crashed; of an empty one, files lay about."""
    lines = screen(cli, *(["-m", "seed=0,1"] if "sweep" in name else []), f"{name}={path}", "tracking=none")
    assert lines[2].startswith(f"  {name} must be a directory that can be made, got '{path and '/'}")
    assert lines[3].endswith(f"{reason}; set {name}=<another directory>")


@pytest.mark.skipif(sys.platform != "linux", reason="that /proc takes no files is Linux's")
def test_a_current_directory_that_cannot_be_written_to_is_one_screen(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")
    assert "writing to /proc fails: No such file or directory; set hydra.run.dir=" in cli().err


def test_an_interrupt_is_one_line(cli: CommandLine) -> None:
    def interrupt(_: SpeculativeConfig) -> None:
        raise KeyboardInterrupt

    cli.on_job = interrupt
    ending = cli()
    assert (ending.status, ending.err) == (130, "interrupted\n")


def test_a_terminal_gets_the_same_screen_in_colour(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("runner.cli.screen.sys.stderr.isatty", lambda: True)
    ending = cli("metod=ngram")
    assert ending.status == 2
    assert "\x1b[" in ending.err
    assert "metod is an unknown key, got 'ngram'" in ending.err


def test_the_version_is_the_runners_and_hydras(cli: CommandLine) -> None:
    """It was Hydra's alone."""
    ending = cli("--version")
    assert (ending.status, ending.jobs) == (0, []) and re.match(r"speculative-runner \S+.*, Hydra 1\.3", ending.out)


# --- help ---------------------------------------------------------------------------------------------------------


def test_help_names_every_option_and_every_key(cli: CommandLine) -> None:
    ending = cli("--help")
    assert (ending.status, ending.jobs) == (0, [])
    for path in (ROOT / "conf").glob("*/*.yaml"):
        assert path.stem in ending.out
    for name, field in SpeculativeConfig.model_fields.items():
        nodes = node_classes(field.annotation)
        if not nodes:
            assert f"  {name} " in ending.out
        for key in {key for node in nodes for key in node.model_fields if key not in ("method", "name")}:
            assert f"  {name}.{key}" in ending.out
    assert "\n  python -m runner -m method=ngram,suffix,draft_model" in ending.out


def test_help_says_which_methods_have_a_key_and_where_its_value_differs(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    text = " ".join(cli("--help").out.split())
    assert "in [0, 128]; 0: none [4; dflash: 7; dspark: 7; suffix: 8]" in text
    assert "with method=ngram, ngram_gpu method.prompt_lookup_min shortest n-gram matched" in text
    assert (
        "with method=eagle, eagle3, mtp, medusa, dflash, dspark method.speculative_token_tree null drafts a chain"
        in text
    )
    assert "with method=custom_class method.model dotted path of a Proposer subclass" in text


def test_help_begins_with_the_keys_that_every_method_has(cli: CommandLine) -> None:
    """They stood behind the first heading, as those of the methods that it names."""
    lines = cli("--help").out.splitlines()
    first, heading = (
        next(i for i, line in enumerate(lines) if line.startswith(start)) for start in ("  method.", "  with method=")
    )
    assert first < heading and lines[first - 1] == "" != lines[first - 2]


def test_help_names_the_file_that_lacks_a_key(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a method was being written help was a traceback that ended in KeyError."""
    read = usage._yaml
    monkeypatch.setattr(usage, "_yaml", lambda name: {k: v for k, v in read(name).items() if k != "exit_layer"})
    ending = cli("--help")
    assert (ending.status, ending.out) == (2, "")
    assert "conf/method/early_exit.yaml must have exit_layer, with its default" in ending.err


def test_help_says_what_every_method_is_and_fits_the_terminal(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = cli("--help").out.splitlines()
    for method in METHODS:
        assert any(line.startswith(f"  {method} ") for line in lines)
    assert [line for line in lines if len(line) > 100 and "python -m runner" not in line] == []


@pytest.mark.parametrize("method", UNAVAILABLE_METHODS)
def test_a_method_of_vllm_that_is_not_here_yet_is_no_typo(cli: CommandLine, method: str) -> None:
    assert screen(cli, f"method={method}")[3] == f"      {method} is not available yet"


def test_the_composed_configuration_says_when_its_method_does_not_count(cli: CommandLine) -> None:
    ending = cli("--cfg", "job", "speculative_config={method:ngram}")
    assert ending.err == "speculative_config stands in place of the method group shown here\n"
    assert OmegaConf.create(ending.out).speculative_config == {"method": "ngram"}


def test_cfg_job_prints_what_would_run(cli: CommandLine) -> None:
    ending = cli("--cfg", "job", "method=ngram")
    assert (ending.status, ending.jobs) == (0, [])
    assert OmegaConf.create(ending.out).method.method == "ngram"


def test_the_command_line_answers_without_loading_the_heavy_packages(tmp_path: Path) -> None:
    """--help and every screen come within a second: torch, transformers and mlflow load only when something runs."""
    heavy = ("torch", "transformers", "mlflow", "triton", "numpy", "matplotlib")
    code = (
        "import sys\n"
        "from runner.__main__ import main\n"
        "assert main(['method=ngrm']) == 2\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"
