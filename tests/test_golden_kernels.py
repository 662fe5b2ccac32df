"""The model decoding with the kernels, in bfloat16, against transformers' float32 goldens.

Every position is decoded from the golden's own tokens, so that one different choice does not change what
comes after. The rule: an error of at most twice that of the reference operations in the same precision. Exact
is plain JAX in float32, which must agree with the golden; with rounded keys and values, it rounds them too.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mmx_jax.attention import Step
from mmx_jax.cache import make_pages
from mmx_jax.loading import Settings, Source
from mmx_jax.rope import rope_tables
from pallas_kernels.ops import KERNELS, Ops
from pallas_kernels.paging import PAGE_FORMATS, PagedRows
from tests.conftest import GOLDENS
from tests.test_golden import LOGITS, golden

INTERPRETED = ["tiny_vl", "real_heads"]  # the kernels' interpreter takes its time
COMPILED = ["tiny_vl", "tiny_text", "block128", "real_heads"]


class Decoded(NamedTuple):
    """Of every position, decoded by itself."""

    logits: np.ndarray  # [B, S, V]
    choices: np.ndarray  # [B, S, n]: experts and blocks of all layers, each in ascending order


@cache
def decoded(name: str, kernels: str, kv_format: str | None = None, dtype: str = "bfloat16") -> Decoded:
    """Every position, one token at a time."""
    tokens = golden(name)["input_ids"]
    n_rows, length = tokens.shape
    source = Source(GOLDENS / name, Settings(dtype=dtype, kernels=kernels, kv_format=kv_format))
    ops = source.ops(n_rows, 1)
    wanted = "reference" if kernels == "reference" else "triton"
    assert ops.table() == dict.fromkeys(KERNELS, wanted)
    model = source.read(ops.takes_packed)
    n_blocks = -(-length // source.config.block_size)
    table = jnp.arange(n_rows * n_blocks).reshape(n_rows, n_blocks)
    rope = rope_tables(source.config, length)

    @partial(jax.jit, static_argnums=0)
    def run(ops: Ops, tokens):
        def step(pages, t):
            positions = jnp.full((n_rows, 1), t)
            rows = PagedRows(table, positions, jnp.full(n_rows, t + 1), n_blocks)
            hidden, pages, traces = model(tokens[:, t][:, None], pages, Step(rows, *rope.at(positions), ops))
            found = [a for trace in traces for a in (trace.experts, trace.blocks) if a is not None]
            choices = [jnp.sort(a, axis=-1).reshape(n_rows, -1) for a in found]
            return pages, (model.logits(hidden[:, 0], ops), jnp.concatenate(choices, axis=-1))

        pages = make_pages(source.config, n_rows * n_blocks, model.dtype, model.kv_format)
        return lax.scan(step, pages, jnp.arange(length))[1]

    logits, choices = (np.asarray(a).swapaxes(0, 1) for a in run(ops, jnp.asarray(tokens)))
    return Decoded(logits.astype(np.float64), choices)


def runs(interpreted: list[str]) -> pytest.MarkDecorator:
    compiled = [pytest.param(name, "pallas", marks=pytest.mark.gpu) for name in COMPILED]
    return pytest.mark.parametrize(
        ("name", "kernels"), [*((name, "interpret") for name in interpreted), *compiled]
    )


def assert_decodes(name: str, kernels: str, kv_format: str | None) -> None:
    """The rule where all chose the same experts and blocks, and others chosen no oftener than by rounding.

    Near a tie rounding decides which is chosen, and then a position is off by far more than by rounding: a
    few of those would be all that a sum over all positions tells of. How many there are is chance.
    """
    exact = decoded(name, "reference", kv_format, "float32")
    if kv_format is None:
        np.testing.assert_allclose(exact.logits, golden(name)["logits"], rtol=0, atol=LOGITS)
    both = [decoded(name, k, kv_format) for k in ("reference", kernels)]
    others = [np.any(d.choices != exact.choices, axis=-1) for d in both]
    same = ~(others[0] | others[1])
    assert same.mean() > 0.25  # enough are left
    reference, got = (np.linalg.norm((d.logits - exact.logits)[same]) for d in both)
    assert got <= 2 * reference
    expected, found = (np.sum(o) for o in others)
    assert found <= 2 * expected + 4


@runs(INTERPRETED)
def test_decoding(name: str, kernels: str) -> None:
    assert_decodes(name, kernels, None)


@pytest.mark.parametrize("kv_format", PAGE_FORMATS)
@runs(["real_heads"])
def test_decoding_with_rounded_pages(name: str, kernels: str, kv_format: str) -> None:
    assert_decodes(name, kernels, kv_format)
