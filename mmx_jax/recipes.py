"""Which format each weight is held in: patterns of parameter paths, the first that fits.

    {"formats": {"*.moe.experts.*": "int4_g64", "*": "int8"}}

Router, norms and embedding are never quantised: only the last pattern, `*`, may fit them and say otherwise.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mmx_jax.config import bundled, read_json
from mmx_jax.errors import ConfigError
from pallas_kernels.formats import FORMATS

RECIPES = ("bf16", "int8", "int4_g64", "int3_g64", "fp8", "mxfp8", "nvfp4")
UNQUANTISED = ("bfloat16", "float32")
# Selection is discrete: what chooses blocks is held in 8 bits or more.
INDEXER_FORMATS = (*UNQUANTISED, "int8", "int8_g64", "fp8", "mxfp8")
_MATRICES = ("gate", "up", "down")
_NORM = "norms are small and every number passes them"
_ROUTER = "the router's choice is discrete"
# Every kind of parameter below a layer -> why no recipe may quantise it, or None.
_OF_A_LAYER: Mapping[str, str | None] = {
    **dict.fromkeys(("input_norm.weight", "post_norm.weight"), _NORM),
    **dict.fromkeys(
        (f"attention.{name}_norm.weight" for name in ("q", "k", "indexer.q", "indexer.k")), _NORM
    ),
    **dict.fromkeys(("moe.router.weight", "moe.router.bias"), _ROUTER),
    **dict.fromkeys(f"attention.{name}" for name in ("q", "k", "v", "o", "indexer.q", "indexer.k")),
    **dict.fromkeys(f"{mlp}.{name}" for mlp in ("mlp", "moe.experts", "moe.shared") for name in _MATRICES),
}
_MAX_LAYERS = 256  # a recipe is read without a model: patterns are tried on the layers of any
# Parameter -> the same, of a model of so many layers, all of which have all kinds.
PARAMETERS: Mapping[str, str | None] = {
    "embed": "the embedding is read one row at a time",
    "norm.weight": _NORM,
    "head": None,
    **{f"layers.{i}.{kind}": why for i in range(_MAX_LAYERS) for kind, why in _OF_A_LAYER.items()},
}


@dataclass(frozen=True)
class Recipe:
    """Pattern -> format, in order; the last pattern is `*`."""

    formats: Mapping[str, str]

    def pattern_of(self, path: str) -> str:
        """The pattern that decides on `path`, such as `layers.3.moe.experts.gate`."""
        return next(pattern for pattern in self.formats if fnmatchcase(path, pattern))

    def format_of(self, path: str) -> str:
        """The format of the weight at `path`."""
        return self.formats[self.pattern_of(path)]

    @property
    def digest(self) -> str:
        """Differs between recipes that may give different formats."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({"formats": dict(self.formats)}, indent=2) + "\n"


def load(name: str) -> Recipe:
    """A recipe of the project by its name, or one from a JSON file; ConfigError says what is wrong."""
    if name in RECIPES:
        return read(bundled(f"recipes/{name}.json"))
    if not name.endswith(".json"):
        raise ConfigError(f"recipe {name!r}: expected {', '.join(RECIPES)} or a .json file")
    return read(Path(name))


def read(path: Path) -> Recipe:
    """The recipe in a file."""
    data = read_json(path)
    formats = data.get("formats")
    if data.keys() != {"formats"} or not isinstance(formats, dict) or list(formats)[-1:] != ["*"]:
        raise ConfigError(
            f'{path}: formats: expected an object from patterns to formats, the last pattern "*", and no more'
        )
    allowed = [name for name in FORMATS if name != "float64"]
    for pattern, form in formats.items():
        if form not in allowed:
            raise ConfigError(f"{path}: {pattern!r}: format {form!r} is none of {', '.join(allowed)}")
    recipe, unused = Recipe(formats), set(formats) - {"*"}
    for name, exempt in PARAMETERS.items():
        pattern = recipe.pattern_of(name)
        form = formats[pattern]
        unused.discard(pattern)
        if exempt and pattern != "*" and form not in UNQUANTISED:
            raise ConfigError(
                f"{path}: {pattern!r} asks for {name} in {form}, which is never quantised: {exempt}; a"
                " narrower pattern would do"
            )
        if ".indexer." in name and not exempt and form not in INDEXER_FORMATS:
            raise ConfigError(
                f"{path}: {name}: the indexer would be held in {form}: it chooses blocks and needs 8 bits or"
                f" more ({', '.join(INDEXER_FORMATS)})"
            )
    if unused:
        raise ConfigError(
            f"{path}: {sorted(unused)[0]!r} fits no parameter, or only such as earlier patterns fit"
        )
    return recipe
