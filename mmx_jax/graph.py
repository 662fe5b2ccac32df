"""What the compiled programs compute: pure functions from state to state.

    decode:  (model, rope, Pages, Batch) -> (Pages, Batch, Emitted)      N tokens in one program
    prefill: (model, rope, Pages, Chunk) -> Pages                        R rows x C tokens, right-padded

Prefill writes all but the last token of a prompt; decoding starts by feeding that one. So the head runs only
for tokens that are asked for, and there is one place that samples.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mmx_jax.attention import Step
from mmx_jax.cache import Pages
from mmx_jax.model import M3
from mmx_jax.rope import RopeTables
from mmx_jax.sampling import LogProbs, Sampling, log_probs, sample
from pallas_kernels.ops import Ops
from pallas_kernels.paging import PagedRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The rows being decoded: small arrays that the host may also write. A row with `remaining` 0 is idle."""

    page_table: Int[Array, "B M"]
    lengths: Int[Array, " B"]  # tokens whose keys are in the cache
    last_token: Int[Array, " B"]  # the next token to feed
    remaining: Int[Array, " B"]  # tokens still to emit
    ignore_eos: Bool[Array, " B"]
    want_logprobs: Bool[Array, " B"]
    seen: Bool[Array, "B V"]  # tokens of prompt and answer, for the repetition penalty
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """Up to C tokens for each of R rows; `n_valid` of them are real."""

    page_table: Int[Array, "R M"]
    start: Int[Array, " R"]
    tokens: Int[Array, "R C"]
    n_valid: Int[Array, " R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """N steps of B rows, steps first. `tokens` is -1 where a row was idle."""

    tokens: Int[Array, "*N B"]
    finite: Bool[Array, "*N B"]  # whether the row's logits were
    logprobs: LogProbs


def decode_step(
    model: M3, rope: RopeTables, pages: Pages, batch: Batch, ops: Ops, stop_ids: Sequence[int]
) -> tuple[Pages, Batch, Emitted]:
    """Feed each row's last token and choose its next one."""
    active = batch.remaining > 0
    positions = batch.lengths[:, None]
    rows = PagedRows(
        page_table=batch.page_table,
        positions=positions,
        lengths=batch.lengths + active,
        n_blocks=jnp.max(jnp.where(active, batch.lengths, -1)) // model.config.block_size + 1,
    )
    hidden, pages, _ = model(batch.last_token[:, None], pages, Step(rows, *rope.at(positions), ops))
    logits = model.logits(hidden[:, 0], ops)
    with jax.named_scope("sample"):
        token = sample(logits, batch.seen, batch.lengths + 1, batch.sampling)
        logprobs = log_probs(logits, token, active & batch.want_logprobs)
    stopped = jnp.isin(token, jnp.asarray(stop_ids, jnp.int32)) & ~batch.ignore_eos
    batch = dataclasses.replace(
        batch,
        lengths=batch.lengths + active,
        last_token=jnp.where(active, token, batch.last_token),
        remaining=jnp.where(active & ~stopped, batch.remaining - 1, 0),
        seen=batch.seen.at[jnp.arange(token.shape[0]), token].max(active),
    )
    finite = jnp.all(jnp.isfinite(logits), axis=-1) | ~active
    return pages, batch, Emitted(jnp.where(active, token, -1), finite, logprobs)


def decode(
    model: M3, rope: RopeTables, pages: Pages, batch: Batch, *, ops: Ops, stop_ids: Sequence[int], steps: int
) -> tuple[Pages, Batch, Emitted]:
    """`steps` tokens for each row that does not stop before."""

    def step(carry: tuple[Pages, Batch], _: None) -> tuple[tuple[Pages, Batch], Emitted]:
        pages, batch, emitted = decode_step(model, rope, *carry, ops, stop_ids)
        return (pages, batch), emitted

    (pages, batch), emitted = lax.scan(step, (pages, batch), length=steps)
    return pages, batch, emitted


def prefill(model: M3, rope: RopeTables, pages: Pages, chunk: Chunk, *, ops: Ops) -> Pages:
    """Write the keys of a chunk of each row's prompt, which may start anywhere in a block."""
    positions = chunk.start[:, None] + jnp.arange(chunk.tokens.shape[1])
    lengths = chunk.start + chunk.n_valid
    last = jnp.max(jnp.where(chunk.n_valid > 0, lengths, 0)) - 1
    rows = PagedRows(chunk.page_table, positions, lengths, last // model.config.block_size + 1)
    _, pages, _ = model(chunk.tokens, pages, Step(rows, *rope.at(positions), ops))
    return pages
