"""The next token: what can be drawn, how often, and what a draw depends on; against float64 numpy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmx_jax import sampling
from mmx_jax.sampling import MAX_LOGPROBS, LogProbs, Sampling

V = 13
DRAWS = 16384  # per case, each at a position of its own
LEVEL = np.log(2 / 1e-9)  # a bound below fails by chance less than once in 1e9

sample = jax.jit(sampling.sample)
log_probs = jax.jit(sampling.log_probs)

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 5}
DTYPES = {"top_k": np.int32, "seed": np.uint32}


def params(n_rows: int, **given: Any) -> Sampling:
    """Parameters of a batch; each is one value for all rows or one per row."""
    return Sampling(
        **{
            name: jnp.asarray(
                np.broadcast_to(given.get(name, off), n_rows).astype(DTYPES.get(name, np.float32))
            )
            for name, off in OFF.items()
        }
    )


def oracle(logits: np.ndarray, seen: np.ndarray, **given: Any) -> np.ndarray:
    """The probability of each token, written plainly in float64."""
    p = OFF | given
    x = logits.astype(np.float64)
    for i in range(len(x)):
        if seen[i]:
            x[i] = x[i] * p["repetition_penalty"] if x[i] < 0 else x[i] / p["repetition_penalty"]
    x = x / p["temperature"]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p["top_k"]:
        order = order[: p["top_k"]]
    weight = {i: np.exp(x[i] - x[order[0]]) for i in order}
    total, before, kept = sum(weight.values()), 0.0, []
    for i in order:
        if p["top_p"] == 1 or before < p["top_p"] or not kept:
            kept.append(i)
        before += weight[i] / total
    kept = [i for i in kept if weight[i] >= p["min_p"] * weight[order[0]]]
    out = np.zeros(len(x))
    for i in kept:
        out[i] = weight[i] / sum(weight[j] for j in kept)
    return out


# From 2.4 down to -1.8 in shuffled order: with T = 1 the rarest token still has p = 0.005.
LOGITS = np.array([0.3, -1.1, 2.4, 0.9, -1.8, 1.6, -0.4, 2.1, -0.7, 1.2, 0.6, -1.4, 0.1], np.float32)
TIED = np.array([0, 1, 2, 1, 0, 2, 1, 0, 1, 2, 0, 1, 0], np.float32)
SEEN = np.isin(np.arange(V), [2, 4, 7, 11])  # two likely tokens and two with negative logits
NONE = np.zeros(V, bool)

CASES: dict[str, tuple[np.ndarray, np.ndarray, dict[str, Any]]] = {
    "plain": (LOGITS, NONE, {"temperature": 1}),
    "cool": (LOGITS, NONE, {"temperature": 0.75}),
    "warm": (LOGITS, NONE, {"temperature": 2.5}),
    "top_k": (LOGITS, NONE, {"temperature": 1, "top_k": 3}),
    "top_k of one": (LOGITS, NONE, {"temperature": 1, "top_k": 1}),
    "top_k beyond the vocabulary": (LOGITS, NONE, {"temperature": 1, "top_k": 99}),
    "top_k among ties": (TIED, NONE, {"temperature": 1, "top_k": 5}),
    "top_p": (LOGITS, NONE, {"temperature": 1, "top_p": 0.6}),
    "top_p below the likeliest": (LOGITS, NONE, {"temperature": 1, "top_p": 1e-6}),
    "top_p after temperature": (LOGITS, NONE, {"temperature": 2.5, "top_p": 0.6}),
    "min_p": (LOGITS, NONE, {"temperature": 1, "min_p": 0.2}),
    "min_p after temperature": (LOGITS, NONE, {"temperature": 2.5, "min_p": 0.5}),
    "min_p of 1": (LOGITS, NONE, {"temperature": 1, "min_p": 1}),
    "min_p of 1 among ties": (TIED, NONE, {"temperature": 1, "min_p": 1}),
    "top_k, then top_p of what is left": (LOGITS, NONE, {"temperature": 1, "top_k": 4, "top_p": 0.7}),
    "top_k and min_p": (LOGITS, NONE, {"temperature": 1, "top_k": 6, "min_p": 0.4}),
    "top_p and min_p": (LOGITS, NONE, {"temperature": 1, "top_p": 0.9, "min_p": 0.25}),
    "penalty": (LOGITS, SEEN, {"temperature": 1, "repetition_penalty": 1.5}),
    "reward": (LOGITS, SEEN, {"temperature": 1.25, "repetition_penalty": 0.8}),
    "all": (
        LOGITS,
        SEEN,
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.35, "repetition_penalty": 1.2},
    ),
}


@pytest.fixture(scope="module")
def draws() -> dict[str, np.ndarray]:
    """All cases in one batch, so that one compilation serves them and rows of every kind are mixed."""
    names = list(CASES)
    case = np.arange(len(names) * DRAWS) % len(names)
    logits, seen = (np.stack([CASES[n][i] for n in names])[case] for i in (0, 1))
    given = {key: np.array([(OFF | CASES[n][2])[key] for n in names])[case] for key in OFF if key != "seed"}
    tokens = sample(
        logits, seen, np.arange(len(case), dtype=np.int32) // len(names), params(len(case), **given)
    )
    return {name: np.asarray(tokens)[case == i] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_support_and_frequencies(name: str, draws: dict[str, np.ndarray]):
    logits, seen, given = CASES[name]
    p = oracle(logits, seen, **given)
    counts = np.bincount(draws[name], minlength=V)
    # A token of probability p stays undrawn with (1 - p)^DRAWS, below 1e-9 for each that the cases keep.
    assert p[p > 0].min() > LEVEL / DRAWS
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(p))
    # Bernstein's inequality for the mean of DRAWS Bernoulli variables.
    bound = np.sqrt(2 * p * (1 - p) * LEVEL / DRAWS) + 2 * LEVEL / (3 * DRAWS)
    np.testing.assert_array_less(np.abs(counts / DRAWS - p), bound)


def test_cases_keep_what_they_should():
    """The oracle itself, where the answer is plain: ids by falling logit are 2 7 5 9 3 10 0 12 ..."""
    kept = {name: set(np.flatnonzero(oracle(*CASES[name][:2], **CASES[name][2]))) for name in CASES}
    assert kept["top_k"] == {2, 7, 5}
    assert kept["top_k of one"] == kept["min_p of 1"] == kept["top_p below the likeliest"] == {2}
    assert kept["plain"] == kept["top_k beyond the vocabulary"] == set(range(V))
    assert kept["top_k among ties"] == {2, 5, 9, 1, 3}
    assert kept["min_p of 1 among ties"] == {2, 5, 9}
    assert kept["min_p"] == {2, 7, 5, 9, 3}  # exp(x - 2.4) >= 0.2 from x = 0.79 on
    # Of the four likeliest, exp(0, -0.3, -0.8, -1.2) = 1, 0.74, 0.45, 0.30: two sum to 0.70, at 0.6988.
    assert kept["top_k, then top_p of what is left"] == {2, 7, 5}


ROWS = 6  # the batch of the tests below


def batch(logits: np.ndarray, **given: Any) -> np.ndarray:
    seen, positions = given.pop("seen", np.zeros((ROWS, V), bool)), given.pop("positions", np.full(ROWS, 3))
    logits = np.broadcast_to(logits, (ROWS, V)).astype(np.float32)
    return np.asarray(sample(logits, seen, positions.astype(np.int32), params(ROWS, **given)))


def test_greedy_and_ties_to_the_lower_id():
    logits = np.zeros((ROWS, V))
    logits[0, 7] = 3
    logits[1, [4, 9]] = 2
    logits[2] = -5
    logits[3] = np.linspace(-9, -1, V)
    logits[4, [11, 12]] = 1e30
    logits[5, :3] = -1
    expected = [7, 4, 0, 12, 11, 3]
    np.testing.assert_array_equal(batch(logits), expected)
    # top-k, top-p and min-p never change a greedy row
    np.testing.assert_array_equal(batch(logits, top_k=2, top_p=0.1, min_p=0.5), expected)


def test_greedy_rows_beside_sampled_ones():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, V))
    temperature = np.array([0, 5, 0, 5, 5, 0])
    for position in range(20):
        got = batch(logits, temperature=temperature, positions=np.full(ROWS, position))
        np.testing.assert_array_equal(got[[0, 2, 5]], np.argmax(logits, axis=1)[[0, 2, 5]])


def test_repetition_penalty_of_greedy_rows():
    logits = np.full((ROWS, V), -9.0)
    logits[:, 2], logits[:, 5] = 3, 2  # 3 / 1.4 is above 2, 3 / 1.6 below
    logits[3:] = -9
    logits[3:, 2], logits[3:, 5] = -2, -3  # -2 * 1.4 is above -3, -2 * 1.6 below
    seen = np.zeros((ROWS, V), bool)
    seen[:, 2] = [True, True, False, True, True, False]
    penalty = np.array([1.4, 1.6, 1.6, 1.4, 1.6, 1.6])
    np.testing.assert_array_equal(batch(logits, seen=seen, repetition_penalty=penalty), [2, 5, 2, 2, 5, 2])


@pytest.mark.parametrize("temperature", [1e-30, 2e-38])
def test_a_tiny_temperature_is_greedy(temperature: float):
    """Also where the quotient overflows: several infinities are no tie."""
    logits = np.zeros((ROWS, V))
    logits[:, 3], logits[:, 8] = 40, 50
    np.testing.assert_array_equal(batch(logits, temperature=temperature), [8] * ROWS)
    np.testing.assert_array_equal(batch(-logits - 1e3 * (logits == 0), temperature=temperature), [3] * ROWS)


def test_a_draw_depends_on_its_own_row_alone():
    rng = np.random.default_rng(1)
    row = rng.normal(size=V)
    seen = rng.random(V) < 0.3
    own = {
        "temperature": 1.5,
        "top_k": 11,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "seed": 77,
    }
    results = set()
    for position in range(40):
        expected = int(
            sample(row[None].astype(np.float32), seen[None], np.array([position]), params(1, **own))[0]
        )
        place = position % ROWS
        others = {
            "temperature": rng.choice([0.0, 0.5, 3.0], ROWS),
            "top_k": rng.integers(0, V, ROWS),
            "top_p": rng.uniform(0.1, 1, ROWS),
            "min_p": rng.uniform(0, 1, ROWS),
            "repetition_penalty": rng.uniform(0.5, 2, ROWS),
            "seed": rng.integers(0, 2**32, ROWS),
        }
        logits, all_seen = rng.normal(size=(ROWS, V)) * 4, rng.random((ROWS, V)) < 0.5
        positions = rng.integers(0, 1000, ROWS)
        logits[place], all_seen[place], positions[place] = row, seen, position
        for name, value in own.items():
            others[name][place] = value
        assert batch(logits, seen=all_seen, positions=positions, **others)[place] == expected
        results.add(expected)
    assert len(results) > 3  # there was something to get wrong


def stream(seed: int, first: int) -> np.ndarray:
    """Draws from the uniform distribution at 600 positions."""
    calls = [
        batch(np.zeros(V), temperature=1, seed=seed, positions=first + i * ROWS + np.arange(ROWS))
        for i in range(100)
    ]
    return np.concatenate(calls)


def test_seed_and_position_make_the_draw():
    a = stream(7, 0)
    np.testing.assert_array_equal(a, stream(7, 0))
    np.testing.assert_array_equal(a[60:], stream(7, 60)[:-60])  # the position counts, not the call
    # Independent uniform draws agree with probability 1/V; Bernstein as above.
    p, n = 1 / V, len(a)
    bound = np.sqrt(2 * p * (1 - p) * LEVEL / n) + 2 * LEVEL / (3 * n)
    for other in (stream(7, 100_000), stream(8, 0), stream(2**32 - 1, 0), np.roll(a, 1)):
        assert abs(np.mean(a == other) - p) < bound


# --- Log-probabilities ---


@pytest.mark.parametrize("n_vocab", [V, 37])
def test_log_probs(n_vocab: int):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(5, n_vocab)) * 6).astype(np.float32)
    logits[1, 3:] = logits[1, 3]  # ties: the lower ids first
    logits[2] += 1e4
    tokens = np.array([4, 0, n_vocab - 1, 7, 2], np.int32)
    wanted = np.arange(5) != 3
    found = log_probs(logits, tokens, wanted)
    assert not any(np.any(a[3]) for a in dataclasses.astuple(found))
    got = LogProbs(*(a[wanted] for a in dataclasses.astuple(found)))
    logits, tokens = logits[wanted], tokens[wanted]
    x = logits.astype(np.float64)
    shifted = x - x.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    # exp and log add a few roundings, the sum n_vocab, each shifted logit one of its own size in and out.
    atol = 2.0**-24 * (n_vocab + 4 * np.abs(shifted).max() + 8)
    np.testing.assert_allclose(got.chosen, expected[np.arange(4), tokens], rtol=0, atol=atol)
    n_top = min(MAX_LOGPROBS, n_vocab)
    order = np.argsort(-x, axis=1, kind="stable")[:, :n_top]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(expected, order, axis=1), rtol=0, atol=atol)


@pytest.mark.parametrize("value", [1.0, np.nan, -np.inf])
def test_log_probs_that_nobody_wants_are_zeros(value: float):
    got = log_probs(np.full((5, V), value, np.float32), np.arange(5, dtype=np.int32), np.zeros(5, bool))
    for name, array in dataclasses.asdict(got).items():
        assert array.shape == ((5,) if name == "chosen" else (5, V))
        np.testing.assert_array_equal(array, np.zeros(array.shape))
