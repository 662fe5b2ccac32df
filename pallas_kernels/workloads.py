"""What the benchmark and the tuner run: every operation at M3's sizes, with inputs made on the device.

The inputs rotate: each call works on other experts, weights or pages, more of them than the L2 cache holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.block_attention import triton as attention_triton
from pallas_kernels.block_attention.reference import block_attention
from pallas_kernels.call import DECODE_TOKENS
from pallas_kernels.formats import FORMATS
from pallas_kernels.moe import triton as moe_triton
from pallas_kernels.moe.packing import pack_mlp
from pallas_kernels.moe.reference import MLPWeights
from pallas_kernels.moe.reference import moe as moe_reference
from pallas_kernels.moe.routing import make_routing
from pallas_kernels.paging import PAGE_FORMATS, LayerPages, PagedRows, round_heads
from pallas_kernels.qmatmul import triton as qmatmul_triton
from pallas_kernels.qmatmul.reference import qmatmul as qmatmul_reference
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import pack

D, F, E, X = 6144, 3072, 128, 4
N, K, H, C, P = 64, 4, 128, 128, 16
INDEX = 128
ALPHA, LIMIT = 1.702, 7.0
MOE_TOKENS = (1, 8, 32, 64, 128)
QMATMUL_TOKENS = (1, 16)
CONTEXTS = ((1, 8), (1, 32), (1, 128), (1, 512), (32, 8), (32, 128))  # rows, thousands of keys
# Name -> rows and columns of a projection, and how many copies the L2 cache does not hold.
PROJECTIONS = {"o_proj": (6144, 8192, 4), "qkv": (9856, 6144, 4), "lm_head": (200064, 6144, 2)}
KV_FORMATS = ("bfloat16", *PAGE_FORMATS)
POOL = 32768  # pages


@dataclass(frozen=True)
class Workload:
    """One row of the table: a kernel and its reference on the same numbers.

    `inputs` and `reference_inputs` are arguments of `kernel` and `reference`, one tuple for each call.
    `check` takes both, jitted, and gives the kernel's result, the reference's and an exact one for the gate.
    """

    op: str
    name: str
    format: str
    size: int  # tokens, or keys per row
    n_bytes: float
    kernel: Callable
    inputs: Sequence[tuple]
    reference: Callable
    reference_inputs: Sequence[tuple]
    check: Callable[[Callable, Callable], tuple[Array, Array, Array | np.ndarray]]
    experts: tuple[np.ndarray, ...] = ()


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal numbers, a slice of the first axis at a time."""
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda k: jax.random.normal(k, shape[1:], dtype), keys)


@partial(jax.jit, static_argnums=(1, 2))
def _codes(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    bits = jax.random.bits(key, shape, f"uint{8 * jnp.dtype(dtype).itemsize}")
    return jax.lax.bitcast_convert_type(bits, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _scales(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.uniform(key, shape, minval=0.5, maxval=1.5).astype(dtype)


def random_weight(form: str, shape: tuple[int, ...], seed: int) -> QTensor:
    """Random codes, made on the device, with scales that give entries of about 1 / sqrt(D)."""
    size = shape[-1] ** -0.5
    buffers = {}
    for i, (name, spec) in enumerate(FORMATS[form].buffers(shape).items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        if form == "bfloat16":
            buffers[name] = _normal(key, spec.shape, spec.dtype) * jnp.bfloat16(size)
        elif (form, name) == ("mxfp8", "scale"):
            buffers[name] = 113 + _codes(key, spec.shape, spec.dtype) % 2  # about 2^-13 of codes about 100
        elif (form, name) == ("nvfp4", "scale"):
            buffers[name] = 0x30 + _codes(key, spec.shape, spec.dtype) % 16  # 0.5 to 1.9
        elif name == "scale_2":
            buffers[name] = jnp.full(spec.shape, size / 3, spec.dtype)
        elif name == "scale":
            largest = {"fp8": 200, "int4_g64": 5, "int3_g64": 2}.get(form, 80)
            buffers[name] = _scales(key, spec.shape, spec.dtype) * spec.dtype.type(size / largest)
        elif form in ("fp8", "mxfp8"):
            codes = _codes(key, spec.shape, spec.dtype)
            buffers[name] = jnp.where(codes & 0x7F == 0x7F, 0, codes)  # no NaN
        else:
            buffers[name] = _codes(key, spec.shape, spec.dtype)
    return QTensor(form, shape, buffers)


def summed(function: Callable) -> Callable:
    """With the sum of its terms, which a model leaves to whoever reads them."""
    return lambda *arguments: jnp.sum(function(*arguments), axis=0)


def moe(formats: Sequence[str], tokens: Sequence[int]) -> Iterator[Workload]:
    """The routed experts alone for tokens with uniformly random experts, of which the last is one."""
    constants = {"alpha": ALPHA, "limit": LIMIT}
    for form in formats:
        shapes = (E, F, D), (E, F, D), (E, D, F)
        weights = MLPWeights(*(random_weight(form, s, i) for i, s in enumerate(shapes)))
        packed = jax.jit(pack_mlp)(weights.gate, weights.up, weights.down)
        per_expert = sum(FORMATS[form].nbytes(s[1:]) for s in shapes)
        for t in tokens:
            rng = np.random.default_rng(t)
            chosen = [rng.random((t, E)).argsort(-1)[:, :X].astype(np.int32) for _ in range(8)]
            chosen[0][0] = (E - 1, 0, 1, 2)
            make = jax.jit(partial(make_routing, n_experts=E))
            routings = [make(c, jnp.full((t, X), 0.5), jnp.ones(t, bool)) for c in chosen]
            x = _normal(jax.random.key(t), (t, D), jnp.bfloat16)
            kernel, reference = (summed(partial(f, **constants)) for f in (moe_triton.moe, moe_reference))

            def check(kernel, reference, x=x, r=routings[0], packed=packed, weights=weights):
                exact = reference(x.astype(jnp.float32), r, weights, None)
                return kernel(x, r, packed, None), reference(x, r, weights, None), exact

            active = float(np.mean([len(np.unique(c)) for c in chosen]))
            yield Workload(
                "moe",
                f"moe, {active:.1f} experts",
                form,
                t,
                active * per_expert,
                kernel,
                [(x, r, packed, None) for r in routings],
                reference,
                [(x, r, weights, None) for r in routings[:2]],
                check,
                tuple(chosen),
            )


def qmatmul(formats: Sequence[str], tokens: Sequence[int]) -> Iterator[Workload]:
    """A layer's large projections, and the output head."""
    kernel, reference = summed(qmatmul_triton.qmatmul), summed(qmatmul_reference)
    for form in formats:
        for name, (rows, columns, copies) in PROJECTIONS.items():
            shape = (rows, columns)
            weights = [random_weight(form, shape, i) for i in range(copies)]
            packed = [jax.jit(pack)(w) for w in weights]
            for t in tokens:
                x = _normal(jax.random.key(t), (t, columns), jnp.bfloat16)

                def check(kernel, reference, x=x, w=weights[0], packed=packed[0], step=rows // 256):
                    some = w.dequantize()[::step]
                    exact = np.asarray(x, np.float64) @ np.asarray(some, np.float64).T
                    return kernel(x, packed)[:, ::step], reference(x, w)[:, ::step], exact

                yield Workload(
                    "qmatmul",
                    name,
                    form,
                    t,
                    FORMATS[form].nbytes(shape),
                    kernel,
                    [(x, w) for w in packed * 2],
                    reference,
                    [(x, w) for w in weights],
                    check,
                )


@partial(jax.jit, static_argnums=(1, 2))
def _rounded(key: Array, shape: tuple[int, ...], kv_format: str) -> tuple[Array, Array]:
    """Normal numbers as codes and scales, a page at a time."""

    def page(key: Array) -> tuple[Array, Array]:
        (codes,), scale = round_heads([jax.random.normal(key, shape[1:])], PAGE_FORMATS[kv_format].dtype)
        return codes, scale

    return jax.lax.map(page, jax.random.split(key, shape[0]))


def random_pages(
    n_pages: int,
    kv_format: str,
    dims: tuple[int, int, int] = (K, C, H),
    index: int | None = INDEX,
    seed: int = 0,
) -> LayerPages:
    """One layer's pages of normal numbers; `dims` are KV heads, block size and head dim."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (n_pages, *dims)
    index_k = None if index is None else _normal(keys[2], (n_pages, dims[1], index), jnp.bfloat16)
    if kv_format == "bfloat16":
        k, v = (_normal(key, shape, jnp.bfloat16) for key in keys[:2])
        return LayerPages(k, v, index_k)
    (k, k_scale), (v, v_scale) = (_rounded(key, shape, kv_format) for key in keys[:2])
    return LayerPages(k, v, index_k, k_scale, v_scale)


def attention(contexts: Sequence[tuple[int, int]], dense: bool, kv_format: str) -> Iterator[Workload]:
    """One new token per row on pages all over the pool: all pages, or the choice and then the chosen ones."""
    choice = {"top_blocks": P, "local_blocks": 1, "init_blocks": 0}

    def attend(function: Callable) -> Callable:
        def run(q, index_q, pages, table, positions, lengths):
            rows = PagedRows(table, positions, lengths, table.shape[1])
            return function(q, None if dense else index_q, pages, rows, **choice)[0]

        return run

    key, pages = jax.random.key(1), random_pages(POOL, kv_format)
    kv_bytes = sum(a.nbytes for a in jax.tree.leaves(replace(pages, index_k=None))) // (POOL * C)  # of a key
    for n_rows, thousands in contexts:
        n_keys = thousands * 1024
        n_blocks = n_keys // C
        rng = np.random.default_rng(n_keys)
        inputs = []
        for i in range(min(32, max(4, POOL // (n_rows * n_blocks)))):
            table = rng.permutation(POOL)[: n_rows * n_blocks].reshape(n_rows, n_blocks).astype(np.int32)
            lengths = jnp.full(n_rows, n_keys - 5, jnp.int32)
            q, index_q = (
                _normal(jax.random.fold_in(key, 2 * i + j), (n_rows, 1, heads, H), jnp.bfloat16)
                for j, heads in enumerate((N, K))
            )
            inputs.append((q, index_q, pages, jnp.asarray(table), lengths[:, None] - 1, lengths))
        kernel, reference = attend(attention_triton.block_attention), attend(block_attention)

        def check(kernel, reference, arguments=inputs[0]):
            query, *rest = arguments
            exact = reference(query.astype(jnp.float32), *rest)
            return kernel(*arguments), reference(*arguments), exact

        per_key = kv_bytes if dense else 2 * INDEX
        chosen = 0 if dense else min(P, n_blocks) * C * kv_bytes
        yield Workload(
            "dense attention" if dense else "attention",
            f"{n_rows} rows",
            kv_format,
            n_keys,
            n_rows * (n_keys * per_key + chosen),
            kernel,
            inputs,
            reference,
            inputs[:2],
            check,
        )


def workloads(
    ops: Sequence[str],
    formats: Sequence[str],
    tokens: Sequence[int] | None,
    contexts: Sequence[tuple[int, int]] = CONTEXTS,
    kv_formats: Sequence[str] = ("bfloat16",),
) -> Iterator[Workload]:
    """All rows of the table, made one after the other so that one format's weights are held at a time."""
    if "moe" in ops:
        yield from moe(formats, tokens or MOE_TOKENS)
    if "qmatmul" in ops:
        yield from qmatmul(formats, [t for t in tokens or QMATMUL_TOKENS if t <= DECODE_TOKENS])
    for name, dense in (("attention", False), ("dense attention", True)):
        for kv_format in kv_formats if name in ops else ():
            yield from attention(contexts, dense, kv_format)
