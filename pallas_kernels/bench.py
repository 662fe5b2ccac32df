"""Kernels at M3's sizes on the GPU at hand: correctness first, then time.

    python -m pallas_kernels.bench [--op moe qmatmul] [--format int4_g64 ...] [--tokens 1 8 ...]

A row is printed only after its kernel passed the gate: on the same dequantised weights, an error of at most
twice that of plain JAX in bfloat16. Exact is the reference in float32, or float64 on some of the rows.

Times are kernel times by CUPTI, the median over inputs that rotate (other experts, or other weights, each
time), so that the L2 cache is cold; all kernels of the operation count. Bytes are those of the weights that
must be read, with their scales. `read` is the share of the rate at which a plain sum reads 4 GiB in the same
run. The last line is JSON.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.formats import FORMATS
from pallas_kernels.moe import triton as moe_triton
from pallas_kernels.moe.reference import moe as moe_reference
from pallas_kernels.moe.routing import make_routing
from pallas_kernels.qmatmul import triton as qmatmul_triton
from pallas_kernels.qmatmul.reference import qmatmul as qmatmul_reference
from pallas_kernels.qtensor import QTensor
from pallas_kernels.tiles import TILE_FORMATS, nbytes, pack

D, F, E, X = 6144, 3072, 128, 4
ALPHA, LIMIT = 1.702, 7.0
ROTATION = 8
WARM_UP = 50
# Name -> rows and columns of a projection.
PROJECTIONS = {"o_proj": (6144, 8192), "qkv": (9856, 6144), "lm_head": (200064, 6144)}


def kernel_us(function: Callable, inputs: Sequence[tuple]) -> float:
    """Microseconds of kernel time per call, the median over the inputs."""
    from jax.experimental.mosaic.gpu import profiler

    profile: Any = profiler.Cupti(finalize=False).measure(function, aggregate=False)
    # An idle GPU runs at a low clock at first.
    jax.block_until_ready([function(*inputs[i % len(inputs)]) for i in range(WARM_UP)])
    times = [sum(ms for _, ms in profile(*arguments)[1]) for arguments in inputs]
    return float(np.median(times)) * 1e3


def random_weight(form: str, shape: tuple[int, ...], seed: int) -> QTensor:
    """Random codes, made on the device, with scales that give entries of about 1 / sqrt(D)."""
    buffers = {}
    for i, (name, spec) in enumerate(FORMATS[form].buffers(shape).items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        if jnp.issubdtype(spec.dtype, jnp.integer):
            buffers[name] = jax.jit(jax.random.bits, static_argnums=(1, 2))(
                key, spec.shape, jnp.dtype(f"uint{8 * spec.dtype.itemsize}")
            ).astype(spec.dtype)
        else:
            values = jax.jit(jax.random.uniform, static_argnums=(1, 2))(key, spec.shape, spec.dtype)
            largest = {"int8": 127, "int4_g64": 7}.get(form, 1)
            buffers[name] = ((values + 0.5) / (largest * shape[-1] ** 0.5)).astype(spec.dtype)
    return QTensor(form, shape, buffers)


def gate(got: Array, reference: Array, exact: Array | np.ndarray) -> tuple[float, bool]:
    """The kernel's error over the reference's, and whether it passes."""
    g, r, e = (np.asarray(a, np.float64) for a in (got, reference, exact))
    # XLA may keep the reference's intermediates in float32, which leaves it almost no error: what is 2^-7 of
    # the rounding to bfloat16 that every caller applies is no error of a kernel either.
    ratio = float(np.linalg.norm(g - e) / (np.linalg.norm(r - e) + 2.0**-16 * np.linalg.norm(e)))
    return ratio, bool(np.isfinite(g).all() and ratio <= 2)


def row(
    read: float, op: str, form: str, n_tokens: int, n_bytes: float, us: float, other: float
) -> dict[str, Any]:
    rate = n_bytes / us / 1e6
    result = {"op": op, "format": form, "tokens": n_tokens, "us": round(us, 1), "TB/s": round(rate, 2)}
    result |= {"read": round(rate / read, 3), "x reference": round(other / us, 2)}
    print("  ".join(f"{k} {v}" for k, v in result.items()), flush=True)
    return result


def bench_moe(form: str, tokens: Sequence[int], read: float) -> list[dict[str, Any]]:
    up_shape, down_shape = (E, F, D), (E, D, F)
    weights = [random_weight(form, s, i) for i, s in enumerate((up_shape, up_shape, down_shape))]
    packed = jax.jit(moe_triton.pack_experts)(*weights)
    per_expert = (nbytes(packed.gate_up) + nbytes(packed.down)) / E
    constants = {"alpha": ALPHA, "limit": LIMIT}
    kernel = jax.jit(functools.partial(moe_triton.moe, **constants))
    reference = jax.jit(lambda x, r, w: moe_reference(x, r, *w, **constants))
    rng = np.random.default_rng(0)
    rows = []
    for t in tokens:
        chosen = [
            np.stack([rng.permutation(E)[:X] for _ in range(t)]).astype(np.int32) for _ in range(ROTATION)
        ]
        chosen[0][0, 0] = E - 1 if E - 1 not in chosen[0][0] else chosen[0][0, 0]
        make = jax.jit(functools.partial(make_routing, n_experts=E))
        routings = [make(c, jnp.full((t, X), 0.5), jnp.ones(t, bool)) for c in chosen]
        x = jax.random.normal(jax.random.key(t), (t, D)).astype(jnp.bfloat16)
        exact = reference(x.astype(jnp.float32), routings[0], weights)
        ratio, passed = gate(kernel(x, routings[0], packed), reference(x, routings[0], weights), exact)
        if not passed:
            raise SystemExit(f"moe {form}, {t} tokens: error {ratio:.2f} times the reference's, more than 2")
        active = float(np.mean([len(np.unique(c)) for c in chosen]))
        us = kernel_us(kernel, [(x, r, packed) for r in routings])
        other = kernel_us(reference, [(x, r, weights) for r in routings[:2]])
        rows.append(row(read, "moe", form, t, active * per_expert, us, other) | {"experts": active})
    return rows


def bench_qmatmul(form: str, tokens: Sequence[int], read: float) -> list[dict[str, Any]]:
    rows = []
    for name, shape in PROJECTIONS.items():
        copies = 2 if name == "lm_head" else 4  # more than the L2 cache holds
        weights = [random_weight(form, shape, i) for i in range(copies)]
        packed = [jax.jit(pack)(w) for w in weights]
        for t in [t for t in tokens if t <= qmatmul_triton.MAX_TOKENS]:
            x = jax.random.normal(jax.random.key(t), (t, shape[1])).astype(jnp.bfloat16)
            kernel, reference = jax.jit(qmatmul_triton.qmatmul), jax.jit(qmatmul_reference)
            some = slice(None, None, shape[0] // 256)
            buffers = {n: b[some] for n, b in weights[0].buffers.items()}
            few = QTensor(form, (len(buffers["data"]), shape[1]), buffers).dequantize()
            exact = np.asarray(x, np.float64) @ np.asarray(few, np.float64).T
            got, reference_out = kernel(x, packed[0])[:, some], reference(x, weights[0])[:, some]
            ratio, passed = gate(got, reference_out, exact)
            if not passed:
                raise SystemExit(f"{name} {form}, {t} tokens: error {ratio:.2f} times the reference's")
            us = kernel_us(kernel, [(x, w) for w in packed] * 2)
            other = kernel_us(reference, [(x, w) for w in weights])
            rows.append(row(read, name, form, t, nbytes(packed[0]), us, other))
    return rows


OPERATIONS = {"moe": bench_moe, "qmatmul": bench_qmatmul}


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description="Time the kernels on a GPU."
    )
    p.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    p.add_argument("--format", nargs="+", choices=TILE_FORMATS, default=list(TILE_FORMATS))
    p.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    args = p.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"error: the kernels need an NVIDIA GPU, this device is {device.platform}")
    words = jax.jit(jax.random.bits, static_argnums=1)(jax.random.key(0), (1 << 30,))
    read = words.nbytes / kernel_us(jax.jit(jnp.sum), [(words,)] * 3) / 1e6
    del words
    print(f"read {read:.2f} TB/s", flush=True)
    rows = [r for op in args.op for form in args.format for r in OPERATIONS[op](form, args.tokens, read)]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    told = {"device": device.device_kind, "jax": jax.__version__, "commit": git.stdout.strip() or None}
    print(json.dumps(told | {"read": read, "rows": rows}))


if __name__ == "__main__":
    main()
