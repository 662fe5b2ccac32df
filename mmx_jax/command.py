"""What the project's commands share: options, progress, errors as one line, and JAX's settings.

A command's body gets its parsed options and the progress bars, and returns the exit code.
"""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from mmx_jax import versions
from mmx_jax.errors import InputError, MmxError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


class Bars:
    """A progress bar per stage on stderr; nothing when stderr is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.console.is_terminal:
            return
        if stage != self.stage:
            self.close()
            count = DownloadColumn() if stage == "loading" else MofNCompleteColumn()
            self.bar = Progress(
                TextColumn(f"{stage:10}"),
                BarColumn(),
                count,
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
            self.bar.add_task(stage, total=total)
            self.stage = stage
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total)
            if done >= total:
                self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.stage = None, ""


def run(body: Callable[[argparse.Namespace, Bars], int], argv: Sequence[str] | None, parser: Parser) -> int:
    """Run a command; the exit code. Bad input is one line on stderr and code 2."""
    if sys.stderr is None:  # closed by the caller; print would fall back to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    bars = Bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            return body(parser.parse_args(argv), bars)
    except MmxError as error:
        return _fail(bars, str(error))
    except BrokenPipeError:
        # The reader went away; Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(bars, f"{error.filename or 'output'}: {error.strerror}")
    except KeyboardInterrupt:
        bars.close()
        print("\ninterrupted", file=sys.stderr)
        return 130


def _fail(bars: Bars, message: str) -> int:
    bars.close()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def prepare_jax() -> None:
    """Say which versions do not fit, and choose JAX's settings. To be called before JAX is imported."""
    for problem in versions.mismatches(versions.installed()):
        print(f"warning: {problem}", file=sys.stderr)
    # JAX's own default leaves a quarter of the GPU unused; it reads this when the first device is touched.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    _keep_programs()


def _keep_programs() -> None:
    """Turn JAX's cache of compiled programs on, unless the user chose a place or there is none."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmx_jax" / "programs"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return
    jax.config.update("jax_compilation_cache_dir", str(cache))


def interrupted(*_: object) -> NoReturn:
    """End at once: an import or the compiler may swallow a KeyboardInterrupt, or take long to notice it."""
    sys.stderr.write("\x1b[?25h\ninterrupted\n" if sys.stderr.isatty() else "\ninterrupted\n")
    sys.stderr.flush()
    os._exit(130)
