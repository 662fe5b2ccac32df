"""What the project's programs share: options, progress bars, and one line for whatever the user can cause.

Refuses to know what a program does.
"""

import argparse
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mmx_jax import versions
from mmx_jax.errors import InputError, MmxError

BYTES = ("loading", "converting", "verifying")  # stages that count bytes


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


class Bars:
    """A progress bar for each stage under way, on stderr; nothing when stderr is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:10}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._tasks: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.console.is_terminal:
            return
        count = f"{readable(done)} of {readable(total)}" if stage in BYTES else f"{done} of {total}"
        if stage not in self._tasks:
            self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=total, count=count)
        task = self._tasks[stage]
        self._bars.update(task, completed=done, total=total, count=count)  # pyright: ignore[reportArgumentType]
        if done >= total:
            self._bars.remove_task(self._tasks.pop(stage))  # pyright: ignore[reportArgumentType]
            if not self._tasks:
                self._bars.stop()

    def close(self) -> None:
        if self._tasks:
            self._bars.stop()


def readable(n_bytes: float) -> str:
    """Bytes for people to read, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.2f} TB"


def run(
    body: Callable[[argparse.Namespace, Bars], int], parser: Parser, argv: Sequence[str] | None = None
) -> int:
    """Run a program; the exit code. Bad input is one line on stderr and code 2."""
    if sys.stderr is None:  # closed by the caller; print would fall back to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what its errors say
    bars = Bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            return body(parser.parse_intermixed_args(argv), bars)
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


def start(main: Callable[[], int]) -> NoReturn:
    """Run `main` as the whole process: Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, _interrupted)
    sys.exit(main())


def _interrupted(*_: object) -> NoReturn:
    """An import or the compiler may swallow a KeyboardInterrupt, or take long to notice it."""
    sys.stderr.write("\x1b[?25h\ninterrupted\n" if sys.stderr.isatty() else "\ninterrupted\n")
    sys.stderr.flush()
    os._exit(130)
