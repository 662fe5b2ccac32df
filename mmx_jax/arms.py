"""One model of random weights, run in several ways: what the benchmark compares.

Weights and pages are made on the device, the same for every arm. A row decodes behind `context` keys that
were never computed: the pages hold random keys and values, in random order.
"""

import inspect
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.profiler import ProfileData
from jaxtyping import Array, Float, Int

from mmx_jax.attention import Step
from mmx_jax.cache import Pages
from mmx_jax.checkpoint import part_of
from mmx_jax.engine import Engine
from mmx_jax.errors import NonFiniteError
from mmx_jax.graph import Batch
from mmx_jax.loading import Source
from mmx_jax.model import M3
from mmx_jax.params import formats_and_shapes, hold
from mmx_jax.rope import RopeTables, rope_tables
from pallas_kernels.ops import KERNELS, Ops
from pallas_kernels.paging import PagedRows
from pallas_kernels.workloads import random_pages, random_weight

STEPS = 8  # of a program, and tokens of the gate
WARM_UP = 3  # calls: a CUDA graph is made in the first ones
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True)
class Point:
    """Rows, and the keys that each of them sees."""

    batch: int
    context: int


class Forced(NamedTuple):
    """What an arm makes of tokens that are given to it, `STEPS` of each row."""

    logits: Float[np.ndarray, "G B V"]
    choices: list[Int[np.ndarray, "G B s n"]]  # of each layer s sets of experts or blocks; -1 is none
    experts: float  # distinct ones in a layer, the mean over layers and steps


def fill(source: Source, packed: bool) -> M3:
    """The source's model with random weights, parameter by parameter, packed part by part."""
    model = nnx.clone(source.model)
    found = formats_and_shapes(source.model)
    key = jax.random.key(0)
    for part, paths in groupby(sorted(found, key=part_of), key=part_of):
        for path in paths:
            form, shape = found[path]
            key, one = jax.random.split(key)
            if path == "embed":  # large beside what layers add, so that the next token depends on the last
                buffers = {"data": jax.random.normal(one, shape, source.settings.dtype)}
            elif form == "float32":  # norms, and the router
                scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
                buffers = {"data": jax.random.normal(one, shape) * scale}
            else:
                buffers = random_weight(form, shape, int(jax.random.bits(one, (), "uint16"))).buffers
            hold(model, path, buffers)
        if packed:
            model.pack(part)
    return model


def in_float32(model: M3) -> M3:
    """The same weights; activations become float32, because the embedding is."""
    exact = nnx.clone(model)
    exact.embed.format = "float32"
    exact.embed.hold({"data": model.embed.tensor().dequantize().astype(jnp.float32)})
    return exact


class Arm:
    """A model, how it is run, and where: at one point, with room for `tokens` more in each row."""

    def __init__(self, source: Source, model: M3, ops: Ops, point: Point, tokens: int, exact: bool = False):
        self.source, self.model, self.ops, self.point, self.exact = source, model, ops, point, exact
        block = source.config.block_size
        self.max_length = -(-(point.context + max(tokens, STEPS) + 1) // block) * block
        rng = np.random.default_rng(0)
        n_pages = point.batch * (self.max_length // block)
        self.table = rng.permutation(n_pages).astype(np.int32).reshape(point.batch, -1)
        self.given = rng.integers(source.config.vocab_size, size=(STEPS, point.batch), dtype=np.int32)
        self._forced: Callable[..., Any] | None = None

    @cached_property
    def rope(self) -> RopeTables:
        return rope_tables(self.source.config, self.max_length)

    def engine(self, steps: int = STEPS, **options: Any) -> Engine:
        """The compiled program, as `decode` runs it."""
        return Engine(
            self.model,
            lambda rows, new_tokens: self.ops,
            self.source.mesh,
            batch=self.point.batch,
            max_length=self.max_length,
            chunks=(),
            steps=(steps,),
            **options,
        )

    def pages(self) -> Pages:
        c, kv_format = self.source.config, self.source.settings.kv_format or "bfloat16"
        make = partial(random_pages, self.table.size, kv_format, (c.num_kv_heads, c.block_size, c.head_dim))

        def widen(a: Array) -> Array:
            return a.astype(jnp.float32) if self.exact and a.dtype == jnp.bfloat16 else a

        indices = [c.index_head_dim if sparse else None for sparse in c.sparse_layers]
        return tuple(jax.tree.map(widen, make(index, i)) for i, index in enumerate(indices))

    def forced(self, tokens: Int[np.ndarray, "G B"]) -> Forced:
        """Feed tokens, whatever the arm would say itself."""
        graphdef, state = nnx.split(self.model)

        def run(state: nnx.State, rope: RopeTables, pages: Pages, tokens: Array) -> Any:
            model = nnx.merge(graphdef, state)

            def step(pages: Pages, given: tuple[Array, Array]) -> tuple[Pages, tuple]:
                t, token = given
                logits, pages, traces = self.step(model, rope, pages, token, self.point.context + t)
                experts = [trace.experts for trace in traces if trace.experts is not None]
                blocks = [trace.blocks for trace in traces if trace.blocks is not None]
                return pages, (logits, experts, blocks)

            return lax.scan(step, pages, (jnp.arange(STEPS), tokens))

        if self._forced is None:
            self._forced = jax.jit(run, donate_argnums=2)
        _, made = self._forced(state, self.rope, self.pages(), jnp.asarray(tokens))
        logits, experts, blocks = jax.device_get(made)
        distinct = [len(np.unique(step)) for layer in experts for step in layer]
        sets = [a.reshape(STEPS, self.point.batch, -1, a.shape[-1]) for a in (*experts, *blocks)]
        return Forced(logits, sets, float(np.mean(distinct)) if distinct else 0.0)

    def step(
        self, model: M3, rope: RopeTables, pages: Pages, token: Array, position: Array | int
    ) -> tuple[Array, Pages, tuple]:
        """Logits after one more token of every row."""
        positions = jnp.full((token.size, 1), position, jnp.int32)
        n_blocks = position // self.source.config.block_size + 1
        rows = PagedRows(jnp.asarray(self.table), positions, positions[:, 0] + 1, n_blocks)
        hidden, pages, traces = model(token[:, None], pages, Step(rows, *rope.at(positions), self.ops))
        return model.logits(hidden[:, 0], self.ops), pages, traces

    def batch(self, engine: Engine) -> Batch:
        """All rows at the context's end, greedy, with tokens of their own."""
        batch = engine.idle_batch()
        batch.page_table[:] = self.table
        batch.lengths[:] = self.point.context
        batch.last_token[:] = self.given[0]
        batch.remaining[:] = self.max_length
        batch.ignore_eos[:] = True
        return batch


class Timed(NamedTuple):
    """Runs of `steps` steps each."""

    seconds: list[float]  # of each run
    steps: int
    tokens: int  # of all rows in a run, counted
    first: Int[np.ndarray, "G B"]  # what the first `STEPS` steps emitted


def time_programs(arm: Arm, engine: Engine, tokens: int, runs: int, limit: float) -> Timed:
    """Wall clock of runs of `tokens` steps, read by the host after each program as an engine does.

    Runs end after `limit` seconds, but there are always two. Each begins at the context's end.
    """
    program = engine.programs[f"decode {arm.point.batch}x{STEPS}"].run
    weights, pages, start = jax.tree.leaves(nnx.state(arm.model)), arm.pages(), arm.batch(engine)
    first, seconds, count, began = None, [], 0, time.perf_counter()
    for run in range(-1, runs):
        if run > 1 and time.perf_counter() - began > limit:
            break
        batch, count, before = start, 0, time.perf_counter()
        for _ in range(WARM_UP if run < 0 else tokens // STEPS):
            pages, batch, emitted = program(weights, engine.rope, pages, batch)
            emitted = jax.device_get(emitted)
            count += int(np.sum(emitted.tokens >= 0))
            if not emitted.finite.all():
                raise NonFiniteError("the logits of random weights are not finite: the step is broken")
            first = emitted.tokens if first is None else first
        if run >= 0:
            seconds.append(time.perf_counter() - before)
    assert first is not None
    return Timed(seconds, tokens, count, first)


def time_eager(arm: Arm, runs: int, limit: float) -> Timed:
    """As `time_programs`, of `STEPS` steps, each operation of the model a program of its own."""
    pages, start = arm.pages(), jnp.asarray(arm.given[0])
    first, seconds, began = None, [], time.perf_counter()
    for run in range(-1, runs):
        if run > 1 and time.perf_counter() - began > limit:
            break
        token, emitted, before = start, [], time.perf_counter()
        for t in range(STEPS):
            logits, pages, _ = arm.step(arm.model, arm.rope, pages, token, arm.point.context + t)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            emitted.append(token)
        emitted = np.stack(jax.device_get(emitted))
        first = emitted if first is None else first
        if run >= 0:
            seconds.append(time.perf_counter() - before)
    assert first is not None
    return Timed(seconds, STEPS, first.size, first)


def eager_ops() -> Ops:
    """The references, each compiled by itself."""

    def alone(function: Callable) -> Callable:
        static = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY or name == "layout"
        ]
        return jax.jit(function, static_argnames=static)

    return replace(Ops(), **{name: alone(getattr(Ops(), name)) for name in KERNELS})


class Verdict(NamedTuple):
    """The gate's. An arm passes with at most twice the error of plain JAX in the same precision."""

    error: float  # over that of plain JAX, on those positions where both chose what float32 chose
    positions: int  # how many those are; near a tie rounding decides, and what follows is off by far more
    other: int  # experts and blocks that float32 did not choose, on all positions
    passed: bool


def gate(got: Forced, plain: Forced, exact: Forced) -> Verdict:
    """Judge an arm by logits and by choices.

    It may choose other experts and blocks than float32 twice as often as plain JAX does, and once more for
    each position.
    """
    ours, theirs = _others(got, exact), _others(plain, exact)
    same = (ours == 0) & (theirs == 0)
    if not same.any():
        same[:] = True
    errors = [np.linalg.norm((a.logits[same] - exact.logits[same]).astype(np.float64)) for a in (got, plain)]
    error = float(errors[0] / max(errors[1], np.finfo(np.float32).tiny))
    passed = error <= 2 and ours.sum() <= 2 * theirs.sum() + ours.size
    return Verdict(error, int(same.sum()), int(ours.sum()), bool(passed))


def _others(got: Forced, exact: Forced) -> Int[np.ndarray, "G B"]:
    """How many of the chosen experts and blocks of a position are not among those of `exact`."""
    count = np.zeros(exact.logits.shape[:2], int)
    for ours, theirs in zip(got.choices, exact.choices, strict=True):
        found = (ours[..., :, None] == theirs[..., None, :]).any(axis=-1)
        count += (~found & (ours >= 0)).sum(axis=(-1, -2))
    return count


def are_likeliest(tokens: Int[np.ndarray, "G B"], logits: Float[np.ndarray, "G B V"]) -> bool:
    """Whether each token has the largest logit, or one within rounding to bfloat16 of it."""
    chosen = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return bool(np.all(chosen >= logits.max(axis=-1) - 2.0**-7 * np.abs(logits).max(axis=-1)))


def profile(arm: Arm, engine: Engine) -> dict[str, tuple[int, float]]:
    """What one call of the decode program does: event -> its count and microseconds.

    Kernels and copies of the GPU, and the calls of CUDA's driver that start work.
    """
    (name,) = (name for name in engine.programs if name.startswith("decode"))
    program, weights = engine.programs[name].run, jax.tree.leaves(nnx.state(arm.model))
    pages, batch = arm.pages(), arm.batch(engine)
    for _ in range(WARM_UP):
        pages, batch, _ = jax.block_until_ready(program(weights, engine.rope, pages, batch))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(program(weights, engine.rope, pages, batch))
        (file,) = Path(directory).rglob("*.xplane.pb")
        return summarise(ProfileData.from_file(str(file)))


def summarise(data: Any) -> dict[str, tuple[int, float]]:
    """Of a ProfileData: events of the GPU's streams by name, and the driver's calls that launch or copy."""
    found: dict[str, tuple[int, float]] = {}
    for plane in data.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):  # the other lines sum these up
                continue
            for event in line.events:
                if on_gpu or re.match(r"cu(Graph)?(Launch|Memcpy|Memset)", event.name):
                    count, us = found.get(event.name, (0, 0.0))
                    found[event.name] = count + 1, us + event.duration_ns / 1e3
    return found


def summary(seconds: Sequence[float], steps: int) -> dict[str, float]:
    """Milliseconds of a step."""
    ms = 1e3 * np.array(seconds) / steps
    return {"ms": float(ms.mean()), "std": float(ms.std()), "median": float(np.median(ms))}
