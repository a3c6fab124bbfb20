"""Small random transformers models, our engine driven over the same tokens, and the errors of both against float64.

Shared by the tests of our own decoder families and of the transformers path.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from runner.engine.block_manager import BlockManager
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.launch import Part
from runner.engine.loader import LoadedModel, load_model
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.segment import Segment
from runner.engine.tile_shape import TileShape
from tests.edit_json import edit_json
from tests.edit_tensors import edit_tensors

CPU = torch.device("cpu")
BLOCK_SIZE = 16
# Sharp attention and logits of order one to ten, so that a wrong mask, rotation or scale cannot hide.
INITIALIZER_RANGE = 0.2


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """Tokens of one request: prompt and what follows it."""

    prompt: list[int]
    output: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output


def random_sequences(vocab_size: int, lengths: Sequence[tuple[int, int]]) -> list[TokenSequence]:
    """Sequences of (prompt, output) lengths; a prefix of the longest is nobody else's text."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for num_prompt, num_output in lengths:
        ids = torch.randint(1, vocab_size, (num_prompt + num_output,), generator=generator).tolist()
        sequences.append(TokenSequence(prompt=ids[:num_prompt], output=ids[num_prompt:]))
    return sequences


def random_model(config: Any, auto_class: Any = None) -> Any:
    """A float32 transformers model whose biases, norms, sinks and corrections are random too, not zeros and ones."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM

    # transformers knows it within Mistral 3's checkpoints alone.
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    config.initializer_range = INITIALIZER_RANGE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Eager is each model's definition; some versions of Gemma 2's sdpa leave out its soft cap.
        builder = auto_class or AutoModelForCausalLM
        model = builder.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):  # of all experts
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_()
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def save(model: Any, directory: Path, **options: Any) -> ModelSource:
    model.save_pretrained(directory, **options)
    if model.config.model_type == "olmo_hybrid":
        edit_tensors(directory, partial(_split_convolutions, model.config))
    if model.config.model_type == "bailing_hybrid":  # by which transformers finds linear_head_dim, and saves another
        edit_json(directory / "config.json", head_dim=model.config.linear_head_dim)
    return ModelSource(model=str(directory))


def _split_convolutions(config: Any, tensors: dict[str, torch.Tensor]) -> None:
    """As they are published; transformers saves three parts of one size, whatever sizes they have."""
    sizes = [config.linear_num_key_heads * config.linear_key_head_dim] * 2
    sizes += [config.linear_num_value_heads * config.linear_value_head_dim]
    for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors.update(zip(names, map(torch.clone, whole.split(sizes)), strict=True))


def saved_model(directory: Path, dtype: torch.dtype) -> Any:
    """A saved model as transformers itself loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of the words w0, w1, ..."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


def load(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    reads_kv_scales: bool = False,
) -> LoadedModel:
    return load_model(source, device=CPU, dtype=dtype, max_model_len=max_model_len, reads_kv_scales=reads_kv_scales)


@torch.inference_mode()
def reference_logits(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """transformers' own logits of every position, one sequence at a time: [sum of lengths, vocab]."""
    return torch.cat([model(torch.tensor([s.token_ids]), use_cache=False).logits[0] for s in sequences])


def float64_logits(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    with KeepFloat64():
        return reference_logits(in_float64(model), sequences)


def long_context_logits(model: Any, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' and float64 logits of sequences that are read as the beginnings of longer ones.

    Causal, so only what depends on the length at hand differs: the factor set of longrope.
    """
    filler = random_sequences(model.config.vocab_size, ((0, 64),))[0].output
    lengthened = [TokenSequence(prompt=s.prompt, output=s.output + filler) for s in sequences]
    keep, start = [], 0
    for short, long in zip(sequences, lengthened, strict=True):
        keep += range(start, start + len(short.token_ids))
        start += len(long.token_ids)
    return reference_logits(model, lengthened)[keep], float64_logits(model, lengthened)[keep]


@torch.inference_mode()
def hidden_states(model: Any, token_ids: list[int]) -> dict[int | str, torch.Tensor]:
    """The residual stream after 0, 1 and 2 layers, and normed; transformers' last entry is the normed one."""
    decoder = model.base_model
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    last: list[torch.Tensor] = []
    hook = layers[-1].register_forward_hook(
        lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with hook:
        output = decoder(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    return {0: states[0][0], 1: states[1][0], 2: last[0][0], "normed": output.last_hidden_state[0]}


def assert_taps_are_hidden_states(loaded: LoadedModel, model: Any, tiles: TileShape) -> None:
    token_ids = random_sequences(model.config.vocab_size, ((20, 0),))[0].prompt
    segment = Segment(start=0, num_tokens=len(token_ids), block_table=[1, 2], state_slot=1)
    reads_segments = loaded.model.is_recurrent
    batch = ForwardBatch.build(
        "prefill", [segment], token_ids, shape=tiles, block_size=BLOCK_SIZE, device=CPU, reads_segments=reads_segments
    )
    with torch.inference_mode():
        states = loaded.model.empty_states(2, 0, torch.float32, CPU) if isinstance(loaded.model, Decoder) else ()
        cache = PagedKVCache(loaded.model.kv_widths, 4, BLOCK_SIZE, torch.float32, CPU, states=states)
        normed, taps = loaded.model(batch, cache, (2, 0, 1))
        untapped, none = loaded.model(batch, cache)
    assert none == [] and torch.equal(normed, untapped), "tapping changes nothing"
    theirs = hidden_states(model, token_ids)
    with KeepFloat64():
        exact = hidden_states(in_float64(model), token_ids)
    for ours, name in zip((*taps, normed), (2, 0, 1, "normed"), strict=True):
        assert_as_accurate(ours[: len(token_ids)], theirs[name], exact[name])


def in_float64(model: Any) -> Any:
    """A copy with float64 weights; the rotary frequencies stay the float32 numbers that define the model."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


class KeepFloat64(TorchFunctionMode):
    """Turns modelling code's casts of float64 tensors to float32 (norms, softmax, routers) into no casts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def engine_logits(
    loaded: LoadedModel,
    sequences: Sequence[TokenSequence],
    *,
    batch_invariant: bool = True,
    kv_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Our logits of the same positions, by chunked prefill, verification, rejection and decoding in ragged batches."""
    dtype = next(loaded.model.parameters()).dtype
    runner = ModelRunner(
        loaded.model,
        block_size=BLOCK_SIZE,
        device=CPU,
        dtype=dtype,
        batch_invariant=batch_invariant,
        kv_dtype=kv_dtype,
    )
    blocks = BlockManager(64, BLOCK_SIZE)
    runner.allocate_cache(blocks.num_blocks, max_num_seqs=len(sequences), num_uncertain=4)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=s.prompt,
            sampling_params=SamplingParams(),
            seed=0,
            state_slot=index + 1,
        )
        for index, s in enumerate(sequences)
    ]
    rows: list[dict[int, torch.Tensor]] = [{} for _ in requests]  # by position

    def step(*plan: tuple[int, int, int, list[int]]) -> None:
        """(request, start, end, drafts) each: committed tokens start..end-1, then drafts."""
        parts, drafts = [], []
        for index, start, end, guesses in plan:
            request = requests[index]
            request.output_token_ids = sequences[index].token_ids[
                request.num_prompt_tokens : max(end, len(request.prompt_token_ids))
            ]
            assert blocks.grow(request.block_table, end + len(guesses))
            count = end - start + len(guesses)
            parts.append(Part(request=request, start=start, end=end, num_draft_tokens=len(guesses), num_logits=count))
            drafts += guesses
        logits = runner.run(parts, torch.tensor(drafts, dtype=torch.int64))
        assert logits.dtype == torch.float32
        for (index, start, end, guesses), chunk in zip(plan, logits.split([p.num_logits for p in parts]), strict=True):
            fed = sequences[index].token_ids[:end] + guesses
            for offset, row in enumerate(chunk):
                if fed[: start + offset + 1] == sequences[index].token_ids[: start + offset + 1]:
                    rows[index][start + offset] = row

    first, second, third = (len(s.prompt) for s in sequences)
    ids = [s.token_ids for s in sequences]
    half = second // 2
    wrong = [1, 2]
    step((0, 0, first, []), (1, 0, half, []), (2, 0, third, []))
    # A prompt's second chunk beside verification: one right draft and two wrong ones, and a plain decode.
    step((1, half, second, []), (0, first, first + 1, [ids[0][first + 1], *wrong]), (2, third, third + 1, []))
    # The wrong drafts' cache slots are written again; the others verify at other depths.
    step(
        (0, first + 2, first + 3, ids[0][first + 3 :]),
        (1, second, second + 1, ids[1][second + 1 :]),
        (2, third + 1, third + 2, ids[2][third + 2 :]),
    )
    return torch.stack(
        [rows[index][position] for index, s in enumerate(sequences) for position in range(len(s.token_ids))]
    )


def assert_as_accurate(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Error against float64 at most twice transformers' in the same dtype, plus one ulp at the largest value."""
    assert exact.dtype == torch.float64 and ours.shape == theirs.shape == exact.shape
    largest = exact.abs().max()
    ulp = torch.finfo(theirs.dtype).eps * 2.0 ** largest.log2().floor()
    our_error, their_error = (ours - exact).abs().max(), (theirs - exact).abs().max()
    assert their_error < 0.05 * largest, f"the reference is useless: off by {their_error} of {largest}"
    assert our_error <= 2 * their_error + ulp, f"off by {our_error}, transformers by {their_error}, ulp {ulp}"


def assert_rows_are_as_accurate(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """As assert_as_accurate, of the median row of [num_rows, width].

    For rows whose conditions differ much: the error of the worst one, ours and theirs, is a draw that says little.
    """
    assert exact.dtype == torch.float64 and ours.shape == theirs.shape == exact.shape
    our_error, their_error = ((found - exact).abs().amax(dim=1).median() for found in (ours, theirs))
    ulp = torch.finfo(theirs.dtype).eps * 2.0 ** exact.abs().max().log2().floor()
    assert our_error <= 2 * their_error + ulp, f"off by {our_error}, transformers by {their_error}, ulp {ulp}"
