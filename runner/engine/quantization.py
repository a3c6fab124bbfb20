"""Which weights of a model are held in 8 or 4 bits, and how; what a checkpoint's quantization_config says of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.quantized_weight import CODES, FP4_GROUP, QuantizedWeight, fits_codes
from kernels.words import Kind
from runner.engine.errors import UserError

SMALLEST_GROUP = 16  # inputs: a step of a tensor core's
READABLE = (
    "fp8, compressed-tensors (float-quantized, int-quantized, pack-quantized, nvfp4-pack-quantized), modelopt (FP8, "
    "NVFP4, MIXED_PRECISION), gptq, awq and mxfp4"
)
MXFP4_GROUP = 32  # inputs that share a scale in that format


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How the numbers of a weight are held."""

    kind: Kind
    group_size: int | None = None  # inputs that share a scale; None: all do
    has_zeros: bool = False  # zero points, of int4

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Storage:
        size = FP4_GROUP if weight.kind == "fp4" else weight.shared_columns
        return cls(kind=weight.kind, group_size=size, has_zeros=weight.has_zeros)

    @property
    def has_codes(self) -> bool:
        return self.kind in CODES

    @property
    def is_multiplied(self) -> bool:
        """Whether kernels take it so; any other is expanded on loading."""
        size = self.group_size
        return size is None or (size >= SMALLEST_GROUP and size & (size - 1) == 0)

    def of_inputs(self, in_features: int) -> Storage:
        """As a weight of so many inputs is held: the numbers of codes that kernels would not take take 8 bits."""
        if not self.has_codes or fits_codes(self.kind, in_features, self.group_size or in_features):
            return self
        return Storage(kind="int8", group_size=self.group_size)

    def __str__(self) -> str:
        if self.group_size == 1:
            return f"{self.kind}, a scale for each number"
        if self.group_size is None or self.kind == "fp4":
            return self.kind
        return f"{self.kind} in groups of {self.group_size}"


FP4 = Storage(kind="fp4", group_size=FP4_GROUP)  # of NVFP4, and of MXFP4
Quantization = Mapping[str, Storage]  # by module, such as model.layers.0.self_attn.q_proj


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint's tensors are packed."""

    # scaled: numbers of 8 bits beside scales; int32: compressed-tensors' words; gptq; awq; nvfp4 of modelopt or of
    # compressed-tensors; mixed: modelopt's nvfp4, and scaled where a module has 8 bits; mxfp4: of experts alone.
    packing: str
    storage: Storage  # of its weights, once unpacked
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    bits: int = 8  # of a number that is packed into words
    zero_offset: int = 0  # what is to be added to packed zero points


SCALED_FP8 = Scheme(packing="scaled", storage=Storage(kind="fp8"))


def read_scheme(stated: Mapping[str, Any], of: str, option: str) -> Scheme:
    """What a quantization_config means. of: the checkpoint, and option: that quantizes a dense one, for errors.

    Raises:
        UserError: a method or a format that is not read.
    """
    try:
        scheme = _scheme_of(stated)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # values of other types than are published
        scheme = None
    if scheme is None:
        keys = (
            *("quant_method", "format", "fmt", "quant_algo", "bits", "version", "checkpoint_format"),
            "transform_config",
        )
        said = {key: stated[key] for key in keys if stated.get(key) is not None}
        raise UserError(
            f"quantization_config of {of} must be one of {READABLE}, got {said}; choose such a checkpoint, or the "
            f"unquantized one, which {option}=fp8 holds in 8 bits"
        )
    return scheme


FORMATS_OF_8_BITS = ("e4m3", "float8_e4m3fn")  # float8_e4m3fn: MiniMax's spelling


def _scheme_of(stated: Mapping[str, Any]) -> Scheme | None:
    """None: it is not read."""
    method = str(stated.get("quant_method", "modelopt" if "quant_algo" in stated else None))
    if method in ("fp8", "fbgemm_fp8") and str(stated.get("fmt", "e4m3")) in FORMATS_OF_8_BITS:
        return _scaled("fp8", _block(stated.get("weight_block_size")))
    if method == "modelopt" and str(stated.get("quant_algo")) == "FP8":
        return SCALED_FP8
    if method == "modelopt" and str(stated.get("quant_algo")) in ("NVFP4", "W4A16_NVFP4"):
        return _nvfp4("nvfp4 of modelopt", stated.get("group_size"))
    if method == "modelopt" and str(stated.get("quant_algo")) == "MIXED_PRECISION":
        return _nvfp4("mixed", None)
    if method == "compressed-tensors":
        return _compressed(stated)
    bits, size = stated.get("bits"), _size(stated.get("group_size"))
    if method == "gptq" and bits in (4, 8) and stated.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"):
        is_first = stated.get("checkpoint_format", "gptq") == "gptq"  # it stores zero points less one
        storage = storage_of_bits(bits, size, has_zeros=not stated.get("sym", True))
        return Scheme(packing="gptq", storage=storage, bits=bits, zero_offset=int(is_first))
    if method == "awq" and bits == 4 and str(stated.get("version", "gemm")).lower() == "gemm":
        storage = storage_of_bits(4, size, has_zeros=bool(stated.get("zero_point", True)))
        return Scheme(packing="awq", storage=storage, bits=4)
    if method == "mxfp4":
        return Scheme(packing="mxfp4", storage=FP4, bits=4)
    return None


def _compressed(stated: Mapping[str, Any]) -> Scheme | None:
    """Of the first group of modules; where others are packed differently their tensors are unexpected ones.

    Not read are those whose rows are rotated where they run, in front of products or behind them (QuIP, SpinQuant).
    """
    rotations = (stated.get("transform_config") or {}).get("config_groups") or {}
    if any(not own["location"].startswith("weight") for rotation in rotations.values() for own in rotation["apply"]):
        return None
    groups = stated.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    kind, bits = weights.get("type"), weights.get("num_bits")
    block, size = _block(weights.get("block_structure")), _size(weights.get("group_size"))
    match stated.get("format"), kind, bits:
        case ("float-quantized" | "naive-quantized", "float", 8):
            return _scaled("fp8", block, size)
        case ("int-quantized" | "naive-quantized", "int", 8):
            return _scaled("int8", None, size)
        case ("pack-quantized", "int", 4 | 8):
            storage = storage_of_bits(int(bits), size, has_zeros=weights.get("symmetric") is False)
            return Scheme(packing="int32", storage=storage, bits=int(bits))
        case ("nvfp4-pack-quantized", "float", 4):
            return _nvfp4("nvfp4 of compressed-tensors", size)
    return None


def _nvfp4(packing: str, size: int | None) -> Scheme | None:
    """size: what is stated of groups, which have one size in this format."""
    return None if size not in (None, FP4_GROUP) else Scheme(packing=packing, storage=FP4, bits=4)


def storage_of_bits(bits: int, size: int | None, *, has_zeros: bool = False) -> Storage:
    """Of numbers that are packed into words, of which so many share a scale."""
    if bits == 8:
        return Storage(kind="int8", group_size=size)
    return Storage(kind="int4", group_size=size, has_zeros=has_zeros)


def _scaled(kind: Kind, block: tuple[int, int] | None, size: int | None = None) -> Scheme:
    storage = Storage(kind=kind, group_size=size if block is None else block[1])
    return Scheme(packing="scaled", storage=storage, block=block)


def _size(stated: Any) -> int | None:
    """Inputs that share a scale; None: all do."""
    if stated in (None, -1):
        return None
    if type(stated) is not int or stated < 1:
        raise ValueError("no number of inputs")
    return stated


def _block(stated: Any) -> tuple[int, int] | None:
    rows, columns = (None, None) if stated is None else map(_size, stated)
    return None if rows is None or columns is None else (rows, columns)


def held_weights(
    modules: Collection[str],  # that may be held so
    found: Quantization,  # what the checkpoint holds so
    wanted: Mapping[str, Kind],  # modules of them that shall be
    of: str,
    option: str,  # by which they were asked for
) -> Quantization:
    """What a decoder holds in 8 or 4 bits.

    Raises:
        UserError: the checkpoint is quantized in another way than was asked for.
    """
    held = {name: storage for name, storage in found.items() if name in modules and storage.is_multiplied}
    for kind in set(wanted.values()):
        if other := sorted({str(kept) for kept in found.values() if kept.kind != kind}):
            raise UserError(
                f"{of} must not be quantized to {kind}: its checkpoint is quantized already ({', '.join(other)}); "
                f"leave {option} null, or choose the unquantized checkpoint"
            )
    return {name: Storage(kind=kind) for name, kind in wanted.items()} | held


def within(quantization: Quantization | None, prefix: str) -> Quantization:
    """Of the modules of a part, by what their names have behind its own; None: all are dense."""
    own = (quantization or {}).items()
    return {name.removeprefix(prefix): storage for name, storage in own if name.startswith(prefix)}
