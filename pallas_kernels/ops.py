"""Which implementation of each operation a program runs; decided once, before compilation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pallas_kernels.add_norm.triton as add_norm_triton
import pallas_kernels.block_attention.triton as block_attention_triton
import pallas_kernels.moe.triton as moe_triton
import pallas_kernels.qk_norm_rope.triton as qk_norm_rope_triton
import pallas_kernels.qmatmul.triton as qmatmul_triton
import pallas_kernels.route.triton as route_triton
from pallas_kernels.add_norm.reference import add_norm
from pallas_kernels.block_attention.reference import block_attention
from pallas_kernels.call import Call
from pallas_kernels.moe.reference import mlp, moe
from pallas_kernels.qk_norm_rope.reference import qk_norm_rope
from pallas_kernels.qmatmul.reference import qmatmul
from pallas_kernels.route.reference import route

IMPLEMENTATIONS = ("auto", "reference", "pallas", "interpret")
# Of the GPU; kernels are measured on 9.0.
MIN_CAPABILITY = 8.0


@dataclass(frozen=True)
class Ops:
    """One field per operation, each with the signature of its reference."""

    add_norm: Callable = add_norm
    qmatmul: Callable = qmatmul
    qk_norm_rope: Callable = qk_norm_rope
    block_attention: Callable = block_attention
    mlp: Callable = mlp
    route: Callable = route
    moe: Callable = moe
    # Operation -> why its kernel was not chosen; for people to read.
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def takes_packed(self) -> bool:
        """Whether weights must be in the kernels' order. The references take any."""
        return self.qmatmul is not qmatmul

    def table(self) -> dict[str, str]:
        """Operation -> the implementation that was chosen, and why where it is not a kernel."""
        chosen = {name: getattr(self, name) for name in KERNELS}
        names = {n: getattr(f, "func", f).__module__.rsplit(".", 1)[-1] for n, f in chosen.items()}
        return {n: f"{name} ({self.refused[n]})" if n in self.refused else name for n, name in names.items()}


# Operation -> the module with its kernel and `supported`, which says what is in the way of a call.
KERNELS: dict[str, Any] = {
    "add_norm": add_norm_triton,
    "qmatmul": qmatmul_triton,
    "qk_norm_rope": qk_norm_rope_triton,
    "block_attention": block_attention_triton,
    "mlp": moe_triton,
    "route": route_triton,
    "moe": moe_triton,
}
# They read the model's weights, which are in one order: they are chosen together.
WEIGHTED = ("qmatmul", "mlp", "moe")


def resolve(implementation: str, device: Any, call: Call) -> Ops:
    """The operations of one program.

    `reference`: plain JAX. `pallas`: the kernels. `interpret`: the kernels, interpreted on any device,
    slowly. `auto`: a kernel wherever device and call allow, else the reference; `Ops.refused` says why.
    The kernels are for decoding; with more than one new token a row, every implementation is the reference.

    Raises ValueError for a name that is no implementation, and where a kernel that was asked for by name does
    not take the call: it never becomes the reference without a word.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"kernels {implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "reference" or call.new_tokens > 1:
        return Ops()
    on_device = None if implementation == "interpret" else _wrong_device(device)
    reasons = {name: on_device or module.supported(call) for name, module in KERNELS.items()}
    refused = {name: reason for name, reason in reasons.items() if reason}
    if weighted := {refused[n] for n in WEIGHTED if n in refused}:
        refused |= dict.fromkeys(WEIGHTED, weighted.pop())
    if refused and implementation != "auto":
        told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        if on_device:
            told = on_device
        raise ValueError(f"kernels {implementation!r}: {told}; use 'auto' or 'reference'")
    chosen = {name: getattr(module, name) for name, module in KERNELS.items() if name not in refused}
    if implementation == "interpret":
        chosen = {name: partial(kernel, interpret=True) for name, kernel in chosen.items()}
    return replace(Ops(), **chosen, refused=MappingProxyType(refused))


def _wrong_device(device: Any) -> str | None:
    if device.platform != "gpu":
        return f"the device is {device.platform}, the kernels need an NVIDIA GPU"
    capability = getattr(device, "compute_capability", "0")
    try:
        enough = float(capability) >= MIN_CAPABILITY
    except ValueError:
        enough = False
    return None if enough else f"compute capability {capability}, the kernels need {MIN_CAPABILITY}"
