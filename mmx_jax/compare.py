"""Two models on the same windows of tokens: what the first did is recorded, the second is compared with it.

Only one model has to be in memory. `Record` keeps the first one's logits in float32 and the input of each of
its layers in files without a name in the temporary directory: 4 V + w L D bytes a token with w bytes in a
number, 1.5 MB for the released model in bfloat16. The chosen experts and blocks stay in memory, 4 L (X + K P)
bytes a token. Beside that and the weights, a model takes its forward over one window, whose logits are 4 V
bytes a token, and those again on the host.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Float32, Float64, Int

from mmx_jax.config import ModelConfig
from mmx_jax.engine import Progress
from mmx_jax.errors import InputError, NonFiniteError
from mmx_jax.model import M3, forward

Windows = Sequence[Int[np.ndarray, " _"]]  # of different lengths

_ROWS = 64  # positions whose distributions are in float64 at a time

_forward = jax.jit(forward)


@runtime_checkable
class Sink(Protocol):
    """Takes what a model does: each layer of each window once, and each window's logits once."""

    def layer(
        self,
        window: int,
        layer: int,
        hidden: Float[np.ndarray, "T D"],
        experts: Int[np.ndarray, "T X"] | None,
        blocks: Int[np.ndarray, "T K P"] | None,
    ) -> None:
        """The layer's input, and the experts and blocks it chose; a block of -1 is none."""

    def logits(self, window: int, logits: Float32[np.ndarray, "T V"]) -> None: ...


def run_model(tree: M3, windows: Windows, sink: Sink, progress: Progress) -> None:
    """The plain forward over one window after another.

    All are padded on the right to the longest, so that one program serves them; attention is causal, so what
    stands behind a window's end changes nothing in it, and it is cut off.
    """
    length = max(map(len, windows))
    for window, ids in enumerate(windows):
        progress("evaluating", window, len(windows))
        n = len(ids)
        logits, layers = _forward(tree, np.pad(ids, (0, length - n))[None].astype(np.int32))
        for i, trace in enumerate(layers):
            hidden, *choices = jax.device_get((trace.hidden, trace.experts, trace.blocks))
            experts, blocks = (None if choice is None else choice[0, :n] for choice in choices)
            sink.layer(window, i, hidden[0, :n], experts, blocks)
        sink.logits(window, np.asarray(logits)[0, :n])
    progress("evaluating", len(windows), len(windows))


class Mean:
    """A running mean in float64."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Float[np.ndarray, "..."]) -> None:
        self.total += float(values.sum(dtype=np.float64))
        self.count += values.size

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class Surprise(Mean):
    """-log p of each token that was predicted, in nats."""

    def add_tokens(self, log_p: Float64[np.ndarray, "T V"], ids: Int[np.ndarray, " T"]) -> None:
        self.add(-np.take_along_axis(log_p, ids[:, None], axis=-1))

    @property
    def perplexity(self) -> float:
        """exp of the mean."""
        return math.exp(self.total / self.count)


class Record:
    """What model A did. Without `keep` only its perplexity, which takes neither files nor memory."""

    def __init__(self, windows: Windows, config: ModelConfig, dtype: np.dtype, keep: bool):
        self.windows, self.config = windows, config
        self.surprise = Surprise()
        self.experts: dict[tuple[int, int], np.ndarray] = {}
        self.blocks: dict[tuple[int, int], np.ndarray] = {}
        self.keep = keep
        if not keep:
            return
        ends = np.cumsum([len(ids) for ids in windows]).tolist()
        self._tokens = [slice(end - len(ids), end) for ids, end in zip(windows, ends, strict=True)]
        shapes = [
            ((ends[-1], config.vocab_size), np.dtype(np.float32)),
            ((config.num_layers, ends[-1], config.hidden_size), dtype),
        ]
        needed = sum(math.prod(shape) * kind.itemsize for shape, kind in shapes)
        directory = tempfile.gettempdir()
        free = shutil.disk_usage(directory).free
        if needed > free:  # running out later would kill the process without a word
            raise InputError(
                f"{directory}: comparing {ends[-1]} tokens takes {needed / 1e9:.1f} GB of temporary files and"
                f" {free / 1e9:.1f} GB are free: ask for fewer --tokens, or set TMPDIR to another directory"
            )
        self._logits, self._hidden = (_temporary(shape, kind) for shape, kind in shapes)

    def layer(
        self,
        window: int,
        layer: int,
        hidden: Float[np.ndarray, "T D"],
        experts: Int[np.ndarray, "T X"] | None,
        blocks: Int[np.ndarray, "T K P"] | None,
    ) -> None:
        if not self.keep:
            return
        self._hidden[layer, self._tokens[window]] = hidden
        if experts is not None:
            self.experts[window, layer] = experts
        if blocks is not None:
            self.blocks[window, layer] = blocks

    def logits(self, window: int, logits: Float32[np.ndarray, "T V"]) -> None:
        for rows, log_p in _predictions(logits, "A"):
            self.surprise.add_tokens(log_p, self.windows[window][1:][rows])
        if self.keep:
            self._logits[self._tokens[window]] = logits

    def hidden_of(self, window: int, layer: int) -> Float[np.ndarray, "T D"]:
        return self._hidden[layer, self._tokens[window]]

    def logits_of(self, window: int) -> Float32[np.ndarray, "T V"]:
        return self._logits[self._tokens[window]]


class Worst(NamedTuple):
    """The largest divergence, and which token of which window is predicted there; both count from 0."""

    value: float
    window: int
    token: int


class LayerFigures:
    """How far A is from B in one layer.

    hidden: |a - b| / |b| of the layer's input, mean over tokens. experts: share of B's experts that A chose
    too, mean over tokens. blocks: the same of the blocks of each KV head, mean over the queries that have a
    choice, which are those that see more blocks than they may choose.
    """

    def __init__(self) -> None:
        self.hidden, self.experts, self.blocks = Mean(), Mean(), Mean()


class Comparison:
    """Model B against the record of A. B is the reference: KL(B || A) = sum_v p_B (log p_B - log p_A), nats.

    Positions count that predict a token, which are all but the last of each window.
    """

    def __init__(self, record: Record):
        self.record = record
        self.surprise = Surprise()
        self.divergence, self.agreement = Mean(), Mean()
        self.worst = Worst(-math.inf, 0, 0)
        self.layers = [LayerFigures() for _ in range(record.config.num_layers)]

    def layer(
        self,
        window: int,
        layer: int,
        hidden: Float[np.ndarray, "T D"],
        experts: Int[np.ndarray, "T X"] | None,
        blocks: Int[np.ndarray, "T K P"] | None,
    ) -> None:
        figures, c = self.layers[layer], self.record.config
        b = hidden.astype(np.float64)
        a = self.record.hidden_of(window, layer).astype(np.float64)
        size = np.maximum(np.linalg.norm(b, axis=-1), np.finfo(np.float32).tiny)  # a zero embedding
        figures.hidden.add(np.linalg.norm(a - b, axis=-1) / size)
        if experts is not None:
            figures.experts.add(_overlap(self.record.experts[window, layer], experts))
        if blocks is not None:
            choice = np.arange(len(blocks)) // c.block_size + 1 > c.top_blocks
            shares = _overlap(self.record.blocks[window, layer][choice], blocks[choice])
            figures.blocks.add(shares.mean(axis=-1))

    def logits(self, window: int, logits: Float32[np.ndarray, "T V"]) -> None:
        recorded = _predictions(self.record.logits_of(window), "A")
        for (rows, b), (_, a) in zip(_predictions(logits, "B"), recorded, strict=True):
            self.surprise.add_tokens(b, self.record.windows[window][1:][rows])
            divergence = (np.exp(b) * (b - a)).sum(axis=-1)
            self.divergence.add(divergence)
            self.agreement.add((a.argmax(axis=-1) == b.argmax(axis=-1)).astype(np.float64))
            worst = int(divergence.argmax())
            self.worst = max(self.worst, Worst(float(divergence[worst]), window, rows.start + worst + 1))


def _temporary(shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """An array in a file that is gone when the array is."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _predictions(logits: Float32[np.ndarray, "T V"], model: str) -> Iterator[tuple[slice, Any]]:
    """log p in float64 at every position but the last, which predicts nothing known; some rows at a time."""
    for start in range(0, len(logits) - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, len(logits) - 1))
        x = logits[rows].astype(np.float64)
        if not np.isfinite(x).all():
            raise NonFiniteError(
                f"the logits of {model} hold NaN or infinity: broken weights, or an overflow in this dtype"
            )
        x -= x.max(axis=-1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
        yield rows, x


def _overlap(
    chosen: Int[np.ndarray, "*T P"], reference: Int[np.ndarray, "*T Q"]
) -> Float64[np.ndarray, "*T"]:
    """The share of the reference's entries that were chosen too; -1 is no entry."""
    real = reference >= 0
    found = (reference[..., :, None] == chosen[..., None, :]).any(axis=-1) & real
    return found.sum(axis=-1) / real.sum(axis=-1)
