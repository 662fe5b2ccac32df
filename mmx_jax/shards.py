"""The safetensors files of a checkpoint, mapped into memory and seen as tensors by name.

Owns: the file format, and what can be wrong with files. Refuses to know what any tensor is for. The library's
own numpy loader does not read every dtype of the released files, so headers are parsed here.
"""

import json
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mmx_jax.errors import CheckpointError

_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library


class TensorInfo(NamedTuple):
    """Where a tensor lies: bytes `begin` to `end` of `file`, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one directory, mapped into memory; `tensors` goes by the names in the files."""

    directory: Path
    tensors: dict[str, TensorInfo]
    _maps: dict[Path, mmap.mmap] = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file (F8_E8M0 as uint8).

        Raises CheckpointError for a dtype that is not known.
        """
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(
                f"{info.file}: tensor {name}: unknown dtype {info.dtype}; known are {known}"
            )
        dtype = _DTYPES[info.dtype]
        count = (info.end - info.begin) // dtype.itemsize
        return np.frombuffer(self._maps[info.file], dtype, count, info.begin).reshape(info.shape)

    def sample(self, name: str, n_bytes: int) -> bytes:
        """So many bytes each from the beginning, the middle and the end of a tensor."""
        info = self.tensors[name]
        last = max(info.end - n_bytes, info.begin)
        places = (info.begin, (info.begin + last) // 2, last)
        return b"".join(self._maps[info.file][at : min(at + n_bytes, info.end)] for at in places)

    def release(self, name: str) -> None:
        """Give the tensor's pages back to the system; views stay valid and read the file again."""
        info = self.tensors[name]
        begin = info.begin - info.begin % mmap.PAGESIZE
        if info.end > info.begin:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, info.end - begin)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Map the safetensors files of `directory` and check their headers; no tensor is read.

    The files are the shards of `model.safetensors.index.json` where it exists, else `model.safetensors`, else
    every `*.safetensors`. Raises CheckpointError naming the file, and the tensor where there is one.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    listed: dict[str, str] = {}
    if index.is_file():
        listed = _read_index(index)
        files = [directory / shard for shard in sorted(set(listed.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{index}: names the shard {file.name}, which is not in the directory")
    else:
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors file in this directory")
    tensors: dict[str, TensorInfo] = {}
    maps: dict[Path, mmap.mmap] = {}
    for file in files:
        maps[file], found = _open_file(file)
        for name, info in found.items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = info
    for name, shard in listed.items():
        if name not in tensors or tensors[name].file != directory / shard:
            raise CheckpointError(
                f"{index}: says that tensor {name} is in {shard}, which does not contain it"
            )
    return Checkpoint(directory, tensors, maps)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} appears twice")
    return result


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a JSON index: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: has no `weight_map` from tensor names to file names")
    return weight_map


def _open_file(file: Path) -> tuple[mmap.mmap, dict[str, TensorInfo]]:
    try:
        size = file.stat().st_size
    except OSError as error:  # a link to nothing, for one
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if size < 8:
        raise CheckpointError(f"{file}: {size} bytes long: cut short, or not a safetensors file")
    with file.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[:24] == b"version https://git-lfs.":
        raise CheckpointError(f"{file}: a Git LFS pointer, not the tensors; fetch them with `git lfs pull`")
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > 8 + _MAX_HEADER:
        raise CheckpointError(f"{file}: header length {start - 8} is absurd: not a safetensors file")
    if start > size:
        raise CheckpointError(f"{file}: cut short: the header ends at byte {start}, the file at {size}")
    try:
        header = json.loads(mapped[8:start], object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(file, name, entry, start) for name, entry in header.items()}
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if info.begin != end:
            fault = "overlaps the tensor before it" if info.begin < end else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {name} {fault} (byte {info.begin - start}, not {end - start})"
            )
        end = info.end
    if end > size:
        raise CheckpointError(f"{file}: cut short: the header describes {end} bytes, the file has {size}")
    if end < size:
        raise CheckpointError(f"{file}: {size - end} bytes at the end belong to no tensor")
    return mapped, tensors


def _tensor_info(file: Path, name: str, entry: Any, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if type(dtype) is not str or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError("a string and whole numbers would do")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name}: bad dtype, shape or data_offsets: {error}") from error
    # A dtype that is not known only matters if the tensor turns out to be wanted.
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else max(end - begin, 0)
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name}: offsets {begin} to {end}, but {dtype} {list(shape)} takes {nbytes} bytes"
        )
    return TensorInfo(file, dtype, shape, start + begin, start + end)
