"""Chat messages to a prompt, with the checkpoint's own template.

Owns: loading the template, checking messages it would drop or garble, and keeping markers that a caller typed
plain text. Refuses to know: how text becomes ids beyond `Tokenizer.encode`, and what the model answers.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmx_jax.errors import ChatError
from mmx_jax.tokenizer import Tokenizer

ThinkingMode = Literal["enabled", "disabled", "adaptive"]
_ROLES = ("root", "system", "developer", "user", "assistant", "tool")
_MEDIA = ("image", "image_url", "input_image", "video", "video_url", "input_video")
_THINK_MARKERS = re.compile(r"(</?mm:think>)")
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template; made by `load`."""

    path: Path
    source: str
    _template: jinja2.Template

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking_mode: ThinkingMode = "adaptive",
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text. Raises ChatError for messages that the template cannot render faithfully."""
        chat = _check(messages, tools, thinking_mode)
        return self._render(*chat, thinking_mode, add_generation_prompt)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking_mode: ThinkingMode = "adaptive",
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt ids; only the template's own markers become control tokens.

        For messages without markers these are the ids of the rendered text. In the content of an assistant
        the think markers keep their meaning. Raises ChatError like `render`, and TokenizerError.
        """
        checked, checked_tools = _check(messages, tools, thinking_mode)
        everything = json.dumps([checked, checked_tools], ensure_ascii=False) + self.source
        sentinel = next((chr(c) for c in _PRIVATE_USE if chr(c) not in everything), None)
        if sentinel is None:
            raise ChatError("the messages use every private-use character; one must be left out")
        guard = _Guard(sentinel, tokenizer.special_tokens, self.source)
        text = self._render(
            [guard.message(message) for message in checked],
            guard.value(checked_tools),
            thinking_mode,
            add_generation_prompt,
            sentinel,
        )
        if text.replace(sentinel, "") != self._render(
            checked, checked_tools, thinking_mode, add_generation_prompt
        ):
            raise ChatError(
                f"{self.path}: the template transforms strings; markers in them cannot be kept plain"
            )
        return tokenizer.encode(text, allow_special=True, ignore=sentinel)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        thinking_mode: ThinkingMode,
        add_generation_prompt: bool,
        sentinel: str = "",
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                thinking_mode=thinking_mode,
                add_generation_prompt=add_generation_prompt,
                _sentinel=sentinel,
            )
        except Exception as error:  # the template is a foreign program and can fail in any way
            raise ChatError(f"{self.path}: {error}") from error


def load(directory: str | Path) -> ChatTemplate:
    """The chat template of a checkpoint directory.

    Read from `chat_template.jinja`, or else the key "chat_template" of `tokenizer_config.json`. Raises
    ChatError if there is neither, or the template is broken.
    """
    path = Path(directory) / "chat_template.jinja"
    try:
        if path.exists():
            source = path.read_text(encoding="utf-8")
        else:
            path = Path(directory) / "tokenizer_config.json"
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            source = config.get("chat_template") if isinstance(config, dict) else None
    except (OSError, ValueError) as error:
        raise ChatError(f"{path}: cannot be read ({error})") from None
    if not isinstance(source, str):
        raise ChatError(
            f'{directory}: no chat template; it must have chat_template.jinja, or a string "chat_template" '
            "in tokenizer_config.json"
        )
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"{path}: line {error.lineno}: {error.message}") from None
    return ChatTemplate(path, source, template)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context, value: Any, ensure_ascii: bool = False, indent: int | None = None
) -> str:
    """JSON without jinja's HTML escapes. The sentinel stays raw, or it could not be dropped later."""
    if isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("tojson of a missing value (has every tool its 'function' object?)")
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if not ensure_ascii:
        return text
    sentinel = context.get("_sentinel")
    return re.sub(r"[^\x00-\x7f]", lambda m: m[0] if m[0] == sentinel else json.dumps(m[0])[1:-1], text)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Guard:
    """Puts a sentinel character into caller-supplied strings so that no control token forms in them.

    After the first character of every marker, and around each string so that none forms across its ends.
    """

    def __init__(self, sentinel: str, markers: Collection[str], source: str) -> None:
        for marker in markers:
            if len(marker) < 2:
                raise ChatError(f"special token {marker!r} is one character and cannot be kept plain text")
        alternatives = "|".join(map(re.escape, markers)) or "(?!)"
        self._starts = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._sentinel = sentinel
        self._own_markers = {marker for marker in markers if marker in source}

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        guarded = self.value(message)
        content = message.get("content")
        if message["role"] != "assistant" or not content:
            return guarded
        if isinstance(content, str):
            return guarded | {"content": self._answer(content)}
        parts = zip(guarded["content"], content, strict=True)
        return guarded | {"content": [part | {"text": self._answer(plain["text"])} for part, plain in parts]}

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._around(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {
                # Templates compare roles and types: only a marker inside is broken up.
                self._key(key): self._inside(item)
                if key in ("role", "type") and isinstance(item, str)
                else self.value(item)
                for key, item in value.items()
            }
        return value

    def _answer(self, text: str) -> str:
        segments = _THINK_MARKERS.split(text)
        return "".join(part if i % 2 else self._around(part) for i, part in enumerate(segments))

    def _key(self, key: str) -> str:
        # An argument `x` is written as `<x>` and `</x>`. Some tags, as `<filename>`, are special tokens in
        # the reference too: a name is guarded only against the markers that the template itself writes.
        tags = {f"<{key}>", f"</{key}>"}
        return self._around(key) if tags & self._own_markers else self._inside(key)

    def _inside(self, text: str) -> str:
        return self._starts.sub(rf"\1{self._sentinel}", text)

    def _around(self, text: str) -> str:
        # Inside the outer white space: templates strip it and test for empty text.
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        guarded = f"{self._sentinel}{self._inside(core)}{self._sentinel}"
        return text[:start] + guarded + text[start + len(core) :]


def _check(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking_mode: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Copies of the messages and tools, with tool call arguments as dicts."""
    modes = get_args(ThinkingMode)
    if thinking_mode not in modes:
        raise ChatError(f"thinking_mode {thinking_mode!r}; it must be one of {', '.join(modes)}")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list with at least one message")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ChatError("tools must be a list of objects")
    try:
        copies, tools = json.loads(json.dumps([messages, tools]))
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"messages and tools must be JSON values: {error}") from None
    for i, message in enumerate(copies):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise ChatError(f"{where} must be an object, not {type(message).__name__}")
        role = message.get("role")
        if role not in _ROLES:
            raise ChatError(f"{where} has role {role!r}; it must be one of {', '.join(_ROLES)}")
        after_root = i == 1 and copies[0]["role"] == "root"
        if (role == "root" and i > 0) or (role in ("system", "developer") and i > 0 and not after_root):
            raise ChatError(
                f"{where} has role {role!r} in the middle, where the template would drop it; root must be "
                "the first message, system or developer the first or right after root"
            )
        _check_content(message, where)
        _parse_calls(message, where)
    return copies, tools


def _check_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return
    if not isinstance(content, list):
        raise ChatError(f"{where}.content must be a string or a list of parts, not {type(content).__name__}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            raise ChatError(
                f"{where}.content[{i}] is of type {kind!r}: image input is not supported yet; use text"
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatError(
                f'{where}.content[{i}] must be {{"type": "text", "text": a string}}, not type {kind!r}'
            )


def _parse_calls(message: dict[str, Any], where: str) -> None:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
    for i, call in enumerate(calls):
        place = f"{where}.tool_calls[{i}]"
        function = (call.get("function") or call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(f"{place} must be an object with a function name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ChatError(f"{place} has arguments that are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ChatError(
                f"{place} has arguments of type {type(arguments).__name__}; they must be an object"
            )
        function["arguments"] = arguments
