"""The model decoding with the kernels, in bfloat16, against transformers' float32 goldens.

Every position is decoded from the golden's own tokens, so that one different choice does not change what
comes after. The rule: an error of at most twice that of the reference operations in the same precision. With
rounded keys and values, exact is plain JAX in float32 that rounds them too.
"""

from functools import cache, partial

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
from tests.test_golden import golden

INTERPRETED = ["tiny_vl", "real_heads"]  # the kernels' interpreter takes its time
COMPILED = ["tiny_vl", "tiny_text", "block128", "real_heads"]


@cache
def decoded(name: str, kernels: str, kv_format: str | None = None, dtype: str = "bfloat16") -> np.ndarray:
    """The logits of every position, one token at a time."""
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
            hidden, pages, _ = model(tokens[:, t][:, None], pages, Step(rows, *rope.at(positions), ops))
            return pages, model.logits(hidden[:, 0], ops)

        pages = make_pages(source.config, n_rows * n_blocks, model.dtype, model.kv_format)
        return lax.scan(step, pages, jnp.arange(length))[1].swapaxes(0, 1)

    return np.asarray(run(ops, jnp.asarray(tokens)), np.float64)


def runs(interpreted: list[str]) -> pytest.MarkDecorator:
    compiled = [pytest.param(name, "pallas", marks=pytest.mark.gpu) for name in COMPILED]
    return pytest.mark.parametrize(
        ("name", "kernels"), [*((name, "interpret") for name in interpreted), *compiled]
    )


@runs(INTERPRETED)
def test_decoding(name: str, kernels: str) -> None:
    exact = golden(name)["logits"]
    errors = {k: np.linalg.norm(decoded(name, k) - exact) for k in ("reference", kernels)}
    assert errors[kernels] <= 2 * errors["reference"], errors


@pytest.mark.parametrize("kv_format", PAGE_FORMATS)
@runs(["real_heads"])
def test_decoding_with_rounded_pages(name: str, kernels: str, kv_format: str) -> None:
    """By the rule, of the middle position and of how often the greedy token is another.

    Where another expert or block is chosen, near a tie, a position is off by far more than by rounding: the
    sum over all positions would tell of a few of those.
    """
    exact = decoded(name, "reference", kv_format, "float32")
    reference, got = (decoded(name, k, kv_format) for k in ("reference", kernels))
    errors = [np.median(np.linalg.norm(a - exact, axis=-1)) for a in (reference, got)]
    assert errors[1] <= 2 * errors[0]
    others = [np.sum(a.argmax(-1) != exact.argmax(-1)) for a in (reference, got)]
    assert others[1] <= 2 * others[0]
