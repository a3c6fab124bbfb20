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
from kernels.reference.fp8_rows import NO_SCALES
from kernels.words import Kind
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.operations import head_logits
from runner.engine.transformers_attention import Launch, Probe
from runner.engine.transformers_functions import keep_rows_in
from runner.engine.transformers_modules import OwnExperts, OwnLinear, take_products
from runner.engine.transformers_support import CONFIG_ERRORS, sliding_layers

PROBE_ROWS = 2
ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts, where they are linear layers


class TransformersModel(nn.Module):
    """The interface of runner.engine.decoder.Decoder over a transformers model."""

    keeps_rows = False  # keep_rows
    is_recurrent = False  # models of layers with states are refused

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
        self.kv_scales = [NO_SCALES] * self.num_layers
        self._layers = [_enclosing_layer(self.decoder, probe.modules[layer]) for layer in range(self.num_layers)]
        self._like_last = (_without_weights(self._layers[-1]),)  # in a tuple: no module of this one

    def hold_in_8_bits(self, kind: Kind, *, with_head: bool) -> None:
        """From now on layers multiply by weights quantized to such numbers; embedding and routers stay as they are.

        Args:
            kind: of numbers of 8 bits.
            with_head: the projection to the vocabulary, too.
        """

        def change(weight: Weight) -> Weight:
            return pack(quantize(unpack(weight), kind))

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

        A head tied to the embedding becomes a copy of it.

        Args:
            change: how the weights of products are laid out; nothing can be loaded into them any more.
        """
        if self.keeps_rows:
            return
        for part in (self.decoder, self.head):
            take_products(part, change)
        probe = Probe(num_rows=PROBE_ROWS, sliding_layers=frozenset())
        keep_rows_in(self, lambda: self._pass_over_two(probe))
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

    def raw_logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """What the projection alone gives, without a scale or a soft cap behind it."""
        return head_logits(hidden, self.whole_head(), tile)

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
        except (UserError, TypeError, AttributeError) as error:  # of Python's: it needs a mask or cache of its own
            raise UserError(
                f"{name}: {type(self.head).__name__} cannot run over a paged KV cache: {error}; choose another model"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except CONFIG_ERRORS as error:
            raise UserError(
                f"{name}: {type(self.head).__name__} does not run with what its config.json says "
                f"({type(error).__name__}: {error}); mend it, or choose another model"
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
