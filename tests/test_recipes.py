"""Recipes: which format each weight is held in."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from mmx_jax import recipes
from mmx_jax.errors import ConfigError
from mmx_jax.loading import Settings, Source
from mmx_jax.model import abstract_model
from mmx_jax.params import Weight, parameters
from tests.conftest import GOLDENS


def formats(name: str) -> dict[str, str]:
    config = Source(GOLDENS / "tiny_text", Settings()).config
    model = abstract_model(config, "bfloat16", recipes.load(name))
    return {".".join(map(str, p)): m.format for p, m in nnx.iter_modules(model) if isinstance(m, Weight)}


def test_int4_quantises_experts_and_keeps_the_rest_in_8_bits() -> None:
    found = formats("int4_g64")
    assert found.pop("embed") == "bfloat16"
    assert {p for p, f in found.items() if f == "int4_g64"} == {p for p in found if ".moe.experts." in p}
    assert {f for p, f in found.items() if ".moe.experts." not in p} == {"int8"}


def test_recipes_know_every_kind_of_parameter() -> None:
    """Those of a model with dense and sparse layers, and which of them are weights that may be rounded."""
    model = abstract_model(Source(GOLDENS / "tiny_text", Settings()).config, "bfloat16")
    weights = {".".join(map(str, p)) for p, m in nnx.iter_modules(model) if isinstance(m, Weight)}
    for path in parameters(model):
        assert (recipes.PARAMETERS[path] is None) == (path in weights - {"embed"}), path
    kinds = {path.split(".", 2)[-1] for path in parameters(model)}
    assert {path.split(".", 2)[-1] for path in recipes.PARAMETERS} <= kinds | {"embed", "head"}


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_indexer_has_8_bits_or_more(name: str) -> None:
    found = formats(name)
    index = [f for p, f in found.items() if ".indexer." in p]
    assert index
    assert set(index) <= {"bfloat16", "int8", "fp8", "mxfp8"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"formats": {"*": "int4_g64"}},
            "layers.0.attention.indexer.q: the indexer would be held in int4_g64",
        ),
        (
            {"formats": {"*.indexer.k": "int3_g64", "*": "int8"}},
            "the indexer would be held in int3_g64",
        ),
        (
            {"formats": {"*.moe.*": "int4_g64", "*": "int8"}},
            "'*.moe.*' asks for layers.0.moe.router.weight in int4_g64, which is never quantised",
        ),
        ({"formats": {"*.bias": "fp8", "*": "int8"}}, "asks for layers.0.moe.router.bias in fp8"),
        ({"formats": {"*norm*": "int8", "*": "int8"}}, "asks for norm.weight in int8"),
        ({"formats": {"emb*": "int8", "*": "int8"}}, "asks for embed in int8"),
        ({"formats": {"layers.7.*": "int4_g64", "*": "int8"}}, "asks for layers.7."),
        (
            {"formats": {"layers.7.attention.*.q": "int4_g64", "*": "int8"}},
            "layers.7.attention.indexer.q: the",
        ),
        ({"formats": {"layers.70.moe.router.*": "int8", "*": "int8"}}, "layers.70.moe.router.weight in int8"),
        (
            {"formats": {"layers.7.*norm*": "int8", "*": "int8"}},
            "asks for layers.7.input_norm.weight in int8",
        ),
        ({"formats": {"*.moe.expert.*": "int4_g64", "*": "int8"}}, "'*.moe.expert.*' fits no parameter"),
        ({"formats": {"*": "int8"}, "layers": 3}, "and no more"),
        ({"formats": {"*": ["int8"]}}, "format ['int8'] is none of bfloat16"),
        ({"formats": {"*": "float64"}}, "format 'float64' is none of bfloat16"),
        ({"formats": {"*": "int5"}}, "format 'int5' is none of bfloat16"),
        ({"formats": {"*.mlp.*": "int8"}}, 'the last pattern "*"'),
        ({"formats": []}, 'the last pattern "*"'),
        ({}, 'the last pattern "*"'),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(content: dict, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        recipes.load(str(file))
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_what_is_never_quantised_may_be_named_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"formats": {"*.moe.router.*": "float32", "*": "int8"}}))
    assert recipes.load(str(file)).format_of("head") == "int8"


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="recipe 'int5': expected bf16, int8, int4_g64"):
        recipes.load("int5")


def test_weights_are_rounded_while_they_are_loaded() -> None:
    """int8 with a scale per row: off by at most half a step, which is the row's largest number / 127."""
    plain, rounded = (
        Source(GOLDENS / "tiny_text", Settings(dtype="float32", recipe=r)).read(pack=False)
        for r in (None, "int8")
    )
    for path in ("layers.1.attention.q", "head"):
        a, b = (np.asarray(_find(tree, path).tensor().dequantize()) for tree in (plain, rounded))
        assert np.all(np.abs(a - b) <= np.abs(a).max(-1, keepdims=True) / 127 * 0.5001)
        assert np.any(a != b)
    assert parameters(plain).keys() == parameters(rounded).keys()


def _find(tree: nnx.Module, path: str) -> Weight:
    for name, module in nnx.iter_modules(tree):
        if ".".join(map(str, name)) == path:
            assert isinstance(module, Weight)
            return module
    raise KeyError(path)
