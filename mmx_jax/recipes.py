"""Which format each weight is held in: patterns of parameter paths, the first that fits.

    {"formats": {"*.moe.experts.*": "int4_g64", "*": "int8"}}

Router, norms and embedding are never quantised and ask no recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mmx_jax.config import bundled, read_json
from mmx_jax.errors import ConfigError
from pallas_kernels.formats import FORMATS

RECIPES = ("bf16", "int8", "int4_g64", "int3_g64", "fp8", "mxfp8", "nvfp4")
# Selection is discrete: what chooses blocks is held in 8 bits or more.
INDEXER_FORMATS = ("bfloat16", "float32", "int8", "int8_g64", "fp8", "mxfp8")


@dataclass(frozen=True)
class Recipe:
    """Pattern -> format, in order; the last pattern is `*`."""

    formats: Mapping[str, str]

    def format_of(self, path: str) -> str:
        """The format of the weight at `path`, such as `layers.3.moe.experts.gate`."""
        return next(form for pattern, form in self.formats.items() if fnmatchcase(path, pattern))


def load(name: str) -> Recipe:
    """A recipe of the project by its name, or one from a JSON file; ConfigError says what is wrong."""
    path = bundled(f"recipes/{name}.json") if name in RECIPES else Path(name)
    if name not in RECIPES and path.suffix != ".json":
        raise ConfigError(f"recipe {name!r}: expected {', '.join(RECIPES)} or a .json file")
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
    return recipe
