"""From a directory to a model: everything is checked first, then programs compile while weights are read."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from mmx_jax import chat, checkpoint, recipes, tokenizer
from mmx_jax.chat import ChatTemplate
from mmx_jax.checkpoint import Converted, part_of
from mmx_jax.config import ModelConfig, bundled, read_json, token_ids
from mmx_jax.engine import Engine, Program, Progress, silent
from mmx_jax.errors import ConfigError, InputError, KernelError
from mmx_jax.generate import Model, SamplingParams
from mmx_jax.mesh import make_mesh, sharding
from mmx_jax.model import M3, abstract_model, packed, random_model
from mmx_jax.params import assign, formats_and_shapes, hold, parameters
from mmx_jax.plan import memory_plan
from mmx_jax.shards import open_checkpoint
from mmx_jax.tokenizer import Tokenizer
from mmx_jax.weights import LoadPlan, plan_load
from pallas_kernels.call import Call
from pallas_kernels.ops import Ops, resolve
from pallas_kernels.paging import PAGE_FORMATS

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
DEFAULT_MAX_LENGTH = 4096
END_OF_TURN = "[e~["


@dataclass(frozen=True)
class Settings:
    """Which model to make of a checkpoint; see `load`."""

    dtype: str = "bfloat16"
    kernels: str = "auto"
    attention: str = "sparse"
    layers: int | None = None  # run only the first so many
    recipe: str | None = None  # the formats that weights are rounded to while they are loaded
    kv_format: str | None = None  # the format that cached keys and values are rounded to

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r}: expected {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if self.kv_format is not None and self.kv_format not in PAGE_FORMATS:
            raise InputError(f"kv_format {self.kv_format!r}: expected {' or '.join(PAGE_FORMATS)}")


class Source:
    """A checkpoint directory (or a bare config file) as `Settings` read it; reading checks everything.

    Raises ConfigError, CheckpointError, TokenizerError, ChatError, InputError or KernelError with one line
    that names the file, tensor, key or value.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Settings):
        self.path, self.settings = Path(path), settings
        try:
            found = self.path.exists()
        except OSError as error:  # a name too long, for one
            raise InputError(f"{path}: {error.strerror}") from None
        if not found:
            raise InputError(_missing(os.fspath(path)))
        self.is_directory = self.path.is_dir()
        config = (ModelConfig.from_dir if self.is_directory else ModelConfig.from_file)(self.path)
        if settings.layers is not None:
            config = config.first_layers(settings.layers)
        self.config = config = config.with_attention(settings.attention)
        self.default_length = min(config.max_position, DEFAULT_MAX_LENGTH)
        self.mesh: Mesh = make_mesh()
        self.ops(1, 1)  # a wrong choice is an error at once
        self.is_converted = self.is_directory and checkpoint.is_converted(self.path)
        self.recipe = None if settings.recipe is None else recipes.load(settings.recipe)
        if self.is_converted:
            if settings.recipe is not None:
                raise InputError(f"{path}: is converted already; its formats are those of its own recipe")
            self.recipe = recipes.read(self.path / checkpoint.RECIPE)
        self.model = self.shapes(config)

    def shapes(self, config: ModelConfig) -> M3:
        """The model that was asked for, with shapes in place of arrays."""
        return abstract_model(config, self.settings.dtype, self.recipe, self.settings.kv_format)

    def ops(self, rows: int, new_tokens: int) -> Ops:
        """The operations of a program with so many rows and new tokens in each."""
        call = Call(self.settings.dtype, rows, new_tokens)
        try:
            return resolve(self.settings.kernels, self.mesh.devices.flat[0], call)
        except ValueError as error:
            raise KernelError(str(error)) from None

    def in_memory(self, model: M3, batch: int) -> M3:
        """The shapes that a model is held in: in the kernels' order if decoding a batch runs them."""
        return packed(model) if self.ops(batch, 1).takes_packed else model

    @cached_property
    def weights(self) -> LoadPlan | Converted:
        """Where every parameter comes from."""
        layers, indexer = self.settings.layers, self.settings.attention == "sparse"
        if self.is_converted:
            return Converted(self.path, formats_and_shapes(self.model), layers=layers, indexer=indexer)
        opened = open_checkpoint(self.path)
        return plan_load(opened, parameters(self.model), layers=layers, indexer=indexer)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return tokenizer.load(self.path) if self._has("tokenizer.json") else None

    @cached_property
    def chat(self) -> ChatTemplate | None:
        if self._has("chat_template.jinja") or "chat_template" in self._json("tokenizer_config.json"):
            return chat.load(self.path)
        return None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The union of what generation config, config and tokenizer config say, else the end of a turn."""
        generation = self._json("generation_config.json").get("eos_token_id")
        where = f"{self.path / 'generation_config.json'}: eos_token_id"
        ids = [*token_ids(generation, where), *self.config.eos_token_ids]
        if self.tokenizer is not None:
            text = self._json("tokenizer_config.json").get("eos_token")
            text = text.get("content") if isinstance(text, Mapping) else text
            named = self.tokenizer.token_id(text) if isinstance(text, str) else None
            if named is not None:
                ids.append(named)
            if not ids and (end := self.tokenizer.token_id(END_OF_TURN)) is not None:
                ids.append(end)
        return tuple(dict.fromkeys(ids))

    @cached_property
    def sampling(self) -> SamplingParams:
        """The checkpoint's sampling defaults; greedy where it has none or `do_sample` is false.

        A temperature without `do_sample` counts: whoever wrote it meant it.
        """
        data = self._json("generation_config.json")
        where = self.path / "generation_config.json"
        do_sample = data.get("do_sample")
        if do_sample not in (True, False, None):
            raise ConfigError(f"{where}: do_sample is {do_sample!r}: expected true or false")
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values: dict[str, Any] = {name: data[name] for name in names if data.get(name) is not None}
        if do_sample is False:
            values["temperature"] = 0.0
        elif do_sample:
            values.setdefault("temperature", 1.0)
        try:
            return SamplingParams(**values)
        except InputError as error:
            raise ConfigError(f"{where}: {error}") from None

    def programs(self, batch: int, max_length: int, progress: Progress = silent) -> dict[str, Program]:
        """The programs, compiled for as few layers as show every kind of layer there is.

        Scratch memory is reused from layer to layer, so theirs is the whole model's.
        """
        kinds = list(zip(self.config.moe_layers, self.config.sparse_layers, strict=True))
        shortest = max(kinds.index(kind) for kind in set(kinds)) + 1
        model = self.shapes(self.config.first_layers(shortest))
        return self.engine(self.in_memory(model, batch), batch, max_length, progress).programs

    def load(self, batch: int = 1, max_length: int | None = None, progress: Progress = silent) -> Model:
        """Compile, and meanwhile read the weights, each straight to its device."""
        _ = self.weights, self.tokenizer, self.chat, self.sampling  # what is wrong is an error at once
        max_length = self.default_length if max_length is None else max_length
        shapes = self.in_memory(self.model, batch)
        memory_plan(shapes, batch, max_length).check(self.mesh)
        failed = threading.Event()

        def watched(stage: str, done: int, total: int) -> None:
            if failed.is_set():
                raise InterruptedError
            progress(stage, done, total)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self.read, self.ops(batch, 1).takes_packed, watched)
            try:
                engine = self.engine(shapes, batch, max_length, progress)
                return Model(reading.result(), engine, self.tokenizer, self.chat, self.sampling)
            except BaseException:
                failed.set()  # the pool waits for the reader, which need not go on
                raise

    def read(self, pack: bool, progress: Progress = silent) -> M3:
        """The weights, each straight to its device; where packed, each layer as soon as it is complete."""
        plan, model = self.weights, nnx.clone(self.model)
        place = sharding(self.mesh)
        done = 0
        for part, grouped in groupby(plan.paths, key=part_of):
            progress("loading", done, plan.nbytes)
            paths = list(grouped)
            if isinstance(plan, Converted):
                for path, buffers in plan.restore(paths, lambda *_: place).items():
                    hold(model, path, buffers)
                done += sum(map(plan.source_bytes, paths))
            else:
                for path in paths:
                    assign(model, path, jax.device_put(plan.read(path), place).block_until_ready())
                    done += plan.source_bytes(path)
                    progress("loading", done, plan.nbytes)
            if pack:
                model.pack(part)
        progress("loading", plan.nbytes, plan.nbytes)
        return model

    def engine(self, model: M3, batch: int, max_length: int, progress: Progress) -> Engine:
        return Engine(
            model,
            self.ops,
            self.mesh,
            batch=batch,
            max_length=max_length,
            stop_ids=self.stop_ids,
            progress=progress,
        )

    @property
    def has_weights(self) -> bool:
        return self.is_converted or (self.is_directory and any(self.path.glob("*.safetensors*")))

    def _has(self, name: str) -> bool:
        return self.is_directory and (self.path / name).is_file()

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name) if self._has(name) else {}


class Demo(Source):
    """The embedded default: `configs/tiny.json`, seeded random weights and a byte-level tokenizer."""

    def __init__(self, settings: Settings):
        super().__init__(bundled("tiny.json"), settings)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer.byte_level()

    def load(self, batch: int = 1, max_length: int | None = None, progress: Progress = silent) -> Model:
        max_length = self.default_length if max_length is None else max_length
        engine = self.engine(self.in_memory(self.model, batch), batch, max_length, progress)
        s = self.settings
        tree = random_model(self.config, s.dtype, self.recipe, s.kv_format)
        if self.ops(batch, 1).takes_packed:
            tree.pack()
        return Model(tree, engine, self.tokenizer, None, self.sampling)


def load(
    directory: str | os.PathLike[str],
    *,
    max_length: int | None = None,
    batch: int = 1,
    dtype: str | DTypeLike = "bfloat16",
    kernels: str = "auto",
    attention: str = "sparse",
    layers: int | None = None,
    recipe: str | None = None,
    kv_format: str | None = None,
    progress: Progress = silent,
) -> Model:
    """Load a checkpoint for `batch` sequences of up to `max_length` tokens, prompt and answer together.

    dtype: "bfloat16" or "float32", of weights and activations; kernels: "auto", "reference", "pallas" or
    "interpret"; attention: "sparse", or "dense" to turn block selection off; layers: only the first so many;
    recipe: "int4_g64" or another of `mmx_jax.recipes`, or a .json file: rounds the weights while they load;
    kv_format: "int8" or "fp8" rounds cached keys and values, with a scale for each token and head.
    A process that shares its GPU memory fraction with no one should set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
    before JAX is imported: the default of 0.75 wastes a quarter of the device.

    Raises a subclass of MmxError that names the file, tensor, key or value; before any weight is read, unless
    it is the weight itself that is broken.
    """
    dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    for name, value in (("max_length", max_length), ("batch", batch), ("layers", layers)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{name} {value!r}: expected an integer")
    return Source(directory, Settings(dtype, kernels, attention, layers, recipe, kv_format)).load(
        batch, max_length, progress
    )


def _missing(path: str) -> str:
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return (
            f"{path}: no such directory; it looks like the name of a repository on a hub: download it first"
            f" (hf download {path} --local-dir DIR) and give the directory"
        )
    return f"{path}: no such file or directory"
