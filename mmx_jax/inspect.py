"""The program that says what a checkpoint is, as released or converted: config, formats, sizes, errors."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmx_jax.command import Bars, Parser, readable, run, start
from mmx_jax.errors import InputError


@dataclass
class Format:
    """All parameters of one format."""

    parameters: int = 0
    numbers: int = 0
    bytes: int = 0
    rms_error: float | None = None  # of the worst parameter, as a share of its root mean square
    rms_error_nearest: float | None = None
    worst: str | None = None


def parser() -> Parser:
    p = Parser(prog="python -m mmx_jax.inspect", description="Say what a checkpoint is; no weight is read.")
    p.add_argument("checkpoint", metavar="DIR", help="a checkpoint as released, or converted")
    p.add_argument("--json", action="store_true", help="one JSON object to stdout")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Bad input is one line on stderr and code 2."""
    return run(_run, parser(), argv)


def _run(args: argparse.Namespace, bars: Bars) -> int:
    directory = Path(args.checkpoint)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory")
    facts = describe(directory)
    if args.json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def describe(directory: Path) -> dict[str, Any]:
    """What `inspect` prints, as plain data. Raises ConfigError or CheckpointError."""
    from mmx_jax import checkpoint
    from mmx_jax.config import ModelConfig
    from mmx_jax.model import abstract_model
    from mmx_jax.params import parameters
    from mmx_jax.shards import open_checkpoint
    from mmx_jax.weights import plan_load

    c = ModelConfig.from_dir(directory)
    facts: dict[str, Any] = {
        "checkpoint": str(directory),
        "layers": c.num_layers,
        "sparse_layers": sum(c.sparse_layers),
        "moe_layers": sum(c.moe_layers),
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "experts": c.num_experts,
        "experts_per_token": c.experts_per_token,
        "heads": c.num_heads,
        "kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "block_size": c.block_size,
        "top_blocks": c.top_blocks,
        "max_position": c.max_position,
    }
    formats: dict[str, Format] = {}
    if checkpoint.is_converted(directory):
        manifest = checkpoint.Manifest.read(directory)
        facts |= {"converted": True, "attention": manifest.attention, "sources": manifest.sources}
        facts["missing_parts"] = checkpoint.missing_parts(manifest, c)
        for path, entry in manifest.entries.items():
            form = formats.setdefault(entry.format, Format())
            _count(form, math.prod(entry.shape), entry.bytes)
            if form.rms_error is None or entry.rms_error > form.rms_error:
                form.rms_error, form.rms_error_nearest = entry.rms_error, entry.rms_error_nearest
                form.worst = path
    else:
        wanted = parameters(abstract_model(c, "float32"))
        plan = plan_load(open_checkpoint(directory), wanted)
        facts |= {"converted": False, "skipped": {why: len(names) for why, names in plan.skipped.items()}}
        for path, name in plan.formats.items():
            _count(formats.setdefault(name, Format()), math.prod(wanted[path].shape), plan.source_bytes(path))
    facts["formats"] = {name: vars(form) for name, form in formats.items()}
    return facts


def _count(form: Format, numbers: int, n_bytes: int) -> None:
    form.parameters += 1
    form.numbers += numbers
    form.bytes += n_bytes


def _print(facts: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    f = facts
    out.print(
        f"{f['checkpoint']}: {f['layers']} layers ({f['sparse_layers']} block-sparse, {f['moe_layers']} with"
        f" {f['experts']} experts, {f['experts_per_token']} a token), hidden size {f['hidden_size']},"
        f" vocabulary {f['vocab_size']}, {f['heads']} heads on {f['kv_heads']} of {f['head_dim']},"
        f" {f['top_blocks']} blocks of {f['block_size']}, positions up to {f['max_position']}"
    )
    if f["converted"]:
        added = "".join(f", {name} added" for name in f["sources"] if name != "all")
        out.print(f"converted, attention {f['attention']}{added}")
        if f["missing_parts"]:
            out.print(f"not complete, it lacks {', '.join(f['missing_parts'])}")
    else:
        for reason, count in f["skipped"].items():
            out.print(f"skipped: {count} tensors, {reason}")
    table = Table("format", "parameters", "numbers", "size", "bits")
    if f["converted"]:
        table.add_column("rms error")
        table.add_column("nearest")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, form in f["formats"].items():
        bits = 8 * form["bytes"] / form["numbers"]
        row = [name, str(form["parameters"]), f"{form['numbers']:,}", readable(form["bytes"]), f"{bits:.2f}"]
        if f["converted"]:
            row += [f"{form['rms_error']:.3%}", f"{form['rms_error_nearest']:.3%}"]
        table.add_row(*row)
    total = sum(form["bytes"] for form in f["formats"].values())
    table.add_section()
    table.add_row("all", "", f"{sum(form['numbers'] for form in f['formats'].values()):,}", readable(total))
    out.print(table)
    for name, form in f["formats"].items():
        if form["rms_error"]:
            out.print(f"largest rms error in {name}: {form['worst']}")


if __name__ == "__main__":
    start(main)
