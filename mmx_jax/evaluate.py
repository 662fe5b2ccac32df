"""The command: how good a checkpoint is on a text, and how far it is from another one.

Perplexity of A; against B, which is the reference: KL(B || A) of the next-token distributions, top-1
agreement, and layer by layer how far the hidden states are and which choices of experts and blocks differ.
B is another checkpoint, A itself without the recipe, or transformers' own code on A's numbers. The plain
forward runs, over windows that do not overlap and of which the first token is not predicted.
`compare` says what memory it takes, `parity` what transformers does differently.
"""

import argparse
import dataclasses
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmx_jax import command
from mmx_jax.errors import ConfigError, InputError

if TYPE_CHECKING:
    from mmx_jax.compare import Comparison, Record
    from mmx_jax.loading import Source

TRANSFORMERS = "transformers"
DEFAULT_LENGTH = 4096
# What two models must have in common for their tokens, layers, blocks and experts to be comparable.
SAME = (
    "vocab_size num_layers hidden_size moe_layers sparse_layers num_kv_heads block_size top_blocks"
    " local_blocks init_blocks num_experts experts_per_token".split()
)


def parser() -> command.Parser:
    p = command.Parser(
        prog="python -m mmx_jax.evaluate",
        description="Perplexity of a checkpoint on a text, and its distance from a reference.",
    )
    p.add_argument("--checkpoint", required=True, metavar="A", help="directory of the checkpoint to evaluate")
    p.add_argument(
        "--against",
        metavar="B",
        help="the reference: another directory, A itself (with --recipe), or the"
        f" word {TRANSFORMERS}: its code in torch, on A's numbers",
    )
    p.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        help="UTF-8 text; or a .json file with a list of token ids, or"
        " a list of such lists, which start a window each",
    )
    p.add_argument(
        "--length",
        type=int,
        metavar="L",
        help=f"tokens per window (default {DEFAULT_LENGTH}, or all that the model takes)",
    )
    p.add_argument("--tokens", type=int, default=8192, metavar="N", help="at most so many (default 8192)")
    p.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32, for A and B")
    p.add_argument("--attention", default="sparse", help="sparse (default) or dense, for A and B")
    p.add_argument("--layers", type=int, metavar="N", help="cut A and B to the first N layers")
    p.add_argument(
        "--recipe", metavar="NAME", help="round A's weights while loading: int8, int4_g64, FILE.json .."
    )
    p.add_argument("--json", action="store_true", help="one JSON object to stdout in place of the tables")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Bad input is one line on stderr and code 2."""
    return command.run(_run, parser(), argv)


def _run(args: argparse.Namespace, bars: command.Bars) -> int:
    command.prepare_jax()

    from mmx_jax.compare import Comparison, Record, run_model
    from mmx_jax.loading import Settings, Source
    from mmx_jax.plan import memory_plan

    settings = Settings(args.dtype, "reference", args.attention, args.layers, args.recipe)
    source = Source(args.checkpoint, settings)
    other, run_transformers = None, None
    if args.against == TRANSFORMERS:
        run_transformers = _transformers()
        if source.config.init_blocks and any(source.config.sparse_layers):
            warnings.warn(f"transformers ignores init_blocks {source.config.init_blocks}", stacklevel=1)
    elif args.against is not None:
        other = Source(args.against, dataclasses.replace(settings, recipe=None))
        _check_same(source, other)
    windows = _windows(args, source)
    length = max(map(len, windows))
    for each in (source, other):  # what is wrong with either is an error before anything runs
        if each is not None:
            memory_plan(each.model, 1, length).check(each.mesh)
            _ = each.weights

    record = Record(windows, source.config, np.dtype(settings.dtype), keep=args.against is not None)
    comparison = None if args.against is None else Comparison(record)
    tree = source.read(pack=False, progress=bars)
    run_model(tree, windows, record, bars)
    if comparison is not None and run_transformers is not None:
        run_transformers(tree, windows, comparison, bars)
    elif comparison is not None and other is not None:
        del tree  # both may not fit
        run_model(other.read(pack=False, progress=bars), windows, comparison, bars)
    figures = _figures(args, settings.dtype, record, comparison)
    if args.json:
        print(json.dumps(figures), flush=True)
    else:
        _print(figures)
    return 0


def _transformers() -> Any:
    try:
        from mmx_jax.parity import run_transformers
    except ImportError as error:
        raise InputError(
            f"--against {TRANSFORMERS} needs torch and transformers 5.24 or later:"
            f" pip install 'mmx-jax[compare]' ({error})"
        ) from None
    return run_transformers


def _check_same(a: "Source", b: "Source") -> None:
    for name in SAME:
        ours, theirs = getattr(a.config, name), getattr(b.config, name)
        if ours != theirs:
            raise ConfigError(
                f"{b.path}: {name} is {theirs}, but {ours} in {a.path}: they cannot be compared"
            )


def _windows(args: argparse.Namespace, source: "Source") -> list[np.ndarray]:
    """The ids of the text in windows of at most --length tokens, --tokens in all; each predicts something."""
    c = source.config
    length = min(DEFAULT_LENGTH, c.max_position) if args.length is None else args.length
    if not 2 <= length <= c.max_position:
        raise InputError(f"--length {length}: the model takes 2 to {c.max_position} tokens")
    if args.tokens < 2:
        raise InputError(f"--tokens {args.tokens}: at least 2 are needed, the first is not predicted")
    windows: list[np.ndarray] = []
    left = args.tokens
    for row in _rows(args.text, source):
        row = row[:left]
        left -= len(row)
        if bad := [i for i in row if not 0 <= i < c.vocab_size]:
            raise InputError(
                f"{args.text}: token id {bad[0]} is outside the vocabulary: 0 to {c.vocab_size - 1}"
            )
        windows += [np.asarray(row[i : i + length]) for i in range(0, len(row), length)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise InputError(
            f"{args.text}: no window of 2 tokens or more, and the first of each is not predicted"
        )
    return windows


def _rows(name: str, source: "Source") -> list[list[int]]:
    from mmx_jax.prompts import parse_json, read_text

    text = read_text(name)
    if not name.endswith(".json"):
        if source.tokenizer is None:
            raise InputError(f"{source.path}: no tokenizer.json; give --text as a .json file of token ids")
        return [source.tokenizer.encode(text)]
    value = parse_json(name, text)
    rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
    if not all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows):
        raise InputError(f"{name}: expected a list of token ids, or a list of such lists")
    return rows


def _figures(
    args: argparse.Namespace, dtype: str, record: "Record", comparison: "Comparison | None"
) -> dict[str, Any]:
    """Everything that was measured, as --json prints it; a share over nothing is None."""
    c = record.config
    figures: dict[str, Any] = {
        "checkpoint": args.checkpoint,
        "recipe": args.recipe,
        "against": args.against,
        "text": args.text,
        "dtype": dtype,
        "attention": args.attention,
        "layers_run": c.num_layers,
        "windows": len(record.windows),
        "tokens": sum(map(len, record.windows)),
        "predictions": record.surprise.count,
        "perplexity": record.surprise.perplexity,
    }
    if comparison is None:
        return figures
    return figures | {
        "against_perplexity": comparison.surprise.perplexity,
        "kl_mean": comparison.divergence.value,
        "kl_worst": comparison.worst._asdict(),
        "top1_agreement": comparison.agreement.value,
        "layers": [
            {
                "layer": i,
                "attention": "sparse" if c.sparse_layers[i] else "dense",
                "feed_forward": "experts" if c.moe_layers[i] else "dense",
                "hidden_error": layer.hidden.value,
                "expert_overlap": layer.experts.value,
                "block_overlap": layer.blocks.value,
                "block_queries": layer.blocks.count,
            }
            for i, layer in enumerate(comparison.layers)
        ],
    }


def _print(figures: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    rounded = f" rounded to {figures['recipe']}" if figures["recipe"] else ""
    out.print(f"A: {figures['checkpoint']}{rounded}", markup=False)
    if figures["against"] is not None:
        theirs = "transformers on A's numbers" if figures["against"] == TRANSFORMERS else figures["against"]
        out.print(f"B: {theirs}, the reference", markup=False)
    out.print(
        f"{figures['text']}: windows {figures['windows']}, predictions {figures['predictions']};"
        f" layers {figures['layers_run']}, {figures['dtype']}, {figures['attention']} attention",
        markup=False,
    )
    table = Table("figure", show_header=False)
    table.add_column(justify="right")
    table.add_row("perplexity of A", f"{figures['perplexity']:.4f}")
    if figures["against"] is None:
        out.print(table)
        return
    worst = figures["kl_worst"]
    table.add_row("perplexity of B", f"{figures['against_perplexity']:.4f}")
    table.add_row("KL(B || A), mean, nats", f"{figures['kl_mean']:.3g}")
    table.add_row(
        "KL(B || A), worst, nats",
        f"{worst['value']:.3g} at token {worst['token']} of window {worst['window']}",
    )
    table.add_row("top-1 agreement", _percent(figures["top1_agreement"]))
    out.print(table)
    out.print(
        "By layer: relative error of its input; share of B's experts and blocks that A chose too,\n"
        "blocks over the queries that see more of them than they may choose"
    )
    table = Table("layer", "attention", "feed-forward")
    for heading in ("input error", "experts", "blocks", "queries"):
        table.add_column(heading, justify="right")
    for layer in figures["layers"]:
        table.add_row(
            str(layer["layer"]),
            layer["attention"],
            layer["feed_forward"],
            f"{layer['hidden_error']:.2e}",
            _percent(layer["expert_overlap"]),
            _percent(layer["block_overlap"]),
            str(layer["block_queries"]) if layer["attention"] == "sparse" else "",
        )
    out.print(table)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


if __name__ == "__main__":
    command.start(main)
