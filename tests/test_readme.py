"""The README and the documents that it links to: links lead to files, every command composes, the examples run."""

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
from runner.engine.families import FAMILIES
from runner.engine.sampling_params import SamplingParams
from tests.command_line import CommandLine
from tests.conftest import Engines, complete

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
METHODS = ROOT / "proposers" / "methods.md"
REQUESTS = ROOT / "runner" / "engine" / "requests.md"
MODELS = ROOT / "runner" / "engine" / "models.md"


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), flags=re.DOTALL | re.MULTILINE)


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def links(document: Path) -> list[str]:
    """The links to other files of the repository and to headings, as they are written."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [link for link in found if not re.match(r"\w+:", link)]


def linked_file(document: Path, link: str) -> Path:
    path = link.partition("#")[0]
    return (document.parent / path).resolve() if path else document


def anchors(document: Path) -> set[str]:
    """What links call the headings: in lower case, hyphens for spaces, without punctuation."""
    headings = re.findall(r"^#+ (.+)$", prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def documents() -> list[Path]:
    """The README and every document that it links to."""
    linked = [linked_file(README, link) for link in links(README)]
    return list(dict.fromkeys([README, *(path for path in linked if path.suffix == ".md" and path.is_file())]))


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def runner_arguments() -> list[list[str]]:
    """The arguments of every `python -m runner` in the documents, without the comment behind it; each once."""
    commands: list[str] = []
    for document in documents():
        lines = [line for block in blocks(document, "bash") for line in block.replace("\\\n", " ").splitlines()]
        found = [re.search(r"python -m runner(?![.\w])([^#]*)", line) for line in lines]
        commands += [match[1] for match in found if match]
        commands += re.findall(r"`python -m runner(?![.\w])([^`]*)`", prose(document))
    filled = [re.sub(r"<directory[^>]*>", "some/model", command) for command in commands]
    return [list(arguments) for arguments in dict.fromkeys(tuple(shlex.split(command)) for command in filled)]


def test_the_first_thirty_lines_install_run_and_test() -> None:
    head = "\n".join(text_of(README).splitlines()[:30])
    assert "pip install -e . && python -m runner" in head
    assert 'pip install -e ".[test]" && pytest' in head


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_every_link_leads_to_a_file(document: Path) -> None:
    """And, behind #, to a heading of it."""
    broken = []
    for link in links(document):
        file, anchor = linked_file(document, link), link.partition("#")[2]
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


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
    [completion], [constrained] = blocks(README, "python"), blocks(REQUESTS, "python")
    exec(compile(completion, name_of(README), "exec"), {})
    assert "vllm:spec_decode_num_accepted_tokens" in capsys.readouterr().out
    exec(compile(constrained, name_of(REQUESTS), "exec"), {})
    printed = capsys.readouterr().out
    assert re.match(r'\{"color": ?"(red|green)", ?"count": ?-?\d+\} ', printed), printed
    assert "logprob" in printed


def test_the_example_of_a_method_drafts_and_changes_no_token(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = blocks(METHODS, "python")
    module = ModuleType("repeat")
    exec(compile(example, name_of(METHODS), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "repeat", module)
    method = {"method": "custom_class", "model": "repeat.RepeatProposer", "num_speculative_tokens": 3}
    prompts, params = [{"prompt_token_ids": [5, 6, 7]}], [SamplingParams(max_tokens=12, seed=1)]
    requests, metrics = complete(engines(method), prompts, params)
    assert 3 in metrics.records[0].num_draft_tokens
    assert requests[0].output_token_ids == complete(engines(), prompts, params)[0][0].output_token_ids


def test_no_document_has_a_python_example_that_is_not_run() -> None:
    assert {document for document in documents() if blocks(document, "python")} == {README, METHODS, REQUESTS}


def test_the_module_runs_as_written(tmp_path: Path) -> None:
    """In a process of its own, in an empty directory: the whole path from the shell to files and MLflow."""
    arguments = ["workload.limit=2", "sampler.max_tokens=8", "tracking=jsonl"]
    command = [sys.executable, "-m", "runner", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["OMP_NUM_THREADS"] = "1"  # beside other tests a second thread is waited for most of the time
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "identical to plain decoding" in done.stdout
    assert "2/2" in done.stdout
    assert len(list(tmp_path.rglob("metrics.json"))) == 1


def test_the_table_of_models_names_every_family_of_our_own_decoder() -> None:
    """By its model_type, and every preset of one."""
    text = text_of(MODELS)
    assert [family for family in FAMILIES if f"`{family}`" not in text] == []
    presets = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - {"hf", "tiny"}
    assert [preset for preset in sorted(presets) if preset not in text] == []
