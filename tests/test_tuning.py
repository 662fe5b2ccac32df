"""The kernels' parameters: where they come from, and how the best are found."""

import itertools
import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import tuning


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    tuning._tuned.cache_clear()
    return tmp_path


def write(directory: Path, parameters: dict) -> None:
    file = directory / tuning.file_name(jax.devices()[0].device_kind)
    file.write_text(json.dumps({"parameters": parameters}))


def test_a_device_without_a_file_has_the_defaults(directory: Path) -> None:
    assert tuning.parameters("moe") == {"warps": 4, "stages": 3}


def test_a_tuned_device_has_its_own(directory: Path) -> None:
    write(directory, {"block_attention": {"programs": 77, "keys": 32}})
    assert tuning.parameters("block_attention") == {"programs": 77, "keys": 32}
    assert tuning.parameters("moe") == {"warps": 4, "stages": 3}
    with tuning.trying("block_attention", {"programs": 5, "keys": 16}):
        assert tuning.parameters("block_attention")["programs"] == 5
    assert tuning.parameters("block_attention")["programs"] == 77


def test_a_file_with_other_parameters_is_refused_by_name(directory: Path) -> None:
    write(directory, {"moe": {"threads": 4}})
    with pytest.raises(ValueError, match=r"cpu\.json: moe has \['threads'\]; expected"):
        tuning.parameters("moe")


def test_the_best_has_the_least_geometric_mean() -> None:
    """Two workloads: (8, 2) has 2 and 5, (4, 4) has 1 and 9; the default (4, 3) has 4 and 10."""
    times = {(8, 2): (2.0, 5.0), (4, 4): (1.0, 9.0), (4, 3): (4.0, 10.0)}
    chosen, gain = tuning.best("moe", lambda v: times.get((v["warps"], v["stages"]), (math.inf, math.inf)))
    assert chosen == {"warps": 4, "stages": 4}
    assert gain == pytest.approx((40 / 9) ** 0.5)


@pytest.mark.filterwarnings("ignore:'pallas_kernels.tuning' found in sys.modules:RuntimeWarning")
def test_the_program_tries_its_candidates_on_the_kernels(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest is written, by whatever parameters the kernels see while they are traced."""
    seen = []

    def kernel() -> None:
        seen.append(dict(tuning.parameters("moe")))

    def time(compiled, inputs) -> float:
        compiled(*inputs[0])
        return abs(seen[-1]["stages"] - 2) + seen[-1]["warps"]

    work = SimpleNamespace(kernel=kernel, inputs=[()])
    monkeypatch.setattr("pallas_kernels.workloads.workloads", lambda *_: [work])
    monkeypatch.setattr("pallas_kernels.bench.time", time)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="Some GPU")])
    out = tmp_path / "some_gpu.json"
    monkeypatch.setattr(sys, "argv", ["tuning", "--op", "moe", "--out", str(out)])
    runpy.run_module("pallas_kernels.tuning", run_name="__main__")
    candidates = itertools.product(*tuning.CANDIDATES["moe"].values())
    assert seen == [dict(zip(tuning.CANDIDATES["moe"], values, strict=True)) for values in candidates]
    assert json.loads(out.read_text())["parameters"] == {"moe": {"warps": 4, "stages": 2}}


def test_file_names() -> None:
    assert tuning.file_name("NVIDIA H200") == "nvidia_h200.json"
