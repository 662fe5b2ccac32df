"""The command: how fast a model decodes here, beside the memory roofline and beside transformers.

Arms: `eager` runs plain JAX, one program for each operation of the model; `graph` plain JAX as `decode` runs
it, compiled into one program; `kernels` the same with the Pallas kernels. Weights and cached keys are random,
the decoding is real. An arm is timed only after it passed the gate (`mmx_jax.arms.gate`) on tokens that are
given to it, and its time counts only if the tokens that it made while it was timed are its likeliest.

A time is wall clock of one step of all rows, which gives each row a token. The roofline is the time in which
what a step must read (`mmx_jax.plan.step_bytes`, with the experts that the timed tokens chose) can be read,
at the rate at which a plain sum reads 4 GiB in the same process.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmx_jax import command
from mmx_jax.errors import InputError

if TYPE_CHECKING:
    from mmx_jax.arms import Forced, Point
    from mmx_jax.loading import Source
    from mmx_jax.model import M3
    from pallas_kernels.ops import Ops

ARMS = ("eager", "graph", "kernels")
PEER = "transformers"
SECONDS = 20.0  # after which an arm makes no more runs at a point
PEER_TOKENS = 24
SAME = ("layers", "batch", "context")  # what a row shares with that of transformers


def parser() -> command.Parser:
    p = command.Parser(
        prog="python -m mmx_jax.bench",
        description="Time decoding with random weights. Options that take several values are combined.",
    )
    p.add_argument("--config", metavar="FILE", help="a model's config (default: the released one)")
    p.add_argument("--layers", type=int, nargs="+", default=[5], metavar="N", help="the first N (default: 5)")
    p.add_argument("--format", nargs="+", default=["bf16"], metavar="NAME", help="recipes (default: bf16)")
    p.add_argument("--kv-format", metavar="NAME", help="round cached keys and values: int8 or fp8")
    p.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="rows (default: 1)")
    p.add_argument("--context", nargs="+", default=["1K"], metavar="C", help="keys of a row, such as 128K")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    p.add_argument("--tokens", type=int, default=64, metavar="N", help="of a row in each run (default: 64)")
    p.add_argument("--runs", type=int, default=5, metavar="N", help="runs of an arm (default: 5)")
    p.add_argument("--transformers", action="store_true", help="time transformers in bfloat16, too")
    p.add_argument("--profile", action="store_true", help="list what a step of the kernels does on the GPU")
    p.add_argument("--plot", metavar="FILE.png", help="draw milliseconds against context (needs matplotlib)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Bad input is one line on stderr and code 2."""
    return command.run(_run, parser(), argv)


def _run(args: argparse.Namespace, bars: command.Bars) -> int:
    if args.plot is not None:
        _check_plot(Path(args.plot))
    command.prepare_jax()
    _check(args)
    rows = list(_transformers(args)) if args.transformers else []  # before JAX takes the GPU's memory
    import jax

    device = jax.devices()[0]
    read = None
    if device.platform == "gpu":
        from pallas_kernels.bench import read_rate

        read = read_rate()
    elif args.profile:
        raise InputError(f"--profile: it is about a GPU, and the device is {device.platform}")
    elif "kernels" in args.arms:
        print("warning: kernels are interpreted here, their times mean nothing", file=sys.stderr)
    try:
        models = [Model(args, layers, form) for form in args.format for layers in args.layers]
        total = len(models) * len(args.arms) * len(args.batch) * len(args.context)
        for done, row in enumerate((row for model in models for row in model.rows(read)), 1):
            rows.append(row)
            bars("measuring", done, total)
            bars.console.print(f"{_where(row)}: {row['median']} ms", highlight=False)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(f"the device has too little memory: {str(error).splitlines()[0]}") from None
    finally:
        if rows:  # what was measured before a failure is not lost
            _print(rows, read)
            _print_json(args, rows, read, sys.exception())
    if args.plot is not None:
        _plot(rows, Path(args.plot))
    return 0


def _print_json(
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    read: float | None,
    failure: BaseException | None,
) -> None:
    import jax

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    told = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": git.stdout.strip() or None,
    }
    told |= {"config": args.config, "kv_format": args.kv_format, "read": read, "rows": rows}
    told["failed"] = None if failure is None else str(failure)
    print(json.dumps(told), flush=True)


def _check(args: argparse.Namespace) -> None:
    """Raise an error for what can be known without a device; --context becomes numbers."""
    from mmx_jax import recipes
    from mmx_jax.config import ModelConfig, bundled
    from mmx_jax.loading import Settings

    for name in ("batch", "layers", "runs"):
        if (least := np.min(getattr(args, name))) < 1:
            raise InputError(f"--{name} {least}: it must be at least 1")
    if args.tokens < 8 or args.tokens % 8:
        raise InputError(f"--tokens {args.tokens}: expected a multiple of 8, the tokens of a program")
    args.config = str(args.config or bundled("minimax_m3.json"))
    config = ModelConfig.from_file(Path(args.config))
    for layers in args.layers:
        config.first_layers(layers)
    for form in args.format:
        recipes.load(form)
    Settings(kv_format=args.kv_format)
    args.context = [_keys(text) for text in args.context]
    if max(args.context) > (longest := config.max_position - args.tokens - 1):
        raise InputError(f"--context {max(args.context)}: the model has positions for {longest} keys")


def _where(row: dict[str, Any]) -> str:
    what = f"{row['arm']}, {row['format']}, {row['layers']} layers"
    return f"{what}, {row['batch']} rows, {row['context']} keys"


def _keys(text: str) -> int:
    number = text[:-1] if text[-1:] in ("K", "k") else text
    if not (number.isascii() and number.isdecimal() and int(number)):
        raise InputError(f"--context {text!r}: expected a number of keys, such as 1024 or 128K")
    return int(number) * (1 if number == text else 1024)


class Model:
    """One model of the benchmark at all its points. What does not fit is an error at once."""

    def __init__(self, args: argparse.Namespace, layers: int, form: str):
        import jax

        from mmx_jax.arms import Point
        from mmx_jax.loading import Settings, Source
        from mmx_jax.plan import memory_plan

        self.args, self.layers, self.form = args, layers, form
        self.points = [Point(batch, context) for batch in args.batch for context in args.context]
        compiled = "pallas" if jax.default_backend() == "gpu" else "interpret"

        def source(kernels: str) -> Source:
            settings = Settings(kernels=kernels, layers=layers, recipe=form, kv_format=args.kv_format)
            return Source(args.config, settings)

        self.reference, self.kernels = source("reference"), source(compiled)
        for point in self.points:
            self.kernels.ops(point.batch, 1)
            memory_plan(self.reference.model, point.batch, point.context).check(self.reference.mesh)

    def rows(self, read: float | None) -> Iterator[dict[str, Any]]:
        """A row for each arm and point. One order of weights is held at a time."""
        from mmx_jax.arms import Arm, eager_ops, fill, in_float32
        from pallas_kernels.ops import Ops

        source, model = self.reference, fill(self.reference, packed=False)
        judges: dict[Point, tuple[Forced, Forced]] = {}
        for point in self.points:
            exact = Arm(source, in_float32(model), Ops(), point, self.args.tokens, exact=True)
            plain = Arm(source, model, Ops(), point, self.args.tokens)
            judges[point] = plain.forced(plain.given), exact.forced(exact.given)
        for name in (name for name in ARMS if name in self.args.arms):
            if name == "kernels":
                source = self.kernels
                del model  # both may not fit
                model = fill(source, packed=True)
            for point in self.points:
                ops = eager_ops() if name == "eager" else source.ops(point.batch, 1)
                yield self._row(name, source, model, ops, point, judges[point], read)

    def _row(
        self,
        name: str,
        source: "Source",
        model: "M3",
        ops: "Ops",
        point: "Point",
        judges: tuple["Forced", "Forced"],
        read: float | None,
    ) -> dict[str, Any]:
        """One line of the table; InputError if the arm does not pass the gate."""
        from mmx_jax import arms
        from mmx_jax.plan import step_bytes

        arm = arms.Arm(source, model, ops, point, self.args.tokens)
        row: dict[str, Any] = {"arm": name, "format": self.form, "layers": self.layers}
        row |= {"batch": point.batch, "context": point.context}
        verdict = arms.gate(arm.forced(arm.given), *judges)
        if not verdict.passed:
            raise InputError(
                f"{_where(row)}: error {verdict.error:.2f} times that of plain JAX, {verdict.other} experts"
                " and blocks are other than in float32: no time is given"
            )
        row |= {"error": round(verdict.error, 2), "positions": verdict.positions, "other": verdict.other}
        if name == "eager":
            timed = arms.time_eager(arm, self.args.runs, SECONDS)
        else:
            engine = arm.engine()
            row["compile"] = round(max(p.seconds for p in engine.programs.values()), 1)
            timed = arms.time_programs(arm, engine, self.args.tokens, self.args.runs, SECONDS)
        again = arm.forced(np.concatenate([arm.given[:1], timed.first[:-1]]))
        if not arms.are_likeliest(timed.first, again.logits):
            raise InputError(f"{_where(row)}: it made other tokens than the likeliest while it was timed")
        row |= {key: round(value, 3) for key, value in arms.summary(timed.seconds, timed.steps).items()}
        row |= {"runs": len(timed.seconds), "tokens": timed.tokens, "experts": round(again.experts, 3)}
        row["tokens/s"] = round(timed.tokens / timed.steps * 1e3 / row["median"], 1)
        # Of the weights as they are on disk: what a kernel pads does not count as work.
        row["bytes"] = step_bytes(self.reference.model, point.batch, point.context, again.experts)
        if read is not None:
            row["roofline"] = round(row["bytes"] / read / 1e9, 3)
            row["share"] = round(row["roofline"] / row["median"], 3)
        if self.args.profile and name == "kernels":
            row["captured"] = arms.profile(arm, arm.engine())
            row["uncaptured"] = arms.profile(arm, arm.engine(steps=1, options=arms.NO_GRAPHS))
        return row


def _transformers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """transformers' rows, from a process of its own for each number of layers."""
    points = [(batch, context) for batch in args.batch for context in args.context]
    asked = {"config": args.config, "points": points, "tokens": PEER_TOKENS, "runs": args.runs}
    for layers in args.layers:
        child = subprocess.run(
            [sys.executable, "-m", "mmx_jax.peer", json.dumps(asked | {"layers": layers})],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # the GPU's memory is for torch
        )
        if child.returncode:
            told = child.stderr.strip().splitlines()
            raise InputError(f"--transformers: {told[-1] if told else f'it ended with {child.returncode}'}")
        for line in child.stdout.splitlines():
            if line.startswith("{"):
                yield {"arm": PEER, "format": "bf16", "layers": layers} | json.loads(line)


def _print(rows: Sequence[dict[str, Any]], read: float | None) -> None:
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    table = Table("arm", "format", title=None if read is None else f"a plain sum reads {read:.2f} TB/s")
    headings = (
        "layers",
        "rows",
        "keys",
        "ms",
        "median",
        "tokens/s",
        "roofline",
        "share",
        "x peer",
        "compile",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    theirs = {tuple(r[k] for k in SAME): r for r in rows if r["arm"] == PEER and "failed" not in r}
    for r in rows:
        what = (r["arm"], r["format"], str(r["layers"]), str(r["batch"]), str(r["context"]))
        if "failed" in r:
            table.add_row(*what, r["failed"])
            continue
        peer = theirs.get(tuple(r[k] for k in SAME))
        table.add_row(
            *what,
            f"{r['ms']:.2f} ± {r['std']:.2f}",
            f"{r['median']:.2f}",
            f"{1e3 * r['batch'] / r['median']:.0f}",
            f"{r['roofline']:.2f}" if "roofline" in r else "",
            f"{r['share']:.0%}" if "share" in r else "",
            f"{peer['median'] / r['median']:.2f}" if peer is not None else "",
            f"{r['compile']:.1f} s" if "compile" in r else "",
        )
    out.print(table)
    for line in per_layer(rows):
        out.print(line)
    for r in rows:
        for name, title in (("captured", "eight steps, as they run"), ("uncaptured", "one step, no graph")):
            if name in r:
                table = Table(title, title=f"{r['format']}, {r['layers']} layers, {r['batch']} rows")
                for heading in ("count", "µs"):
                    table.add_column(heading, justify="right")
                for event, (count, us) in sorted(r[name].items(), key=lambda item: -item[1][1]):
                    table.add_row(event, str(count), f"{us:.1f}")
                out.print(table)


def per_layer(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What each further layer takes, where an arm ran with several numbers of layers."""
    series: dict[tuple, list[dict[str, Any]]] = {}
    for r in rows:
        if "failed" not in r:
            series.setdefault((r["arm"], r["format"], r["batch"], r["context"]), []).append(r)
    for (arm, form, batch, context), found in series.items():
        few, many = (choose(found, key=lambda r: r["layers"]) for choose in (min, max))
        if (more := many["layers"] - few["layers"]) > 0:
            us = 1e3 * (many["median"] - few["median"]) / more
            what = f"{arm}, {form}, {batch} rows, {context} keys"
            yield f"{what}: {us:.1f} µs for each of layers {few['layers'] + 1} to {many['layers']}"


def _pyplot() -> Any:
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'mmx-jax[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot


def _check_plot(file: Path) -> None:
    """Before anything is timed."""
    formats = sorted(_pyplot().FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in formats:
        raise InputError(f"--plot {file}: the name must end in one of {', '.join(formats)}")
    if not file.parent.is_dir():
        raise InputError(f"--plot {file}: there is no directory {file.parent}")


def _plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    series: dict[str, list[dict[str, Any]]] = {}
    for r in (r for r in rows if "failed" not in r):
        label = f"{r['arm']}, {r['format']}, {r['layers']} layers, {r['batch']} rows"
        series.setdefault(label, []).append(r)
    for label, found in series.items():
        found.sort(key=lambda r: r["context"])
        x, ms, std = ([r[key] for r in found] for key in ("context", "ms", "std"))
        line = axes.errorbar(x, ms, std, marker="o", label=label).lines[0]
        if all("roofline" in r for r in found):
            axes.plot(x, [r["roofline"] for r in found], "--", color=line.get_color(), alpha=0.5)
    axes.set(xscale="log", yscale="log", xlabel="keys of a row", ylabel="ms a step (dashed: roofline)")
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)


if __name__ == "__main__":
    command.start(main)
