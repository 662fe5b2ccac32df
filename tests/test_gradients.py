"""The pure forward can be differentiated in every parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmx_jax.cache import make_pages
from mmx_jax.config import ModelConfig, bundled
from mmx_jax.model import M3, forward

CONFIG = ModelConfig.from_file(bundled("tiny.json"))
LENGTH = 83  # five blocks of 16 and a part of the sixth, four of which are chosen


@pytest.fixture(scope="module")
def x64():
    """Numerical derivatives need more than float32."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def losses(x64):
    """The parameters, the loss as a function of them, and its gradients from clean and from NaN memory."""
    model = M3(CONFIG, "float64", rngs=nnx.Rngs(3))
    graphdef, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(7), (1, LENGTH), 0, CONFIG.vocab_size)

    def loss(state: nnx.State, fill: jax.Array) -> jax.Array:
        n_pages = -(-LENGTH // CONFIG.block_size)
        pages = jax.tree.map(lambda a: jnp.full_like(a, fill), make_pages(CONFIG, n_pages, jnp.float64))
        logits, _ = forward(nnx.merge(graphdef, state), tokens, pages=pages)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    clean, poisoned = (value_and_grad(state, fill) for fill in (0.0, jnp.nan))
    return state, value_and_grad, clean, poisoned


def by_path(state: nnx.State) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


def test_finite_whatever_unused_memory_holds(losses) -> None:
    _, _, (value, gradients), (poisoned_value, poisoned_gradients) = losses
    assert value == poisoned_value
    poisoned = by_path(poisoned_gradients)
    for path, gradient in by_path(gradients).items():
        assert np.isfinite(gradient).all(), path
        np.testing.assert_array_equal(poisoned[path], gradient, err_msg=path)


def test_discrete_choices_have_gradient_exactly_zero_and_nothing_else_has(losses) -> None:
    _, _, (_, gradients), _ = losses
    for path, gradient in by_path(gradients).items():
        discrete = ".indexer." in path or path.endswith("router.bias")
        assert (np.count_nonzero(gradient) == 0) == discrete, path


@pytest.mark.parametrize(
    "path",
    [
        "embed.data",
        "head.data",
        "norm.weight",
        "layers.0.attention.k.data",
        "layers.0.mlp.up.data",
        "layers.1.attention.q.data",
        "layers.1.attention.v.data",
        "layers.1.attention.k_norm.weight",
        "layers.2.moe.router.weight",
        "layers.2.moe.experts.gate.data",
        "layers.2.moe.experts.down.data",
        "layers.3.moe.shared.gate.data",
    ],
)
def test_matches_a_numerical_derivative(losses, path: str) -> None:
    """Central differences with step h are off by h^2 f''' / 6 + rounding / h: about 1e-8 at h = 1e-5."""
    state, value_and_grad, (_, gradients), _ = losses
    gradient = by_path(gradients)[path]
    entry = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
    h = 1e-5
    values = []
    for step in (h, -h):
        flat = nnx.to_flat_state(state)
        moved = [
            (p, v.replace(v[...].at[entry].add(step)) if ".".join(map(str, p)) == path else v)
            for p, v in flat
        ]
        values.append(float(value_and_grad(nnx.from_flat_state(moved), 0.0)[0]))
    numerical = (values[0] - values[1]) / (2 * h)
    assert numerical == pytest.approx(gradient[entry], abs=1e-7, rel=1e-5)
