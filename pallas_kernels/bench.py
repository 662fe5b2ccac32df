"""Kernels at M3's sizes on the GPU at hand: correctness first, then time.

    python -m pallas_kernels.bench [--op moe ...] [--format int4_g64 ...] [--tokens 1 8 ...]
                                   [--kv-format int8 ...] [--peer]

A row is printed only after its kernel passed the gate: on the same dequantised weights, an error of at most
twice that of plain JAX in bfloat16. Exact is the reference in float32, or float64 on some of the rows.

Times are sums of kernel times by CUPTI, the median over calls whose inputs rotate (other experts, weights or
pages each time), so that the L2 cache is cold; all kernels of the operation count, `kernels` has each. Bytes
are those that must be read: weights or keys and values as they are at rest, and their scales. `read` is the
share of the rate at which a plain sum reads 4 GiB in the same run. With `--peer`, humming-kernels' two int4
matmuls run on the same experts. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.tiles import TILE_FORMATS
from pallas_kernels.workloads import KV_FORMATS, D, E, F, Workload, workloads

OPERATIONS = ("moe", "qmatmul", "attention", "dense attention")
WARM_UP = 20
# CUPTI sees the kernels of a loop once if the loop is part of a CUDA graph.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def kernel_times(calls: Sequence[Callable[[], Any]], warm_up: int = WARM_UP) -> dict[str, float]:
    """Kernel -> its microseconds per call, the median over the calls, which run one after the other."""
    cupti: Any = import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    # An idle GPU runs at a low clock at first.
    for i in range(max(warm_up, len(calls))):
        jax.block_until_ready(calls[i % len(calls)]())
    found: list[tuple[str, float]] = []
    while not found or len(found) % len(calls):  # now and then a kernel is missing from the record
        cupti._cupti_init()
        try:
            results = [call() for call in calls]
            jax.block_until_ready([r for r in results if r is not None])
        finally:
            found = cupti._cupti_get_timings(False)
    names = [name for name, _ in found[: len(found) // len(calls)]]
    microseconds = 1e3 * np.array([ms for _, ms in found]).reshape(len(calls), -1)
    typical = np.argsort(microseconds.sum(axis=1))[len(calls) // 2]
    times = dict.fromkeys(names, 0.0)
    for name, us in zip(names, microseconds[typical], strict=True):
        times[name] += float(us)
    return times


def kernel_us(calls: Sequence[Callable[[], Any]], warm_up: int = WARM_UP) -> float:
    """Microseconds of kernel time per call: that of the median call."""
    return sum(kernel_times(calls, warm_up).values())


def time(compiled: Callable, inputs: Sequence[tuple], warm_up: int = WARM_UP) -> float:
    """`kernel_us` of a jitted function over its inputs."""
    return kernel_us([lambda a=a: compiled(*a) for a in inputs], warm_up)


def read_rate() -> float:
    """TB/s at which a plain sum reads 4 GiB."""
    words = jax.jit(jax.random.bits, static_argnums=1)(jax.random.key(0), (1 << 30,))
    return words.nbytes / time(jax.jit(jnp.sum), [(words,)] * 3) / 1e6


def gate(got: Array, reference: Array, exact: Array | np.ndarray) -> tuple[float, bool]:
    """The kernel's error over the reference's, and whether it passes."""
    g, r, e = (np.asarray(a, np.float64) for a in (got, reference, exact))
    # XLA may keep the reference's intermediates in float32, which leaves it almost no error: what is 2^-7 of
    # the rounding to bfloat16 that every caller applies is no error of a kernel either.
    ratio = float(np.linalg.norm(g - e) / (np.linalg.norm(r - e) + 2.0**-16 * np.linalg.norm(e)))
    return ratio, bool(np.isfinite(g).all() and ratio <= 2)


def measure(w: Workload, read: float, peer: bool) -> dict[str, Any]:
    """One row of the table; SystemExit if the gate does not pass."""
    kernel, reference = (jax.jit(f, compiler_options=NO_GRAPHS) for f in (w.kernel, w.reference))
    ratio, passed = gate(*w.check(kernel, reference))
    if not passed:
        raise SystemExit(
            f"{w.op} {w.name} {w.format}, {w.size}: error {ratio:.2f} times the reference's, more than 2"
        )
    times = kernel_times([lambda a=a: kernel(*a) for a in w.inputs])
    us = sum(times.values())
    reference_us = time(reference, w.reference_inputs, warm_up=1)
    rate = w.n_bytes / us / 1e6
    row: dict[str, Any] = {"op": w.op, "name": w.name, "format": w.format, "size": w.size, "us": round(us, 1)}
    row |= {"TB/s": round(rate, 2), "read": round(rate / read, 3), "x reference": round(reference_us / us, 2)}
    row |= {"error": round(ratio, 2), "kernels": {name: round(part, 1) for name, part in times.items()}}
    if peer and w.op == "moe" and w.format == "int4_g64":
        from pallas_kernels.peers import humming_int4

        row["x humming"] = round(kernel_us(humming_int4(w.experts, E, D, F)) / us, 3)
    return row


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description="Time the kernels on a GPU."
    )
    p.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    p.add_argument("--format", nargs="+", choices=TILE_FORMATS, default=list(TILE_FORMATS))
    p.add_argument("--tokens", nargs="+", type=int, help="(default: 1 to 128)")
    p.add_argument("--kv-format", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    p.add_argument("--peer", action="store_true", help="time humming-kernels beside moe int4_g64")
    args = p.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"error: the kernels need an NVIDIA GPU, this device is {device.platform}")
    read = read_rate()
    print(f"read {read:.2f} TB/s", flush=True)
    rows = []
    for workload in workloads(args.op, args.format, args.tokens, kv_formats=args.kv_format):
        rows.append(measure(workload, read, args.peer))
        print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    told = {"device": device.device_kind, "jax": jax.__version__, "commit": git.stdout.strip() or None}
    print(json.dumps(told | {"read": read, "rows": rows}))


if __name__ == "__main__":
    main()
