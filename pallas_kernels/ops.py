"""Which implementation of each operation a program runs; decided once, before compilation."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from pallas_kernels.block_attention.reference import block_attention
from pallas_kernels.block_select.reference import block_select
from pallas_kernels.moe.reference import moe
from pallas_kernels.qk_norm_rope.reference import qk_norm_rope
from pallas_kernels.qmatmul.reference import qmatmul

IMPLEMENTATIONS = ("auto", "reference", "pallas", "interpret")


@dataclass(frozen=True)
class Ops:
    """One field per operation, each with the signature of its reference."""

    qmatmul: Callable = qmatmul
    qk_norm_rope: Callable = qk_norm_rope
    block_select: Callable = block_select
    block_attention: Callable = block_attention
    moe: Callable = moe

    def table(self) -> dict[str, str]:
        """Operation -> the implementation that was chosen, for people to read."""
        return {f.name: getattr(self, f.name).__module__.rsplit(".", 1)[-1] for f in fields(self)}


def resolve(implementation: str) -> Ops:
    """The operations for `--kernels`. `auto` is the fastest that exists for the device.

    Raises ValueError for a name that is no implementation, and where an implementation that was asked for
    by name does not exist: it never becomes the reference without a word.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"kernels {implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if implementation in ("pallas", "interpret"):
        names = ", ".join(f.name for f in fields(Ops))
        raise ValueError(
            f"kernels {implementation!r}: this version has no Pallas kernel for {names}; "
            "use 'auto' or 'reference'"
        )
    return Ops()
