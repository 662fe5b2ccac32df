"""Choosing the next token on the device: greedy, or sampled after the usual filters.

Every parameter is an array with one entry per row, so no change of them compiles anything. Order of the
filters, as in transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

MAX_LOGPROBS = 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Per-row parameters. Off means: temperature 0 (greedy), top_k 0, top_p 1, min_p 0, penalty 1."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    seed: UInt[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbs:
    """Log-softmax of the raw logits: of the chosen token, and the largest `MAX_LOGPROBS` of each row."""

    chosen: Float[Array, " B"]
    top_ids: Int[Array, "B top"]
    top: Float[Array, "B top"]


def sample(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"],
    positions: Int[Array, " B"],
    sampling: Sampling,
) -> Int[Array, " B"]:
    """The next token of each row; `seen` marks the tokens that its prompt and answer hold already.

    A row's randomness comes from its seed and the position of the new token alone, so neither the other rows
    nor the number of tokens per call change it. Ties go to the lower id. The vocabulary is sorted only if
    some row samples.
    """
    penalty = sampling.repetition_penalty[:, None]
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    logits = jnp.where(seen, penalised, logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, _draw(logits, positions, sampling), greedy),
        lambda: greedy,
    )


def _draw(logits: Float[Array, "B V"], positions: Int[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    n_vocab = logits.shape[-1]
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    ids = jnp.broadcast_to(jnp.arange(n_vocab, dtype=jnp.int32), logits.shape)
    below = jnp.max(logits, axis=-1, keepdims=True) - logits  # a tiny temperature cannot overflow the best
    negated, ids = lax.sort((below / temperature, ids), num_keys=1, is_stable=True)
    scaled = -negated  # descending

    rank = jnp.arange(n_vocab)
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, n_vocab)[:, None]
    keep = rank < top_k
    p = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    top_p = sampling.top_p[:, None]
    keep &= (before < top_p) | (top_p >= 1)
    keep &= p >= sampling.min_p[:, None] * p[:, :1]
    keep |= rank == 0

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (n_vocab,), logits.dtype)

    noisy = jnp.where(keep, scaled + jax.vmap(noise)(sampling.seed, positions), -jnp.inf)
    winner = jnp.argmax(noisy, axis=-1, keepdims=True)
    return jnp.take_along_axis(ids, winner, axis=-1)[:, 0]


def log_probs(logits: Float[Array, "B V"], tokens: Int[Array, " B"], wanted: Bool[Array, " B"]) -> LogProbs:
    """Log-probabilities before temperature and filters; zeros for rows that want none.

    They cost nothing if no row wants them. Zeros are put in outside of the condition, so that no output of
    the program is one of the condition's: a copy of that could not be captured in a CUDA graph.
    """
    n_top = min(MAX_LOGPROBS, logits.shape[-1])

    def compute() -> LogProbs:
        values = jax.nn.log_softmax(logits, axis=-1)
        top, ids = lax.top_k(values, n_top)
        return LogProbs(jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0], ids, top)

    def skip() -> LogProbs:
        zeros = jnp.zeros((logits.shape[0], n_top), logits.dtype)
        return LogProbs(zeros[:, 0], zeros.astype(jnp.int32), zeros)

    found = lax.cond(jnp.any(wanted), compute, skip)
    return jax.tree.map(lambda a: jnp.where(wanted.reshape(-1, *[1] * (a.ndim - 1)), a, 0), found)
