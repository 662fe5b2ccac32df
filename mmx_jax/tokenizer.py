"""Text to token ids and back, from the `tokenizer.json` of a checkpoint.

Owns: reading the file, the split on added tokens, normalization, the byte-level BPE (run by tiktoken) and
decoding. The ids are those of the `tokenizers` library. Refuses to know: chat roles, templates and the model.
"""

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from mmx_jax.errors import TokenizerError

# GPT-2's spelling of bytes in a vocabulary: printable Latin-1 stands for itself, the rest moves to U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}

# Every regex of the cl100k and o200k family ends like this; the cut in `_pieces` relies on it.
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

# tiktoken's regex engine overflows its stack in `\s+(?!\S)` on about a million spaces. In a run of blanks
# that no line break follows, that alternative takes all but the last blank, or all at the end of the text.
# The lookbehind lets a run be tried at its start only, which keeps the search linear.
_LONG_BLANKS = re.compile(r"(?<![^\S\r\n\x1c-\x1f])[^\S\r\n\x1c-\x1f]{10000,}+(?![\r\n])")

# The `tokenizers` library normalizes by Unicode 9: it neither reorders nor composes these younger characters.
_YOUNG_MARKS = re.compile(
    "([\u07fd\u0898-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b\u0d3c\u0eba\u1715\u1abf-\u1ace\u1df6-\u1dfa\ua82c"
    "\U00010d24-\U00010d27\U00010eab\U00010eac\U00010efd-\U00010eff\U00010f46-\U00010f50"
    "\U00010f82-\U00010f85\U00011070\U0001133b\U0001145e\U00011839\U0001183a\U00011930"
    "\U0001193d\U0001193e\U00011943\U000119e0\U00011a34\U00011a47\U00011a99\U00011d42"
    "\U00011d44\U00011d45\U00011d97\U00011f41\U00011f42\U00016ff0\U00016ff1\U0001e08f"
    "\U0001e130-\U0001e136\U0001e2ae\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef]+)"
)


class StreamDecoder:
    """Decodes ids one at a time; the parts together equal `decode` of all ids.

    Holds back an incomplete UTF-8 tail, so a character that spans tokens comes out whole.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete after this id. Raises TokenizerError for a negative id."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The rest, with U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer; made by `load` or `byte_level`.

    `special_tokens` maps the text of every added token to its id. `vocab_size` is the largest id plus one.
    """

    special_tokens: dict[str, int]
    vocab_size: int
    _bpe: tiktoken.Encoding
    _ids: list[int]  # tiktoken's rank -> id
    _bytes: dict[int, bytes]  # id -> bytes, added tokens included
    _markers: re.Pattern[str]
    _nfc: bool

    def encode(self, text: str, allow_special: bool = False, ignore: str = "") -> list[int]:
        """The ids of `text`; markers in it become control tokens only with `allow_special`.

        `ignore` is a string to drop after the split on added tokens: inside a marker it keeps it plain text.
        Raises TokenizerError for a lone surrogate. Same ids as `tokenizers` (add_special_tokens=False).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text has a lone surrogate {text[error.start]!a} at position {error.start}; "
                "it must be valid Unicode"
            ) from None
        ids: list[int] = []
        for i, part in enumerate(self._markers.split(text) if allow_special else [text]):
            if i % 2:
                ids.append(self.special_tokens[part])
            elif part:
                ids += self._encode_plain(part.replace(ignore, "") if ignore else part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        text = _nfc(text) if self._nfc else text
        ranks: list[int] = []
        done = 0
        for run in _LONG_BLANKS.finditer(text):
            end = run.end() if run.end() == len(text) else run.end() - 1
            ranks += self._bpe.encode_ordinary(text[done : run.start()])
            ranks += self._bpe._encode_single_piece(text[run.start() : end])
            done = end
        ranks += self._bpe.encode_ordinary(text[done:])
        ids = [self._ids[rank] for rank in ranks]
        # tiktoken drops what its regex does not match.
        if sum(len(self._bytes[token]) for token in ids) != len(text.encode()):
            raise TokenizerError("the pre-tokenizer's regex skips part of the text; it must match all of it")
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id, none for an id without a token. Raises TokenizerError for a negative id."""
        if token < 0:
            raise TokenizerError(f"token id {token} is negative; ids start at 0")
        return self._bytes.get(token, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included, U+FFFD for broken UTF-8.

        Ids without a token (the model's embedding has a few more rows than the tokenizer) give no text.
        Raises TokenizerError for a negative id.
        """
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self)

    def token_id(self, text: str) -> int | None:
        """The id of an added token such as `[e~[`, or None."""
        return self.special_tokens.get(text)


def load(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises TokenizerError if `tokenizer.json` is missing, broken, or not a byte-level BPE with the regex split
    of the cl100k or o200k family whose ids this module reproduces exactly.
    """
    path = Path(directory) / "tokenizer.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from None
    try:
        return _build(data)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TokenizerError(f"{path}: not a tokenizer.json ({type(error).__name__}: {error})") from None


def byte_level() -> Tokenizer:
    """A tokenizer for demonstrations: one id per byte, and the markers of a chat turn as 256-258."""
    return _assemble(
        ranks={bytes([byte]): byte for byte in range(256)},
        ids=list(range(256)),
        vocab={byte: bytes([byte]) for byte in range(256)},
        special={"[e~[": 256, "]~b]": 257, "]~!b[": 258},
        pattern=r"[^\s]" + _TAIL,
        nfc=False,
    )


def _build(data: dict[str, Any]) -> Tokenizer:
    model = data["model"]
    if model.get("type") != "BPE":
        raise TokenizerError(f"model type {model.get('type')!r}; only byte-level 'BPE' is supported")
    for key in (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ):
        if model.get(key):
            raise TokenizerError(f"model.{key} = {model[key]!r} is not supported; it must be unset")
    normalizer = data.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise TokenizerError(f"normalizer {normalizer!r}; only NFC or none is supported")
    special = _added_tokens(data.get("added_tokens") or [])
    vocab = {token_id: _token_bytes(text) for text, token_id in model["vocab"].items() if text not in special}
    ranks, ids = _merge_ranks(model["vocab"], model["merges"])
    return _assemble(
        ranks, ids, vocab, special, _split_pattern(data.get("pre_tokenizer")), normalizer is not None
    )


def _assemble(
    ranks: dict[bytes, int],
    ids: list[int],
    vocab: dict[int, bytes],
    special: dict[str, int],
    pattern: str,
    nfc: bool,
) -> Tokenizer:
    try:
        bpe = tiktoken.Encoding("mmx", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise TokenizerError(f"pre-tokenizer regex {pattern!r} does not compile ({error})") from None
    by_length = sorted(special, key=len, reverse=True)  # of two tokens at one place the longer wins
    return Tokenizer(
        special_tokens=special,
        vocab_size=max([*vocab, *special.values()]) + 1,
        _bpe=bpe,
        _ids=ids,
        _bytes=vocab | {token: text.encode() for text, token in special.items()},
        _markers=re.compile(f"({'|'.join(map(re.escape, by_length)) or '(?!)'})"),
        _nfc=nfc,
    )


def _added_tokens(entries: list[dict[str, Any]]) -> dict[str, int]:
    special: dict[str, int] = {}
    for entry in entries:
        text = entry["content"]
        for flag in ("single_word", "lstrip", "rstrip", "normalized"):
            if entry.get(flag):
                raise TokenizerError(f"added token {text!r} has {flag}=true; only false is supported")
        if not text:
            raise TokenizerError(f"added token {entry['id']} has an empty content")
        special[text] = entry["id"]
    return special


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    steps = (pre_tokenizer or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        raise TokenizerError(f"pre_tokenizer {pre_tokenizer!r}; it must be a Sequence of Split and ByteLevel")
    split, byte_level_step = steps
    if split["behavior"] != "Isolated" or split.get("invert") or "Regex" not in split["pattern"]:
        raise TokenizerError(f"pre-tokenizer {split!r}; Split must have a Regex and behavior Isolated")
    if byte_level_step.get("add_prefix_space") or byte_level_step.get("use_regex", True):
        raise TokenizerError(
            f"pre-tokenizer {byte_level_step!r}; ByteLevel must have add_prefix_space and use_regex false"
        )
    pattern = split["pattern"]["Regex"]
    # `{1,3}+` is possessive to tiktoken and a repeated group to the `tokenizers` library.
    if not pattern.endswith(_TAIL) or re.search(r"\d\}\+", pattern):
        raise TokenizerError(
            f"pre-tokenizer regex {pattern!r}; it must end with {_TAIL!r} and have no '{{n}}+'"
        )
    return pattern


def _token_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in text])
    except KeyError:
        raise TokenizerError(
            f"vocabulary entry {text!r} is not byte-level (each character stands for a byte)"
        ) from None


def _merge_ranks(
    vocab: dict[str, int], merges: list[str] | list[list[str]]
) -> tuple[dict[bytes, int], list[int]]:
    """tiktoken's ranks (the 256 bytes, then the merges in order) and the id of each rank.

    `tokenizers` joins the listed pairs only; tiktoken joins any neighbours whose concatenation has a rank,
    and takes a piece that is a token whole. Both give the same ids for every text if each merge joins tokens
    of earlier ranks, and a token encoded alone with the earlier merges ends as its two listed parts: then
    no other pair with the same concatenation can become neighbours. This is checked here for every merge.
    """
    if not merges:
        raise TokenizerError("model.merges is empty; a BPE needs its merges")
    missing = [char for char in _BYTE_OF if char not in vocab]
    if missing:
        raise TokenizerError(
            f"vocabulary has no token for byte {_BYTE_OF[missing[0]]:#04x}; it needs all 256"
        )
    rank = {char: i for i, char in enumerate(_BYTE_OF)}
    parts: list[tuple[int, int]] = [(0, 0)] * 256  # of a rank; bytes have none
    pairs: dict[tuple[int, int], int] = {}
    for i, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        text = left + right
        if left not in rank or right not in rank or text not in vocab or text in rank:
            raise TokenizerError(
                f"merge {i} ({left!r}, {right!r}) must join two earlier tokens to a new one of the vocabulary"
            )
        pair = rank[left], rank[right]
        rank[text] = pairs[pair] = len(parts)
        parts.append(pair)
    for i, (left, right) in enumerate(parts[256:], 256):
        if not _stays_apart(pairs, parts, left, right, i):
            raise TokenizerError(
                f"merge {i - 256} {merges[i - 256]!r} is never reached: earlier merges take its text apart"
            )
    return {_token_bytes(text): i for text, i in rank.items()}, [vocab[text] for text in rank]


def _stays_apart(
    pairs: dict[tuple[int, int], int], parts: list[tuple[int, int]], left: int, right: int, limit: int
) -> bool:
    """Whether no merge with a rank below `limit` ever joins across the border of these neighbours.

    Undoes the merges on both sides, the latest first, and looks at each pair that was at the border.
    """
    while pairs.get((left, right), limit) >= limit:
        if left < 256 and right < 256:
            return True
        # Equal merges happen from left to right: of two the right one is the later, and at its rank
        # a merge across the border would have come before it.
        if left > right:
            limit, left = left, parts[left][1]
        else:
            limit, right = right + 1, parts[right][0]
    return False


def _nfc(text: str) -> str:
    parts = _YOUNG_MARKS.split(text)
    return "".join(part if i % 2 else unicodedata.normalize("NFC", part) for i, part in enumerate(parts))
