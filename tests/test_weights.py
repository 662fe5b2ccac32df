"""Tensors from files: headers and their faults, names, and every decoder against plain float64 arithmetic."""

import contextlib
import json
import math
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmx_jax import weights
from mmx_jax.errors import CheckpointError
from mmx_jax.shards import Checkpoint, TensorInfo, open_checkpoint
from mmx_jax.weights import plan_load

GOLDEN = Path(__file__).parent / "golden"
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
DTYPES = {"BF16": BF16, "F16": np.float16, "F32": F32, "F8_E4M3": E4M3, "U8": np.uint8}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, tuple[str, np.ndarray]]  # name -> dtype as the header spells it, values


class Want(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


# --- An independent reader and writer ---


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def join(header: dict[str, Any] | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def read_all(directory: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(directory.glob("model*.safetensors")):
        header, body = split(file.read_bytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            values = np.frombuffer(body[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = entry["dtype"], values
    return tensors


def write(file: Path, tensors: Tensors) -> None:
    header, body = {}, b""
    for name, (dtype, values) in tensors.items():
        data = values.tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        body += data
    file.write_bytes(join(header, body))


def exact(tensors: Tensors, name: str) -> np.ndarray:
    """The tensor's values, exact in float64."""
    _, weight = tensors[name]
    if name + "_scale_inv" in tensors:
        kind, scale = tensors[name + "_scale_inv"]
        if kind == "F32":
            rows, columns = (np.arange(n) // 128 for n in weight.shape)
            return weight.astype(np.float64) * scale.astype(np.float64)[rows][:, columns]
        return weight.astype(np.float64) * 2.0 ** (np.repeat(scale, 32, axis=1).astype(np.float64) - 127)
    if name + "_scale" in tensors:
        values = np.empty((weight.shape[0], 2 * weight.shape[1]))
        values[:, 0::2], values[:, 1::2] = E2M1[weight & 15], E2M1[weight >> 4]
        scale = np.repeat(tensors[name + "_scale"][1].astype(np.float64), 16, axis=1)
        return values * scale * np.float64(tensors[name + "_scale_2"][1])
    return weight.astype(np.float64)


# --- The parameters of the goldens, from their config files ---


def wanted(directory: Path, dtype: Any, *, layers: int = 99, indexer: bool = True) -> dict[str, Want]:
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    sparse = config.get("sparse_attention_config", {})
    count, d, head = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    iq = config.get("index_n_heads") or sparse["sparse_num_index_heads"]
    i = config.get("index_head_dim") or sparse["sparse_index_dim"]
    is_moe = config.get("moe_layer_freq") or [kind == "sparse" for kind in config["mlp_layer_types"]]
    is_sparse = sparse.get("sparse_attention_freq") or [
        kind == "minimax_m3_sparse" for kind in config["layer_types"]
    ]
    e, f = config["num_local_experts"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "head": (config["vocab_size"], d),
        "norm.weight": (d,),
        "embed": (config["vocab_size"], d),
    }
    for n in range(min(count, layers)):
        layer = {
            "input_norm.weight": (d,),
            "post_norm.weight": (d,),
            "attention.q": (q, d),
            "attention.k": (kv, d),
            "attention.v": (kv, d),
            "attention.o": (d, q),
            "attention.q_norm.weight": (head,),
            "attention.k_norm.weight": (head,),
        }
        if is_sparse[n] and indexer:
            layer |= {"attention.indexer.q": (iq * i, d), "attention.indexer.k": (i, d)}
            layer |= {"attention.indexer.q_norm.weight": (i,), "attention.indexer.k_norm.weight": (i,)}
        if is_moe[n]:
            s = config["shared_intermediate_size"]
            layer |= {"moe.router.weight": (e, d), "moe.router.bias": (e,)}
            layer |= {f"moe.experts.{name}": (e, f, d) for name in ("gate", "up")}
            layer |= {f"moe.shared.{name}": (s, d) for name in ("gate", "up")}
            layer |= {"moe.experts.down": (e, d, f), "moe.shared.down": (d, s)}
        else:
            dense = config["dense_intermediate_size"]
            layer |= {"mlp.gate": (dense, d), "mlp.up": (dense, d), "mlp.down": (d, dense)}
        shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
    return {path: Want(shape, F32 if "router" in path else dtype) for path, shape in shapes.items()}


def expected(tensors: Tensors, path: str) -> np.ndarray:
    """What the parameter should be in float64, spelled out apart from the table in the module."""
    root = "language_model." if "language_model.lm_head.weight" in tensors else ""
    whole = {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm.weight": "model.norm.weight",
    }
    if path in whole:
        return exact(tensors, root + whole[path])
    _, number, rest = path.split(".", 2)
    layer = f"{root}model.layers.{number}."
    group, _, leaf = rest.rpartition(".")
    if rest.endswith("norm.weight"):
        name = {"input_norm.weight": "input_layernorm", "post_norm.weight": "post_attention_layernorm"}.get(
            rest
        )
        released = rest.replace("attention.indexer.", "self_attn.index_").replace("attention.", "self_attn.")
        name = name + ".weight" if name else released
        return exact(tensors, layer + (name if root else name.replace(".index_", ".indexer.")))
    if group == "attention":
        return exact(tensors, f"{layer}self_attn.{leaf}_proj.weight")
    if group == "attention.indexer":
        return exact(tensors, f"{layer}self_attn.{'index_' if root else 'indexer.'}{leaf}_proj.weight")
    if group == "moe.router":
        moe = layer + ("block_sparse_moe." if root else "mlp.gate.")
        if leaf == "bias":
            return exact(tensors, moe + "e_score_correction_bias")
        return exact(tensors, moe + ("gate.weight" if root else "weight"))
    if group == "moe.experts" and root:
        w, e = {"gate": "w1", "up": "w3", "down": "w2"}[leaf], 0
        stack = []
        while (name := f"{layer}block_sparse_moe.experts.{e}.{w}.weight") in tensors:
            stack.append(exact(tensors, name))
            e += 1
        return np.stack(stack)
    stem = {"mlp": "mlp.", "moe.shared": "mlp.shared_experts.", "moe.experts": "mlp.experts."}[group]
    if root:
        return exact(
            tensors, layer + stem.replace("mlp.shared", "block_sparse_moe.shared") + leaf + "_proj.weight"
        )
    end = "" if group == "moe.experts" else ".weight"
    if leaf == "down":
        return exact(tensors, f"{layer}{stem}down_proj{end}")
    gate, up = np.split(exact(tensors, f"{layer}{stem}gate_up_proj{end}"), 2, axis=-2)
    return gate if leaf == "gate" else up


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(np.float32).astype(dtype)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


# --- Goldens ---


@pytest.mark.parametrize("chunk", [1 << 17, 1000])
@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype(np.float64)])
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("tiny_vl", {"BF16", "F32"}),
        ("tiny_text", {"BF16", "F32"}),
        ("block128", {"BF16", "F32"}),
        ("real_heads", {"BF16", "F32"}),
        ("tiny_mxfp8", {"BF16", "F32", "MXFP8"}),
        ("tiny_nvfp4", {"BF16", "F32", "MXFP8", "NVFP4"}),
    ],
)
def test_golden(
    name: str, formats: set[str], dtype: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CHUNK", chunk)
    tensors = read_all(GOLDEN / name)
    params = wanted(GOLDEN / name, dtype)
    plan = plan_load(open_checkpoint(GOLDEN / name), params)
    assert set(plan.paths) == set(params)
    assert set(plan.formats.values()) == formats
    for path in plan.paths:
        value = plan.read(path)
        assert same(value, rounded(expected(tensors, path), params[path].dtype)), path
        assert value.flags.c_contiguous


@pytest.mark.parametrize("name", ["tiny_text", "tiny_mxfp8", "tiny_nvfp4"])
def test_some_rows_of_an_expert(name: str) -> None:
    """What is read of a part is that part of the whole: stacked, single and fused tensors in every format."""
    plan = plan_load(open_checkpoint(GOLDEN / name), wanted(GOLDEN / name, F32))
    whole = {path: plan.read(path) for path in plan.paths}
    assert any(a.ndim == 3 for a in whole.values())
    for path, array in whole.items():
        rows = slice(3, 3 + len(array[0] if array.ndim == 3 else array) // 2)
        if array.ndim == 3:
            np.testing.assert_array_equal(plan.read(path, 1, rows), array[1, rows])
            np.testing.assert_array_equal(plan.read(path, len(array) - 1), array[-1])
        else:
            np.testing.assert_array_equal(plan.read(path, rows=rows), array[rows])


def test_views_are_the_bytes_of_the_file() -> None:
    for name in ("tiny_vl", "tiny_nvfp4"):
        checkpoint = open_checkpoint(GOLDEN / name)
        tensors = read_all(GOLDEN / name)
        assert checkpoint.tensors.keys() == tensors.keys()
        for tensor, (dtype, values) in tensors.items():
            view = checkpoint.read(tensor)
            assert checkpoint.tensors[tensor].dtype == dtype
            assert same(view, values)
            assert not view.flags.owndata
            assert not view.flags.writeable


def test_order_bytes_and_skipped() -> None:
    plan = plan_load(open_checkpoint(GOLDEN / "tiny_vl"), wanted(GOLDEN / "tiny_vl", BF16))
    assert plan.paths[:2] == ["embed", "layers.0.input_norm.weight"]
    assert plan.paths[-2:] == ["norm.weight", "head"]
    numbers = [int(path.split(".")[1]) for path in plan.paths[1:-2]]
    assert numbers == sorted(numbers)
    tensors = read_all(GOLDEN / "tiny_vl")
    text = [name for name in tensors if name.startswith("language_model.")]
    assert plan.nbytes == sum(tensors[name][1].nbytes for name in text)
    assert plan.source_bytes("layers.2.moe.experts.up") == 9 * 64 * 80 * 2
    assert plan.skipped == {
        "vision side: only text is served": [n for n in plan.checkpoint.tensors if n not in text]
    }


@pytest.mark.parametrize("name", ["tiny_text", "tiny_mxfp8"])
def test_bytes_of_fused_and_scaled_tensors(name: str) -> None:
    tensors = read_all(GOLDEN / name)
    plan = plan_load(open_checkpoint(GOLDEN / name), wanted(GOLDEN / name, BF16))
    vision = {n for names in plan.skipped.values() for n in names}
    assert plan.nbytes == sum(values.nbytes for n, (_, values) in tensors.items() if n not in vision)


@pytest.mark.parametrize("name", ["tiny_vl", "tiny_text"])
def test_skips_that_are_asked_for(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    plan = plan_load(
        checkpoint, wanted(GOLDEN / name, BF16, layers=3, indexer=False), layers=3, indexer=False
    )
    late = plan.skipped["only the first 3 layers were asked for"]
    assert late == [
        n for n in checkpoint.tensors if ".layers.3." in n or ".layers.4." in n if "vision" not in n
    ]
    dense = plan.skipped["dense attention was asked for"]
    assert dense == [n for n in checkpoint.tensors if "self_attn.index" in n and n not in late]
    assert dense
    assert plan.read("layers.2.attention.q").shape == (192, 80)


def test_mtp_is_skipped_with_its_reason(tmp_path: Path) -> None:
    tensors = read_all(GOLDEN / "tiny_text") | {"mtp.0.proj.weight": ("U8", np.zeros(3, np.uint8))}
    tensors["model.mtp.layers.0.self_attn.q_proj.weight"] = "U8", np.zeros(3, np.uint8)
    write(tmp_path / "model.safetensors", tensors)
    plan = plan_load(open_checkpoint(tmp_path), wanted(GOLDEN / "tiny_text", BF16))
    reason = "multi-token prediction is not implemented"
    assert plan.skipped == {reason: ["mtp.0.proj.weight", "model.mtp.layers.0.self_attn.q_proj.weight"]}


@pytest.mark.parametrize("prefixes", [("model.", ""), ("model.language_model.", "")])
def test_other_prefixes_of_the_released_names(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    tensors = read_all(GOLDEN / "tiny_mxfp8")

    def rename(name: str) -> str:
        if name.startswith("language_model.model."):
            return prefixes[0] + name.removeprefix("language_model.model.")
        return prefixes[1] + name.removeprefix("language_model.")

    write(tmp_path / "part-1.safetensors", {rename(n): t for n, t in tensors.items() if "experts" in n})
    write(tmp_path / "part-2.safetensors", {rename(n): t for n, t in tensors.items() if "experts" not in n})
    plan = plan_load(open_checkpoint(tmp_path), wanted(GOLDEN / "tiny_mxfp8", BF16))
    for path in ("embed", "head", "norm.weight", "layers.1.attention.indexer.q", "layers.3.moe.experts.down"):
        assert same(plan.read(path), rounded(expected(tensors, path), BF16))


# --- Decoders ---


def decode(tensors: Tensors, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Decode a weight and its scale tensors, named here by what follows `lm_head.weight`."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "model.safetensors", {"lm_head.weight" + n: t for n, t in tensors.items()})
        return plan_load(open_checkpoint(Path(name)), {"head": Want(shape, dtype)}).read("head")


@pytest.mark.parametrize("kind", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mxfp8_every_code_with_every_scale(kind: str, dtype: Any) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, axis=1)
    codes[(codes & 127) == 127] = 0
    value = codes.view(E4M3).astype(np.float64) * 2.0 ** (np.arange(255.0)[:, None] - 127)
    over = np.abs(value) > np.finfo(np.float32).max
    assert over.any(axis=1).tolist() == [byte >= 247 for byte in range(255)]
    codes[over], value[over] = 0, 0
    out = decode({"": ("F8_E4M3", codes), "_scale_inv": (kind, scale)}, codes.shape, dtype)
    assert same(out, value.astype(dtype))
    if dtype == F32:
        assert (out.astype(np.float64) == value).all()  # exact, down to the subnormals of bytes 0 to 7
    assert np.abs(out[value != 0].astype(np.float64)).min() < 2.0**-126


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.float64)])
@pytest.mark.parametrize("byte", range(247, 255))
def test_mxfp8_overflow_is_an_error_by_name(byte: int, dtype: Any) -> None:
    finite = np.arange(127, dtype=np.uint8)
    code = finite[finite.view(E4M3).astype(np.float64) * 2.0 ** (byte - 127) > np.finfo(np.float32).max][0]
    codes = np.zeros((3, 64), np.uint8)
    scale = np.full((3, 2), byte, np.uint8)
    codes[2, 40] = code - 1
    decode({"": ("F8_E4M3", codes), "_scale_inv": ("U8", scale)}, (3, 64), dtype)
    codes[2, 40] = code
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight \(MXFP8\) has values beyond the range of fp32"
    ):
        decode({"": ("F8_E4M3", codes), "_scale_inv": ("U8", scale)}, (3, 64), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("scale_2", [1.0, 0.3712, 3e-38, 1e35])
def test_nvfp4_every_nibble_with_every_scale(scale_2: float, dtype: Any) -> None:
    scale = np.arange(256, dtype=np.uint8)[:, None].copy()
    scale[(scale & 127) == 127] = 1
    low, high = np.arange(0, 16, 2, dtype=np.uint8), np.arange(1, 16, 2, dtype=np.uint8)
    packed = np.tile(low | high << 4, (256, 1))
    tensors = {
        "": ("U8", packed),
        "_scale": ("F8_E4M3", scale.view(E4M3)),
        "_scale_2": ("F32", np.float32(scale_2)),
    }
    out = decode(tensors, (256, 16), dtype)
    value = E2M1 * scale.view(E4M3).astype(np.float64) * np.float64(np.float32(scale_2))  # exact: 30 bits
    assert same(out, rounded(value, dtype))


def test_nvfp4_nan_and_overflow_are_errors_by_name() -> None:
    def tensors(scale: int, scale_2: float) -> Tensors:
        scales = np.array([[1], [scale]], np.uint8).view(E4M3)
        packed = np.full((2, 8), 0x77, np.uint8)
        return {"": ("U8", packed), "_scale": ("F8_E4M3", scales), "_scale_2": ("F32", np.float32(scale_2))}

    for code in (0x7F, 0xFF):
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight_scale holds NaN"):
            decode(tensors(code, 1.0), (2, 16), BF16)
    for bad in (math.nan, math.inf):
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight_scale_2 holds NaN"):
            decode(tensors(1, bad), (2, 16), BF16)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(NVFP4\) has values beyond"):
        decode(tensors(0x7E, 3e38), (2, 16), BF16)


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 127) == 127] = 0
    return codes.view(E4M3)


def check_block(n: int, k: int, seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    scale = rng.normal(size=(-(-n // 128), -(-k // 128))).astype(np.float32)
    tensors: Tensors = {"": ("F8_E4M3", random_codes(rng, (n, k))), "_scale_inv": ("F32", scale)}
    assert same(decode(tensors, (n, k), dtype), rounded(exact(tensors, ""), dtype))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2**32 - 1), st.sampled_from([F32, BF16]))
def test_fp8_block_with_ragged_edges(n: int, k: int, seed: int, dtype: Any) -> None:
    check_block(n, k, seed, dtype)


def test_fp8_block_in_chunks_that_cross_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 1000)
    check_block(333, 200, 5, F32)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([F32, BF16]))
def test_mxfp8_random(n: int, groups: int, seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    scale = rng.integers(0, 247, (n, groups), dtype=np.uint8)
    tensors: Tensors = {"": ("F8_E4M3", random_codes(rng, (n, 32 * groups))), "_scale_inv": ("U8", scale)}
    assert same(decode(tensors, (n, 32 * groups), dtype), exact(tensors, "").astype(dtype))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([F32, BF16]))
def test_nvfp4_random(n: int, groups: int, seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {
        "": ("U8", rng.integers(0, 256, (n, 8 * groups), dtype=np.uint8)),
        "_scale": ("F8_E4M3", random_codes(rng, (n, groups))),
        "_scale_2": ("F32", np.float32(rng.normal())),
    }
    assert same(decode(tensors, (n, 16 * groups), dtype), rounded(exact(tensors, ""), dtype))


def test_plain_formats_round_once_to_nearest_even() -> None:
    ties = np.array(
        [[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 2**-133, 2**-134, 3e38, -0.0]]
    )
    for dtype in (BF16, F32, np.dtype(np.float64)):
        assert same(
            decode({"": ("F32", ties.astype(F32))}, ties.shape, dtype), ties.astype(F32).astype(dtype)
        )
    assert decode({"": ("F32", ties[:, :4].astype(F32))}, (1, 4), BF16).astype(float).tolist() == [
        [1, 1 + 2**-6, 1 + 2**-7, -1]
    ]
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16)[None]
    assert same(decode({"": ("F16", half)}, half.shape, F32), half.astype(F32))
    assert same(decode({"": ("F16", half)}, half.shape, BF16), half.astype(F32).astype(BF16))


# --- Values that are refused, by the tensor's name ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("source", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_finite_plain_values(source: str, bad: float, dtype: Any) -> None:
    values = np.ones((40, 5), DTYPES[source])
    values[37, 3] = bad
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor lm_head\.weight holds NaN"):
        decode({"": (source, values)}, values.shape, dtype)


def test_f32_beyond_bf16() -> None:
    values = np.full((1, 1), np.finfo(np.float32).max)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(F32\) has values beyond .* bfloat16"):
        decode({"": ("F32", values)}, (1, 1), BF16)


def test_scale_byte_255_and_nan_codes() -> None:
    codes, scale = np.zeros((4, 64), np.uint8), np.full((4, 2), 127, np.uint8)
    scale[3, 1] = 255
    with pytest.raises(CheckpointError, match=r"lm_head\.weight_scale_inv holds the scale byte 255"):
        decode({"": ("F8_E4M3", codes), "_scale_inv": ("F8_E8M0", scale)}, (4, 64), BF16)
    scale[3, 1] = 254
    for code in (0x7F, 0xFF):
        codes[1, 33] = code
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight holds NaN"):
            decode({"": ("F8_E4M3", codes), "_scale_inv": ("U8", scale)}, (4, 64), F32)
        block = "F32", np.ones((1, 1), np.float32)
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight holds NaN"):
            decode({"": ("F8_E4M3", codes), "_scale_inv": block}, (4, 64), F32)


def test_block_scale_nan() -> None:
    tensors: Tensors = {"": ("F8_E4M3", np.zeros((2, 2), np.uint8))}
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight_scale_inv holds NaN"):
        decode(tensors | {"_scale_inv": ("F32", np.full((1, 1), np.nan, F32))}, (2, 2), BF16)


def test_a_bad_expert_is_named(tmp_path: Path) -> None:
    tensors = read_all(GOLDEN / "tiny_mxfp8")
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_scale_inv"
    scale = tensors[name][1].copy()
    scale[-1, -1] = 255
    write(tmp_path / "model.safetensors", tensors | {name: ("U8", scale)})
    plan = plan_load(open_checkpoint(tmp_path), wanted(GOLDEN / "tiny_mxfp8", BF16))
    plan.read("layers.2.moe.experts.up")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        plan.read("layers.2.moe.experts.down")


# --- Plans that are refused ---


def refusal(directory: Path, tensors: Tensors, params: dict[str, Want], **options: Any) -> str:
    write(directory / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        plan_load(open_checkpoint(directory), params, **options)
    return str(caught.value)


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    tensors = read_all(GOLDEN / "block128")
    layer = "language_model.model.layers.1."
    del tensors[layer + "self_attn.q_proj.weight"]
    del tensors[layer + "block_sparse_moe.experts.4.w3.weight"]
    tensors["language_model.model.layers.7.self_attn.q_proj.weight"] = "BF16", np.zeros((2, 2), BF16)
    tensors[layer + "self_attn.k_proj.bias"] = "BF16", np.zeros(2, BF16)
    tensors[layer + "block_sparse_moe.gate.weight"] = "F32", np.zeros((9, 95), F32)
    tensors["language_model.lm_head.weight"] = "U8", np.zeros((352, 96), np.uint8)
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "block128", BF16))
    assert (
        f"2 missing: {layer}self_attn.q_proj.weight, {layer}block_sparse_moe.experts.4.w3.weight" in message
    )
    assert (
        "2 unexpected: language_model.model.layers.7.self_attn.q_proj.weight, "
        f"{layer}self_attn.k_proj.bias" in message
    )
    assert f"1 wrong shape: {layer}block_sparse_moe.gate.weight [9, 95], not [9, 96]" in message
    assert "1 cannot be decoded (known: BF16;" in message
    assert "language_model.lm_head.weight (U8 with no scale tensor)" in message
    assert "\n" not in message
    assert "--attention dense" not in message


def test_names_with_traps(tmp_path: Path) -> None:
    """index_q_proj is no q_proj, and block_sparse_moe.gate no gate_proj."""
    tensors = read_all(GOLDEN / "block128")
    del tensors["language_model.model.layers.1.self_attn.q_proj.weight"]
    del tensors["language_model.model.layers.0.mlp.gate_proj.weight"]
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "block128", BF16))
    assert message.endswith(
        "2 missing: language_model.model.layers.0.mlp.gate_proj.weight, "
        "language_model.model.layers.1.self_attn.q_proj.weight"
    )


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    tensors = {
        n: t for n, t in read_all(GOLDEN / "block128").items() if ".2.block_sparse_moe.experts" not in n
    }
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "block128", BF16))
    assert "27 missing: " in message
    assert message.endswith(" and 7 more")
    assert message.count("experts.") == 20


@pytest.mark.parametrize("name", ["tiny_vl", "tiny_text"])
def test_missing_indexer_tensors_name_the_way_out(tmp_path: Path, name: str) -> None:
    tensors = {n: t for n, t in read_all(GOLDEN / name).items() if "self_attn.index" not in n}
    message = refusal(tmp_path, tensors, wanted(GOLDEN / name, BF16))
    assert "12 missing: " in message
    lost = f"language_model.model.layers.{2 if name == 'tiny_vl' else 1}.self_attn.index_q_proj.weight"
    assert f"without indexer tensors such as {lost} attention cannot be sparse" in message
    assert "--attention dense" in message
    plan_load(open_checkpoint(tmp_path), wanted(GOLDEN / name, BF16, indexer=False), indexer=False)


def test_present_indexer_tensors_are_not_dropped_silently(tmp_path: Path) -> None:
    message = refusal(tmp_path, read_all(GOLDEN / "tiny_vl"), wanted(GOLDEN / "tiny_vl", BF16, indexer=False))
    assert "12 unexpected: " in message


def test_one_expert_too_many(tmp_path: Path) -> None:
    tensors = read_all(GOLDEN / "block128")
    extra = "language_model.model.layers.2.block_sparse_moe.experts.9.w1.weight"
    tensors[extra] = tensors[extra.replace("experts.9", "experts.8")]
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "block128", BF16))
    assert message.endswith(f"1 unexpected: {extra}")


def test_two_names_for_one_parameter(tmp_path: Path) -> None:
    tensors = read_all(GOLDEN / "block128")
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"]
    layer = "language_model.model.layers.0.mlp."
    tensors[layer + "gate_up_proj.weight"] = "BF16", np.zeros((224, 96), BF16)
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "block128", BF16))
    assert message.endswith(
        f"3 duplicate: {layer}gate_proj.weight = {layer}gate_up_proj.weight, "
        f"{layer}up_proj.weight = {layer}gate_up_proj.weight, "
        "language_model.model.norm.weight = model.norm.weight"
    )


Edit = Callable[[Tensors, str], None]


def _drop_scale(tensors: Tensors, name: str) -> None:
    del tensors[name + "_scale_inv"]


def _half_scale(tensors: Tensors, name: str) -> None:
    tensors[name + "_scale_inv"] = "U8", tensors[name + "_scale_inv"][1][:, :2].copy()


def _bf16_scale(tensors: Tensors, name: str) -> None:
    tensors[name + "_scale_inv"] = "BF16", np.zeros((192, 3), BF16)


def _both_scales(tensors: Tensors, name: str) -> None:
    tensors[name + "_scale"] = "F8_E4M3", np.zeros((192, 6), np.uint8)


def _plain_with_scale(tensors: Tensors, name: str) -> None:
    tensors[name] = "BF16", np.zeros((192, 96), BF16)


def _block_scale(tensors: Tensors, name: str) -> None:
    tensors[name + "_scale_inv"] = "F32", np.ones((1, 1), F32)


def _nvfp4_half(tensors: Tensors, name: str) -> None:
    del tensors[name + "_scale_inv"]
    tensors[name] = "U8", np.zeros((192, 48), np.uint8)
    tensors[name + "_scale"] = "F8_E4M3", np.zeros((192, 6), np.uint8)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_drop_scale, "{} (F8_E4M3 with no scale tensor)"),
        (_half_scale, "1 wrong shape: {}_scale_inv [192, 2], not [192, 3]"),
        (_bf16_scale, "{} (F8_E4M3 with scale tensors (_scale_inv BF16))"),
        (_both_scales, "{} (F8_E4M3 with scale tensors (_scale_inv U8, _scale F8_E4M3))"),
        (_plain_with_scale, "{} (BF16 with scale tensors (_scale_inv U8))"),
        (_block_scale, "1 wrong shape: {}_scale_inv [1, 1], not [2, 1]"),
        (_nvfp4_half, "{} (U8 with scale tensors (_scale F8_E4M3))"),
    ],
)
def test_scale_tensors_that_do_not_fit(tmp_path: Path, edit: Edit, told: str) -> None:
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    tensors = read_all(GOLDEN / "tiny_mxfp8")
    edit(tensors, name)
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "tiny_mxfp8", BF16))
    assert message.endswith(told.format(name))


def test_width_that_is_no_multiple_of_the_group(tmp_path: Path) -> None:
    tensors: Tensors = {"lm_head.weight": ("F8_E4M3", np.zeros((4, 80), np.uint8))}
    tensors["lm_head.weight_scale_inv"] = "U8", np.zeros((4, 2), np.uint8)
    message = refusal(tmp_path, tensors, {"head": Want((4, 80), BF16)})
    assert message.endswith("lm_head.weight (width 80, not in groups of 32)")


def test_fused_tensor_with_scales(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_up_proj.weight"
    tensors = read_all(GOLDEN / "tiny_text")
    tensors[name] = "F8_E4M3", np.zeros((224, 80), np.uint8)
    tensors[name + "_scale_inv"] = "F32", np.zeros((2, 1), F32)
    message = refusal(tmp_path, tensors, wanted(GOLDEN / "tiny_text", BF16))
    assert message.endswith(f"{name} (a fused or stacked tensor with scale tensors)")


def test_input_scale_is_part_of_nvfp4_only(tmp_path: Path) -> None:
    tensors: Tensors = {"lm_head.weight": ("BF16", np.zeros((4, 16), BF16))}
    tensors["lm_head.input_scale"] = "F32", np.zeros((), F32)
    message = refusal(tmp_path, tensors, {"head": Want((4, 16), BF16)})
    assert message.endswith("1 unexpected: lm_head.input_scale")


def test_working_dtype(tmp_path: Path) -> None:
    tensors: Tensors = {"lm_head.weight": ("BF16", np.zeros((4, 16), BF16))}
    message = refusal(tmp_path, tensors, {"head": Want((4, 16), np.float16)})
    assert "head as float16" in message


# --- Files that are refused ---


def single(directory: Path, change: Callable[[bytes], bytes]) -> str:
    """Write the golden `block128` with its bytes changed; return what opening it says."""
    data = (GOLDEN / "block128" / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(change(data))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    message = str(caught.value)
    assert str(directory / "model.safetensors") in message
    return message


def with_entry(**changes: Any) -> Callable[[bytes], bytes]:
    """Change the header entry of the norm."""

    def change(data: bytes) -> bytes:
        header, body = split(data)
        header["language_model.model.norm.weight"] |= changes
        return join(header, body)

    return change


def test_cut_short(tmp_path: Path) -> None:
    assert "cut short: the header describes" in single(tmp_path, lambda data: data[:-1])
    assert "cut short: the header ends at byte" in single(tmp_path, lambda data: data[:500])
    assert "cut short" in single(tmp_path, lambda data: data[:7])
    assert "cut short" in single(tmp_path, lambda data: b"")


def test_trailing_bytes(tmp_path: Path) -> None:
    assert "3 bytes at the end belong to no tensor" in single(tmp_path, lambda data: data + b"abc")


def test_bad_headers(tmp_path: Path) -> None:
    assert "is absurd" in single(tmp_path, lambda data: b"PK\3\4zipped" + data)
    assert "not JSON" in single(tmp_path, lambda data: data[:8] + b"x" + data[9:])
    assert "not JSON" in single(tmp_path, lambda data: data[:8] + b"\xff" + data[9:])
    assert "not a JSON object" in single(tmp_path, lambda data: join(b"[]", b""))
    entry = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    twice = b"{" + entry + b"," + entry + b"}"
    assert "the key 'a' appears twice" in single(tmp_path, lambda data: join(twice, b"0"))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4983718288\n"
    assert "git lfs pull" in single(tmp_path, lambda data: pointer)


def test_bad_header_entries(tmp_path: Path) -> None:
    norm = "tensor language_model.model.norm.weight"
    header, _ = split((GOLDEN / "block128" / "model.safetensors").read_bytes())
    begin, end = header["language_model.model.norm.weight"]["data_offsets"]
    assert f"{norm}: offsets" in single(tmp_path, with_entry(shape=[95]))
    assert f"{norm}: offsets" in single(tmp_path, with_entry(data_offsets=[end, begin]))
    assert f"{norm} overlaps" in single(tmp_path, with_entry(data_offsets=[begin - 2, end - 2]))
    assert "leaves a gap" in single(tmp_path, with_entry(data_offsets=[begin + 2, end + 2]))
    for changes in (
        {"shape": [-96]},
        {"shape": 96},
        {"data_offsets": [0]},
        {"shape": ["96"]},
        {"dtype": None},
    ):
        assert f"{norm}: bad dtype, shape or data_offsets" in single(tmp_path, with_entry(**changes))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_is_a_checkpoint_error_or_harmless(data: st.DataObject) -> None:
    content = bytearray((GOLDEN / "tiny_vl" / "model-00002-of-00023.safetensors").read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model.safetensors").write_bytes(content)
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(Path(name))
            assert sum(checkpoint.read(tensor).nbytes for tensor in checkpoint.tensors) == 74400


def test_an_unknown_dtype_matters_only_where_it_is_wanted(tmp_path: Path) -> None:
    data = (GOLDEN / "block128" / "model.safetensors").read_bytes()
    params = wanted(GOLDEN / "block128", BF16)
    for name, refused in (
        ("multi_modal_projector.linear_1.bias", False),
        ("language_model.model.norm.weight", True),
    ):
        header, body = split(data)
        header[name] |= {"dtype": "F4"}
        (tmp_path / "model.safetensors").write_bytes(join(header, body))
        checkpoint = open_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=f"tensor {name}: unknown dtype F4; known are BF16"):
            checkpoint.read(name)
        if not refused:
            plan_load(checkpoint, params)
            continue
        with pytest.raises(
            CheckpointError, match=r"1 cannot be decoded .*norm.weight \(F4 with no scale tensor\)"
        ):
            plan_load(checkpoint, params)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiny_vl", tmp_path / "model"))


def index_fault(directory: Path, edit: Callable[[dict[str, str]], None]) -> str:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    edit(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00007-of-00023.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"index\.json: names the shard model-00007-of-00023\.safetensors"
    ):
        open_checkpoint(sharded)


def test_index_that_points_to_the_wrong_shard(sharded: Path) -> None:
    norm = "language_model.model.norm.weight"
    wrong = "model-00005-of-00023.safetensors"
    message = index_fault(sharded, lambda weight_map: weight_map.update({norm: wrong}))
    assert f"says that tensor {norm} is in {wrong}" in message


def test_index_with_a_tensor_that_no_shard_has(sharded: Path) -> None:
    wrong = "model-00005-of-00023.safetensors"
    assert "tensor ghost is in" in index_fault(sharded, lambda weight_map: weight_map.update(ghost=wrong))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b", "a": "c"}}']
)
def test_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors\.index\.json: (not a JSON|has no `weight_map`)"
    ):
        open_checkpoint(sharded)


def test_the_same_tensor_in_two_shards(sharded: Path) -> None:
    head = "language_model.lm_head.weight"
    file = sharded / "model-00009-of-00023.safetensors"
    write(file, read_shard(file) | {head: ("BF16", np.zeros((2, 2), BF16))})
    with pytest.raises(CheckpointError, match=f"{file.name}: tensor {head} is also in model-00001"):
        open_checkpoint(sharded)


def read_shard(file: Path) -> Tensors:
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(file, Path(name) / "model.safetensors")
        return read_all(Path(name))


def test_a_tensor_that_the_index_does_not_list_counts(sharded: Path) -> None:
    file = sharded / "model-00009-of-00023.safetensors"
    write(file, read_shard(file) | {"stray": ("BF16", np.zeros((2, 2), BF16))})
    with pytest.raises(CheckpointError, match="1 unexpected: stray"):
        plan_load(open_checkpoint(sharded), wanted(sharded, BF16))


# --- Size ---


def test_a_stacked_parameter_takes_little_more_than_itself(tmp_path: Path) -> None:
    experts, shape = 8, (2048, 2048)
    rng = np.random.default_rng(1)
    codes, scale = random_codes(rng, shape), rng.integers(100, 140, (2048, 64), dtype=np.uint8)
    tensors: Tensors = {}
    for e in range(experts):
        name = f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"
        tensors |= {name: ("F8_E4M3", codes), name + "_scale_inv": ("U8", scale)}
    write(tmp_path / "model.safetensors", tensors)
    path = "layers.0.moe.experts.gate"
    plan = plan_load(open_checkpoint(tmp_path), {path: Want((experts, *shape), BF16)})
    tracemalloc.start()
    value = plan.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value.nbytes == 64 << 20
    assert value.nbytes < peak < 1.3 * value.nbytes
    assert same(value[7], rounded(exact({"": ("F8_E4M3", codes), "_scale_inv": ("U8", scale)}, ""), BF16))


def test_the_released_size_plans_in_seconds() -> None:
    tensors: dict[str, TensorInfo] = {}
    params: dict[str, Want] = {}
    for n in range(57):
        for leaf, w, shape in (("gate", 1, (3072, 6144)), ("up", 3, (3072, 6144)), ("down", 2, (6144, 3072))):
            params[f"layers.{n}.moe.experts.{leaf}"] = Want((128, *shape), BF16)
            for e in range(128):
                name = f"language_model.model.layers.{n}.block_sparse_moe.experts.{e}.w{w}."
                rows, k = shape
                for end, dtype, parts in (
                    ("weight", "U8", (rows, k // 2)),
                    ("weight_scale", "F8_E4M3", (rows, k // 16)),
                    ("weight_scale_2", "F32", ()),
                    ("input_scale", "F32", ()),
                ):
                    tensors[name + end] = TensorInfo(Path("x"), dtype, parts, 0, math.prod(parts))
    begin = time.perf_counter()
    plan = plan_load(Checkpoint(Path("x"), tensors, {}), params)
    assert time.perf_counter() - begin < 5
    assert set(plan.formats.values()) == {"NVFP4"}
    assert plan.skipped == {}
