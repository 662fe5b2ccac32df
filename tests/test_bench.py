"""`python -m mmx_jax.bench`: what it counts, what it refuses, a whole run with interpreted kernels."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

import pallas_kernels.add_norm.triton as add_norm_triton
from mmx_jax import bench
from mmx_jax.arms import Forced, are_likeliest, gate, in_float32, summarise
from mmx_jax.config import bundled
from mmx_jax.loading import Settings, Source
from mmx_jax.model import random_model
from mmx_jax.plan import step_bytes

CONFIG = str(bundled("tiny.json"))
SMALL = ["--config", CONFIG, "--layers", "2", "--context", "40", "--tokens", "8", "--runs", "2"]


def run(options: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert bench.main(options) == 0
    *_, last = (out := capsys.readouterr().out).splitlines()
    return json.loads(last), out


def test_a_whole_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    told, out = run([*SMALL, "--batch", "2", "--plot", str(plot)], capsys)
    rows = told["rows"]
    assert [row["arm"] for row in rows] == ["eager", "graph", "kernels"]
    for row in rows:
        assert (row["layers"], row["batch"], row["context"], row["runs"]) == (2, 2, 40, 2)
        assert row["tokens"] == 2 * 8  # of a run
        assert row["tokens/s"] == pytest.approx(2e3 / row["median"], rel=1e-3)
        assert row["error"] <= 2
        assert 4 <= row["experts"] <= 8
        for name in ("arm", "layers", "context"):
            assert str(row[name]) in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    # What tiny.json's two layers hold in bfloat16, and what two rows of 40 keys have in the pages.
    d, kv, h, index = 96, 2, 24, 20
    attention = 8 * h * d * 2 + 2 * kv * h * d
    experts, router = 3 * 48 * d, 10 * d
    indexer = kv * index * d + index * d
    numbers = 320 * d + 2 * attention + 3 * 160 * d + 3 * 56 * d + indexer
    float32 = router + 10 + 5 * d + 2 * 2 * h + 2 * index  # with router bias and norms
    dense_layer, sparse_layer = 2 * 2 * 40 * kv * h * 2, 2 * (2 * 40 * kv * h + 40 * index) * 2
    for row in rows:
        routed = row["experts"] * experts * 2
        assert row["bytes"] == pytest.approx(
            2 * numbers + 4 * float32 + routed + dense_layer + sparse_layer, abs=0.01 * experts
        )


@pytest.fixture
def kernels_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = add_norm_triton.add_norm

    def wrong(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        x, normed = right(*args, **kwargs)
        return x, normed * 1.05

    monkeypatch.setattr(add_norm_triton, "add_norm", wrong)


@pytest.mark.usefixtures("kernels_that_are_off")
def test_an_arm_that_is_off_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--arms", "kernels"]) == 2
    out, err = capsys.readouterr()
    assert "ms" not in out
    assert "kernels, bf16, 2 layers, 1 rows, 40 keys: error" in err.splitlines()[-1]


@pytest.mark.usefixtures("kernels_that_are_off")
def test_what_was_measured_before_a_failure_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--arms", "graph", "kernels"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert [row["arm"] for row in told["rows"]] == ["graph"]
    assert told["failed"] in err.splitlines()[-1]
    assert "kernels, bf16, 2 layers, 1 rows, 40 keys: error" in told["failed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "4", "0"], "--batch 0: it must be at least 1"),
        (["--runs", "-1"], "--runs -1: it must be at least 1"),
        (["--tokens", "9"], "--tokens 9: expected a multiple of 8"),
        (["--context", "1K", "1M"], "--context '1M': expected a number of keys"),
        (["--context", "1024K"], "--context 1048576: the model has positions for 1048511 keys"),
        (["--layers", "61"], "layers 61: the model has 60"),
        (["--format", "int5"], "recipe 'int5': expected bf16"),
        (["--kv-format", "int4"], "kv_format 'int4': expected int8 or fp8"),
        (["--config", "nothing.json"], "nothing.json: no such file"),
        (["--profile"], "--profile: it is about a GPU"),
        (["--plot", "no/out.png"], "--plot no/out.png: there is no directory no"),
        (["--plot", "out.foo"], "--plot out.foo: the name must end in one of"),
        (["--arms", "fast"], "argument --arms: invalid choice: 'fast'"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if options == ["--profile"] and jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert bench.main(options) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1


def released(recipe: str, layers: int) -> Any:
    return Source(bundled("minimax_m3.json"), Settings(recipe=recipe, layers=layers)).model


def test_bytes_of_a_step() -> None:
    """Of the released model; experts in int4 with 4.25 bits a number, the rest in int8 with a scale a row."""
    model = released("int4_g64", 60)
    expert = 3 * 6144 * 3072 * 4.25 / 8
    projections = (64 + 4 + 4 + 64) * 128 * 6144
    shared = 3 * 6144 * 3072
    int8 = 60 * projections + 57 * (5 * 128 * 6144 + shared) + 3 * 3 * 6144 * 12288 + 200064 * 6144
    weights = 57 * 4 * expert + int8 + 57 * 4 * 128 * 6144  # and the router's float32
    read = step_bytes(model, 1, 0, experts=4)
    assert read == pytest.approx(weights, rel=2e-3)  # scales of rows, norms
    assert step_bytes(model, 1, 0, experts=6.5) - read == pytest.approx(57 * 2.5 * expert, rel=1e-6)
    # Keys and values take 2 KiB of a layer, index keys 256 bytes; a sparse layer reads 16 blocks of 128.
    for batch, keys in ((1, 1024), (1, 524288), (32, 131072)):
        per_row = 3 * keys * 2048 + 57 * (min(keys, 2048) * 2048 + keys * 256)
        assert step_bytes(model, batch, keys, experts=4) - read == batch * per_row


def forced(logits: list[float], experts: list[list[int]]) -> Forced:
    """One row, one number of logits and one set of experts for each position."""
    choices = np.array(experts)[:, None, None]
    return Forced(np.array(logits)[:, None, None], [choices], 2.0)


def test_the_gate_counts_error_where_choices_agree_and_other_choices_everywhere() -> None:
    exact = forced([1.0, 2.0, 3.0], [[0, 1], [2, 3], [4, 5]])
    plain = forced([1.1, 2.1, 9.0], [[1, 0], [3, 2], [4, 6]])
    same = [[0, 1], [2, 3], [5, 4]]
    verdict = gate(forced([1.1, 2.2, -50.0], same), plain, exact)  # the third position: plain chose otherwise
    assert verdict.error == pytest.approx(np.hypot(0.1, 0.2) / np.hypot(0.1, 0.1))
    assert (verdict.positions, verdict.other, verdict.passed) == (2, 0, True)
    assert not gate(forced([1.1, 2.4, 3.0], same), plain, exact).passed
    # Plain has one other expert and there are three positions: up to five may be.
    five = gate(forced([1.0, 2.0, 3.0], [[7, 8], [7, 8], [4, 8]]), plain, exact)
    assert (five.other, five.passed) == (5, True)
    assert five.error == 0.0  # no position is left where both chose alike, so all count
    assert not gate(forced([1.0, 2.0, 3.0], [[7, 8], [7, 8], [7, 8]]), plain, exact).passed


def test_a_gate_of_other_choices_alone() -> None:
    exact = forced([1.0, 2.0], [[0, 1], [2, 3]])
    assert gate(forced([1.0, 2.0], [[0, 8], [2, 8]]), exact, exact).passed
    assert not gate(forced([1.0, 2.0], [[7, 8], [2, 8]]), exact, exact).passed


def test_likeliest_tokens() -> None:
    logits = np.array([[[0.0, 4.0, 3.99, 3.9]]])
    assert are_likeliest(np.array([[1]]), logits)
    assert are_likeliest(np.array([[2]]), logits)  # 2^-7 of 4 is 0.03
    assert not are_likeliest(np.array([[3]]), logits)


def test_float32_weights_are_the_same_numbers() -> None:
    source = Source(CONFIG, Settings(layers=2))
    model = random_model(source.config, "bfloat16")
    exact = in_float32(model)
    assert exact.embed.tensor().dequantize().dtype == np.float32
    assert model.embed.tensor().dequantize().dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(
        exact.embed.tensor().dequantize(), model.embed.tensor().dequantize().astype(np.float32)
    )


def test_a_profile_counts_what_starts_work() -> None:
    text = """
    planes { name: "/device:GPU:0"
      lines { name: "Stream #14" events { metadata_id: 1 duration_ps: 3000000 }
              events { metadata_id: 1 duration_ps: 1000000 } events { metadata_id: 2 duration_ps: 500000 } }
      lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000000 } }
      event_metadata { key: 1 value { id: 1 name: "moe_down" } }
      event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } } }
    planes { name: "/host:CPU"
      lines { name: "python" events { metadata_id: 1 duration_ps: 2000000 }
              events { metadata_id: 2 duration_ps: 7000000 } }
      event_metadata { key: 1 value { id: 1 name: "cuGraphLaunch" } }
      event_metadata { key: 2 value { id: 2 name: "cuStreamSynchronize" } } }
    """
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    assert summarise(data) == {"moe_down": (2, 4.0), "MemcpyD2D": (1, 0.5), "cuGraphLaunch": (1, 2.0)}


def test_what_each_further_layer_takes() -> None:
    row = {"arm": "kernels", "format": "bf16", "batch": 1, "context": 1024}
    rows = [row | {"layers": 5, "median": 1.0}, row | {"layers": 20, "median": 2.5}]
    other = [
        row | {"arm": "graph", "layers": 5, "median": 1.0},
        row | {"layers": 9, "failed": "out of memory"},
    ]
    (line,) = bench.per_layer([*rows, *other])
    assert line == "kernels, bf16, 1 rows, 1024 keys: 100.0 µs for each of layers 6 to 20"


def test_transformers_runs_beside(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    told, out = run([*SMALL, "--arms", "graph", "--transformers"], capsys)
    theirs, ours = told["rows"]
    assert (theirs["arm"], theirs["tokens"], theirs["runs"]) == ("transformers", bench.PEER_TOKENS, 2)
    assert f"{theirs['median'] / ours['median']:.2f}" in out
