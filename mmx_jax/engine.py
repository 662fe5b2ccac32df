"""Compiles the static programs and runs batches of requests through them. Token ids only, no text.

Everything is compiled from abstract shapes before any weight is read, so that what cannot work fails in
seconds. A shape that was not compiled for is an error, never a silent recompile.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from mmx_jax.cache import Pages, make_pages
from mmx_jax.config import ModelConfig
from mmx_jax.errors import InputError, NonFiniteError
from mmx_jax.graph import Batch, Chunk, Emitted, decode, prefill
from mmx_jax.mesh import sharding
from mmx_jax.model import M3
from mmx_jax.rope import RopeTables, rope_tables
from mmx_jax.sampling import MAX_LOGPROBS, Sampling
from pallas_kernels.ops import Ops

# Progress of a long stage: its name, how much is done, how much there is.
Progress = Callable[[str, int, int], None]

LARGE_CHUNK = 2048
DECODE_STEPS = (1, 8)

# XLA options by platform; the one place where they are set. What XLA_FLAGS names is left to it.
COMPILER_OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    "gpu": {
        # All that can be captured in a CUDA graph; WHILE, which is not by default, makes a whole decode
        # program one graph.
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,"
        "CONDITIONAL,WHILE",
        # A sort by CUB cannot be captured, and one in a branch that is not taken breaks the graph as well.
        "xla_gpu_enable_cub_radix_sort": False,
    }
}


def compiler_options(platform: str) -> dict[str, str | bool]:
    """The options for a platform, without those that the user set."""
    options, set_by_user = COMPILER_OPTIONS.get(platform, {}), os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in set_by_user}


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Off means: temperature 0 (greedy), top_k 0, top_p 1, min_p 0, repetition_penalty 1. `logprobs` is how
    many alternatives to report with each token's log-probability; None reports neither.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None


def check_capacity(config: ModelConfig, batch: int, max_length: int) -> None:
    """Raise InputError for a batch or a capacity that the model cannot have."""
    if batch < 1:
        raise InputError(f"batch {batch}: it must be at least 1")
    if not 1 <= max_length <= config.max_position:
        raise InputError(f"max_length {max_length}: the model takes 1 to {config.max_position} tokens")


def check_request(request: Request, config: ModelConfig, max_length: int) -> None:
    """Raise InputError for what JAX would clamp, wrap or drop without a word."""
    prompt, vocab = request.prompt, config.vocab_size
    if not prompt:
        raise InputError("the prompt is empty: at least one token is needed")
    if bad := [i for i in prompt if not 0 <= i < vocab]:
        raise InputError(f"token id {bad[0]} is outside the vocabulary: 0 to {vocab - 1}")
    if len(prompt) >= max_length:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_length is {max_length}: it must be longer than"
            " the prompt"
        )
    if request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens {request.max_new_tokens}: it must be at least 1")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise InputError(f"logprobs {request.logprobs}: it must be 0 to {MAX_LOGPROBS}")


class Token(NamedTuple):
    """One emitted token, with its log-probability and the likeliest alternatives where asked for."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None


@dataclass(frozen=True)
class Program:
    """A compiled program, and how long compiling it took."""

    run: jax.stages.Compiled
    seconds: float

    @property
    def temp_bytes(self) -> int:
        """Scratch memory it takes while it runs."""
        analysis = self.run.memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes


class Engine:
    """The compiled programs for one batch size and capacity, and the rope tables they share.

    `ops(rows, new tokens)` chooses the operations of a program. A model in the kernels' order takes any.

    `chunks` are the prefill lengths, the first for all rows at once and the others for one row; `steps` the
    tokens per decode call. Each length is a program. `options` go to the compiler over `COMPILER_OPTIONS`.
    """

    def __init__(
        self,
        model: M3,
        ops: Callable[[int, int], Ops],
        mesh: Mesh,
        *,
        batch: int = 1,
        max_length: int,
        stop_ids: Sequence[int] = (),
        chunks: Sequence[int] | None = None,
        steps: Sequence[int] = DECODE_STEPS,
        options: Mapping[str, str | bool] = MappingProxyType({}),
        progress: Progress = silent,
    ):
        config = model.config
        check_capacity(config, batch, max_length)
        if bad := [i for i in stop_ids if not 0 <= i < config.vocab_size]:
            raise InputError(f"stop id {bad[0]} is outside the vocabulary of {config.vocab_size}")
        self.config, self.mesh, self.batch, self.max_length = config, mesh, batch, max_length
        self.stop_ids = tuple(stop_ids)
        self.blocks_per_row = -(-max_length // config.block_size)
        if chunks is None:
            chunks = (config.block_size, LARGE_CHUNK) if max_length > LARGE_CHUNK else (config.block_size,)
        self.chunks = [(batch if i == 0 else 1, length) for i, length in enumerate(chunks)]
        self.steps = sorted(steps)
        self.options = compiler_options(mesh.devices.flat[0].platform) | dict(options)
        self.programs = self._compile(model, ops, progress)

    @cached_property
    def rope(self) -> RopeTables:
        return jax.device_put(rope_tables(self.config, self.max_length), sharding(self.mesh))

    def _compile(self, model: M3, ops: Callable[[int, int], Ops], progress: Progress) -> dict[str, Program]:
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        place = sharding(self.mesh)

        def abstract(tree: Any) -> Any:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)

        def on_leaves(function: Callable) -> Callable:
            # A flat list of arrays is what a call can pass at little cost; the tree is rebuilt when tracing.
            return lambda leaves, *args: function(
                nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), *args
            )

        n_pages = self.batch * self.blocks_per_row
        new_pages = partial(make_pages, self.config, n_pages, model.dtype, model.kv_format)
        rope = jax.eval_shape(partial(rope_tables, self.config, self.max_length))
        state_args = abstract((leaves, rope, jax.eval_shape(new_pages)))
        # The state is donated (argument 2 is the pages, 3 the batch): its arrays keep their addresses from
        # call to call, so that a captured graph runs again as it is.
        jobs: dict[str, tuple[Callable, tuple, tuple[int, ...]]] = {"new pages": (new_pages, (), ())}
        for n in self.steps:
            function = partial(decode, ops=ops(self.batch, 1), stop_ids=self.stop_ids, steps=n)
            args = (*state_args, abstract(self.idle_batch()))
            jobs[f"decode {self.batch}x{n}"] = on_leaves(function), args, (2, 3)
        for shape in self.chunks:
            jobs[f"prefill {shape[0]}x{shape[1]}"] = (
                on_leaves(partial(prefill, ops=ops(*shape))),
                (*state_args, abstract(self.empty_chunk(*shape))),
                (2,),
            )

        def compile_one(function: Callable, args: tuple, donated: tuple[int, ...]) -> Program:
            start = time.perf_counter()
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=place)
            return Program(jitted.lower(*args).compile(self.options), time.perf_counter() - start)

        progress("compiling", 0, len(jobs))
        with ThreadPoolExecutor() as pool:  # XLA compiles each program on one thread
            running = {pool.submit(compile_one, *job): name for name, job in jobs.items()}
            for done, _ in enumerate(as_completed(running), 1):
                progress("compiling", done, len(jobs))
        return {name: future.result() for future, name in running.items()}

    def idle_batch(self) -> Batch:
        """Host arrays of a batch in which no row is active."""
        b = self.batch
        return Batch(
            page_table=_host((b, self.blocks_per_row), np.int32, -1),
            lengths=_host(b, np.int32),
            last_token=_host(b, np.int32),
            remaining=_host(b, np.int32),
            ignore_eos=_host(b, bool),
            want_logprobs=_host(b, bool),
            seen=_host((b, self.config.vocab_size), bool),
            sampling=Sampling(
                temperature=_host(b, np.float32),
                top_k=_host(b, np.int32),
                top_p=_host(b, np.float32, 1),
                min_p=_host(b, np.float32),
                repetition_penalty=_host(b, np.float32, 1),
                seed=_host(b, np.uint32),
            ),
        )

    def empty_chunk(self, n_rows: int, length: int) -> Chunk:
        """Host arrays of a prefill chunk without tokens."""
        return Chunk(
            page_table=_host((n_rows, self.blocks_per_row), np.int32, -1),
            start=_host(n_rows, np.int32),
            tokens=_host((n_rows, length), np.int32),
            n_valid=_host(n_rows, np.int32),
        )

    def start(self, weights: Sequence[Array], requests: Sequence[Request], first: int = 0) -> "Decoding":
        """Admit up to `batch` requests, the first of which errors call prompt `first`.

        `weights` are the leaves of the model's `nnx.state`.
        """
        return Decoding(self, weights, requests, first)


def _host(shape: int | tuple[int, ...], dtype: DTypeLike, fill: float = 0) -> Any:
    """A writable array on the host, where the type checker expects one of JAX; programs take both."""
    return np.full(shape, fill, dtype)


class Decoding:
    """One batch in flight: `prefill`, then `step` until `active` is empty.

    A row that would outgrow the capacity ends there, as if it had asked for no more tokens.
    """

    def __init__(self, engine: Engine, weights: Sequence[Array], requests: Sequence[Request], first: int):
        if len(requests) > engine.batch:
            raise InputError(f"{len(requests)} requests and batch is {engine.batch}")
        for request in requests:
            check_request(request, engine.config, engine.max_length)
        self.engine, self.weights, self.requests = engine, list(weights), list(requests)
        self.first = first
        self.pages: Pages = engine.programs["new pages"].run()
        self.batch = engine.idle_batch()
        self.budget = [min(r.max_new_tokens, engine.max_length - len(r.prompt)) for r in requests]
        self.emitted = [0] * len(requests)
        b = self.batch
        b.page_table[:] = np.arange(b.page_table.size).reshape(b.page_table.shape)
        for row, r in enumerate(requests):
            b.lengths[row] = len(r.prompt) - 1
            b.last_token[row] = r.prompt[-1]
            b.remaining[row] = self.budget[row]
            b.ignore_eos[row] = r.ignore_eos
            b.want_logprobs[row] = r.logprobs is not None
            b.seen[row, list(r.prompt)] = True
            for name in (f.name for f in dataclasses.fields(Sampling)):
                getattr(b.sampling, name)[row] = getattr(r, name)

    @property
    def active(self) -> list[int]:
        """Rows that still have tokens to emit."""
        return [row for row, remaining in enumerate(np.asarray(self.batch.remaining)) if remaining > 0]

    def prefill(self, progress: Progress = silent) -> None:
        """Write every prompt but its last token to the cache, in the chunk lengths there are programs for."""
        engine = self.engine
        prompts = [np.asarray(r.prompt[:-1], np.int32) for r in self.requests]
        done = [0] * len(prompts)
        total = sum(map(len, prompts))
        (_, small), *large = engine.chunks
        for _, length in sorted(large, reverse=True):
            for row, prompt in enumerate(prompts):
                while len(prompt) - done[row] >= length:
                    progress("prefill", sum(done), total)
                    self._prefill_chunk((1, length), [row], prompts, done)
        while sum(done) < total:
            progress("prefill", sum(done), total)
            self._prefill_chunk((engine.batch, small), range(len(prompts)), prompts, done)
        progress("prefill", total, total)

    def _prefill_chunk(
        self, shape: tuple[int, int], rows: Sequence[int], prompts: list[np.ndarray], done: list[int]
    ) -> None:
        chunk = self.engine.empty_chunk(*shape)
        for i, row in enumerate(rows):
            piece = prompts[row][done[row] : done[row] + shape[1]]
            chunk.page_table[i] = self.batch.page_table[row]
            chunk.start[i] = done[row]
            chunk.tokens[i, : len(piece)] = piece
            chunk.n_valid[i] = len(piece)
            done[row] += len(piece)
        program = self.engine.programs[f"prefill {shape[0]}x{shape[1]}"]
        self.pages = program.run(self.weights, self.engine.rope, self.pages, chunk)

    def step(self) -> list[list[Token]]:
        """Run one decode program; the new tokens of each row, none for idle rows.

        Raises NonFiniteError, naming the row, when a row's logits are NaN or infinite.
        """
        longest = max(self.budget[row] - self.emitted[row] for row in self.active)
        n = max((n for n in self.engine.steps if n <= longest), default=self.engine.steps[0])
        program = self.engine.programs[f"decode {self.engine.batch}x{n}"]
        self.pages, self.batch, emitted = program.run(self.weights, self.engine.rope, self.pages, self.batch)
        return self._read(jax.device_get(emitted))

    def _read(self, emitted: Emitted) -> list[list[Token]]:
        out: list[list[Token]] = []
        for row, request in enumerate(self.requests):
            count = int(np.sum(emitted.tokens[:, row] >= 0))
            finite = emitted.finite[:count, row]
            if not finite.all():
                at = self.emitted[row] + int(np.argmin(finite)) + 1
                raise NonFiniteError(
                    f"the logits of prompt {self.first + row} are not finite at new token {at}: the weights"
                    " are broken, or the working precision overflows"
                )
            tokens = []
            for n in range(count):
                logprob, top = None, None
                if request.logprobs is not None:
                    p, k = emitted.logprobs, request.logprobs
                    logprob = float(p.chosen[n, row])
                    top = list(zip(p.top_ids[n, row, :k].tolist(), p.top[n, row, :k].tolist(), strict=True))
                tokens.append(Token(int(emitted.tokens[n, row]), logprob, top))
            self.emitted[row] += count
            out.append(tokens)
        return out

    def stop(self, row: int, kept: int) -> None:
        """End a row whose text ended it, and drop what it emitted beyond its first `kept` tokens."""
        remaining, lengths = np.array(self.batch.remaining), np.array(self.batch.lengths)
        remaining[row] = 0
        lengths[row] = len(self.requests[row].prompt) + kept - 1
        self.batch = dataclasses.replace(self.batch, remaining=remaining, lengths=lengths)
