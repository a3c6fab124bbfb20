"""Any other decoder that transformers supports, run by its own modelling code over our paged KV cache.

Our attention is registered under a name of its own (runner.engine.transformers_attention). The modules are not ours,
and a row's bits depend on its launch, until `keep_rows` has our kernels compute what they multiply and takes over the
functions that make it so (transformers_modules, transformers_functions); whether that was all, transformers_check asks.
What cannot run is refused with the reason: by its config before anything is loaded, and by one probing pass after.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from kernels.cpu.panels import Change, Weight, pack, tensors_of, unpack
from kernels.quantized_weight import quantize
from runner.engine.checkpoint import ModelSource, read_tensors, require_finite, resolve_directory
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.memory import model_remedy, require_memory
from runner.engine.mtp_layout import is_mtp_tensor
from runner.engine.rope import pin_longrope
from runner.engine.transformers_attention import ATTENTION_NAME, Launch, Probe, attention
from runner.engine.transformers_functions import keep_rows_in
from runner.engine.transformers_modules import OwnExperts, OwnLinear, take_products
from runner.engine.transformers_support import auto_class, quantization_method, sliding_layers

PROBE_ROWS = 2
ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts, where they are linear layers
# What transformers' code raises where a config lacks a value, or has two that do not go together.
CONFIG_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class TransformersModel(nn.Module):
    """The interface of runner.engine.decoder.Decoder over a transformers model."""

    keeps_rows = False  # keep_rows

    def __init__(self, causal_model: Any, config: Any, name: str, *, max_model_len: int) -> None:
        """Take a loaded model apart into decoder and head.

        Raises:
            UserError: a probing pass shows that its attention does not go through our cache.
        """
        super().__init__()
        self.decoder = causal_model.base_model.get_decoder()
        # With the decoder replaced by a stand-in, the model's own forward is its head: projection, scale, soft cap.
        path = next(path for path, module in causal_model.named_modules() if module is self.decoder)
        causal_model.set_submodule(path, _GivenHiddenStates())
        self.head = causal_model
        self.max_model_len = max_model_len
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        probe, self.vocab_size = self._probe(config, name)
        self.kv_widths = [probe.kv_widths[layer] for layer in range(self.num_layers)]
        self._layers = [_enclosing_layer(self.decoder, probe.modules[layer]) for layer in range(self.num_layers)]
        self._like_last = (_without_weights(self._layers[-1]),)  # in a tuple: no module of this one

    @classmethod
    def load(
        cls, source: ModelSource, config: Any, *, device: torch.device, dtype: torch.dtype, max_model_len: int
    ) -> TransformersModel:
        """Load a model that `require_supported` let through.

        Raises:
            UserError: a corrupt or incomplete checkpoint, too little memory, or attention that is not replaceable.
        """
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attention)
        config = copy.deepcopy(config)
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # a training loss would be computed from them
        try:
            with torch.device("meta"):
                num_bytes = sum(p.numel() * p.element_size() for p in _build(config, source, dtype).parameters())
        except CONFIG_ERRORS as error:
            raise UserError(
                f"{source.name}={source.model}: transformers cannot build a {config.model_type!r} model by its "
                f"config.json ({type(error).__name__}: {error}); mend it"
            ) from error
        require_memory(num_bytes, device, f"{source.name}={source.model}", model_remedy(dtype))
        if source.is_dummy:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
                torch.manual_seed(0)
                causal_model = _build(config, source, dtype)
        else:
            causal_model = _read(config, source, dtype, device)
            for name, parameter in causal_model.named_parameters():
                require_finite(parameter, name, source)
        pin_longrope(causal_model, max_model_len)
        name = f"{source.name}={source.model}"
        return cls(causal_model.requires_grad_(False).eval(), config, name, max_model_len=max_model_len)

    def hold_in_8_bits(self, numbers: torch.dtype, *, with_head: bool) -> None:
        """From now on layers multiply by weights quantized to such numbers; embedding and routers stay as they are.

        Args:
            numbers: one of runner.engine.quantization.NUMBERS.
            with_head: the projection to the vocabulary, too.
        """

        def change(weight: Weight) -> Weight:
            return pack(quantize(unpack(weight), numbers))

        take_products(self.decoder, change, but=ROUTERS)
        if with_head:
            take_products(self.head, change)

    @property
    def num_weight_bytes(self) -> int:
        own = [part for part in self.modules() if isinstance(part, OwnLinear | OwnExperts)]
        tensors = [
            *self.parameters(),
            *(tensor for part in own for weight in part.weights for tensor in tensors_of(weight)),
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def keep_rows(self, change: Change) -> None:
        """From now on rows are computed, as far as that is in our hands, with bits of their own.

        Args:
            change: how the weights of products are laid out, which checkpoints' tensors have no place in then.
        """
        if self.keeps_rows:
            return
        for part in (self.decoder, self.head):
            take_products(part, change)
        probe = Probe(num_rows=PROBE_ROWS, sliding_layers=frozenset())
        keep_rows_in(lambda: self._pass_over_two(probe))
        self.keeps_rows = True

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the rows of one launch, writing their KV; returns as Decoder.forward does."""
        taps: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            for index in tap_layers:
                hooks.enter_context(self._tap(index, taps))
            hidden = self._decode(batch.token_ids, batch.positions, Launch(batch=batch, cache=cache))
        return hidden, [taps[index] for index in tap_layers]

    @property
    def embed_tokens(self) -> torch.Tensor:
        """[vocab, hidden]"""
        weight: torch.Tensor = self.decoder.get_input_embeddings().weight
        return weight

    def whole_head(self) -> torch.Tensor:
        """[vocab, hidden]; every family that MTP modules are published for calls it so."""
        weight: torch.Tensor = self.head.lm_head.weight
        return weight

    def last_layer(self) -> nn.Module:
        """One more like the last layer, with weights of zero, for an MTP module."""
        layer, device = copy.deepcopy(self._like_last[0]), self.embed_tokens.device
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False))
        return layer

    @property
    def last_layer_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._like_last[0].parameters())

    def rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """What the decoder hands its layers as position_embeddings; position_ids [1, num_rows] int64."""
        return self.decoder.rotary_emb(hidden, position_ids)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64 -> [num_rows, hidden], as the embedding module gives them."""
        embedded: torch.Tensor = self.decoder.get_input_embeddings()(token_ids)
        return embedded

    def logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden] -> [num_rows, vocab] float32; the head knows no tiles."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()

    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, launch: Launch | Probe) -> torch.Tensor:
        output = self.decoder(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, launch=launch
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _tap(self, index: int, taps: dict[int, torch.Tensor]) -> Any:
        """A hook, removed on leaving its context, that keeps the residual stream after `index` layers."""

        def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taps[index] = (args[0] if args else kwargs["hidden_states"])[0]

        def keep_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            taps[index] = (output[0] if isinstance(output, tuple) else output)[0]

        if index < self.num_layers:
            return self._layers[index].register_forward_pre_hook(keep_input, with_kwargs=True)
        return self._layers[-1].register_forward_hook(keep_output)

    @torch.inference_mode()
    def _pass_over_two(self, probe: Probe) -> torch.Tensor:
        """A pass over two tokens that stores nothing: the logits, [PROBE_ROWS, vocab]."""
        device = self.embed_tokens.device
        token_ids = torch.zeros(PROBE_ROWS, dtype=torch.int64, device=device)
        return self.logits(self._decode(token_ids, torch.arange(PROBE_ROWS, device=device), probe), None)

    def _probe(self, config: Any, name: str) -> tuple[Probe, int]:
        """What each layer would store, and the width of the logits."""
        probe = Probe(num_rows=PROBE_ROWS, sliding_layers=sliding_layers(config))
        try:
            vocab_size = self._pass_over_two(probe).shape[-1]
        except (UserError, TypeError, AttributeError) as error:  # the latter two: it needs a mask or cache of its own
            raise UserError(
                f"{name}: {type(self.head).__name__} cannot run over a paged KV cache: {error}; choose another model"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except CONFIG_ERRORS as error:
            raise UserError(
                f"{name}: {type(self.head).__name__} does not run with what its config.json says "
                f"({type(error).__name__}: {error}); mend it"
            ) from error
        if set(probe.modules) != set(range(self.num_layers)):
            raise UserError(
                f"{name}: {type(self.head).__name__} must attend once in each of its {self.num_layers} layers to run "
                f"over a paged KV cache, and does in layers {sorted(probe.modules)}; choose another model"
            )
        return probe, vocab_size


class _GivenHiddenStates(nn.Module):
    """Stands in for the decoder of a causal model: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


class _DecoderOutput(NamedTuple):
    """Of a decoder; of what else some model's forward passes on, whatever a release calls it, there is none."""

    last_hidden_state: torch.Tensor

    def __getattr__(self, name: str) -> None:
        return None


def _build(config: Any, source: ModelSource, dtype: torch.dtype) -> Any:
    """The model with the random weights of its own initialisation."""
    return auto_class().from_config(
        copy.deepcopy(config),
        attn_implementation=ATTENTION_NAME,
        dtype=dtype,
        trust_remote_code=source.trust_remote_code,
    )


def _read(config: Any, source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with the weights of its checkpoint, every one of them."""
    for _ in read_tensors(source):  # headers only: missing, pickled and corrupt files have their errors there
        pass
    options: dict[str, Any] = {}
    if quantization_method(config) == "mxfp4":
        from transformers.utils.quantization_config import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        causal_model, info = auto_class().from_pretrained(
            resolve_directory(source),
            config=config,
            attn_implementation=ATTENTION_NAME,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=source.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            **options,
        )
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):  # tensors that belong together do not fit together
            raise
        info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [("some expert's weights",)]}
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(name for name in info["unexpected_keys"] if not is_mtp_tensor(name, config)),
        "of another shape": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
    }
    found = [f"{kind}: {', '.join(names[:4])}" for kind, names in problems.items() if names]
    if found:
        raise UserError(
            f"{source.name}={source.model}: the tensors do not match its config ({config.model_type}, "
            f"{config.num_hidden_layers} layers); {'; '.join(found)}; download the checkpoint again or mend its "
            "config.json"
        )
    return causal_model


def _without_weights(layer: nn.Module) -> nn.Module:
    """A copy of a layer whose parameters take no memory."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in layer.parameters()
    }
    return copy.deepcopy(layer, memo=empty)


def _enclosing_layer(decoder: nn.Module, attention_module: nn.Module) -> nn.Module:
    """The decoder layer that holds an attention module: layers.3 of layers.3.self_attn."""
    path = next(path for path, module in decoder.named_modules() if module is attention_module).split(".")
    depth = next(index for index, part in enumerate(path) if part.isdigit())
    return decoder.get_submodule(".".join(path[: depth + 1]))
