"""The kernels' parameters: where they come from, and how the best are found."""

import json
import math
from pathlib import Path

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


def test_file_names() -> None:
    assert tuning.file_name("NVIDIA H200") == "nvidia_h200.json"
