"""Which format each weight is held in: patterns of parameter paths, the first that fits.

    {"formats": {"*.moe.experts.*": "int4_g64", "*": "int8"}}

Router, norms and embedding are never quantised and ask no recipe.
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
# A path of each kind that no recipe may quantise -> why.
_EXEMPT = {
    "layers.0.moe.router.weight": "the router's choice is discrete",
    "layers.0.moe.router.bias": "the router's choice is discrete",
    "layers.0.input_norm.weight": "norms are small and every number passes them",
    "layers.0.post_norm.weight": "norms are small and every number passes them",
    "layers.0.attention.q_norm.weight": "norms are small and every number passes them",
    "layers.0.attention.k_norm.weight": "norms are small and every number passes them",
    "layers.0.attention.indexer.q_norm.weight": "norms are small and every number passes them",
    "layers.0.attention.indexer.k_norm.weight": "norms are small and every number passes them",
    "norm.weight": "norms are small and every number passes them",
    "embed": "the embedding is read one row at a time",
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
    formats = read_json(path).get("formats")
    if not isinstance(formats, dict) or list(formats)[-1:] != ["*"]:
        raise ConfigError(
            f'{path}: formats: expected an object from patterns to formats, the last pattern "*"'
        )
    for pattern, form in formats.items():
        if form not in FORMATS:
            raise ConfigError(f"{path}: {pattern!r}: format {form!r} is none of {', '.join(FORMATS)}")
    recipe = Recipe(formats)
    for part in ("q", "k"):
        form = recipe.format_of(f"layers.0.attention.indexer.{part}")
        if form not in INDEXER_FORMATS:
            raise ConfigError(
                f"{path}: the indexer would be held in {form}: it chooses blocks and needs 8 bits or more"
                f" ({', '.join(INDEXER_FORMATS)})"
            )
    for exempt, reason in _EXEMPT.items():
        pattern = recipe.pattern_of(exempt)
        if pattern != "*" and formats[pattern] not in UNQUANTISED:
            raise ConfigError(
                f"{path}: {pattern!r} asks for {exempt} in {formats[pattern]}, which is never quantised:"
                f" {reason}; a narrower pattern would do"
            )
    return recipe
