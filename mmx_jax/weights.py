"""Checkpoint tensors: source names -> parameter paths, and the source formats' decoders.

Owns: the table of source names, the check that every tensor is used exactly once or skipped for a stated
reason, and the arithmetic from a source format to a working dtype. Refuses to know: the configuration, jax,
devices, storage formats. The caller says which parameters it wants.
"""

import functools
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from mmx_jax.errors import CheckpointError
from mmx_jax.shards import Checkpoint, TensorInfo

_WORKING_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64))
_LISTED = 20  # names of one kind that an error message spells out


# --- Names ---

# Parameter path (below `layers.L.` where the parameter belongs to a layer) -> where it may come from: first
# the released name, then the one of transformers' text-only save. `{e}` is one tensor per expert, stacked
# here; `[gate]` and `[up]` are the first and the last half of a fused tensor's rows.
_SOURCES: dict[str, tuple[str, ...]] = {
    "embed": ("embed_tokens.weight",),
    "input_norm.weight": ("input_layernorm.weight",),
    "attention.q": ("self_attn.q_proj.weight",),
    "attention.k": ("self_attn.k_proj.weight",),
    "attention.v": ("self_attn.v_proj.weight",),
    "attention.o": ("self_attn.o_proj.weight",),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "attention.indexer.q": ("self_attn.index_q_proj.weight", "self_attn.indexer.q_proj.weight"),
    "attention.indexer.k": ("self_attn.index_k_proj.weight", "self_attn.indexer.k_proj.weight"),
    "attention.indexer.q_norm.weight": ("self_attn.index_q_norm.weight", "self_attn.indexer.q_norm.weight"),
    "attention.indexer.k_norm.weight": ("self_attn.index_k_norm.weight", "self_attn.indexer.k_norm.weight"),
    "post_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate": ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight[gate]"),
    "mlp.up": ("mlp.up_proj.weight", "mlp.gate_up_proj.weight[up]"),
    "mlp.down": ("mlp.down_proj.weight",),
    "moe.router.weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    "moe.router.bias": ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    "moe.experts.gate": ("block_sparse_moe.experts.{e}.w1.weight", "mlp.experts.gate_up_proj[gate]"),
    "moe.experts.up": ("block_sparse_moe.experts.{e}.w3.weight", "mlp.experts.gate_up_proj[up]"),
    "moe.experts.down": ("block_sparse_moe.experts.{e}.w2.weight", "mlp.experts.down_proj"),
    "moe.shared.gate": (
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "mlp.shared_experts.gate_up_proj.weight[gate]",
    ),
    "moe.shared.up": (
        "block_sparse_moe.shared_experts.up_proj.weight",
        "mlp.shared_experts.gate_up_proj.weight[up]",
    ),
    "moe.shared.down": (
        "block_sparse_moe.shared_experts.down_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    ),
    "norm.weight": ("norm.weight",),
    "head": ("lm_head.weight",),
}
_RANK = {suffix: rank for rank, suffix in enumerate(_SOURCES)}

# Everything below goes by names without the prefix that the different ways to save a model put before them.
_PREFIX = re.compile(r"^(language_model\.model|model\.language_model|language_model|model)\.")
_INDEXER = re.compile(r"layers\.\d+\.self_attn\.index(er\.|_)")
_LAYER = re.compile(r"layers\.(\d+)\.")
_NOT_TEXT = {
    re.compile(r"(vision_tower|multi_modal_projector|patch_merge_mlp)\."): "vision side: only text is served",
    re.compile(r"mtp\."): "multi-token prediction is not implemented",
}

# The weight's dtype and its scale tensors with theirs -> source format.
_FORMATS = {
    ("BF16",): "BF16",
    ("F16",): "F16",
    ("F32",): "F32",
    ("F8_E4M3", "_scale_inv F32"): "FP8 block",
    ("F8_E4M3", "_scale_inv U8"): "MXFP8",
    ("F8_E4M3", "_scale_inv F8_E8M0"): "MXFP8",
    ("U8", "_scale F8_E4M3", "_scale_2 F32"): "NVFP4",
}
_UNDECODABLE = f"cannot be decoded (known: {'; '.join(' + '.join(key) for key in _FORMATS)})"


@runtime_checkable
class ShapeDtype(Protocol):
    """What a parameter should be; `jax.ShapeDtypeStruct` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


class _Piece(NamedTuple):
    """A source tensor and its scale tensors, by their names in the files."""

    tensors: tuple[str, ...]
    format: str
    half: str  # which rows are meant: "gate", "up" or "" for all


class _Parameter(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    per_expert: bool  # one piece for each expert, otherwise a single piece
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class LoadPlan:
    """Which tensors make up each parameter. `skipped` lists the tensors that are left out, by reason."""

    checkpoint: Checkpoint
    skipped: dict[str, list[str]]
    _parameters: dict[str, _Parameter] = field(repr=False)

    @property
    def paths(self) -> list[str]:
        """The parameter paths: embedding, layers in order, final norm, head."""
        return list(self._parameters)

    @property
    def formats(self) -> dict[str, str]:
        """Path -> source format: BF16, F16, F32, FP8 block, MXFP8, NVFP4, or several joined by `+`."""
        return {
            path: "+".join(sorted({piece.format for piece in parameter.pieces}))
            for path, parameter in self._parameters.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that reading every parameter takes from the files."""
        return sum(map(self.source_bytes, self._parameters))

    def source_bytes(self, path: str) -> int:
        """Bytes that `read(path)` takes from the files."""
        total = 0
        for piece in self._parameters[path].pieces:
            infos = [self.checkpoint.tensors[name] for name in piece.tensors]
            total += sum(info.end - info.begin for info in infos) // (2 if piece.half else 1)
        return total

    def read(self, path: str, expert: int | None = None, rows: slice = slice(None)) -> np.ndarray:
        """The parameter in its shape and dtype, decoded in fp32 and rounded once, to nearest even.

        `expert` reads the matrix of one expert only, and `rows` a slice of its rows, or of a single matrix.
        Takes host memory for the result and little more. Raises CheckpointError naming the tensor where a
        value is NaN, infinite or beyond the range of fp32 or of the dtype.
        """
        parameter = self._parameters[path]
        if expert is not None:
            piece, source = self._piece(parameter, expert)
            out = np.empty(parameter.shape[1:], parameter.dtype)[rows]
            self._read_piece(piece, source, rows, out)
            return out
        out = np.empty(parameter.shape, parameter.dtype)[rows]
        if not parameter.per_expert:
            self._read_piece(parameter.pieces[0], None, rows, out)
            return out
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy works outside the lock: experts side by side
            list(pool.map(lambda piece, to: self._read_piece(piece, None, rows, to), parameter.pieces, out))
        return out

    def codes(self, path: str, expert: int | None = None) -> list[np.ndarray]:
        """The tensor of the parameter (or of one expert) as the file has it, then its scale tensors."""
        piece, source = self._piece(self._parameters[path], expert)
        arrays = [self.checkpoint.read(name) for name in piece.tensors]
        return arrays if source is None else [array[source] for array in arrays]

    @staticmethod
    def _piece(parameter: _Parameter, expert: int | None) -> tuple[_Piece, int | None]:
        """The piece that holds an expert, and its index in there if the piece holds them all."""
        if parameter.per_expert:
            return parameter.pieces[expert or 0], None
        return parameter.pieces[0], expert

    def _read_piece(self, piece: _Piece, expert: int | None, rows: slice, out: np.ndarray) -> None:
        weight, *scales = (self.checkpoint.read(name) for name in piece.tensors)
        weight = weight if expert is None else weight[expert]
        # A stacked source is walked expert by expert, so that temporaries stay small.
        for source, matrix in zip(weight, out, strict=True) if weight.ndim == 3 else [(weight, out)]:
            if not _decode(piece, source, scales, rows.start or 0, matrix):
                raise CheckpointError(self._fault(piece, out.dtype))
        for name in piece.tensors:
            self.checkpoint.release(name)

    def _fault(self, piece: _Piece, dtype: np.dtype) -> str:
        """Say which tensor of `piece` made a value that is not finite."""
        for name in piece.tensors:
            file, array = self.checkpoint.tensors[name].file, self.checkpoint.read(name)
            if array.dtype == np.uint8:  # e8m0 scales; the packed e2m1 codes of NVFP4 are all numbers
                if piece.format == "MXFP8" and (array == 255).any():
                    return f"{file}: tensor {name} holds the scale byte 255, which is NaN; 0 to 254 would do"
            elif not all(np.isfinite(row.astype(np.float32)).all() for row in np.atleast_1d(array)):
                return f"{file}: tensor {name} holds NaN or infinity; every value must be finite"
        name = piece.tensors[0]
        file = self.checkpoint.tensors[name].file
        return f"{file}: tensor {name} ({piece.format}) has values beyond the range of fp32 or {dtype}"


def plan_load(
    checkpoint: Checkpoint,
    params: Mapping[str, ShapeDtype],
    *,
    layers: int | None = None,
    indexer: bool = True,
) -> LoadPlan:
    """Find the source of every parameter in `params` (path -> shape and dtype); nothing is read yet.

    `layers=N` skips the tensors of the layers from N on, `indexer=False` those of the indexer; the vision
    side and MTP are always skipped. Raises one CheckpointError that lists every missing, duplicate,
    mis-shaped, undecodable and unexpected tensor.
    """
    names: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        names.setdefault(_PREFIX.sub("", name), []).append(name)
    finder = _Finder(checkpoint.tensors, {short: same[0] for short, same in names.items()})
    parameters = {path: finder.parameter(path, params[path]) for path in sorted(params, key=_order)}
    skipped: dict[str, list[str]] = {}
    for short, same in names.items():
        if short in finder.used:
            if len(same) > 1:
                finder.report("duplicate", " = ".join(same))
        elif reason := _skip_reason(short, layers, indexer):
            skipped.setdefault(reason, []).extend(same)
        else:
            for name in same:
                finder.report("unexpected", name)
    finder.raise_problems(checkpoint.directory)
    return LoadPlan(checkpoint, skipped, parameters)


def _order(path: str) -> tuple[float, int]:
    layer = _LAYER.match(path)
    if layer:
        return int(layer[1]), _RANK[path[layer.end() :]]
    return -1 if path == "embed" else math.inf, _RANK[path]


def _skip_reason(short: str, layers: int | None, indexer: bool) -> str | None:
    for pattern, reason in _NOT_TEXT.items():
        if pattern.match(short):
            return reason
    layer = _LAYER.match(short)
    if layer and layers is not None and int(layer[1]) >= layers:
        return f"only the first {layers} layers were asked for"
    if not indexer and _INDEXER.match(short):
        return "dense attention was asked for"
    return None


class _Finder:
    """Looks up the sources of parameters by short name and gathers what is wrong with them."""

    def __init__(self, tensors: Mapping[str, TensorInfo], names: Mapping[str, str]):
        self.tensors = tensors
        self.names = names  # short name -> name in the files
        self.used: set[str] = set()
        self.problems: dict[str, dict[str, None]] = {}  # kind -> what, in order and without repetition

    def report(self, kind: str, what: str) -> None:
        self.problems.setdefault(kind, {})[what] = None

    def parameter(self, path: str, wanted: ShapeDtype) -> _Parameter:
        shape, dtype = tuple(wanted.shape), np.dtype(wanted.dtype)
        if dtype not in _WORKING_DTYPES:
            self.report(
                "unsupported working dtype", f"{path} as {dtype} (bfloat16, float32 or float64 would do)"
            )
        layer = _LAYER.match(path)
        stem = layer[0] if layer else ""
        choices = []
        for source in _SOURCES[path.removeprefix(stem)]:
            name, _, half = source.removesuffix("]").partition("[")
            per_expert = "{e}" in name
            each = [stem + name.format(e=e) for e in range(shape[0])] if per_expert else [stem + name]
            choices.append((each, shape[1:] if per_expert else shape, half))
        present = [choice for choice in choices if any(name in self.names for name in choice[0])]
        if len(present) > 1:
            clash = [next(self.names[n] for n in each if n in self.names) for each, _, _ in present]
            self.report("duplicate", " = ".join(clash))
            self.used.update(name for each, _, _ in present for name in each)
        each, piece_shape, half = (present or choices)[0]
        pieces = []
        for name in each:
            if name in self.names:
                pieces.append(self.piece(name, piece_shape, half))
            else:
                model = "" if name.startswith("lm_head") else "model."
                self.report("missing", f"language_model.{model}{name}")
        return _Parameter(shape, dtype, piece_shape != shape, tuple(pieces))

    def piece(self, short: str, shape: tuple[int, ...], half: str) -> _Piece:
        scales = [s for s in ("_scale_inv", "_scale", "_scale_2") if short + s in self.names]
        shorts = [short, *(short + suffix for suffix in scales)]
        self.used.update(shorts)
        names = tuple(self.names[name] for name in shorts)
        infos = [self.tensors[name] for name in names]
        key = (infos[0].dtype, *(f"{s} {info.dtype}" for s, info in zip(scales, infos[1:], strict=True)))
        label = _FORMATS.get(key)
        if label is None:
            scaled = f"scale tensors ({', '.join(key[1:])})" if scales else "no scale tensor"
            self.report(_UNDECODABLE, f"{names[0]} ({key[0]} with {scaled})")
            return _Piece(names, "", half)
        if label == "NVFP4":
            self.used.add(short.removesuffix("weight") + "input_scale")  # scales activations, not weights
        if scales and (half or len(shape) != 2):
            self.report(_UNDECODABLE, f"{names[0]} (a fused or stacked tensor with scale tensors)")
        elif scales and label != "FP8 block" and shape[1] % _GROUP[label]:
            self.report(_UNDECODABLE, f"{names[0]} (width {shape[1]}, not in groups of {_GROUP[label]})")
        else:
            if half:
                shape = (*shape[:-2], 2 * shape[-2], shape[-1])
            for name, info, right in zip(names, infos, _stored_shapes(label, shape), strict=True):
                if info.shape != right:
                    self.report("wrong shape", f"{name} {list(info.shape)}, not {list(right)}")
        return _Piece(names, label, half)

    def raise_problems(self, directory: Path) -> None:
        if not self.problems:
            return
        parts = []
        for kind, listed in sorted(self.problems.items()):
            more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
            parts.append(f"{len(listed)} {kind}: {', '.join(list(listed)[:_LISTED])}{more}")
        missing = self.problems.get("missing", ())
        lost = [name for name in missing if _INDEXER.match(_PREFIX.sub("", name))]
        if lost:
            parts.append(
                f"without indexer tensors such as {lost[0]} attention cannot be sparse; "
                "dense attention has to be asked for explicitly (--attention dense)"
            )
        raise CheckpointError(f"{directory}: the tensors do not fit the model: {'; '.join(parts)}")


# --- Formats ---

_CHUNK = 1 << 17  # elements decoded at a time: temporaries stay in the cache
_BLOCK = 128  # rows and columns that share a scale in the FP8 block format
_GROUP = {"MXFP8": 32, "NVFP4": 16}  # consecutive elements of a row that share a scale
_CODES = np.arange(256, dtype=np.uint8)
_E4M3 = _CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def _stored_shapes(label: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the weight and its scale tensors for a weight of the given shape."""
    if label == "FP8 block":
        return [shape, (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))]
    if label == "MXFP8":
        return [shape, (shape[0], shape[1] // _GROUP[label])]
    if label == "NVFP4":
        return [(shape[0], shape[1] // 2), (shape[0], shape[1] // _GROUP[label]), ()]
    return [shape]


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


@functools.cache
def _mxfp8_table(dtype: np.dtype) -> np.ndarray:
    """[scale byte, code] -> e4m3 * 2^(byte - 127) in `dtype`; NaN for byte 255, infinity beyond fp32."""
    with np.errstate(over="ignore"):
        table = np.ldexp(_E4M3.astype(np.float64), _CODES[:, None].astype(np.int32) - 127).astype(np.float32)
    table[255] = np.nan
    return table.astype(dtype).ravel()


@functools.cache
def _nvfp4_table() -> np.ndarray:
    """[scale code, byte] -> the two fp32 values e2m1 * e4m3 (exact), low nibble first, as one uint64."""
    pairs = np.stack([_E2M1[_CODES & 15], _E2M1[_CODES >> 4]], axis=-1)
    with np.errstate(invalid="ignore"):
        return (_E4M3[:, None, None] * pairs).view(np.uint64).ravel()


def _lookup(table: np.ndarray, scale: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """out[n, j] = table[256 * scale[n, j // group] + codes[n, j]]; scale and codes are bytes."""
    index = np.empty(codes.shape, np.uint16)
    grouped = (*scale.shape, codes.shape[1] // scale.shape[1])
    high = scale.astype(np.uint16)[..., None] << 8
    np.bitwise_or(codes.reshape(grouped), high, out=index.reshape(grouped))
    np.take(table, index, out=out, mode="wrap")  # every index is in range; "raise" would copy `out`


def _decode_rows(
    label: str, rows: slice, weight: np.ndarray, scales: list[np.ndarray], out: np.ndarray
) -> None:
    """Decode `weight[rows]` into `out`."""
    if label == "MXFP8":
        # One lookup per element: exact whatever the processor does with subnormals, and rounded in the table.
        _lookup(_bits(_mxfp8_table(out.dtype)), scales[0][rows], _bits(weight[rows]), _bits(out))
    elif label == "NVFP4":
        pairs = np.empty(weight[rows].shape, np.uint64)
        _lookup(_nvfp4_table(), _bits(scales[0][rows]), weight[rows], pairs)
        values = pairs.view(np.float32)
        values *= scales[1]
        out[...] = values
    elif label == "FP8 block":
        values = np.take(_E4M3, _bits(weight[rows]))
        blocks = np.arange(rows.start, rows.start + len(values)) // _BLOCK
        values *= np.repeat(scales[0][blocks], _BLOCK, axis=1)[:, : values.shape[1]]
        out[...] = values
    else:
        out[...] = weight[rows]


def _decode(piece: _Piece, weight: np.ndarray, scales: list[np.ndarray], first: int, out: np.ndarray) -> bool:
    """Decode a matrix (or vector) from row `first` on into `out`, in chunks; False if not all is finite."""
    if piece.half:
        half = len(weight) // 2
        weight = weight[:half] if piece.half == "gate" else weight[half:]
    step = max(1, _CHUNK // math.prod(out.shape[1:]))
    for begin in range(0, len(out), step):
        target = out[begin : begin + step]
        rows = slice(first + begin, first + begin + len(target))
        with np.errstate(over="ignore", invalid="ignore"):
            _decode_rows(piece.format, rows, weight, scales, target)
        if not _all_finite(target):
            return False
    return True


def _all_finite(values: np.ndarray) -> bool:
    if values.dtype != ml_dtypes.bfloat16:
        return bool(np.isfinite(values).all())
    # Five times as fast as ml_dtypes' isfinite: infinity and NaN have the largest bit patterns.
    return bool((_bits(values) & 0x7FFF).max() < 0x7F80)
