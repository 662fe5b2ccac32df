"""Converting a checkpoint as it is released to one in the formats of a recipe.

One parameter is in memory at a time, and numbers are rounded in blocks, on all cores. What is complete stays:
the same conversion goes on where it was stopped, and ends with the same bytes.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmx_jax import checkpoint
from mmx_jax.checkpoint import MANIFEST, RECIPE, Manifest, PartWriter, Writer, part_of
from mmx_jax.config import ModelConfig
from mmx_jax.errors import CheckpointError, InputError
from mmx_jax.model import abstract_model
from mmx_jax.params import formats_and_shapes
from mmx_jax.recipes import Recipe
from mmx_jax.shards import Checkpoint, open_checkpoint
from mmx_jax.weights import LoadPlan, plan_load
from pallas_kernels.formats import FORMATS, Plain, Shape

BLOCK = 1 << 22  # numbers that are rounded at a time by one core
OVERHEAD = 150_000_000  # bytes that the libraries and programs take
# Source formats that are kept bit for bit when the recipe asks for the format of that name.
KEPT = {"BF16": "bfloat16", "F32": "float32", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "FP8 block": "fp8"}
ADDITIONS = {"indexer": ".attention.indexer."}  # what `--only` can add, and the parameters it means
_COPIED = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class Conversion:
    """What is to be done: a source, its plan, and the format and shape of every parameter of the result."""

    source: Path
    directory: Path
    recipe: Recipe
    plan: LoadPlan
    formats: dict[str, str]
    shapes: dict[str, Shape]
    only: str | None  # what is added to a conversion made before
    identity: Manifest  # recipe and sources as the result's manifest must have them
    parts: dict[str, list[str]]  # of the result, with the parameters of each; those that were asked for
    done: frozenset[str]  # parts that are complete

    @property
    def remaining(self) -> dict[str, list[str]]:
        return {name: paths for name, paths in self.parts.items() if name not in self.done}

    def stored_bytes(self, path: str) -> int:
        return FORMATS[self.formats[path]].nbytes(self.shapes[path])

    @property
    def peak_memory(self) -> int:
        """About the most bytes at a time, beside the sources that are mapped.

        A parameter twice, as rounded and on its way to the disk, and for every core a block of numbers in
        float32, with nine more of scratch where they are rounded.
        """

        def peak(path: str) -> int:
            form, shape = FORMATS[self.formats[path]], self.shapes[path]
            block = math.prod(shape[-2:]) if form.rows is None else min(BLOCK, math.prod(shape))
            copies = 1 if KEPT.get(self.plan.formats[path]) == form.name else 10
            return 2 * self.stored_bytes(path) + (os.cpu_count() or 1) * block * 4 * copies

        return OVERHEAD + max((peak(path) for paths in self.remaining.values() for path in paths), default=0)


def prepare(
    source: Path,
    directory: Path,
    recipe: Recipe,
    layers: tuple[int, int] | None = None,
    only: str | None = None,
    attention: str = "sparse",
) -> Conversion:
    """Check everything that can be checked before a weight is read.

    `layers` (from, to) leaves the other layers for another time; `only="indexer"` adds the indexer to a
    conversion that was made without it, with `attention="dense"`. Raises a subclass of MmxError.
    """
    if not source.is_dir():
        raise InputError(f"{source}: no such directory")
    if checkpoint.is_converted(source):
        raise CheckpointError(f"{source}: is converted already; convert from the original")
    config = ModelConfig.from_dir(source)
    first, last = layers or (0, config.num_layers)
    if not 0 <= first < last <= config.num_layers:
        raise InputError(f"layers {first}:{last}: the model has layers 0:{config.num_layers}")
    model = abstract_model(config.with_attention(attention), "bfloat16", recipe)
    specs = formats_and_shapes(model)
    if only is not None:
        specs = {path: spec for path, spec in specs.items() if ADDITIONS[only] in path}
    formats = {path: form for path, (form, _) in specs.items()}
    shapes = {path: shape for path, (_, shape) in specs.items()}
    opened = open_checkpoint(source)
    plan = _plan(opened, formats, shapes, attention, only)
    parts: dict[str, list[str]] = {}
    for name, paths in groupby(plan.paths, key=part_of):
        index = int(name.split(".")[1]) if name.startswith("layers.") else None
        if index is None or first <= index < last:
            parts[name if only is None else f"{name}.{only}"] = list(paths)
    mark = fingerprint(source, opened)
    identity = Manifest(recipe.digest, attention, {only or "all": mark}, {}, {})
    done: frozenset[str] = frozenset()
    if bad := sorted(set("*?[]\\") & set(str(directory.absolute()))):
        raise InputError(f"{directory}: the storage library takes {' '.join(bad)} in a path for a pattern")
    if checkpoint.is_converted(directory):
        identity = _same(directory, config, identity, only)
        done = frozenset(identity.whole_parts(directory))
    elif only is not None:
        raise InputError(f"{directory}: --only {only} adds to a converted checkpoint, and there is none")
    elif not checkpoint.is_fresh(directory):
        raise InputError(f"{directory}: exists and is no converted checkpoint; give a new directory")
    return Conversion(source, directory, recipe, plan, formats, shapes, only, identity, parts, done)


def _plan(
    opened: Checkpoint,
    formats: dict[str, str],
    shapes: dict[str, Shape],
    attention: str,
    only: str | None,
) -> LoadPlan:
    wanted = {
        path: jax.ShapeDtypeStruct(shape, FORMATS[formats[path]].dtype) for path, shape in shapes.items()
    }
    if only is not None:  # the rest may be there and is not looked at
        names = {n: i for n, i in opened.tensors.items() if ".self_attn.index" in n}
        opened = replace(opened, tensors=names)
    return plan_load(opened, wanted, indexer=attention == "sparse")


def _same(directory: Path, config: ModelConfig, identity: Manifest, only: str | None) -> Manifest:
    """The directory's manifest, if it is of the same source and recipe; or has the rest, for an addition."""
    found = Manifest.read(directory)
    if found.recipe != identity.recipe:
        raise InputError(f"{directory}: was made with another recipe ({RECIPE} there); give a new directory")
    if only is None and found.attention != identity.attention:
        raise InputError(f"{directory}: was made with --attention {found.attention}; give a new directory")
    for name, mark in identity.sources.items():
        if found.sources.get(name, mark) != mark:
            raise InputError(f"{directory}: was made from another source; give a new directory")
    if only is not None:
        if found.attention != "dense":
            raise InputError(f"{directory}: was made with the {only}; there is none to add")
        if ModelConfig.from_dir(directory) != config:
            raise InputError(f"{directory / 'config.json'}: is of another model than the source's")
    return replace(found, sources={**found.sources, **identity.sources})


def fingerprint(source: Path, opened: Checkpoint) -> str:
    """Tells sources apart: the config, and every tensor's name, type, shape and 256 bytes in three places.

    How tensors are spread over files does not matter.
    """
    mark = hashlib.sha256((source / "config.json").read_bytes())
    for name, info in sorted(opened.tensors.items()):
        mark.update(f"{name} {info.dtype} {info.shape}".encode())
        mark.update(opened.sample(name, 256))
    return mark.hexdigest()


def convert(conversion: Conversion, progress: Callable[[str, int, int], None]) -> Manifest:
    """Convert what is not complete yet; the manifest then. Raises CheckpointError."""
    c = conversion
    c.directory.mkdir(parents=True, exist_ok=True)
    needed = sum(c.stored_bytes(path) for paths in c.remaining.values() for path in paths)
    if (free := shutil.disk_usage(c.directory).free) < needed:
        raise InputError(f"{c.directory}: {needed / 1e6:,.1f} MB to write and {free / 1e6:,.1f} MB free")
    writer = Writer(c.directory, c.identity)
    try:
        copies = {} if c.only else _copies(c.source, c.recipe)
        lacking = {name: content for name, content in copies.items() if not (c.directory / name).is_file()}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in lacking.items()}
        writer.begin({**c.identity.files, **digests})
        for name, content in lacking.items():
            checkpoint.write_file(c.directory / name, content)
        # Without what another process completed after this one looked.
        remaining = {n: paths for n, paths in c.remaining.items() if n not in writer.manifest.parts}
        total = sum(c.plan.source_bytes(path) for paths in remaining.values() for path in paths)
        done = 0
        with jax.default_device(jax.devices("cpu")[0]):
            for name, paths in remaining.items():
                with writer.part(name) as part:
                    for path in paths:
                        for step in _convert(c, path, part):
                            progress("converting", done + step, total)
                        done += c.plan.source_bytes(path)
        progress("converting", total, total)
        return writer.manifest
    finally:
        writer.close()


def _copies(source: Path, recipe: Recipe) -> dict[str, bytes]:
    """What else belongs to a checkpoint: configuration, tokenizer, template, licence; and the recipe."""
    copies = {
        file.name: file.read_bytes()
        for file in sorted(source.iterdir())
        if file.is_file()
        and (file.suffix in _COPIED or file.name.upper().startswith("LICENSE"))
        and not file.name.endswith(".index.json")
        and file.name != MANIFEST
    }
    return copies | {RECIPE: recipe.to_json().encode()}


# --- One parameter ---


def _convert(c: Conversion, path: str, part: PartWriter) -> Iterator[int]:
    """Add a parameter to its part; yields the source bytes done."""
    form, shape = FORMATS[c.formats[path]], c.shapes[path]
    same = KEPT.get(c.plan.formats[path]) == form.name
    out = {name: np.empty(b.shape, b.dtype) for name, b in form.buffers(shape).items()}

    n_rows = shape[-2:][0]  # a vector is rows too

    def block(expert: int | None, rows: slice) -> tuple[float, ...]:
        # What is kept as it is is decoded all the same: what is not finite is refused by name.
        numbers = c.plan.read(path, expert, rows)
        matrix = (
            out
            if expert is None
            else {n: b[expert : expert + 1].reshape(b.shape[1:]) for n, b in out.items()}
        )
        if same and isinstance(form, Plain):
            matrix["data"][rows] = numbers
        elif same and rows.start == 0:
            for buffer, codes in zip(matrix.values(), c.plan.codes(path, expert), strict=True):
                buffer[...] = codes.view(buffer.dtype)
        if same:
            return 0.0, 0.0, 0.0
        rounded, sums = _quantize(form.name, numbers)
        for name, buffer in matrix.items():
            values = np.asarray(rounded[name])
            if buffer.ndim:  # as many rows as the matrix, or one for several
                begin = rows.start * len(buffer) // n_rows
                buffer[begin : begin + len(values)] = values
            else:
                buffer[...] = values
        return tuple(float(np.asarray(s).sum(dtype=np.float64)) for s in sums)

    blocks = list(_blocks(shape, 1 if same else form.rows))
    total = np.zeros(3)  # squares of numbers, of errors, and of errors without the search for scales
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, sums in enumerate(pool.map(block, *zip(*blocks, strict=True))):
            total += sums
            yield c.plan.source_bytes(path) * (i + 1) // len(blocks)
    if not np.isfinite(total).all():
        raise CheckpointError(f"{path}: the squares of its numbers are beyond float32: no weight is so large")
    squares, *errors = total
    rms = [math.sqrt(error / squares) if squares else 0.0 for error in errors]
    part.add(path, form.name, shape, out, (rms[0], rms[1]))


def _blocks(shape: Shape, together: int | None) -> Iterator[tuple[int | None, slice]]:
    """An expert (None: there is one matrix, or a vector) and some of its rows, about BLOCK numbers."""
    *experts, n_rows, width = shape if len(shape) > 1 else (*shape, 1)
    rows = max(BLOCK // width // together, 1) * together if together else n_rows
    for expert in range(experts[0]) if experts else [None]:
        for begin in range(0, n_rows, rows):
            yield expert, slice(begin, min(begin + rows, n_rows))


@partial(jax.jit, static_argnums=0)
def _quantize(format: str, values: jax.Array) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    """Buffers, and in rows the sums of squared numbers, errors, and errors without a search for scales."""
    form = FORMATS[format]
    buffers = form.quantize(values)

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) ** 2, axis=-1)

    def error(buffers: dict[str, jax.Array]) -> jax.Array:
        return squares(form.dequantize(buffers, values.shape).astype(jnp.float32) - values)

    nearest = replace(form, factors=()).quantize(values) if form.factors else buffers
    return buffers, (squares(values), error(buffers), error(nearest))
