"""The README's commands: every one composes, and those that need no placeholder, GPU or download run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from runner.cli.compose import Composer
from runner.cli.sweep import hydra_node, read_sweep
from runner.config import SpeculativeConfig
from runner.engine.sampling_params import SamplingParams
from tests.command_line import CommandLine
from tests.conftest import Engines, complete

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def runner_arguments() -> list[list[str]]:
    """The arguments of every `python -m runner` in the README, without the comment behind it."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    found = [re.search(r"python -m runner(?![.\w])([^#]*)", line) for line in lines]
    filled = [match[1].replace("<directory or hub id>", "some/model") for match in found if match]
    return [shlex.split(arguments) for arguments in filled]


def test_the_first_thirty_lines_install_run_and_test() -> None:
    head = "\n".join(README.read_text(encoding="utf-8").splitlines()[:30])
    assert "pip install -e . && python -m runner" in head
    assert 'pip install -e ".[test]" && pytest' in head


@pytest.mark.parametrize("arguments", runner_arguments(), ids=" ".join)
def test_every_command_is_one_that_the_runner_takes(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli = CommandLine(monkeypatch, capsys, tmp_path)
    if "-m" in arguments or any(argument.startswith("experiment=") for argument in arguments):
        overrides = [argument for argument in arguments if argument != "-m"]
        with Composer() as composer:
            sweep = read_sweep(composer, overrides, hydra_node(composer, overrides))
        assert sweep is not None
        assert all(isinstance(config, SpeculativeConfig) for config in sweep.configs)
    else:
        ending = cli(*arguments)
        assert ending.status == 0, ending.err
        assert len(ending.jobs) == (0 if "--help" in arguments else 1)


def test_the_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    completion, constrained, _ = blocks("python")
    exec(compile(completion, "README.md", "exec"), {})
    assert "vllm:spec_decode_num_accepted_tokens" in capsys.readouterr().out
    exec(compile(constrained, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.match(r'\{"color": ?"(red|green)", ?"count": ?-?\d+\} ', printed), printed
    assert "logprob" in printed


def test_the_example_of_a_method_drafts_and_changes_no_token(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("repeat")
    exec(compile(blocks("python")[2], "README.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "repeat", module)
    method = {"method": "custom_class", "model": "repeat.RepeatProposer", "num_speculative_tokens": 3}
    prompts, params = [{"prompt_token_ids": [5, 6, 7]}], [SamplingParams(max_tokens=12, seed=1)]
    requests, metrics = complete(engines(method), prompts, params)
    assert 3 in metrics.records[0].num_draft_tokens
    assert requests[0].output_token_ids == complete(engines(), prompts, params)[0][0].output_token_ids


def test_the_module_runs_as_written(tmp_path: Path) -> None:
    """In a process of its own, in an empty directory: the whole path from the shell to files and MLflow."""
    arguments = ["workload.limit=2", "sampler.max_tokens=8", "tracking=jsonl"]
    command = [sys.executable, "-m", "runner", *arguments]
    environment = {"PYTHONPATH": str(README.parent), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["OMP_NUM_THREADS"] = "1"  # beside other tests a second thread is waited for most of the time
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "identical to plain decoding" in done.stdout
    assert "2/2" in done.stdout
    assert len(list(tmp_path.rglob("metrics.json"))) == 1
