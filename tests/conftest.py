"""Small engines with random weights, built once a session for each set of arguments, and the loop that drives them."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch

# The processes that tests start have models as small as ours: threads that wait for each other cost more than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is decorated: before any of them is imported

from kernels import linear_plan
from proposers.drafting import blocks, from_hidden_states
from proposers.heads.quantized import quantize_head_of_target
from runner import cache_size, frozen_heap
from runner.engine import backend, launch_shapes, programs
from runner.engine.checkpoint import ModelSource
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector, core_wait
from runner.prompts import make_requests
from tests.emulated_device import EmulatedDevice
from tests.graphs_for_tests import recorded
from tests.heads_for_tests import HEADS, make_fair
from tests.interpreted_calls import interpret_quickly

if TYPE_CHECKING:
    from tests.command_line import CommandLine

# The same examples in every run, so that what fails here fails everywhere;
# `pytest --hypothesis-profile=exploring` draws others, and twice as many.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("exploring", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("repeatable")

TARGET_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


MOST_KEPT = 64  # engines: more than there are methods, which tests take one after another


class Engines:
    """Builds engines; the same arguments give the same engine, while it is among the last ones asked for."""

    def __init__(self) -> None:
        self._built: dict[str, LLM] = {}  # in the order in which they were asked for

    def __call__(
        self,
        speculative_config: Mapping[str, Any] | None = None,
        *,
        architecture: Mapping[str, Any] | None = None,  # changes to TARGET_CONFIG
        of_drafters: Mapping[str, Any] | None = None,  # the same of draft and heads; None: the target's
        weight_scale: float = 8.0,
        **engine_args: Any,
    ) -> LLM:
        """An engine on the CPU whose draft model is the first layer of its target.

        The scale brings random weights to where texts wander and the draft is right about half of the time: upper
        layers get half of it, so that the first layer alone is a fair guess.
        """
        key = repr((speculative_config, architecture, of_drafters, weight_scale, sorted(engine_args.items())))
        llm = self._built.pop(key, None)
        if llm is None:
            hf_config = {**TARGET_CONFIG, **(architecture or {})}
            engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": hf_config, **engine_args}
            # Of families whose rotations reach further, too.
            engine_args.setdefault("max_model_len", hf_config["max_position_embeddings"])
            drafting = hf_config if of_drafters is None else {**TARGET_CONFIG, **of_drafters}
            draft = {"model": "first-layer", "hf_config": {**drafting, "num_hidden_layers": 1}}
            heads = {
                method: {"model": f"dummy-{method}", "hf_config": make(drafting)} for method, make in HEADS.items()
            }

            def scale(model: Any) -> None:
                for name, parameter in model.named_parameters():
                    is_whole = parameter.is_floating_point() and parameter.dtype != torch.float8_e4m3fn
                    if "norm" not in name and is_whole:  # of quantized ones scales are scaled
                        in_upper_layer = ".layers." in f".{name}" and "layers.0." not in name
                        parameter.mul_(weight_scale / 2 if in_upper_layer else weight_scale)

            with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
                warnings.simplefilter("ignore", UserWarning)  # of keys that a method ignores, and of lossy rules
                change_first(patch, ModelRunner, scale)
                for module in (from_hidden_states, blocks):
                    patch.setattr(module, "quantize_head_of_target", quantize_fair_head)
                llm = LLM("dummy", speculative_config=speculative_config, draft=draft, heads=heads, **engine_args)
            if len(self._built) == MOST_KEPT:
                del self._built[next(iter(self._built))]
        self._built[key] = llm
        return llm


def change_first(patch: pytest.MonkeyPatch, runner_class: Any, change: Callable[[Any], None]) -> None:
    """Have runners change the weights that they are given: later these may be packed."""
    init = runner_class.__init__

    def changed(runner: Any, model: Any, **arguments: Any) -> None:
        change(model)
        init(runner, model, **arguments)

    patch.setattr(runner_class, "__init__", changed)


def quantize_fair_head(head: Any, source: ModelSource, device: torch.device) -> None:
    """What is done to a head that is filled, of one that is right about half of the time."""
    make_fair(head)
    quantize_head_of_target(head, source, device)


def complete(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]
) -> tuple[list[Request], MetricsCollector]:
    """`generate`, with the requests themselves and the metrics of this call alone; checks that no block leaked."""
    requests = make_requests(prompts, params, llm.engine.tokenizer, llm.config.seed)
    metrics = MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics)
    llm.engine.block_manager.check_integrity([])
    return requests, metrics


# What compiles for half a minute and more in one test, where nothing is cached: indices by numba, programs by Triton.
COMPILING = ("test_ngram.py", "test_suffix.py", "test_kernels_aot.py", "test_launches_compile.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what compiles longest, two and a half minutes of one worker in a fresh checkout.

    Workers begin at different places: while one compiles, none of the others comes to a test that needs the same. And
    what is left at the end are short tests, of which each worker takes its part.
    """
    items.sort(key=lambda item: item.path.name not in COMPILING)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is no garbage: its million objects need not be gone over each time.

    Nor are they frozen: whoever runs requests would count them first, to thaw nobody else's (runner/frozen_heap.py).
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.collect()
    gc.set_threshold(10_000, 10, 10)
    return result


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
            interpret_quickly(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waits() -> Iterator[None]:
    """Tests share the cores with each other, and a summary has a note where that is felt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_wait, "THREADS", Path("/nowhere"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_collections() -> Iterator[None]:
    """A search for garbage takes half a second beside all that tests import, and requests leave little of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_heap, "MOST_GROWTH", 500_000)
        yield


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """What is claimed holds in each number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they were loaded, as on a CPU that computes no products from panels."""
    monkeypatch.setattr(launch_shapes, "can_pack_weight", lambda weight: False)
    monkeypatch.setattr(launch_shapes, "multiplies_and_adds", lambda: False)  # so rows attend in torch's tiles


@pytest.fixture(scope="session")
def engines() -> Engines:
    return Engines()


@pytest.fixture(scope="session")
def plain(engines: Engines) -> list[Request]:
    """What plain decoding says to the prompts of tests/test_losslessness.py, with room for everything."""
    from tests.test_losslessness import PARAMS, PROMPTS, ROOMY

    return complete(engines(**ROOMY), PROMPTS, PARAMS)[0]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    from tests.command_line import CommandLine

    return CommandLine(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton kernels run: compiled on a GPU, else interpreted on CPU tensors."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def small_cuts() -> Iterator[None]:
    """Of up to 64 features the sums are cut in two, which are spread while there is one tile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_plan, "MIN_STEPS", 1)
        for programs in ("PROGRAMS", "WIDE_PROGRAMS"):
            patch.setattr(linear_plan, programs, 2)
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> Engines:
    """Engines on the CPU whose operations are interpreted kernels, and whose steps are captured by a stand-in."""
    if kernel_device.type != "cpu":
        pytest.skip("kernels are compiled here; tests/test_gpu_engine.py runs them")
    monkeypatch.setattr(backend, "interprets_kernels", True)
    monkeypatch.setattr(programs, "record_cuda_graph", lambda compute, inputs, memory: recorded(compute, inputs))
    return Engines()


@pytest.fixture
def emulated_gpu(kernel_device: torch.device) -> Iterator[EmulatedDevice]:
    """The GPU that there is while a test runs."""
    if kernel_device.type != "cpu":
        pytest.skip("there is a GPU; tests/test_gpu_engine.py runs on it")
    pytest.importorskip("triton")
    from tests.emulated_cuda import emulated_cuda

    # Rows of padding hold anything, of which a GPU says nothing either.
    with emulated_cuda() as device, np.errstate(invalid="ignore"):
        yield device


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models are too small to share; tests that are about threads set their own number and put this one back."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _small_caches() -> Iterator[None]:
    """Zeros for 256 requests of a KV cache that few fill took a fifth of the tests' time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_size, "CPU_CACHE_BYTES", 16 << 20)
        yield
