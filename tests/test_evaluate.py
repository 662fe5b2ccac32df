"""`python -m mmx_jax.evaluate` against float64 numpy on what transformers recorded, and on separate runs."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmx_jax.compare import Comparison, Record
from mmx_jax.errors import InputError, NonFiniteError
from mmx_jax.evaluate import SAME, main
from mmx_jax.loading import Settings, Source
from mmx_jax.model import forward
from tests.conftest import GOLDENS
from tests.test_golden import golden


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the goldens' token ids as NAME.json."""
    root = tmp_path_factory.mktemp("ids")
    for name in ("tiny_vl", "tiny_text", "tiny_nvfp4", "real_heads", "block128", "tiny_mxfp8"):
        (root / f"{name}.json").write_text(json.dumps(golden(name)["input_ids"].tolist()))
    return root


@pytest.fixture
def evaluate(ids: Path, capsys: pytest.CaptureFixture[str]):
    """Evaluate a golden in float32 on its own tokens; the figures."""

    def run(name: str, *options: str) -> dict[str, Any]:
        common = ["--checkpoint", str(GOLDENS / name), "--text", str(ids / f"{name}.json")]
        assert main([*common, "--dtype", "float32", "--json", *options]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run


@cache
def traced(name: str, recipe: str | None) -> tuple[np.ndarray, Any]:
    """Logits and traces of the whole rows at once."""
    tree = Source(GOLDENS / name, Settings("float32", "reference", recipe=recipe)).read(pack=False)
    return jax.device_get(jax.jit(forward)(tree, golden(name)["input_ids"].astype(np.int32)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits.astype(np.float64))  # logits are small enough here
    return np.log(p / p.sum(-1, keepdims=True))


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Of rows of tokens, each without its first."""
    pairs = zip(log_softmax(logits), tokens, strict=True)
    losses = [-log_p[t, row[t + 1]] for log_p, row in pairs for t in range(len(row) - 1)]
    return float(np.exp(np.mean(losses)))


@pytest.mark.parametrize("name", ["tiny_vl", "tiny_text", "tiny_nvfp4"])
def test_perplexity_of_the_golden_logits(name: str, evaluate) -> None:
    tokens = golden(name)["input_ids"]
    figures = evaluate(name)
    assert figures["perplexity"] == pytest.approx(perplexity(golden(name)["logits"], tokens), rel=1e-5)
    assert figures["windows"] == len(tokens)
    assert figures["predictions"] == tokens.size - len(tokens)
    assert "kl_mean" not in figures


def test_a_checkpoint_against_itself(evaluate) -> None:
    figures = evaluate("tiny_text", "--against", str(GOLDENS / "tiny_text"))
    assert figures["kl_mean"] == figures["kl_worst"]["value"] == 0
    assert figures["top1_agreement"] == 1
    assert figures["perplexity"] == figures["against_perplexity"]
    for layer in figures["layers"]:
        assert layer["hidden_error"] == 0
        assert layer["expert_overlap"] == (1 if layer["feed_forward"] == "experts" else None)
        assert layer["block_overlap"] == (1 if layer["attention"] == "sparse" else None)


def test_a_recipe_against_what_transformers_recorded(evaluate) -> None:
    """A: rounded to int4, run here on the whole rows; B: the golden. Choices are compared as Python sets."""
    name = "tiny_text"
    figures = evaluate(name, "--recipe", "int4_g64", "--against", str(GOLDENS / name))
    expected, tokens = golden(name), golden(name)["input_ids"]
    logits, layers = traced(name, "int4_g64")
    a, b = log_softmax(logits)[:, :-1], log_softmax(expected["logits"])[:, :-1]
    kl = (np.exp(b) * (b - a)).sum(-1)
    # The golden's own logits are 1e-5 off those of this project.
    assert figures["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    window, token = np.unravel_index(kl.argmax(), kl.shape)
    assert figures["kl_worst"] == {
        "value": pytest.approx(kl.max(), rel=1e-4),
        "window": window,
        "token": token + 1,
    }
    backwards = (np.exp(a) * (a - b)).sum(-1).mean()
    assert abs(backwards / kl.mean() - 1) > 1e-3  # so the direction is tested
    assert figures["top1_agreement"] == (a.argmax(-1) == b.argmax(-1)).mean()
    assert figures["perplexity"] == pytest.approx(perplexity(logits, tokens), rel=1e-5)
    assert figures["against_perplexity"] == pytest.approx(perplexity(expected["logits"], tokens), rel=1e-5)

    config = Source(GOLDENS / name, Settings()).config
    partial = 0
    for i, (found, trace) in enumerate(zip(figures["layers"], layers, strict=True)):
        hidden = expected[f"hidden_{i}"].astype(np.float64)
        error = np.linalg.norm(trace.hidden - hidden, axis=-1) / np.linalg.norm(hidden, axis=-1)
        assert found["hidden_error"] == pytest.approx(error.mean(), rel=1e-3, abs=1e-12)
        if trace.experts is not None:
            chosen = trace.experts.reshape(-1, config.experts_per_token)
            pairs = zip(chosen.tolist(), expected[f"experts_{i}"].tolist(), strict=True)
            shares = [len({*x} & {*y}) / len(y) for x, y in pairs]
            assert found["expert_overlap"] == pytest.approx(np.mean(shares), rel=1e-12)
            partial += found["expert_overlap"] < 1
        if trace.blocks is not None:
            shares, queries = [], 0
            for row in range(len(tokens)):
                for t in range(tokens.shape[1]):
                    if t // config.block_size + 1 <= config.top_blocks:
                        continue
                    queries += 1
                    for head in range(config.num_kv_heads):
                        ours, theirs = trace.blocks[row, t, head], expected[f"blocks_{i}"][row, head, t]
                        shares.append(len({*ours.tolist()} & {*theirs.tolist()}) / config.top_blocks)
            assert found["block_queries"] == queries > 0
            assert found["block_overlap"] == pytest.approx(np.mean(shares), rel=1e-12)
            partial += found["block_overlap"] < 1
    assert partial >= 2  # the recipe did change choices, or nothing was tested


def test_windows_do_not_see_each_other_or_the_padding(evaluate) -> None:
    """Windows of 31, 31 and 8 tokens, padded to 31, against each of them alone."""
    figures = evaluate("tiny_vl", "--length", "31", "--tokens", "70")
    assert (figures["windows"], figures["tokens"], figures["predictions"]) == (3, 70, 67)
    tree = Source(GOLDENS / "tiny_vl", Settings("float32", "reference")).read(pack=False)
    (row,) = golden("tiny_vl")["input_ids"].astype(np.int32)
    losses = []
    for window in (row[:31], row[31:62], row[62:70]):
        log_p = log_softmax(np.asarray(jax.jit(forward)(tree, window[None])[0])[0])
        losses += [-log_p[t, window[t + 1]] for t in range(len(window) - 1)]
    assert figures["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    # A last window of one token predicts nothing and does not count.
    figures = evaluate("tiny_vl", "--length", "31", "--tokens", "63")
    assert (figures["windows"], figures["tokens"], figures["predictions"]) == (2, 62, 60)


def test_text_is_what_its_ids_are(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the cat and the [e~[ dog\nthen the hen")
    tokenizer = Source(checkpoint, Settings()).tokenizer
    assert tokenizer is not None
    (tmp_path / "a.json").write_text(json.dumps(tokenizer.encode((tmp_path / "a.txt").read_text())))
    found = []
    for name in ("a.txt", "a.json"):
        assert main(["--checkpoint", str(checkpoint), "--text", str(tmp_path / name), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["perplexity"] == found[1]["perplexity"]
    assert found[0]["dtype"] == "bfloat16"


def test_tables_and_fewer_layers(ids: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(GOLDENS / "tiny_vl")
    options = ["--checkpoint", directory, "--against", directory, "--text", str(ids / "tiny_vl.json")]
    assert main([*options, "--layers", "3", "--recipe", "int8"]) == 0
    out, _ = capsys.readouterr()
    assert "windows 1, predictions 74; layers 3, bfloat16, sparse attention" in out
    assert f"A: {directory} rounded to int8\nB: {directory}, the reference" in out
    assert "KL(B || A), mean, nats" in out
    assert "│ 2     │ sparse" in out
    assert "│ 3     │" not in out


def test_logits_that_are_not_finite_are_refused() -> None:
    config = Source(GOLDENS / "tiny_vl", Settings()).config
    record = Record([np.arange(5)], config, np.dtype(np.float32), keep=True)
    bad = np.zeros((5, config.vocab_size), np.float32)
    record.logits(0, bad)
    bad[3, 7] = np.nan
    with pytest.raises(NonFiniteError, match="the logits of B"):
        Comparison(record).logits(0, bad)
    with pytest.raises(NonFiniteError, match="the logits of A"):
        record.logits(0, bad)


def test_temporary_files_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Source(GOLDENS / "tiny_vl", Settings()).config
    usage = type("usage", (), {"free": 9000})
    monkeypatch.setattr("mmx_jax.compare.shutil.disk_usage", lambda _: usage)
    Record([np.arange(3)], config, np.dtype(np.float32), keep=False)
    Record([np.arange(2)], config, np.dtype(np.float32), keep=True)  # 2 * 4 * (352 + 5 * 80) bytes
    with pytest.raises(InputError, match="comparing 3 tokens takes"):
        Record([np.arange(3)], config, np.dtype(np.float32), keep=True)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("broken")
    (root / "empty.txt").write_text("")
    (root / "one.txt").write_text("e")
    (root / "one.json").write_text("[5]")
    (root / "none.json").write_text("[]")
    (root / "object.json").write_text('{"ids": [1, 2]}')
    (root / "bool.json").write_text("[[1, true]]")
    (root / "outside.json").write_text("[1, 352]")
    (root / "ids.json").write_text("[1, 2, 3]")
    for name, key, value in (("vocab", "vocab_size", 353), ("top", "index_topk_blocks", 4)):
        (root / name).mkdir()
        config = json.loads((GOLDENS / "tiny_text" / "config.json").read_text())
        config[key] = value
        (root / name / "config.json").write_text(json.dumps(config))
    return root


VL, IDS = ["--checkpoint", "{golden}/tiny_vl"], ["--text", "{broken}/ids.json"]
TEXT = ["--checkpoint", "{golden}/tiny_text", *IDS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (VL, "the following arguments are required: --text"),
        (IDS, "the following arguments are required: --checkpoint"),
        (["--checkpoint", "no/such/dir", *IDS], "no/such/dir: no such file or directory"),
        ([*VL, *IDS, "--against", "no/such/dir"], "no/such/dir: no such file or directory"),
        ([*VL, "--text", "{broken}/no.txt"], "no.txt: No such file"),
        ([*VL, "--text", "{broken}/one.txt"], "tiny_vl: no tokenizer.json; give --text as a .json file"),
        (
            ["--checkpoint", "{checkpoint}", "--text", "{broken}/empty.txt"],
            "empty.txt: no window of 2 tokens",
        ),
        (["--checkpoint", "{checkpoint}", "--text", "{broken}/one.txt"], "one.txt: no window of 2 tokens"),
        ([*VL, "--text", "{broken}/one.json"], "one.json: no window of 2 tokens"),
        ([*VL, "--text", "{broken}/none.json"], "none.json: no window of 2 tokens"),
        ([*VL, "--text", "{broken}/object.json"], "object.json: expected a list of token ids"),
        ([*VL, "--text", "{broken}/bool.json"], "bool.json: expected a list of token ids"),
        ([*VL, "--text", "{broken}/outside.json"], "token id 352 is outside the vocabulary: 0 to 351"),
        ([*VL, *IDS, "--length", "1"], "--length 1: the model takes 2 to 512"),
        ([*VL, *IDS, "--length", "513"], "--length 513: the model takes 2 to 512"),
        ([*VL, *IDS, "--tokens", "1"], "--tokens 1: at least 2"),
        ([*VL, *IDS, "--layers", "6"], "the model has 5"),
        ([*VL, *IDS, "--dtype", "int4"], "dtype 'int4': expected"),
        ([*VL, *IDS, "--recipe", "int5"], "recipe 'int5': expected"),
        ([*VL, *IDS, "--kernels", "auto"], "unrecognized arguments: --kernels"),
        ([*VL, *IDS, "--against", "{golden}/tiny_text"], "tiny_text: num_layers is 4, but 5 in"),
        ([*TEXT, "--against", "{broken}/vocab"], "vocab: vocab_size is 353, but 352 in"),
        ([*TEXT, "--against", "{broken}/top"], "top: top_blocks is 4, but 3 in"),
        (["--checkpoint", "{broken}/vocab", *IDS], "{broken}/vocab: no *.safetensors file"),
        ([*VL, *IDS, "--against", "transformers"], "pip install 'mmx-jax[compare]'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    checkpoint: Path,
    broken: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "mmx_jax.parity", raising=False)
    places = {"checkpoint": checkpoint, "broken": broken, "golden": GOLDENS}
    assert main([a.format(**places) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message.format(**places) in line


def test_what_must_be_the_same_is_in_the_config() -> None:
    config = Source(GOLDENS / "tiny_vl", Settings()).config
    assert all(hasattr(config, name) for name in SAME)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny_vl", []),
        ("tiny_text", ["--recipe", "int4_g64", "--length", "40"]),
        ("tiny_mxfp8", ["--layers", "3"]),
        ("tiny_vl", ["--attention", "dense"]),
    ],
)
def test_transformers_computes_the_same(name: str, options: list[str], evaluate) -> None:
    """float32 on both sides: what is left is the order of sums, 1e-5 in a logit."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.24")
    figures = evaluate(name, "--against", "transformers", *options)
    assert abs(figures["kl_mean"]) < 1e-10
    assert figures["kl_worst"]["value"] < 1e-9
    assert figures["top1_agreement"] == 1
    for layer in figures["layers"]:
        assert layer["hidden_error"] < 1e-5
        assert layer["expert_overlap"] in (1, None)
        assert layer["block_overlap"] in (1, None)
    if not options:
        expected = perplexity(golden(name)["logits"], golden(name)["input_ids"])
        assert figures["against_perplexity"] == pytest.approx(expected, rel=1e-6)
        assert [layer["block_queries"] for layer in figures["layers"]] == [0, 0, 51, 51, 51]


@pytest.mark.filterwarnings("ignore")
def test_transformers_in_bfloat16_rounds_elsewhere(evaluate) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.24")
    figures = evaluate("tiny_vl", "--against", "transformers", "--dtype", "bfloat16")
    assert 1e-5 < figures["kl_mean"] < 0.1
    assert figures["perplexity"] != figures["against_perplexity"]
