"""The library: load a checkpoint, look at its forward, continue prompts. Text in, text out."""

import math
import numbers
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from mmx_jax.chat import ChatTemplate
from mmx_jax.config import ModelConfig
from mmx_jax.engine import Engine, Progress, Request, Token, check_request, silent
from mmx_jax.errors import InputError
from mmx_jax.model import M3, LayerTrace, forward
from mmx_jax.sampling import MAX_LOGPROBS
from mmx_jax.stopping import Answer
from mmx_jax.tokenizer import Tokenizer

Ids = Sequence[int] | np.ndarray
Prompt = str | Ids

# The pure forward compiles once per padded length, so lengths are rounded up to a multiple of this.
PAD = 128

# Sampling parameters that neither the caller nor the checkpoint gives.
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. None stands for the checkpoint's own default, else for what is said here.

    temperature: 0 is greedy (the default); top_k: keep the k likeliest (0: all); top_p: keep the likeliest
    that reach this probability (1: all); min_p: drop what is less likely than this share of the likeliest;
    repetition_penalty: above 1 discourages tokens that occurred (1: off); seed: makes sampling repeatable
    (a fresh one is drawn otherwise); stop: texts that end the answer; ignore_eos: go on after a stop id;
    logprobs: report each token's log-probability with this many alternatives (0 to 20; None: do not).
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            stop: tuple[str, ...] = (self.stop,)
        elif isinstance(self.stop, Sequence):
            stop = tuple(self.stop)
        else:
            raise InputError(f"stop {self.stop!r}: expected a text or a list of texts")
        object.__setattr__(self, "stop", stop)
        for name in ("max_new_tokens", "top_k", "seed", "logprobs"):
            self._number(name, numbers.Integral, int, "an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            self._number(name, numbers.Real, float, "a number")
        rules = [
            ("max_new_tokens", lambda v: v >= 1, "at least 1"),
            ("temperature", lambda v: v >= 0, "0 (greedy) or more"),
            ("top_k", lambda v: 0 <= v < 2**31, "0 (off) or more"),
            ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1 (off)"),
            ("min_p", lambda v: 0 <= v <= 1, "0 (off) to 1"),
            ("repetition_penalty", lambda v: v > 0, "above 0 (1 is off)"),
            ("seed", lambda v: 0 <= v < 2**32, "0 to 2^32 - 1"),
            ("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ]
        for name, holds, expected in rules:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise InputError(f"{name} {value!r}: it must be {expected}")
        if any(not isinstance(s, str) or not s for s in stop):
            raise InputError("stop: every stop text must be a string that is not empty")

    def _number(self, name: str, kind: type, convert: type, expected: str) -> None:
        """Check a field that may be None, and make a NumPy number a plain one."""
        value = getattr(self, name)
        if value is None:
            return
        try:
            number = convert(value) if isinstance(value, kind) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InputError(f"{name} {value!r}: expected {expected}")
        object.__setattr__(self, name, number)


class TokenLogProb(NamedTuple):
    """A token's log-probability (fp32 log-softmax before temperature and filters) and its likeliest peers."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """An answer. `token_ids` include the stop id that ended it; `text` has neither stop id nor stop text."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" or "length"
    logprobs: list[TokenLogProb] | None
    stats: dict[str, Any]


class Event(NamedTuple):
    """News of one prompt: text that is safe to show, its tokens so far, and the whole at its end."""

    index: int
    text: str
    n_tokens: int
    completion: Completion | None


@dataclass(frozen=True)
class Trace:
    """What the forward did. Arrays have no batch axis if the ids had none."""

    logits: Float[np.ndarray, "*B S V"]
    layers: list[LayerTrace]


@partial(jax.jit, static_argnums=0)
def _forward(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array) -> Any:
    return forward(nnx.merge(graphdef, state), tokens)


class Model:
    """A loaded model. `tree` is its Flax module tree, open to surgery.

    `logits` and `trace` run the tree as it is, with plain JAX operations. `generate` and `stream` run
    programs that were compiled for the tree's structure: they see new values of weights, and refuse a tree
    whose structure was changed.
    """

    def __init__(
        self,
        tree: M3,
        engine: Engine,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None,
        sampling: SamplingParams,
    ):
        self.tree, self.engine = tree, engine
        self.tokenizer, self.chat, self.default_sampling = tokenizer, chat, sampling
        graphdef, state = nnx.split(tree)
        self._structure = (graphdef, *map(_kind, jax.tree.leaves(state)))

    @property
    def config(self) -> ModelConfig:
        return self.tree.config

    def logits(self, ids: Ids | Sequence[Ids]) -> Float[np.ndarray, "*B S V"]:
        """Float32 logits at every position of one list of ids, or of several of equal length."""
        return self.trace(ids).logits

    def trace(self, ids: Ids | Sequence[Ids]) -> Trace:
        """Logits and, per layer, its input, the experts and weights of each token, and the chosen blocks."""
        tokens, single = self._token_array(ids)
        length = tokens.shape[1]
        padded = np.pad(tokens, ((0, 0), (0, -length % PAD)))
        graphdef, state = nnx.split(self.tree)
        logits, layers = jax.device_get(_forward(graphdef, state, padded))

        def cut(a: np.ndarray) -> np.ndarray:
            return a[0, :length] if single else a[:, :length]

        return Trace(cut(logits), jax.tree.map(cut, list(layers)))

    def _token_array(self, ids: Any) -> tuple[np.ndarray, bool]:
        try:
            tokens = np.asarray(ids)
        except ValueError:
            raise InputError("several lists of ids must have the same length") from None
        if tokens.size == 0:
            raise InputError("no token ids: at least one is needed")
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            raise InputError("expected token ids: a list of integers, or several such lists")
        if bad := tokens[(tokens < 0) | (tokens >= self.config.vocab_size)].tolist():
            raise InputError(
                f"token id {bad[0]} is outside the vocabulary: 0 to {self.config.vocab_size - 1}"
            )
        return np.atleast_2d(tokens).astype(np.int32), tokens.ndim == 1

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress = silent,
    ) -> list[Completion]:
        """Continue one prompt or a list of them; always a list, in the order of the prompts.

        A prompt is a text (in which control markers are plain text) or a list of ids. More prompts than
        `batch` run in turns. `sampling` is one for all, or one for each.
        """
        done = {e.index: e.completion for e in self.events(prompts, sampling, progress) if e.completion}
        return [done[i] for i in sorted(done)]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text, piece by piece, as it is made; never a broken character or part of a stop."""
        if self.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer.json, so there is no text to stream")
        return (event.text for event in self.events([prompt], sampling) if event.text)

    def events(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress = silent,
    ) -> Iterator[Event]:
        """What `generate` does, told as it happens. All input is checked before anything runs."""
        many = _as_list(prompts)
        params = (
            [sampling] * len(many) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        )
        if any(not isinstance(s, SamplingParams | None) for s in params):
            raise InputError("sampling is a SamplingParams, or a list with one for each prompt")
        if len(params) != len(many):
            raise InputError(
                f"{len(params)} sampling parameters for {len(many)} prompts: one for each, or one"
            )
        requests = [self._request(p, s or SamplingParams()) for p, s in zip(many, params, strict=True)]
        stops = [tuple((s or self.default_sampling).stop) for s in params]
        if self.tokenizer is None and any(stops):
            raise InputError("the checkpoint has no tokenizer.json, so no stop text can be found")
        graphdef, state = nnx.split(self.tree)
        weights = jax.tree.leaves(state)
        if (graphdef, *map(_kind, weights)) != self._structure:
            raise InputError(
                "the module tree's structure or a weight's shape was changed: the compiled programs cannot"
                " follow it"
            )
        return self._run(requests, stops, weights, progress)

    def _run(
        self,
        requests: list[Request],
        stops: list[tuple[str, ...]],
        weights: list[jax.Array],
        progress: Progress,
    ) -> Iterator[Event]:
        for first in range(0, len(requests), self.engine.batch):
            turn = requests[first : first + self.engine.batch]
            answers = [
                Answer(self.tokenizer, () if r.ignore_eos else self.engine.stop_ids, stops[first + i])
                for i, r in enumerate(turn)
            ]
            start = time.perf_counter()
            decoding = self.engine.start(weights, turn, first)
            decoding.prefill(progress)
            prefilled = time.perf_counter()
            while decoding.active:
                news = decoding.step()
                active = decoding.active
                for row, tokens in enumerate(news):
                    if not tokens:
                        continue
                    answer = answers[row]
                    shown = "".join(answer.push(t) for t in tokens if answer.finish_reason is None)
                    if answer.finish_reason is None and row not in active:
                        shown += answer.close()
                    elif answer.finish_reason is not None and row in active:
                        decoding.stop(row, len(answer.tokens))
                    completion = None
                    if answer.finish_reason is not None:
                        now = time.perf_counter()
                        completion = _completion(turn[row], answer, prefilled - start, now - prefilled)
                    yield Event(first + row, shown, len(answer.tokens), completion)
            del decoding  # its pages, before the next turn makes its own

    def _request(self, prompt: str | list[int], sampling: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("the checkpoint has no tokenizer.json: give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        values = {}
        for name, off in OFF.items():
            given, default = getattr(sampling, name), getattr(self.default_sampling, name)
            values[name] = given if given is not None else default if default is not None else off
        request = Request(
            prompt=tuple(prompt),
            max_new_tokens=sampling.max_new_tokens,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(32),
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            **values,
        )
        check_request(request, self.config, self.engine.max_length)
        return request


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """The prompts as texts and lists of ids. One list of ids, the empty one too, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    many = prompts if isinstance(prompts, list | tuple) else np.asarray(prompts).tolist()
    if not isinstance(many, list | tuple) or all(_is_id(p) for p in many):
        many = [many]
    return [p if isinstance(p, str) else _ids(p) for p in many]


def _is_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _ids(prompt: Any) -> list[int]:
    values = prompt if isinstance(prompt, list | tuple) else np.asarray(prompt).tolist()
    if not isinstance(values, list | tuple) or not all(_is_id(i) for i in values):
        raise InputError("a prompt is a text or a list of token ids")
    return [int(i) for i in values]


def _kind(array: jax.Array) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)


def _completion(request: Request, answer: Answer, prefill_s: float, decode_s: float) -> Completion:
    tokens: list[Token] = answer.tokens
    logprobs = None
    if request.logprobs is not None:
        logprobs = [TokenLogProb(t.id, t.logprob, t.top) for t in tokens]  # pyright: ignore[reportArgumentType]
    stats = {
        "prompt_tokens": len(request.prompt),
        "new_tokens": len(tokens),
        "prefill_seconds": round(prefill_s, 6),
        "decode_seconds": round(decode_s, 6),
        "tokens_per_second": round(len(tokens) / decode_s, 3) if decode_s > 0 else None,
        "seed": request.seed if request.temperature > 0 else None,
    }
    assert answer.finish_reason is not None
    return Completion(
        list(request.prompt), [t.id for t in tokens], answer.text, answer.finish_reason, logprobs, stats
    )
