"""Keys and values that are rounded in the cache."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mmx_jax
from mmx_jax import SamplingParams
from mmx_jax.errors import InputError
from mmx_jax.loading import Settings, Source
from mmx_jax.plan import memory_plan
from pallas_kernels.block_attention.reference import attend
from pallas_kernels.paging import PAGE_FORMATS, LayerPages, PagedRows
from tests.conftest import GOLDENS

CODES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}  # what pages hold the bits of
LARGEST = {"int8": 127.0, "fp8": 448.0}


@pytest.mark.parametrize("form", PAGE_FORMATS)
def test_a_token_is_rounded_by_its_own_head(form: str) -> None:
    """Against numpy and ml_dtypes; what a row does not hold is NaN and reads as zero."""
    n_pages, n_heads, block, dim = 3, 2, 4, 6
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, 3, n_heads, dim)).astype(np.float32) * 3 for _ in "kv")
    k[0, 1, 0] = 0
    k[0, 2, 1] *= 2.0**-119  # its scale would be a subnormal of float32, which may be taken for 0
    shape = (n_pages, n_heads, block, dim)
    nan = jnp.full(shape[:-1], jnp.nan)
    pages = LayerPages(*(jnp.ones(shape, PAGE_FORMATS[form].dtype) for _ in "kv"), None, nan, nan)
    rows = PagedRows(jnp.array([[2, 0]]), jnp.array([[2, 3, 4]]), jnp.array([5]), 2)
    pages = pages.append(jnp.asarray(k), jnp.asarray(v), None, rows)
    held = jnp.array([[False, False, True, True], [True, False, False, False]])
    for head in range(n_heads):
        read = pages.read(jnp.array([2, 0]), jnp.array([head, head]), held)
        for got, x in zip(read, (k, v), strict=True):
            want = np.zeros((2, block, dim), np.float32)
            for token, slot in enumerate([(0, 2), (0, 3), (1, 0)]):
                row = x[0, token, head]
                scale = np.float32(max(np.abs(row).max() / LARGEST[form], 2.0**-126) if row.any() else 1)
                codes = row / scale
                codes = np.rint(codes) if form == "int8" else codes.astype(CODES[form]).astype(np.float32)
                want[slot] = codes * scale
            # A quotient an ulp off falls to the other side of a tie at most; elsewhere one rounding each.
            np.testing.assert_allclose(np.asarray(got), want, rtol=2.0**-22, atol=2.0**-126)


@pytest.mark.parametrize("form", PAGE_FORMATS)
def test_attention_sees_the_rounded_numbers(form: str) -> None:
    """The same as attention on plain pages that hold codes times scales."""
    n_heads, block, dim, length = 2, 4, 6, 7
    rng = np.random.default_rng(1)
    rows = PagedRows(jnp.array([[1, 0]]), jnp.arange(length)[None], jnp.array([length]), 2)
    k, v = (jnp.asarray(rng.standard_normal((1, length, n_heads, dim)), jnp.float32) for _ in "kv")
    shape = (2, n_heads, block, dim)
    scale = jnp.zeros(shape[:-1])
    pages = LayerPages(*(jnp.zeros(shape, PAGE_FORMATS[form].dtype) for _ in "kv"), None, scale, scale)
    pages = pages.append(k, v, None, rows)
    codes = [np.asarray(a).view(CODES[form]).astype(np.float32) for a in (pages.k, pages.v)]
    plain = [c * np.asarray(s)[..., None] for c, s in zip(codes, (pages.k_scale, pages.v_scale), strict=True)]
    q = jnp.asarray(rng.standard_normal((1, length, 4, dim)), jnp.float32)
    got = attend(q, pages, rows, None)
    want = attend(q, LayerPages(*map(jnp.asarray, plain), None), rows, None)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("form", PAGE_FORMATS)
def test_decoding_with_rounded_pages(form: str) -> None:
    """Through the programs; the rounding shows, and the plan counts a byte a number and four a scale."""
    prompt, sampling = list(range(5, 155)), SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    found = []
    for kv_format in (form, None):
        model = mmx_jax.load(GOLDENS / "block128", dtype="float32", max_length=200, kv_format=kv_format)
        (completion,) = model.generate([prompt], sampling)
        assert len(completion.token_ids) == 8
        assert completion.logprobs is not None
        found.append(completion.logprobs[0].logprob)
    assert found[0] != found[1]
    source = Source(GOLDENS / "block128", Settings(kv_format=form))
    c, plan = source.config, memory_plan(source.model, 1, 200)
    numbers = 2 * c.num_layers * c.num_kv_heads * 2 * c.block_size
    assert plan.state_bytes["K and V pages"] == numbers * (c.head_dim + 4)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="kv_format 'int3': expected int8 or fp8"):
        Settings(kv_format="int3")
