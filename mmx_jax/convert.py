"""The program that converts a checkpoint; see `conversion`."""

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmx_jax import recipes
from mmx_jax.command import Bars, Parser, prepare_jax, readable, run, start
from mmx_jax.errors import InputError

if TYPE_CHECKING:
    from mmx_jax.conversion import Conversion


def parser() -> Parser:
    p = Parser(
        prog="python -m mmx_jax.convert",
        description="Convert a checkpoint to the formats of a recipe; after a stop the same line goes on.",
    )
    p.add_argument("directories", nargs="+", metavar="SRC DST", help="with --verify also DST alone")
    p.add_argument("--recipe", metavar="NAME", help=f"{', '.join(recipes.RECIPES)} or FILE.json")
    p.add_argument("--plan", action="store_true", help="print what would be done, and stop")
    p.add_argument("--layers", metavar="A:B", help="only layers from A to before B, and what is in no layer")
    p.add_argument("--only", choices=["indexer"], help="add the indexer to a conversion made without it")
    p.add_argument(
        "--attention", default="sparse", help="sparse (default), or dense to leave the indexer out"
    )
    p.add_argument("--verify", action="store_true", help="read the result again and check every digest")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Bad input is one line on stderr and code 2."""
    return run(_run, parser(), argv)


def _run(args: argparse.Namespace, bars: Bars) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU would stay idle, with its memory taken
    prepare_jax()

    from mmx_jax.conversion import convert, prepare

    *sources, destination = map(Path, args.directories)
    if args.verify and not sources:
        _verify(destination, bars)
        return 0
    if len(sources) != 1:
        raise InputError("give SRC and DST, or DST alone with --verify")
    if args.recipe is None:
        raise InputError(f"--recipe is missing: {', '.join(recipes.RECIPES)} or FILE.json")
    recipe = recipes.load(args.recipe)
    conversion = prepare(sources[0], destination, recipe, _layers(args.layers), args.only, args.attention)
    if args.plan:
        _print_plan(conversion)
        return 0
    read = sum(conversion.plan.source_bytes(p) for paths in conversion.remaining.values() for p in paths)
    begin = time.perf_counter()
    manifest = convert(conversion, bars)
    seconds = time.perf_counter() - begin
    print(
        f"{destination}: {len(manifest.parts)} parts complete, {len(conversion.remaining)} of them now;"
        f" {readable(read)} of source in {seconds:.1f} s ({readable(read / seconds)}/s)",
        file=sys.stderr,
    )
    if args.verify:
        _verify(destination, bars)
    return 0


def _verify(directory: Path, bars: Bars) -> None:
    from mmx_jax import checkpoint
    from mmx_jax.config import ModelConfig

    n_bytes = checkpoint.verify(directory, bars)
    manifest, config = checkpoint.Manifest.read(directory), ModelConfig.from_dir(directory)
    missing = checkpoint.missing_parts(manifest, config)
    told = f"; not complete, it lacks {', '.join(missing)}" if missing else ""
    print(f"{directory}: {readable(n_bytes)} read, every digest is right{told}", file=sys.stderr)


def _layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise InputError(f"--layers {text!r}: expected A:B, such as 0:10")
    return int(first), int(last)


def _print_plan(c: "Conversion") -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    plan = c.plan
    sources = Counter(plan.formats.values())
    out.print(
        f"{c.source}: {readable(plan.nbytes)} in {len(plan.paths)} parameters"
        f" ({', '.join(f'{n} in {name}' for name, n in sources.items())})"
    )
    for reason, names in plan.skipped.items():
        out.print(f"skipped: {len(names)} tensors, {reason}")
    names = sorted({c.formats[p] for paths in c.remaining.values() for p in paths})
    table = Table(
        "part", "source", *names, "all", title=Text(str(c.directory)), box=None, padding=(0, 1, 0, 0)
    )
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.columns[0].min_width = max(map(len, (*c.remaining, "part")))
    total: Counter[str] = Counter()
    for part, paths in c.remaining.items():
        sizes: Counter[str] = Counter()
        for path in paths:
            sizes[c.formats[path]] += c.stored_bytes(path)
        read = sum(map(plan.source_bytes, paths))
        total += sizes + Counter({"source": read})
        cells = [readable(sizes[name]) if sizes[name] else "" for name in names]
        table.add_row(part, readable(read), *cells, readable(sizes.total()))
    cells = [readable(total[name]) for name in names]
    written = total.total() - total["source"]
    table.add_section()
    table.add_row("all", readable(total["source"]), *cells, readable(written))
    out.print(table)
    out.print(f"{len(c.parts) - len(c.remaining)} parts are complete, {len(c.remaining)} remain")
    existing = next(place for place in (c.directory, *c.directory.resolve().parents) if place.exists())
    free = readable(shutil.disk_usage(existing).free)
    out.print(f"free disk: {free}; peak memory: about {readable(c.peak_memory)}")


if __name__ == "__main__":
    start(main)
