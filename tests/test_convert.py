"""Converting: what comes out, against the source; what is kept when it is stopped, broken or full."""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import mmx_jax
from mmx_jax import SamplingParams, checkpoint, recipes
from mmx_jax.checkpoint import Manifest, restore, verify
from mmx_jax.conversion import convert, prepare
from mmx_jax.convert import main
from mmx_jax.decode import main as decode
from mmx_jax.errors import CheckpointError, InputError
from mmx_jax.inspect import main as inspect
from pallas_kernels.qtensor import QTensor
from tests.conftest import GOLDENS
from tests.synthetic import write_checkpoint
from tests.test_weights import exact, read_all

HOST = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
TEXT = ["tiny_vl", "tiny_text", "block128", "real_heads"]


def silent(*_: object) -> None:
    pass


def converted(source: Path, directory: Path, recipe: str, **options: Any) -> Manifest:
    return convert(prepare(source, directory, recipes.load(recipe), **options), silent)


def numbers(directory: Path, path: str) -> np.ndarray:
    manifest = Manifest.read(directory)
    entry = manifest.entries[path]
    buffers = restore(directory, manifest, [path], lambda *_: HOST)[path]
    return np.asarray(QTensor(entry.format, entry.shape, buffers).dequantize()).astype(np.float64)


def arrays(directory: Path) -> dict[str, bytes]:
    """Every file of every array, by its place."""
    files = [f for f in directory.rglob("*") if f.is_file() and f.parent.parent.name == "state"]
    assert files
    return {str(f.relative_to(directory)): f.read_bytes() for f in files}


# --- What comes out ---


@pytest.mark.parametrize("name", TEXT)
def test_the_bf16_recipe_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """The goldens' weights are bfloat16 numbers: nothing is lost, and greedy tokens are equal."""
    converted(GOLDENS / name, tmp_path / "out", "bf16")
    golden = load_file(GOLDENS / name / "golden.safetensors")
    rows, length = golden["input_ids"].shape
    model = mmx_jax.load(tmp_path / "out", dtype="float32", max_length=length + 24, batch=rows)
    sampling = SamplingParams(max_new_tokens=golden["greedy"].shape[1], ignore_eos=True)
    answers = model.generate(golden["input_ids"].tolist(), sampling)
    assert [a.token_ids for a in answers] == golden["greedy"].tolist()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_codes_of_a_release_are_kept(name: str, tmp_path: Path) -> None:
    """Bit for bit; and the logits are those of float64 arithmetic on the decoded weights."""
    source = GOLDENS / f"tiny_{name}"
    manifest = converted(source, tmp_path / "out", name)
    tensors = read_all(source)
    host = restore(tmp_path / "out", manifest, ["layers.2.moe.experts.up"], lambda *_: HOST)
    buffers = {key: np.asarray(b) for key, b in host["layers.2.moe.experts.up"].items()}
    for e in range(len(buffers["data"])):
        stem = f"language_model.model.layers.2.block_sparse_moe.experts.{e}.w3.weight"
        suffixes = {"mxfp8": ["", "_scale_inv"], "nvfp4": ["", "_scale", "_scale_2"]}[name]
        for buffer, suffix in zip(("data", "scale", "scale_2"), suffixes, strict=False):
            assert buffers[buffer][e].tobytes() == tensors[stem + suffix][1].tobytes()
    assert max(entry.rms_error for entry in manifest.entries.values()) == 0
    golden = load_file(source / "golden.safetensors")
    rows, length = golden["input_ids"].shape
    model = mmx_jax.load(tmp_path / "out", dtype="float32", max_length=length, batch=rows)
    np.testing.assert_allclose(model.logits(golden["input_ids"]), golden["logits"], rtol=0, atol=2e-4)


def test_blocks_of_fp8_are_kept(tmp_path: Path) -> None:
    """A source with a scale for 128 x 128: codes and scales of the edge blocks too."""
    source = write_checkpoint(tmp_path / "source", expert_intermediate_size=200)
    file = source / "layer-1.safetensors"
    tensors = load_file(file)
    rng = np.random.default_rng(3)
    stem = "language_model.model.layers.1.block_sparse_moe.experts."
    for e in range(6):
        name = f"{stem}{e}.w1.weight"
        tensors[name] = rng.normal(size=(200, 256)).astype(ml_dtypes.float8_e4m3fn)
        tensors[name + "_scale_inv"] = rng.uniform(0.01, 1, (2, 2)).astype(np.float32)
    save_file(tensors, file)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file.name}
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = converted(source, tmp_path / "out", "fp8", layers=(1, 2))
    path = "layers.1.moe.experts.gate"
    buffers = restore(tmp_path / "out", manifest, [path], lambda *_: HOST)[path]
    for e in range(6):
        codes, scale = tensors[f"{stem}{e}.w1.weight"], tensors[f"{stem}{e}.w1.weight_scale_inv"]
        assert np.asarray(buffers["data"][e]).tobytes() == codes.tobytes()
        np.testing.assert_array_equal(buffers["scale"][e], scale)
    assert manifest.entries[path].rms_error == 0
    assert manifest.entries["layers.1.moe.experts.up"].rms_error > 0.01


SOURCES = {
    "layers.1.attention.q": "model.layers.1.self_attn.q_proj.weight",
    "layers.1.attention.indexer.k": "model.layers.1.self_attn.index_k_proj.weight",
    "layers.1.moe.shared.down": "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight",
    "layers.0.mlp.gate": "model.layers.0.mlp.gate_proj.weight",
    "layers.1.moe.router.weight": "model.layers.1.block_sparse_moe.gate.weight",
    "layers.1.moe.router.bias": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    "layers.2.attention.q_norm.weight": "model.layers.2.self_attn.q_norm.weight",
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
}
# Half a step over the largest number of what shares a scale, and how many columns (and rows) do.
BOUNDS = {
    "int8": (1 / 127 / 2, None, 1),
    "int4_g64": (1 / 7 / 2, 64, 1),
    "int3_g64": (1 / 3 / 2, 64, 1),
    "fp8": (2.0**-4, 1, 1),  # of each number, above subnormals
    "mxfp8": (2.0**-3, 1, 1),  # saturates up to an eighth
    "nvfp4": (1 / 6, 16, 1),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("synthetic") / "source")


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_recipe_converts_loads_and_decodes(recipe: str, source: Path, tmp_path: Path) -> None:
    """Dequantised numbers are as near the source as the format promises, and the errors are those reported.

    Loading the source with the recipe gives the same model, to the last bit.
    """
    manifest = converted(source, tmp_path / "out", recipe)
    tensors = read_released(source)
    experts = [f"model.layers.2.block_sparse_moe.experts.{e}.w2.weight" for e in range(6)]
    wanted = {path: tensors[name] for path, name in SOURCES.items()}
    wanted["layers.2.moe.experts.down"] = np.stack([tensors[name] for name in experts])
    for path, w in wanted.items():
        got, entry = numbers(tmp_path / "out", path), manifest.entries[path]
        rms = np.sqrt(np.mean((got - w) ** 2) / np.mean(w**2))
        assert entry.rms_error == pytest.approx(rms, rel=1e-4, abs=1e-9), path
        assert entry.rms_error <= entry.rms_error_nearest * (1 + 1e-6)
        if entry.format in ("bfloat16", "float32"):
            np.testing.assert_array_equal(got, w)
            continue
        share, group, _ = BOUNDS[entry.format]
        group = group or w.shape[-1]
        most = np.abs(w).reshape(*w.shape[:-1], -1, group).max(-1)
        limit = np.repeat(most, group, axis=-1) * share * (1 + 2.0**-7)  # scales are bfloat16 at worst
        if entry.format == "fp8":
            limit = limit + np.abs(w).max() * 2.0**-10 / 448
        if entry.format == "mxfp8":
            limit = limit + np.repeat(np.abs(w).reshape(*w.shape[:-1], -1, 32).max(-1), 32, -1) * 2.0**-17
        if entry.rms_error == entry.rms_error_nearest:
            assert np.all(np.abs(got - w) <= limit), path
        else:  # a group may give up its largest numbers, if all of it gains by that
            squares, bound = (x.reshape(*w.shape[:-1], -1, group).sum(-1) for x in ((got - w) ** 2, limit**2))
            assert np.all(squares <= bound), path
    prompt = [[5, 6, 7, 8], [300, 2, 9, 9]]
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    ours = mmx_jax.load(tmp_path / "out", dtype="float32", max_length=64, batch=2)
    theirs = mmx_jax.load(source, dtype="float32", max_length=64, batch=2, recipe=recipe)
    assert [a.token_ids for a in ours.generate(prompt, sampling)] == [
        a.token_ids for a in theirs.generate(prompt, sampling)
    ]
    np.testing.assert_array_equal(ours.logits(prompt), theirs.logits(prompt))


def read_released(source: Path) -> dict[str, np.ndarray]:
    """The tensors in float64, by names without the prefix."""
    found: dict[str, np.ndarray] = {}
    for file in source.glob("*.safetensors"):
        found |= load_file(file)
    return {name.removeprefix("language_model."): a.astype(np.float64) for name, a in found.items()}


def test_a_fused_save_converts_to_the_same(tmp_path: Path) -> None:
    """transformers' text-only names: gate and up of all experts in one tensor."""
    manifest = converted(GOLDENS / "tiny_text", tmp_path / "out", "int8")
    path = next(p for p in manifest.entries if p.endswith("moe.experts.up"))
    layer = path.split(".")[1]
    fused = exact(read_all(GOLDENS / "tiny_text"), f"model.layers.{layer}.mlp.experts.gate_up_proj")
    up = fused[:, fused.shape[1] // 2 :]
    got = numbers(tmp_path / "out", path)
    assert np.all(np.abs(got - up) <= np.abs(up).max(-1, keepdims=True) / 127 * 0.5001)


def test_the_directory_is_complete_in_itself(checkpoint: Path, tmp_path: Path) -> None:
    """Text in and text out, from the converted directory alone."""
    converted(checkpoint, tmp_path / "out", "bf16")
    names = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "recipe.json"}
    assert names < {f.name for f in (tmp_path / "out").iterdir()}
    for name in names - {"recipe.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    answers = [
        mmx_jax.load(directory, dtype="float32", max_length=64).generate(
            "the cat", SamplingParams(max_new_tokens=5)
        )
        for directory in (tmp_path / "out", checkpoint)
    ]
    assert answers[0][0].token_ids == answers[1][0].token_ids
    assert answers[0][0].text == answers[1][0].text


def test_restored_straight_to_eight_devices(source: Path, tmp_path: Path) -> None:
    """In another process that has eight: split over experts, over features, over k, and whole."""
    manifest = converted(source, tmp_path / "out", "int4_g64", layers=(2, 3))
    context = multiprocessing.get_context("spawn")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    try:
        with context.Pool(1) as pool:
            digests = pool.apply(split_digests, (tmp_path / "out",))
    finally:
        del os.environ["XLA_FLAGS"]
    expected = manifest.entries["layers.2.moe.experts.up"].digests
    assert digests == [expected] * 4


def split_digests(directory: Path) -> list[dict[str, str]]:
    path, found = "layers.2.moe.experts.up", []
    for spec in ((), ("d",), (None, "d"), (None, None, "d")):
        size = 2 if spec[:1] == ("d",) else 4 if spec[2:] else 8  # 6 experts, 192 features, 4 groups
        mesh = Mesh(np.asarray(jax.devices()[:size]), ("d",))
        place = NamedSharding(mesh, PartitionSpec(*spec))
        buffers = restore(directory, Manifest.read(directory), [path], lambda *_, p=place: p)[path]
        assert all(b.sharding == place for b in buffers.values())
        if spec:
            assert all(b.addressable_shards[0].data.size * size == b.size for b in buffers.values())
        found.append({name: checkpoint._digest(np.asarray(b)) for name, b in buffers.items()})
    return found


# --- Stopped and continued ---


def convert_for(seconds: float, source: Path, directory: Path) -> None:
    """Convert in a process that a timer kills."""
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    converted(source, directory, "int4_g64")
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_and_ends_equal(source: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mmx_jax.conversion", "tests.synthetic"])

    def run(seconds: float, directory: Path) -> int | None:
        child = context.Process(target=convert_for, args=(seconds, source, directory))
        child.start()
        child.join()
        return child.exitcode

    whole = tmp_path / "whole"
    assert run(0, whole) == 0
    rng = np.random.default_rng(0)
    killed = 0
    while killed < 20:
        directory = tmp_path / f"killed{killed}"
        for _ in range(3):
            code = run(float(rng.uniform(0.05, 4)), directory)
            assert code in (0, -signal.SIGALRM)
            killed += code != 0
        assert run(0, directory) == 0
        assert (directory / checkpoint.MANIFEST).read_bytes() == (whole / checkpoint.MANIFEST).read_bytes()
        assert arrays(directory) == arrays(whole)
        shutil.rmtree(directory)


def test_in_two_goes(source: Path, tmp_path: Path) -> None:
    """Some layers now and the rest later: the same in the end; before that it says what it lacks."""
    whole = converted(source, tmp_path / "whole", "int8")
    converted(source, tmp_path / "out", "int8", layers=(2, 3))
    with pytest.raises(CheckpointError, match=r"not complete, it lacks layers\.0, layers\.1$"):
        mmx_jax.load(tmp_path / "out")
    manifest = converted(source, tmp_path / "out", "int8")
    assert manifest.entries == whole.entries
    assert arrays(tmp_path / "out") == arrays(tmp_path / "whole")
    before = arrays(tmp_path / "out")
    assert prepare(source, tmp_path / "out", recipes.load("int8")).remaining == {}
    assert converted(source, tmp_path / "out", "int8") == manifest
    assert arrays(tmp_path / "out") == before


def test_what_an_interrupted_part_left_is_not_trusted(source: Path, tmp_path: Path) -> None:
    """Files of a part that the manifest does not name are made again, whatever is in them."""
    whole = converted(source, tmp_path / "whole", "bf16")
    converted(source, tmp_path / "out", "bf16", layers=(0, 1))
    for part in ("layers.1", "layers.2.partial_save", "layers.2.partial_save.orbax-checkpoint-tmp"):
        left = tmp_path / "out" / "parts" / part
        shutil.copytree(tmp_path / "out" / "parts" / "layers.0", left)
        (left / "commit_success.txt").unlink()
    assert converted(source, tmp_path / "out", "bf16").entries == whole.entries
    assert arrays(tmp_path / "out") == arrays(tmp_path / "whole")
    assert {place.name for place in (tmp_path / "out" / "parts").iterdir()} == whole.parts.keys()


def test_killed_while_it_began(source: Path, tmp_path: Path) -> None:
    """Half a manifest and nothing else; or no part yet, and not all files of the tokenizer."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json.partial").write_text('{"version"')
    whole = converted(source, out, "bf16", layers=(0, 1))
    begun = tmp_path / "begun"
    begun.mkdir()
    dataclasses.replace(whole, parts={}).write(begun)
    assert converted(source, begun, "bf16", layers=(0, 1)) == whole
    assert {f.name for f in begun.iterdir()} == {"config.json", "manifest.json", "parts", "recipe.json"}


def test_the_indexer_can_be_added(tmp_path: Path) -> None:
    source = GOLDENS / "tiny_text"
    whole = converted(source, tmp_path / "whole", "int8")
    without = converted(source, tmp_path / "out", "int8", attention="dense")
    assert not any(".indexer." in path for path in without.entries)
    with pytest.raises(CheckpointError, match=r"indexer.* is missing.*--attention dense"):
        mmx_jax.load(tmp_path / "out")
    before = arrays(tmp_path / "out")
    with pytest.raises(InputError, match=r"config\.json: is of another model than the source's"):
        converted(GOLDENS / "tiny_vl", tmp_path / "out", "int8", only="indexer")
    manifest = converted(source, tmp_path / "out", "int8", only="indexer")
    assert {p: e for p, e in manifest.entries.items() if ".indexer." not in p} == without.entries
    assert manifest.entries == whole.entries
    after = arrays(tmp_path / "out")
    assert {place: after[place] for place in before} == before
    ids = load_file(source / "golden.safetensors")["input_ids"].tolist()
    logits = [mmx_jax.load(tmp_path / name, max_length=64, batch=2).logits(ids) for name in ("out", "whole")]
    np.testing.assert_array_equal(*logits)
    with pytest.raises(InputError, match="was made with the indexer; there is none to add"):
        converted(source, tmp_path / "whole", "int8", only="indexer")


# --- Refused ---


def test_another_recipe_source_or_attention_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(source, out, "bf16", layers=(0, 1))
    with pytest.raises(InputError, match="was made with another recipe"):
        converted(source, out, "int8")
    with pytest.raises(InputError, match="was made with --attention sparse"):
        converted(source, out, "bf16", attention="dense")
    other = write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="was made from another source"):
        converted(other, out, "bf16")
    assert converted(source, out, "bf16").parts.keys() >= {"layers.2", "head"}


def test_a_relative_place(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(source), "out", "--recipe", "int8", "--verify"]) == 0
    assert len(mmx_jax.load("out", max_length=64, layers=1).tree.layers) == 1


@pytest.mark.parametrize("name", ["a[b]c", "a*c", "a?c", "a\\c"])
def test_a_place_that_would_be_a_pattern_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in a path for a pattern"):
        converted(source, tmp_path / name, "int8")
    assert not (tmp_path / name).exists()


def test_what_is_lost_is_converted_again(whole: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "parts" / "layers.1")
    (out / "parts" / "head" / "state" / "head.data" / "0.0").write_bytes(b"short")
    (out / "config.json").unlink()
    (out / "config.json.partial").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file; converting again copies it"):
        verify(out, silent)
    conversion = prepare(source, out, recipes.load("int8"))
    assert conversion.remaining.keys() == {"layers.1", "head"}
    convert(conversion, silent)
    assert arrays(out) == arrays(whole)
    assert (out / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
    assert not (out / "config.json.partial").exists()
    verify(out, silent)


def test_what_was_copied_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    """A tokenizer that changes in the source halfway is not in the result, and verify knows what is."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(source, mine)
    (mine / "tokenizer.json").write_text("{}")
    converted(mine, out, "bf16", layers=(0, 1))
    (mine / "tokenizer.json").write_text('{"changed": 1}')
    converted(mine, out, "bf16")
    assert (out / "tokenizer.json").read_text() == "{}"
    verify(out, silent)


def test_verify_says_what_is_not_as_it_was_made(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "recipe.json").write_text('{"formats": {"*": "fp8"}}')
    assert main([str(out), "--verify"]) == 2
    assert "recipe.json: is not what was copied" in capsys.readouterr().err
    shutil.copy(whole / "recipe.json", out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert main([str(out), "--verify"]) == 2
    assert "config.json: is not what was copied" in capsys.readouterr().err


def test_two_at_a_time_are_refused(source: Path, tmp_path: Path) -> None:
    conversion = prepare(source, tmp_path / "out", recipes.load("bf16"))
    (tmp_path / "out").mkdir()
    writer = checkpoint.Writer(tmp_path / "out", conversion.identity)
    with pytest.raises(CheckpointError, match="another conversion is writing to it"):
        convert(conversion, silent)
    writer.close()
    convert(conversion, silent)


def test_a_damaged_source_tensor_is_named_and_nothing_complete_is_lost(tmp_path: Path) -> None:
    """NaN in one expert of the last layer: the layers before it stay, and go into the repaired conversion."""
    source = write_checkpoint(tmp_path / "source")
    file = source / "layer-2.safetensors"
    good = load_file(file)
    name = "language_model.model.layers.2.block_sparse_moe.experts.4.w3.weight"
    bad = {**good, name: good[name].copy()}
    bad[name][7, 9] = np.nan
    save_file(bad, file)
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        converted(source, tmp_path / "out", "int4_g64")
    assert Manifest.read(tmp_path / "out").parts.keys() == {"embed", "layers.0", "layers.1"}
    assert {p.name for p in (tmp_path / "out" / "parts").iterdir()} == {"embed", "layers.0", "layers.1"}
    save_file(good, file)
    converted(source, tmp_path / "out", "int4_g64")
    assert verify(tmp_path / "out", silent) > 0


def limited(source: Path, directory: Path, queue: "multiprocessing.Queue[str]") -> None:
    """Convert where no file may be larger than 40 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    try:
        converted(source, directory, "bf16")
    except CheckpointError as error:
        queue.put(str(error))


def test_no_room_for_a_file(source: Path, tmp_path: Path) -> None:
    """The error names the part; what was complete before stays, and the same conversion goes on."""
    out = tmp_path / "out"
    converted(source, out, "bf16", layers=(1, 2))
    before = arrays(out)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=limited, args=(source, out, queue))
    child.start()
    child.join()
    message = queue.get()
    assert f"{out}/parts/layers.0: could not be written: " in message
    assert os.strerror(errno.EFBIG) in message
    assert {place: array for place, array in arrays(out).items() if place in before} == before
    assert verify(out, silent) > 0
    converted(source, out, "bf16")
    assert verify(out, silent) > 0


def test_too_little_room_is_said_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"out: 6\.\d MB to write and 1\.0 MB free"):
        converted(source, tmp_path / "out", "bf16")


def damage(place: Path, what: str) -> None:
    array = place / "state" / "layers.1.moe.experts.up.data"
    file = next(f for f in array.iterdir() if not f.name.startswith("."))
    if what == "flip":
        content = bytearray(file.read_bytes())
        content[1234] ^= 4
        file.write_bytes(content)
    elif what == "short":
        os.truncate(file, 100)
    elif what == "no file":
        file.unlink()
    elif what == "no array":
        shutil.rmtree(array)
    elif what == "no part":
        shutil.rmtree(place)
    else:
        (array / ".zarray").write_text("{")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "out"
    converted(source, directory, "int8")
    return directory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, which then raises
@pytest.mark.parametrize("what", ["flip", "short", "no file", "no array", "no part", "metadata"])
def test_damage_is_found(what: str, whole: Path, tmp_path: Path) -> None:
    """By --verify, which names it; and by loading, except where bytes still make numbers."""
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    damage(broken / "parts" / "layers.1", what)
    with pytest.raises(CheckpointError, match=r"of \d+ parameters are damaged: .*parts/layers\.1: "):
        verify(broken, silent)
    if what not in ("flip", "metadata"):  # the sizes of all files are checked first
        with pytest.raises(CheckpointError, match=r"parts/layers\.1: damaged: "):
            mmx_jax.load(broken)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(version=2), "version 2, this program reads 1"),
        (lambda m: m.pop("parts"), "not a manifest of this version: KeyError('parts')"),
        (lambda m: m.update(parts={"a": {"b": {}}}), "not a manifest of this version"),
        (
            lambda m: m["parts"]["norm"]["norm.weight"].update(shape=[255], bytes=1020),
            "norm.weight is float32 [255], the model takes float32 [256]",
        ),
        (
            lambda m: m["parts"]["norm"]["norm.weight"].update(format="bfloat16", bytes=512),
            "norm.weight",
        ),
        (lambda m: m["parts"]["head"]["head"].update(format="int5"), "head: format 'int5' is none of"),
        (lambda m: m["parts"]["head"]["head"].update(format=["int8"]), "head: format ['int8'] is none of"),
        (lambda m: m["parts"]["head"]["head"].update(shape=["320", "256"]), "head: shape ['320', '256'] is"),
        (lambda m: m["parts"]["head"]["head"].update(shape=[]), "head: shape [] is none"),
        (lambda m: m["parts"]["head"]["head"].update(bytes=None), "head: bytes None: expected 83200"),
        (
            lambda m: m["parts"]["head"]["head"].update(rms_error=None),
            "head: rms_error None: expected a number",
        ),
        (lambda m: m["parts"]["head"]["head"].update(digests=[]), "head: digests: expected data, scale"),
        (lambda m: m["parts"].update({"layers.x": {}}), "not a manifest of this version"),
        (
            lambda m: m["parts"].update(
                {"layers.1.more": {"layers.1.attention.q": m["parts"]["layers.1"]["layers.1.attention.q"]}}
            ),
            "some parameters are in two parts",
        ),
        (lambda m: m["parts"]["layers.1"].pop("layers.1.attention.q"), "layers.1.attention.q is missing"),
        (
            lambda m: m["parts"]["norm"].update({"norm.more": m["parts"]["norm"]["norm.weight"]}),
            "norm.more is not part of the model",
        ),
    ],
)
def test_a_manifest_that_does_not_fit(edit, message: str, whole: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    edit(manifest)
    (broken / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as error:
        mmx_jax.load(broken)
    assert str(broken) in str(error.value)
    assert message in str(error.value)


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(source), str(out), "--recipe", "fp8", "--plan"]) == 0
    plan, _ = capsys.readouterr()
    assert not out.exists()
    assert "skipped" not in plan
    for text in ("layers.2", "bfloat16", "fp8", "free disk: ", "peak memory: "):
        assert text in plan
    assert main([str(source), str(out), "--recipe", "fp8", "--layers", "0:2", "--verify"]) == 0
    _, err = capsys.readouterr()
    assert "5 of them now" in err
    assert "every digest is right" in err
    assert main([str(source), str(out), "--recipe", "fp8", "--plan"]) == 0
    assert "5 parts are complete, 1 remain" in capsys.readouterr().out
    assert main([str(out), "--verify"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}"], "give SRC and DST, or DST alone with --verify"),
        (["{source}", "{tmp}/out"], "--recipe is missing"),
        (["{source}", "{tmp}/out", "--recipe", "int5"], "recipe 'int5': expected bf16"),
        (["{tmp}/none", "{tmp}/out", "--recipe", "bf16"], "none: no such directory"),
        (["{tmp}", "{tmp}/out", "--recipe", "bf16"], "config.json: no such file"),
        (["{source}", "{source}", "--recipe", "bf16"], "exists and is no converted checkpoint"),
        (["{whole}", "{tmp}/out", "--recipe", "bf16"], "is converted already; convert from the original"),
        (["{source}", "{tmp}/out", "--recipe", "bf16", "--layers", "2"], "--layers '2': expected A:B"),
        (
            ["{source}", "{tmp}/out", "--recipe", "bf16", "--layers", "2:4"],
            "layers 2:4: the model has layers 0:3",
        ),
        (
            ["{source}", "{tmp}/out", "--recipe", "bf16", "--only", "indexer"],
            "adds to a converted checkpoint",
        ),
        (["{source}", "{tmp}/out", "--recipe", "bf16", "--attention", "full"], "attention 'full': expected"),
        (["{source}", "--verify"], "manifest.json: no such file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    source: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"source": source, "whole": whole, "tmp": tmp_path}
    assert main([a.format(**places) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_decoding_a_converted_checkpoint(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command; with its plan, which reads no weights; and with kernels, which take their own order."""
    arguments = ["--checkpoint", str(whole), "--prompt-ids", "5,6,7", "--max-new-tokens", "4", "--json"]
    assert decode([*arguments, "--plan"]) == 0
    plan, _ = capsys.readouterr()
    assert "in 54 parameters" in plan
    assert "in int8" in plan
    found = []
    for kernels in ("reference", "interpret"):
        assert decode([*arguments, "--kernels", kernels, "--ignore-eos"]) == 0
        found.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert found[0] == found[1]
    assert decode([*arguments, "--layers", "2", "--attention", "dense"]) == 0


def test_inspect(whole: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(source), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["experts"], facts["converted"]) == (3, 6, False)
    n_bytes = sum(t.nbytes for f in source.glob("*.safetensors") for t in load_file(f).values())
    assert sum(f["bytes"] for f in facts["formats"].values()) == n_bytes
    assert inspect([str(whole), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["missing_parts"] == []
    on_disk = sum(len(content) for place, content in arrays(whole).items() if not place.endswith(".zarray"))
    assert sum(f["bytes"] for f in facts["formats"].values()) == on_disk
    int8 = facts["formats"]["int8"]
    assert int8["rms_error"] == max(
        entry.rms_error for entry in Manifest.read(whole).entries.values() if entry.format == "int8"
    )
    w = read_released(source)[SOURCES["head"]]
    got = numbers(whole, "head")
    assert int8["rms_error"] >= np.sqrt(np.mean((got - w) ** 2) / np.mean(w**2)) * (1 - 1e-4)
    assert inspect([str(whole)]) == 0
    assert f"largest rms error in int8: {int8['worst']}" in capsys.readouterr().out
    assert inspect([str(whole / "none")]) == 2
    assert "none: no such directory" in capsys.readouterr().err


def test_a_converted_checkpoint_takes_no_recipe(whole: Path) -> None:
    with pytest.raises(InputError, match="is converted already"):
        mmx_jax.load(whole, recipe="int8")


# --- Memory ---


def peak_anonymous(source: Path, directory: Path, queue: "multiprocessing.Queue[int]") -> None:
    """Convert, and watch how much memory that no file backs is in use beyond what was at the start."""
    import threading

    def anonymous() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    jax.devices()
    conversion = prepare(source, directory, recipes.load("bf16"))
    start, peak, ended = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    convert(conversion, silent)
    ended.set()
    watcher.join()
    queue.put(peak - start)


@pytest.mark.slow
def test_memory_is_a_layer_of_sources_and_a_block(tmp_path: Path) -> None:
    """1 GB in 8 layers of 128 MB, in the recipe that shrinks nothing."""
    source = write_checkpoint(
        tmp_path / "source",
        hidden_size=1024,
        expert_intermediate_size=1024,
        num_experts=20,
        moe_layers=[1] * 8,
        sparse_layers=[1] * 8,
    )
    layer = (source / "layer-0.safetensors").stat().st_size
    assert layer > 120e6
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=peak_anonymous, args=(source, tmp_path / "out", queue))
    child.start()
    peak = queue.get()
    child.join()
    assert peak < layer + 64e6  # blocks of 16 MB in float32, and what allocators keep
