"""The command: continue a prompt with a checkpoint. Text to stdout, everything else to stderr."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmx_jax import versions
from mmx_jax.command import Bars, Parser, prepare_jax, run, start
from mmx_jax.errors import InputError

if TYPE_CHECKING:
    from mmx_jax.generate import Completion, Event, Model
    from pallas_kernels.ops import Ops

MAX_BATCH = 32


def parser() -> Parser:
    p = Parser(
        prog="python -m mmx_jax.decode",
        description="Continue a prompt with a MiniMax-M3 checkpoint; without arguments, run a demo.",
    )
    p.add_argument("--checkpoint", metavar="DIR", help="directory with config.json and *.safetensors")
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="plain text; control markers in it stay text")
    prompt.add_argument(
        "--prompt-file",
        metavar="F",
        help="one prompt; or, if F ends in .jsonl, a prompt per line: a JSON string, a list of ids, or"
        ' {"prompt": text}, {"prompt_ids": [..]}, {"messages": [..]}',
    )
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids; needs no tokenizer")
    prompt.add_argument(
        "--messages", metavar="F.json", help='chat messages, or {"messages": [..], "tools": [..]}'
    )
    p.add_argument("--thinking-mode", choices=["enabled", "disabled", "adaptive"], help="with --messages")
    p.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    p.add_argument(
        "--max-length", type=int, metavar="L", help="capacity for prompt and answer (default: enough)"
    )
    p.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    p.add_argument("--top-k", type=int, metavar="K")
    p.add_argument("--top-p", type=float, metavar="P")
    p.add_argument("--min-p", type=float, metavar="P")
    p.add_argument("--repetition-penalty", type=float, metavar="R")
    p.add_argument("--seed", type=int, metavar="S")
    p.add_argument("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="end the answer")
    p.add_argument("--ignore-eos", action="store_true", help="go on after a stop id")
    p.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    p.add_argument("--kernels", default="auto", help="auto (default), reference, pallas or interpret")
    p.add_argument(
        "--recipe", metavar="NAME", help="round the weights while loading: int8, int4_g64, FILE.json .."
    )
    p.add_argument("--kv-format", metavar="NAME", help="round cached keys and values: int8 or fp8")
    p.add_argument("--attention", default="sparse", help="sparse (default) or dense")
    p.add_argument("--layers", type=int, metavar="N", help="run only the first N layers")
    p.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities with K alternatives (needs --json)"
    )
    p.add_argument("--json", action="store_true", help="one JSON object per prompt to stdout")
    p.add_argument("--plan", action="store_true", help="print what would be loaded and compiled, and stop")
    p.add_argument("--version", action="store_true", help="print versions and devices, and stop")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Bad input is one line on stderr and code 2."""
    return run(_run, parser(), argv)


def _run(args: argparse.Namespace, bars: Bars) -> int:
    if args.version:
        print(versions.report())
        return 0
    prepare_jax()
    from mmx_jax.engine import Request, check_capacity, check_request
    from mmx_jax.generate import SamplingParams
    from mmx_jax.loading import Demo, Settings, Source
    from mmx_jax.prompts import read_prompts
    from mmx_jax.report import print_plan

    sampling = SamplingParams(**{f.name: getattr(args, f.name) for f in dataclasses.fields(SamplingParams)})
    settings = Settings(args.dtype, args.kernels, args.attention, args.layers, args.recipe, args.kv_format)
    if args.checkpoint is None:
        print(
            "demo: a tiny model with random weights, the answer is noise; --checkpoint DIR runs a real one",
            file=sys.stderr,
        )
        source: Source = Demo(settings)
    else:
        source = Source(args.checkpoint, settings)
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs needs --json, which is where they are printed")
    if args.stop and source.tokenizer is None:
        raise InputError(f"{source.path}: no tokenizer.json, so no --stop text can be found")
    prompts = read_prompts(args, source)
    batch = min(max(len(prompts), 1), MAX_BATCH)
    max_length = args.max_length
    if max_length is None and prompts:
        needed = max(len(p.ids) for p in prompts) + args.max_new_tokens
        max_length = _capacity(needed, source.config.max_position)
    elif max_length is None:
        max_length = source.default_length
    check_capacity(source.config, batch, max_length)
    for prompt in prompts:
        try:
            check_request(Request(tuple(prompt.ids), args.max_new_tokens), source.config, max_length)
        except InputError as error:
            raise InputError(f"{prompt.where}: {error}") from None
    if args.plan:
        print_plan(source, batch, max_length, bars)
        return 0
    if not prompts:
        raise InputError("no prompt: give --prompt, --prompt-file, --prompt-ids or --messages")

    start = time.perf_counter()
    model = source.load(batch, max_length, bars)
    ready = time.perf_counter()
    _print_refused(source.ops(batch, 1))
    done: dict[int, Completion] = {}
    printed = 0
    for event in model.events([p.ids for p in prompts], sampling, bars):
        if event.completion is not None:
            done[event.index] = event.completion
        if len(prompts) == 1 and not args.json:
            _print_piece(event, model)
            continue
        while printed in done:  # in the order of the prompts, whichever ends first
            _print_whole(printed, done[printed], model, args.json)
            printed += 1
    _print_statistics(list(done.values()), ready - start, time.perf_counter() - ready)
    return 0


def _capacity(needed: int, max_position: int) -> int:
    """A power of two, so that prompts of many lengths share the same compiled programs."""
    return min(max(1 << (needed - 1).bit_length(), 1024), max_position)


def _text(completion: "Completion", model: "Model") -> str:
    """What stands for the answer on stdout: its text, or its ids where there is no tokenizer."""
    return completion.text if model.tokenizer is not None else " ".join(map(str, completion.token_ids))


def _print_piece(event: "Event", model: "Model") -> None:
    if model.tokenizer is not None:
        print(event.text, end="\n" if event.completion else "", flush=True)
    elif event.completion is not None:
        print(_text(event.completion, model), flush=True)


def _print_whole(index: int, completion: "Completion", model: "Model", as_json: bool) -> None:
    if not as_json:
        print(f"[{index}] {_text(completion, model)}", flush=True)
        return
    fields = dataclasses.asdict(completion)
    if completion.logprobs is not None:
        fields["logprobs"] = [token._asdict() for token in completion.logprobs]
    print(json.dumps(fields), flush=True)


def _print_refused(ops: "Ops") -> None:
    """Which operations run as plain JAX because their kernels do not take this device or model."""
    for reason in dict.fromkeys(ops.refused.values()):
        names = [name for name, why in ops.refused.items() if why == reason]
        what = "all operations" if len(names) == len(ops.table()) else ", ".join(names)
        print(f"kernels: plain JAX for {what}: {reason}", file=sys.stderr)


def _print_statistics(done: "list[Completion]", load_seconds: float, run_seconds: float) -> None:
    prompt = sum(c.stats["prompt_tokens"] for c in done)
    new = sum(c.stats["new_tokens"] for c in done)
    decode_seconds = max(c.stats["decode_seconds"] for c in done)
    print(
        f"{prompt} prompt tokens, {new} new tokens in {run_seconds:.2f} s"
        f" ({new / max(decode_seconds, 1e-9):.1f} tokens/s decoding); ready after {load_seconds:.1f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    start(main)
