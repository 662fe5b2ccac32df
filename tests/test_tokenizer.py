"""The tokenizer against the `tokenizers` library: a small trained file always, the released one on request.

MMX_M3_DIR names a directory with the released tokenizer.json; without it those tests are skipped.
"""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from mmx_jax.errors import TokenizerError
from mmx_jax.tokenizer import Tokenizer, byte_level, load

# OpenAI's public o200k split.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKERS = ["[e~[", "]~b]", "<think>", "<think>>", "]<]x[>["]
SEEDS = [
    "hello",
    "Hello's",
    " ",
    "  \t",
    "\n\n",
    "don't",
    "123",
    "é",
    "e\u0301",
    "\u0898\u0323",
    "日本",
    "😀",
    ".,/",
]
Pair = tuple[Tokenizer, Library, Library]  # ours, the library, the library without added tokens


def pair_from(directory: Path) -> Pair:
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    plain = Library.from_str(json.dumps(data | {"added_tokens": []}))
    return load(directory), Library.from_file(str(directory / "tokenizer.json")), plain


def library_ids(library: Library, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


def assert_same(pair: Pair, text: str) -> None:
    ours, library, plain = pair
    assert ours.encode(text, allow_special=True) == library_ids(library, text)
    assert ours.encode(text) == library_ids(plain, text)


@pytest.fixture(scope="session")
def small_json() -> dict[str, Any]:
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(O200K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(0)
    library.train_from_iterator(["".join(rng.choices(SEEDS, k=50)) for _ in range(200)], trainer)
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in MARKERS])
    return json.loads(library.to_str())


def save(directory: Path, data: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return directory


@pytest.fixture(scope="session", params=["strings", "pairs", "shuffled ids"])
def small(
    request: pytest.FixtureRequest, small_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    data = copy.deepcopy(small_json)
    model = data["model"]
    if request.param == "strings":
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    if request.param == "shuffled ids":
        tokens = list(model["vocab"])
        random.Random(1).shuffle(tokens)
        model["vocab"] = {token: i for i, token in enumerate(tokens)}
        for i, token in enumerate(data["added_tokens"]):
            token["id"] = len(tokens) + i
    return pair_from(save(tmp_path_factory.mktemp("small"), data))


@pytest.fixture(scope="session")
def released(m3_dir: Path) -> Pair:
    return pair_from(m3_dir)


def random_text(rng: random.Random, words: list[str]) -> str:
    kinds: list[Callable[[], str]] = [
        lambda: rng.choice(words),
        lambda: rng.choice(SEEDS),
        lambda: rng.choice(" \n\r\t/.1aA\u00a0\u017f'sé"),
        lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])),
        lambda: chr(rng.choice([0x301, 0x338, 0x345, 0x323, 0x898, 0x1AC0, 0x11930, 0x11935])),
        lambda: bytes(rng.randrange(256) for _ in range(6)).decode(errors="replace"),
    ]
    return "".join(rng.choice(kinds)() for _ in range(rng.randint(1, 30)))


@settings(deadline=None, max_examples=300)
@given(parts=st.lists(st.one_of(st.text(), st.sampled_from(MARKERS + SEEDS))))
def test_small_equals_library(small: Pair, parts: list[str]) -> None:
    assert_same(small, "".join(parts))


def test_small_fuzz(small: Pair) -> None:
    rng = random.Random(2)
    for _ in range(1500):
        assert_same(small, random_text(rng, MARKERS))


def test_longest_marker_wins(small: Pair) -> None:
    ours = small[0]
    assert ours.encode("<think>>", allow_special=True) == [ours.special_tokens["<think>>"]]


@pytest.mark.parametrize("blank", [" ", "\t", "\u00a0", "\n", " \n", "\n "])
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("x", "y"), (".", "."), ("\n", "\n"), ("[e~[", "[e~[")]
)
def test_long_blanks_equal_library(small: Pair, blank: str, before: str, after: str) -> None:
    for count in (9_999, 10_000, 10_001, 20_000):
        assert_same(small, before + blank * count + after)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 800)))
def test_decode_and_stream(small: Pair, ids: list[int]) -> None:
    ours, library, _ = small
    text = ours.decode(ids)
    assert text == library.decode(ids, skip_special_tokens=False)
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


@given(text=st.text())
def test_stream_emits_whole_characters(text: str) -> None:
    stream = byte_level().stream()
    shown = ""
    for token in byte_level().encode(text):
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown == text  # nothing held back once the last character is complete
    assert stream.flush() == ""


def test_stream_flushes_an_unfinished_character() -> None:
    stream = byte_level().stream()
    assert [*map(stream.push, "é".encode()[:1]), stream.flush()] == ["", "\ufffd"]


def test_byte_level() -> None:
    tokenizer = byte_level()
    text = "a [e~[\r\n  é]~b]"
    ids = [*b"a ", 256, *"\r\n  é".encode(), 257]
    assert tokenizer.encode(text, allow_special=True) == ids
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.token_id("]~!b["), tokenizer.token_id("x")) == (259, 258, None)


def test_ignored_character_keeps_a_marker_plain() -> None:
    ids = byte_level().encode("[\ue000e~[[e~[", allow_special=True, ignore="\ue000")
    assert ids == [*b"[e~[", 256]


def test_empty_and_refused_input() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("") == []
    assert tokenizer.decode([65, 999]) == "A"
    with pytest.raises(TokenizerError, match=r"lone surrogate.*position 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TokenizerError, match="-1 is negative"):
        tokenizer.decode([-1])


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(data: dict[str, Any]) -> None:
        target: Any = data
        for key in parents:
            target = target[int(key)] if isinstance(target, list) else target[key]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("model.merges", []), "merges is empty"),
        (_set("model.type", "Unigram"), "Unigram"),
        (_set("model.byte_fallback", True), "byte_fallback"),
        (_set("model.ignore_merges", True), "ignore_merges"),
        (_set("normalizer", {"type": "NFKC"}), "NFKC"),
        (_set("pre_tokenizer", {"type": "ByteLevel"}), "Split and ByteLevel"),
        (_set("pre_tokenizer.pretokenizers.0.behavior", "Removed"), "Isolated"),
        (_set("pre_tokenizer.pretokenizers.1.use_regex", True), "use_regex"),
        (_set("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\w+|\s+"}), "must end with"),
        (_set("pre_tokenizer.pretokenizers.0.pattern", {"Regex": "(" + O200K}), "does not compile"),
        (_set("added_tokens.0.lstrip", True), "lstrip"),
        (_set("added_tokens.0.normalized", True), "normalized"),
        (_set("model.vocab.嗯", 5000), "not byte-level"),
        (
            _set("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\p{N}{1,3}+" + O200K[-27:]}),
            "must end with",
        ),
        (lambda data: data["model"]["vocab"].pop("a"), "byte 0x61"),
        (lambda data: data["model"]["merges"].reverse(), "two earlier tokens"),
        (lambda data: data["model"].pop("vocab"), "not a tokenizer.json"),
    ],
)
def test_unsupported_files_are_refused(
    small_json: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = copy.deepcopy(small_json)
    change(data)
    with pytest.raises(TokenizerError, match=message):
        load(save(tmp_path, data))


def test_merges_that_tiktoken_reads_differently_are_refused(
    small_json: dict[str, Any], tmp_path: Path
) -> None:
    # "bc" comes first, so (ab, c) never happens in the library; tiktoken would still make "abc" one token.
    data = copy.deepcopy(small_json)
    model = data["model"]
    bytes_only = {token: i for i, token in enumerate(t for t in model["vocab"] if len(t) == 1)}
    model["vocab"] = bytes_only | {"bc": 256, "ab": 257, "abc": 258}
    model["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    data["added_tokens"] = []
    with pytest.raises(TokenizerError, match="never reached"):
        load(save(tmp_path, data))


def test_unmatched_text_is_refused(small_json: dict[str, Any], tmp_path: Path) -> None:
    data = copy.deepcopy(small_json)
    _set("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+"})(data)
    with pytest.raises(TokenizerError, match="skips part"):
        load(save(tmp_path, data)).encode("a1")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"{", "not JSON"), (b"\xff", "not JSON")]
)
def test_broken_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json.*{message}"):
        load(tmp_path)


def test_released_fuzz(released: Pair) -> None:
    rng = random.Random(3)
    ours = released[0]
    words = [ours.decode([rng.randrange(ours.vocab_size)]) for _ in range(5000)]
    words += list(ours.special_tokens) * 10
    for _ in range(6000):
        assert_same(released, random_text(rng, words))


def test_released_tokens_encode_to_themselves(released: Pair) -> None:
    ours = released[0]
    for text, token in ours.special_tokens.items():
        assert ours.encode(text, allow_special=True) == [token]
        assert_same(released, f"a.{text}!{text}\u0301{text}\u0338 {text}\n")
    assert ours.vocab_size == 200_061
    assert ours.decode([200_061, 200_063]) == ""


@pytest.mark.parametrize(
    ("unit", "count"),
    [
        (" ", 2_000_000),
        ("a", 1_000_000),
        ("\n", 1_000_000),
        ("ab", 500_000),
        ("7", 300_000),
        ("\u0301", 300_000),
        ("😀", 200_000),
        ("中", 300_000),
        ("A", 300_000),
    ],
)
def test_released_long_runs(released: Pair, unit: str, count: int) -> None:
    assert_same(released, "x" + unit * 30_000 + "y")
    ours = released[0]
    ids = ours.encode("." + unit * count + ".")
    assert ours.decode(ids) == "." + unit * count + "."
    # Beyond the lengths that are compared with the library: a run is periodic, up to its ends.
    middle = ids[100:-100]
    assert middle[:3000] == middle[-3000:] or middle[1:3000] == middle[-3000:-1]
