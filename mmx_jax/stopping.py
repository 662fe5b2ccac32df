"""Turning a row's tokens into text that is safe to show, and ending it at a stop id or a stop text."""

from collections.abc import Sequence

from mmx_jax.engine import Token
from mmx_jax.tokenizer import Tokenizer


class Answer:
    """One answer as it grows. `finish_reason` is None until it ends.

    Text that might still turn out to be the beginning of a stop text, or of a character, is held back.
    Without a tokenizer there is no text, only tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_ids: Sequence[int], stop: Sequence[str]):
        self.tokens: list[Token] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stop_ids, self._stop = frozenset(stop_ids), tuple(stop)
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._held = ""

    def push(self, token: Token) -> str:
        """Take a token; the text that it makes safe to show."""
        self.tokens.append(token)
        if token.id in self._stop_ids:
            return self._end("stop")
        if self._decoder is None:
            return ""
        return self._show(self._decoder.push(token.id))

    def close(self) -> str:
        """No more tokens were allowed: the text that was held back."""
        return self._end("length")

    def _end(self, reason: str) -> str:
        shown = "" if self._decoder is None else self._show(self._decoder.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            shown += self._held
            self.text += self._held
        return shown

    def _show(self, text: str) -> str:
        self._held += text
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.finish_reason = "stop"
            shown = self._held[: min(found)]
        else:
            shown = self._held[: len(self._held) - self._maybe_stop()]
        self._held = self._held[len(shown) :]
        self.text += shown
        return shown

    def _maybe_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max(map(len, self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0
