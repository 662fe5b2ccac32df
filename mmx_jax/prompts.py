"""The command's prompts: from options and files to token ids, each with a name for error messages."""

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from mmx_jax.chat import ThinkingMode
from mmx_jax.errors import InputError
from mmx_jax.loading import Source

DEMO_PROMPT = "Hello, world"


class NamedPrompt(NamedTuple):
    """A prompt's ids, and the option or the file and line it came from."""

    where: str
    ids: list[int]


def read_prompts(args: argparse.Namespace, source: Source) -> list[NamedPrompt]:
    """All prompts that the options name; none if they name none. Raises InputError or ChatError."""
    many = args.prompt_file is not None and args.prompt_file.endswith(".jsonl")
    if args.thinking_mode and args.messages is None and not many:
        raise InputError("--thinking-mode needs --messages, or messages in a .jsonl file")
    thinking: ThinkingMode = args.thinking_mode or "adaptive"
    if args.prompt is not None:
        return [NamedPrompt("--prompt", _encode(source, args.prompt))]
    if args.prompt_ids is not None:
        if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", args.prompt_ids):
            raise InputError(f"--prompt-ids {args.prompt_ids!r}: expected integers with commas")
        return [NamedPrompt("--prompt-ids", [int(i) for i in args.prompt_ids.split(",")])]
    if args.messages is not None:
        value = parse_json(args.messages, read_text(args.messages))
        return [NamedPrompt(args.messages, _render(source, value, thinking, args.messages))]
    if args.prompt_file is not None and not many:
        return [NamedPrompt(args.prompt_file, _encode(source, read_text(args.prompt_file)))]
    if args.prompt_file is not None:
        lines = enumerate(read_text(args.prompt_file).split("\n"), 1)
        named = [(f"{args.prompt_file}:{n}", line) for n, line in lines if line.strip()]
        if not named:
            raise InputError(f"{args.prompt_file}: no prompts in it")
        values = [(where, parse_json(where, line)) for where, line in named]
        return [NamedPrompt(where, _line(source, value, thinking, where)) for where, value in values]
    if args.checkpoint is None:
        return [NamedPrompt("the demo's prompt", _encode(source, DEMO_PROMPT))]
    return []


def _line(source: Source, value: Any, thinking: ThinkingMode, where: str) -> list[int]:
    """One line of a .jsonl file."""
    if isinstance(value, dict) and "messages" in value:
        return _render(source, value, thinking, where)
    if isinstance(value, dict) and len(value) == 1:
        value = value.get("prompt", value.get("prompt_ids"))
    if isinstance(value, str):
        return _encode(source, value)
    if isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return value
    raise InputError(
        f'{where}: expected a text, a list of ids, {{"prompt": text}}, {{"prompt_ids": [..]}} or'
        ' {"messages": [..]}'
    )


def _encode(source: Source, text: str) -> list[int]:
    if source.tokenizer is None:
        raise InputError(f"{source.path}: no tokenizer.json; give the prompt as --prompt-ids")
    return source.tokenizer.encode(text)


def _render(source: Source, value: Any, thinking: ThinkingMode, where: str) -> list[int]:
    if source.chat is None or source.tokenizer is None:
        raise InputError(f"{source.path}: messages need its tokenizer.json and chat_template.jinja")
    request = value if isinstance(value, dict) else {"messages": value}
    messages = request.get("messages")
    if not isinstance(messages, list) or request.keys() - {"messages", "tools"}:
        raise InputError(f'{where}: expected a list of messages, or {{"messages": [..], "tools": [..]}}')
    return source.chat.encode(source.tokenizer, messages, tools=request.get("tools"), thinking_mode=thinking)


def read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{name}: {reason}") from None


def parse_json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from None
