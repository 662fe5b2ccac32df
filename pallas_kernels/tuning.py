"""The kernels' free parameters by device, and the program that finds them.

    python -m pallas_kernels.tuning [--op moe ...] [--out FILE]

times every candidate at M3's sizes on the GPU at hand and writes the best to `tuned/<device>.json` beside
this file, where `parameters` finds them. A device without a file has the defaults, those of an H200.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "moe": {"warps": 4, "stages": 3},
    "qmatmul": {"programs": 400, "stages": 3},
    "block_select": {"programs": 4224},
    "block_attention": {"programs": 396, "keys": 64},
}
CANDIDATES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "moe": {"warps": (4, 8), "stages": (2, 3, 4)},
    "qmatmul": {"programs": (264, 400, 528, 792), "stages": (2, 3, 4)},
    "block_select": {"programs": (528, 1056, 2112, 4224, 8448)},
    "block_attention": {"programs": (264, 396, 528, 792), "keys": (32, 64, 128)},
}
DIRECTORY = Path(__file__).parent / "tuned"

_tried: dict[str, Mapping[str, int]] = {}


def parameters(op: str) -> Mapping[str, int]:
    """The parameters of an operation's kernel on the first device; read when a program is traced."""
    return _tried.get(op) or _tuned(jax.devices()[0].device_kind).get(op) or DEFAULTS[op]


@functools.cache
def _tuned(device_kind: str) -> Mapping[str, Mapping[str, int]]:
    file = DIRECTORY / file_name(device_kind)
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["parameters"]
    for op, values in found.items():
        if op not in DEFAULTS or values.keys() != DEFAULTS[op].keys():
            expected = {op: sorted(v) for op, v in DEFAULTS.items()}
            raise ValueError(f"{file}: {op} has {sorted(values)}; expected {expected}")
    return found


def file_name(device_kind: str) -> str:
    return device_kind.lower().replace(" ", "_") + ".json"


@contextlib.contextmanager
def trying(op: str, values: Mapping[str, int]) -> Iterator[None]:
    """Programs traced inside have these parameters."""
    _tried[op] = values
    try:
        yield
    finally:
        del _tried[op]


def best(op: str, seconds: Callable[[Mapping[str, int]], Sequence[float]]) -> tuple[dict[str, int], float]:
    """The candidate with the least geometric mean over the workloads, and how much slower the default is.

    `seconds` gives the times of all workloads, infinite where a candidate does not fit the device.
    """
    names = list(CANDIDATES[op])
    means = {}
    for values in itertools.product(*CANDIDATES[op].values()):
        times = seconds(dict(zip(names, values, strict=True)))
        means[values] = math.prod(times) ** (1 / len(times))
    chosen = min(means, key=lambda values: means[values])
    default = tuple(DEFAULTS[op][name] for name in names)
    return dict(zip(names, chosen, strict=True)), means[default] / means[chosen]


def main() -> None:
    from pallas_kernels.bench import time
    from pallas_kernels.tuning import (
        trying,
    )  # run as a program, this file is another module than kernels read
    from pallas_kernels.workloads import Workload, workloads

    p = argparse.ArgumentParser(prog="python -m pallas_kernels.tuning", description="Tune the kernels.")
    p.add_argument("--op", nargs="+", choices=DEFAULTS, default=list(DEFAULTS))
    p.add_argument("--out", type=Path, help="where to write (default: where the kernels look)")
    args = p.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"error: the kernels need an NVIDIA GPU, this device is {device.platform}")
    shown = {
        "moe": lambda: workloads(["moe"], ["int4_g64"], [1, 8, 64], []),
        "qmatmul": lambda: workloads(["qmatmul"], ["int8"], [1, 16], []),
        "block_select": lambda: workloads(["attention"], [], [], [(1, 8), (1, 128), (32, 128)]),
        "block_attention": lambda: itertools.chain(
            workloads(["attention"], [], [], [(1, 8), (32, 8)]),
            workloads(["dense attention"], [], [], [(1, 128), (1, 512)]),
        ),
    }
    found, gains = {}, {}
    for op in args.op:
        examples = list(shown[op]())

        def seconds(
            values: Mapping[str, int], op: str = op, examples: list[Workload] = examples
        ) -> list[float]:
            with trying(op, values):
                try:
                    times = [time(jax.jit(lambda *a, f=w.kernel: f(*a)), w.inputs) for w in examples]
                except jax.errors.JaxRuntimeError:  # more registers or shared memory than there are
                    times = [math.inf] * len(examples)
            print(op, dict(values), *(f"{us:.1f}" for us in times), flush=True)
            return times

        found[op], gains[op] = best(op, seconds)
    out = args.out or DIRECTORY / file_name(device.device_kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {"device": device.device_kind, "jax": jax.__version__, "default_over_best": gains}
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(told | {"parameters": found}, indent=2) + "\n")
    temporary.replace(out)
    print(f"{out}: {found}")


if __name__ == "__main__":
    main()
