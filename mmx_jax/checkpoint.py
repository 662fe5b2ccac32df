"""A converted checkpoint: the model's parts in the canonical layout, and a manifest of what is complete.

    manifest.json    every parameter's format, shape, bytes, error and digests, by part
    recipe.json, config.json, tokenizer files ..
    parts/layers.3/  an Orbax checkpoint for each part of the model: embed, layers.0 .., norm, head

Owns the files. The manifest is the truth: a part is there once the manifest names it, and it is written only
after the part's files are on the disk. Nothing here depends on a kernel's tiles or on the number of devices.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from mmx_jax.config import ModelConfig, read_json
from mmx_jax.errors import CheckpointError, MmxError
from pallas_kernels.formats import FORMATS, Plain, Shape

MANIFEST, RECIPE, PARTS, PARTIAL = "manifest.json", "recipe.json", "parts", ".partial"
VERSION = 1

# At every save it looks for OCDBT files, of which there are none, and warns.
logging.getLogger("absl").addFilter(lambda record: "OCDBT" not in record.getMessage())

Buffers = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """One parameter: its format, logical shape and bytes, and the sha256 of each buffer.

    `rms_error` is that of all numbers, as a share of their root mean square; `rms_error_nearest` is what it
    would be with every scale made for its group's largest magnitude.
    """

    format: str
    shape: Shape
    bytes: int
    rms_error: float
    rms_error_nearest: float
    digests: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint was made of, and its complete parts.

    `sources` has the fingerprint of what was converted under "all", and under the name of a part of every
    layer, such as "indexer", that of what was added later.
    """

    recipe: str  # its digest
    attention: str  # "dense": the indexer was left out
    sources: dict[str, str]
    files: dict[str, str]  # what was copied from the source -> its sha256
    parts: dict[str, dict[str, Entry]]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every parameter by its path."""
        return {path: entry for part in self.parts.values() for path, entry in part.items()}

    @cached_property
    def holder(self) -> dict[str, str]:
        """Parameter -> the part that holds it, which may be an addition such as `layers.3.indexer`."""
        return {path: name for name, part in self.parts.items() for path in part}

    def whole_parts(self, directory: Path) -> dict[str, dict[str, Entry]]:
        """The parts whose files are all there, of the right sizes."""

        def is_whole(part: Mapping[str, Entry]) -> bool:
            try:
                for path in part:
                    _check_files(directory, self, path)
            except CheckpointError:
                return False
            return True

        return {name: part for name, part in self.parts.items() if is_whole(part)}

    @staticmethod
    def read(directory: Path) -> "Manifest":
        """From a directory; CheckpointError says what is wrong with the file."""
        file = directory / MANIFEST
        data = read_json(file)
        if data.get("version") != VERSION:
            raise CheckpointError(f"{file}: version {data.get('version')!r}, this program reads {VERSION}")
        try:
            for name in data["parts"]:
                _place(name)
            parts = {
                name: {path: _entry(file, name, path, fields) for path, fields in part.items()}
                for name, part in data["parts"].items()
            }
            recipe, attention, sources, files = (data[n] for n in ("recipe", "attention", "sources", "files"))
            manifest = Manifest(recipe, attention, dict(sources), dict(files), parts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: not a manifest of this version: {error!r} is missing or wrong"
            ) from None
        if sum(map(len, parts.values())) > len(manifest.entries):
            raise CheckpointError(f"{file}: some parameters are in two parts")
        return manifest

    def write(self, directory: Path) -> None:
        """With the parts in the model's order, whatever order they came in."""
        parts = dict(sorted(self.parts.items(), key=lambda item: _place(item[0])))
        data = {"version": VERSION, **dataclasses.asdict(dataclasses.replace(self, parts=parts))}
        write_file(directory / MANIFEST, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def _place(part: str) -> tuple[int, int, str]:
    """Where a part stands in the model; ValueError for a name that no part has."""
    first, *rest = part.split(".")
    order = ("embed", "layers", "norm", "head").index(first)
    return order, int(rest[0]) if rest else 0, part


def _entry(file: Path, part: str, path: str, fields: Any) -> Entry:
    """An entry of the manifest, if everything in it fits its format and shape."""
    where = f"{file}: {path}"
    if part != part_of(path) and not part.startswith(f"{part_of(path)}."):
        raise CheckpointError(f"{where}: is in part {part}")
    entry = Entry(**{**fields, "shape": tuple(fields["shape"])})
    if not isinstance(entry.format, str) or entry.format not in FORMATS:
        raise CheckpointError(f"{where}: format {entry.format!r} is none of {', '.join(FORMATS)}")
    if not entry.shape or not all(type(n) is int and n > 0 for n in entry.shape):
        raise CheckpointError(f"{where}: shape {list(entry.shape)} is none")
    form = FORMATS[entry.format]
    if entry.bytes != form.nbytes(entry.shape):
        raise CheckpointError(f"{where}: bytes {entry.bytes!r}: expected {form.nbytes(entry.shape)}")
    if not isinstance(entry.digests, dict) or entry.digests.keys() != form.buffers(entry.shape).keys():
        raise CheckpointError(f"{where}: digests: expected {', '.join(form.buffers(entry.shape))}")
    for name in ("rms_error", "rms_error_nearest"):
        if not isinstance(getattr(entry, name), int | float):
            raise CheckpointError(f"{where}: {name} {getattr(entry, name)!r}: expected a number")
    return entry


def part_of(path: str) -> str:
    """The part of the model that a parameter belongs to, such as `layers.3`, `head` or `norm`."""
    return ".".join(path.split(".")[: 2 if path.startswith("layers.") else 1])


def missing_parts(manifest: Manifest, config: ModelConfig) -> list[str]:
    """Parts that a complete conversion has and this one lacks; of an addition too, once it was begun."""
    expected = ["embed", *(f"layers.{i}" for i in range(config.num_layers)), "norm", "head"]
    if "indexer" in manifest.sources:
        expected += [f"layers.{i}.indexer" for i, sparse in enumerate(config.sparse_layers) if sparse]
    return [part for part in expected if part not in manifest.parts]


def is_converted(directory: Path) -> bool:
    """Whether there is a manifest; a file of that name that is something else is none."""
    file = directory / MANIFEST
    try:
        return file.is_file() and bool(read_json(file).keys() & {"version", "parts"})
    except MmxError:  # damaged: whoever reads it says so
        return True


def is_fresh(directory: Path) -> bool:
    """Whether there is nothing, or nothing but what a process left that was killed while it began."""
    if not directory.is_dir():
        return not directory.exists()
    return all(file.name == f"{MANIFEST}{PARTIAL}" for file in directory.iterdir())


def write_file(file: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    beside = file.with_name(file.name + PARTIAL)
    try:
        with beside.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        beside.rename(file)
    except OSError as error:
        raise CheckpointError(f"{file}: could not be written: {error.strerror}") from None


# --- Writing ---


class Writer:
    """Adds parts to a directory. One process at a time: another one is refused."""

    def __init__(self, directory: Path, manifest: Manifest):
        """Goes on with the parts that the directory's manifest has and that are whole.

        Raises CheckpointError if it is not of the recipe and the sources of `manifest`.
        """
        self.directory = directory
        self._lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"{directory}: another conversion is writing to it") from None
        self.manifest = manifest
        if is_converted(directory):
            found = Manifest.read(directory)
            others = {n: m for n, m in found.sources.items() if manifest.sources.get(n) != m}
            if others or (found.recipe, found.attention) != (manifest.recipe, manifest.attention):
                self.close()
                raise CheckpointError(f"{directory}: another conversion has written to it since")
            self.manifest = dataclasses.replace(manifest, parts=found.whole_parts(directory))

    def begin(self, files: dict[str, str]) -> None:
        """Say whose the directory is and what will be copied, and clear what was left half-written."""
        for left in self.directory.glob(f"*{PARTIAL}"):
            left.unlink()
        before, self.manifest = self.manifest, dataclasses.replace(self.manifest, files=files)
        if self.manifest != before or not is_converted(self.directory):
            self.manifest.write(self.directory)

    def close(self) -> None:
        os.close(self._lock)

    @contextmanager
    def part(self, name: str) -> Iterator["PartWriter"]:
        """Write one part; it counts when the block ends without an error, and leaves nothing otherwise."""
        place = self.directory / PARTS / name
        self._remove(place)
        writer = PartWriter(place)
        try:
            yield writer
            writer.finish()
            parts = {**self.manifest.parts, name: writer.entries}
            manifest = dataclasses.replace(self.manifest, parts=parts)
            for path in writer.entries:
                _check_files(self.directory, manifest, path)
        except BaseException as error:
            self._remove(place)
            if isinstance(error, OSError) or _of_storage(error):
                raise CheckpointError(f"{place}: could not be written: {_cause(error)}") from error
            raise
        self.manifest = manifest
        self.manifest.write(self.directory)

    @staticmethod
    def _remove(place: Path) -> None:
        """What an attempt to write the part may have left."""
        if place.parent.is_dir():
            for found in place.parent.iterdir():
                if found.name == place.name or found.name.startswith(f"{place.name}.partial_save"):
                    shutil.rmtree(found, ignore_errors=True)


class PartWriter:
    """Collects the parameters of one part, each written as it comes, so that only one is in memory."""

    def __init__(self, place: Path):
        self.place = place
        self.entries: dict[str, Entry] = {}

    def add(self, path: str, format: str, shape: Shape, buffers: Buffers, rms: tuple[float, float]) -> None:
        """Write a parameter; `rms` are the errors as the manifest has them."""
        digests = {name: _digest(buffer) for name, buffer in buffers.items()}
        n_bytes = sum(buffer.nbytes for buffer in buffers.values())
        self.entries[path] = Entry(format, shape, n_bytes, *rms, digests)
        with _orbax():
            ocp.partial.save(str(self.place.absolute()), {path: dict(buffers)})

    def finish(self) -> None:
        with _orbax():
            ocp.partial.finalize(str(self.place.absolute()))
        # On the disk before the manifest names the part.
        for file in (*self.place.rglob("*"), self.place, self.place.parent):
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def _orbax() -> ocp.Context:
    """Plain files: OCDBT names them at random, and decompressing takes ten times as long as reading."""
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt, saving.use_zarr3, saving.use_compression = False, False, False
    context.pytree.loading.partial_load = True
    return context


def _digest(buffer: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data).hexdigest()


def _of_storage(error: BaseException) -> bool:
    """Whether Orbax failed on files: it raises ValueError and the like, with the cause in the message."""
    return isinstance(error, (ValueError, RuntimeError, KeyError)) and not isinstance(error, CheckpointError)


def _cause(error: BaseException) -> str:
    """What went wrong at the bottom, without long places and what tensorstore adds in brackets."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    line = str(error).strip().split("\n")[0].split(" [")[0] or type(error).__name__
    return re.sub(rf'"[^"]*/{PARTS}/', '"', line)[:400]


# --- Reading ---


class Converted:
    """A converted checkpoint, restored by parameter.

    `wanted` gives the format and logical shape of every parameter that will be read; the manifest must have
    them all like that. `layers=N` skips the layers from N on, `indexer=False` the indexer. Raises one
    CheckpointError that lists what does not fit.
    """

    def __init__(
        self,
        directory: Path,
        wanted: Mapping[str, tuple[str, Shape]],
        *,
        layers: int | None = None,
        indexer: bool = True,
    ):
        self.directory, self.manifest = directory, Manifest.read(directory)
        entries = self.manifest.entries
        by_part: dict[str, list[str]] = {}
        for path in wanted:
            by_part.setdefault(part_of(path), []).append(path)
        self.paths = [path for paths in by_part.values() for path in paths]
        self.formats = {path: entries[path].format for path in wanted if path in entries}
        self.skipped: dict[str, list[str]] = {}
        problems = []
        for path in sorted(entries.keys() - wanted.keys()):
            layer = int(path.split(".")[1]) if path.startswith("layers.") else -1
            if layers is not None and layer >= layers:
                self.skipped.setdefault(f"only the first {layers} layers were asked for", []).append(path)
            elif not indexer and ".indexer." in path:
                self.skipped.setdefault("dense attention was asked for", []).append(path)
            else:
                problems.append(f"{path} is not part of the model")
        missing = [part for part in by_part if part not in self.manifest.parts]
        if missing:
            problems.append(f"the conversion is not complete, it lacks {', '.join(missing)}")
        lost = ""
        for path, (form, shape) in wanted.items():
            entry = entries.get(path)
            if entry is None:
                if part_of(path) not in missing:
                    problems.append(f"{path} is missing")
                if ".indexer." in path:
                    lost = "; dense attention has to be asked for explicitly (--attention dense)"
            elif entry.shape != shape or not _interchangeable(entry.format, form):
                problems.append(
                    f"{path} is {entry.format} {list(entry.shape)}, the model takes {form} {list(shape)}"
                )
        if problems:
            more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"{directory / MANIFEST}: does not fit the model: {'; '.join(problems[:10])}{more}"
                f"{'' if missing else lost}"
            )
        for path in self.paths:
            _check_files(directory, self.manifest, path)

    @property
    def nbytes(self) -> int:
        return sum(map(self.source_bytes, self.paths))

    def source_bytes(self, path: str) -> int:
        return self.manifest.entries[path].bytes

    def restore(
        self, paths: list[str], sharding: Callable[[str, str], Sharding]
    ) -> dict[str, dict[str, jax.Array]]:
        """The buffers of parameters of one part, each straight to where `sharding(path, buffer)` says."""
        return restore(self.directory, self.manifest, paths, sharding)


def _interchangeable(stored: str, wanted: str) -> bool:
    """Plain numbers become those of another plain format while they are loaded."""
    plain = [isinstance(FORMATS.get(name), Plain) for name in (stored, wanted)]
    return stored == wanted or all(plain)


def restore(
    directory: Path, manifest: Manifest, paths: list[str], sharding: Callable[[str, str], Sharding]
) -> dict[str, dict[str, jax.Array]]:
    """See `Converted.restore`. Raises CheckpointError naming the part whose files are damaged."""
    found: dict[str, dict[str, jax.Array]] = {}
    for part in dict.fromkeys(manifest.holder[path] for path in paths):
        place = directory / PARTS / part
        wanted: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
        for path in paths:
            if manifest.holder[path] == part:
                entry = manifest.entries[path]
                wanted[path] = {
                    name: jax.ShapeDtypeStruct(b.shape, b.dtype, sharding=sharding(path, name))
                    for name, b in FORMATS[entry.format].buffers(entry.shape).items()
                }
        try:
            with _orbax():
                found |= ocp.load(str(place.absolute()), wanted)
        except Exception as error:  # whatever storage libraries make of broken files
            raise CheckpointError(f"{place}: damaged: {_cause(error)}") from error
    return found


def _check_files(directory: Path, manifest: Manifest, path: str) -> None:
    """An array is one file of its bytes; what is cut short is known before anything is read."""
    entry, place = manifest.entries[path], directory / PARTS / manifest.holder[path]
    for name, buffer in FORMATS[entry.format].buffers(entry.shape).items():
        array = f"{path}.{name}"
        file = place / "state" / array / ".".join("0" * max(len(buffer.shape), 1))
        expected = math.prod(buffer.shape) * buffer.dtype.itemsize
        found = file.stat().st_size if file.is_file() else None
        if found != expected:
            what = "no such file" if found is None else f"{found} bytes"
            raise CheckpointError(f"{place}: damaged: {array}: {what}, expected {expected} bytes")
        if not _describes(file.with_name(".zarray"), buffer):
            raise CheckpointError(f"{place}: damaged: {array}: .zarray does not describe it")


def _describes(file: Path, buffer: jax.ShapeDtypeStruct) -> bool:
    """Whether an array's metadata says what it must; the library that reads it is less careful."""
    try:
        found = json.loads(file.read_bytes())
        shape = list(buffer.shape)
        return (found["shape"], found["chunks"], found["compressor"]) == (shape, shape, None)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def verify(directory: Path, progress: Callable[[str, int, int], None]) -> int:
    """Read every array again and compare its digest; the bytes read. CheckpointError lists what differs."""
    manifest = Manifest.read(directory)
    for name, digest in {**manifest.files, RECIPE: manifest.recipe}.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; converting again copies it")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise CheckpointError(f"{file}: is not what was copied; delete it and convert again")
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    total = sum(entry.bytes for entry in manifest.entries.values())
    done, wrong = 0, []
    for path, entry in manifest.entries.items():
        progress("verifying", done, total)
        try:
            _check_files(directory, manifest, path)
            buffers = restore(directory, manifest, [path], lambda *_: host)[path]
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        wrong += [
            f"{directory / PARTS / manifest.holder[path]}: {path}: {name} is not what was written"
            for name, buffer in buffers.items()
            if _digest(np.asarray(buffer)) != entry.digests.get(name)
        ]
        done += entry.bytes
    progress("verifying", total, total)
    if wrong:
        kinds = list(dict.fromkeys(wrong))
        more = f"; and {len(kinds) - 5} more" if len(kinds) > 5 else ""
        raise CheckpointError(
            f"{len(wrong)} of {len(manifest.entries)} parameters are damaged: {'; '.join(kinds[:5])}{more};"
            " delete what is damaged and convert again: only that will be done"
        )
    return total
