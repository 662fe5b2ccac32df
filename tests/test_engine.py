"""The static programs: what may not change their results, what they may not compile, what they leave."""

import dataclasses
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mmx_jax.engine import Engine, Request, compiler_options
from mmx_jax.errors import InputError, NonFiniteError
from mmx_jax.loading import Settings, Source
from mmx_jax.model import M3
from tests.conftest import GOLDENS

# Logits of about 7 in float32, summed in another order: 20 times the observed difference.
ATOL = 1e-4
LENGTHS = (37, 40, 23, 9)


@cache
def tree() -> M3:
    return Source(GOLDENS / "tiny_vl", Settings("float32")).load(max_length=16).tree


@cache
def engine(batch: int = 1, chunk: int = 8, steps: int = 8) -> Engine:
    source = Source(GOLDENS / "tiny_vl", Settings("float32"))
    return Engine(
        tree(), source.ops, source.mesh, batch=batch, max_length=104, chunks=(chunk,), steps=(steps,)
    )


def weights() -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(tree()))


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    ids = load_file(GOLDENS / "tiny_vl" / "golden.safetensors")["input_ids"][0]
    return tuple(np.roll(ids, -start)[:length].tolist())


def run(engine: Engine, requests: list[Request], poison: bool = False) -> list[list]:
    decoding = engine.start(weights(), requests)
    if poison:
        decoding.pages = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), decoding.pages)
    decoding.prefill()
    rows = [[] for _ in requests]
    while decoding.active:
        for row, tokens in zip(rows, decoding.step(), strict=True):
            row += tokens
    return rows


def assert_same(got: list, expected: list, atol: float = ATOL) -> None:
    """Equal tokens with equal alternatives, and log-probabilities to the order of summation."""
    assert [t.id for t in got] == [t.id for t in expected]
    for g, e in zip(got, expected, strict=True):
        assert g.logprob == pytest.approx(e.logprob, abs=atol)
        np.testing.assert_allclose([p for _, p in g.top], [p for _, p in e.top], rtol=0, atol=atol)


@cache
def whole() -> list:
    """75 tokens prefilled in one chunk, 24 decoded; their tokens are transformers'."""
    (row,) = run(engine(chunk=80), [Request(prompt(75), 24, logprobs=5)])
    expected = load_file(GOLDENS / "tiny_vl" / "golden.safetensors")["greedy"][0].tolist()
    assert [t.id for t in row] == expected
    return row


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 16])
def test_chunk_size_does_not_matter(chunk: int) -> None:
    (row,) = run(engine(chunk=chunk), [Request(prompt(75), 24, logprobs=5)])
    assert_same(row, whole())


def test_one_token_per_call_is_bit_equal_to_eight() -> None:
    (ones,) = run(engine(steps=1), [Request(prompt(75), 24, logprobs=5)])
    (eights,) = run(engine(steps=8), [Request(prompt(75), 24, logprobs=5)])
    assert ones == eights


def test_batch_is_each_row_alone() -> None:
    requests = [Request(prompt(n, i), 16, logprobs=5) for i, n in enumerate(LENGTHS)]
    together = run(engine(batch=4), requests)
    for request, row in zip(requests, together, strict=True):
        assert_same(row, run(engine(), [request])[0])


def test_sampled_rows_do_not_depend_on_their_company() -> None:
    requests = [Request(prompt(n, i), 16, temperature=1.0, seed=5, logprobs=5) for i, n in enumerate(LENGTHS)]
    together = run(engine(batch=4), requests)
    backwards = run(engine(batch=4), requests[::-1])[::-1]
    for request, row, other in zip(requests, together, backwards, strict=True):
        assert_same(row, run(engine(), [request])[0])
        assert_same(row, other)


def test_rows_that_end_early_leave_the_others_alone() -> None:
    requests = [Request(prompt(75), 24, logprobs=5), Request(prompt(20, 3), 2), Request(prompt(5), 9)]
    rows = run(engine(batch=4), requests)
    assert [len(r) for r in rows] == [24, 2, 9]
    assert_same(rows[0], whole())


@pytest.mark.parametrize("batch", [1, 4])
def test_unused_cache_may_hold_nan(batch: int) -> None:
    requests = [Request(prompt(n, i), 16, logprobs=5) for i, n in enumerate(LENGTHS[:batch])]
    assert run(engine(batch=batch), requests, poison=True) == run(engine(batch=batch), requests)


def test_stop_id_ends_a_row_and_is_emitted() -> None:
    tokens = [t.id for t in whole()]
    stop_id = tokens[4]
    assert 0 not in tokens
    source = Source(GOLDENS / "tiny_vl", Settings("float32"))
    stopping = Engine(tree(), source.ops, source.mesh, max_length=104, stop_ids=(0, stop_id), steps=(8,))
    (row,) = run(stopping, [Request(prompt(75), 24)])
    assert [t.id for t in row] == tokens[: tokens.index(stop_id) + 1]
    (row,) = run(stopping, [Request(prompt(75), 24, ignore_eos=True)])
    assert [t.id for t in row] == tokens


def test_capacity_ends_a_row() -> None:
    (row,) = run(engine(), [Request(prompt(70) + prompt(30), 24)])
    assert len(row) == 4  # 104 in all


def test_stopped_row_forgets_what_was_dropped() -> None:
    decoding = engine().start(weights(), [Request(prompt(30), 24)])
    decoding.prefill()
    assert len(decoding.step()[0]) == 8
    decoding.stop(0, kept=3)
    assert decoding.active == []
    assert int(decoding.batch.lengths[0]) == 30 + 3 - 1  # the last token is never written


def test_prompts_of_any_length_compile_nothing() -> None:
    engine()
    run(engine(), [Request(prompt(1), 2)])
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **kw: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    try:
        jax.jit(lambda x: x + 41)(jnp.zeros(3))
        assert compiled, "the listener hears no compilation: the test would pass whatever happened"
        compiled.clear()
        for length in range(1, 41):
            run(engine(), [Request(prompt(length), 2, temperature=length / 10, top_k=length)])
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_state_is_donated_and_keeps_its_addresses() -> None:
    """Pages from the start, the batch once it has been on the device."""
    decoding = engine().start(weights(), [Request(prompt(20), 24)])

    def advance(step: Callable[[], object], state: Callable[[], object]) -> None:
        before = jax.tree.leaves(state())
        pointers = sorted(a.unsafe_buffer_pointer() for a in before)
        step()
        assert all(a.is_deleted() for a in before)
        assert sorted(a.unsafe_buffer_pointer() for a in jax.tree.leaves(state())) == pointers

    advance(decoding.prefill, lambda: decoding.pages)
    advance(decoding.step, lambda: decoding.pages)
    advance(decoding.step, lambda: (decoding.pages, decoding.batch))
    pages, batch = (sum(a.nbytes for a in jax.tree.leaves(x)) for x in (decoding.pages, decoding.batch))
    for name, size in (("decode 1x8", pages + batch), ("prefill 1x8", pages)):
        assert engine().programs[name].run.memory_analysis().alias_size_in_bytes == size


def test_enough_blocks_are_dense_attention() -> None:
    """With as many blocks to choose as there are, block selection chooses all of them."""
    source = Source(GOLDENS / "tiny_vl", Settings("float32"))
    config = dataclasses.replace(source.config, top_blocks=13)
    everything = M3(config, "float32", rngs=nnx.Rngs(1))
    dense = M3(config.with_attention("dense"), "float32", rngs=nnx.Rngs(2))
    graphdef, _ = nnx.split(dense)
    state = nnx.state(everything)
    for layer in state["layers"].values():
        layer["attention"].pop("indexer", None)
    dense = nnx.merge(graphdef, state)
    rows = []
    for model in (everything, dense):
        made = Engine(model, source.ops, source.mesh, max_length=104, steps=(8,))
        decoding = made.start(jax.tree.leaves(nnx.state(model)), [Request(prompt(75), 16, logprobs=5)])
        decoding.prefill()
        rows.append([t for _ in range(2) for t in decoding.step()[0]])
    assert_same(rows[0], rows[1])


def test_bfloat16_runs_finite() -> None:
    model = Source(GOLDENS / "tiny_vl", Settings("bfloat16")).load(max_length=104)
    (completion,) = model.generate(list(prompt(75)))
    assert len(completion.token_ids) > 0
    logits = model.logits(prompt(75))
    assert np.isfinite(logits).all()
    # bfloat16 has 8 bits: logits of about 7 after 5 layers stay within a few tenths of float32's.
    expected = load_file(GOLDENS / "tiny_vl" / "golden.safetensors")["logits"][0]
    assert np.median(np.abs(logits - expected)) < 0.1


def test_non_finite_logits_are_an_error_by_name() -> None:
    broken = [jnp.full_like(w, jnp.nan) if w.ndim == 2 else w for w in weights()]
    decoding = engine().start(broken, [Request(prompt(9), 8)])
    decoding.prefill()
    with pytest.raises(NonFiniteError, match="prompt 0 are not finite at new token 1"):
        decoding.step()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 4), "the prompt is empty"),
        (Request((3, 352), 4), "token id 352 is outside the vocabulary: 0 to 351"),
        (Request((-1,), 4), "token id -1 is outside"),
        (Request(prompt(75) + prompt(29), 4), "the prompt has 104 tokens and max_length is 104"),
        (Request((3,), 0), "max_new_tokens 0"),
        (Request((3,), 4, logprobs=21), "logprobs 21: it must be 0 to 20"),
    ],
)
def test_bad_requests_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine().start(weights(), [request_])


def test_more_requests_than_rows_are_refused() -> None:
    with pytest.raises(InputError, match="2 requests and batch is 1"):
        engine().start(weights(), [Request((3,), 1)] * 2)


@pytest.mark.parametrize(
    "kwargs", [{"batch": 0}, {"max_length": 0}, {"max_length": 513}, {"stop_ids": (352,)}]
)
def test_impossible_engines_are_refused(kwargs: dict) -> None:
    source = Source(GOLDENS / "tiny_vl", Settings("float32"))
    with pytest.raises(InputError, match=r"must be at least|takes 1 to 512|outside the vocabulary"):
        Engine(tree(), source.ops, source.mesh, **{"max_length": 64} | kwargs)


def test_compiler_options_are_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "xla_gpu_enable_command_buffer"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert "WHILE" in compiler_options("gpu")[name].split(",")
    assert compiler_options("cpu") == {}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_autotune_level=0 --{name}=FUSION")
    assert compiler_options("gpu") == {"xla_gpu_enable_cub_radix_sort": False}
