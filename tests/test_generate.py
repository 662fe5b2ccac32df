"""The library as its users see it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders

import mmx_jax
from mmx_jax import SamplingParams
from mmx_jax.errors import InputError, NonFiniteError
from mmx_jax.loading import Settings, Source
from mmx_jax.model import forward
from tests.conftest import GOLDENS

GOLDEN = load_file(GOLDENS / "tiny_vl" / "golden.safetensors")
IDS = GOLDEN["input_ids"][0].tolist()
GREEDY = GOLDEN["greedy"][0].tolist()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> mmx_jax.Model:
    return mmx_jax.load(checkpoint, dtype="fp32", max_length=128, batch=2)


def text_of(checkpoint: Path, ids: list[int]) -> str:
    """What the `tokenizers` library makes of ids; those without a token vanish."""
    library = Library.from_file(str(checkpoint / "tokenizer.json"))
    library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return library.decode([i for i in ids if i < library.get_vocab_size()], skip_special_tokens=False)


def test_one_prompt_gives_a_list_of_one(model: mmx_jax.Model, checkpoint: Path) -> None:
    (completion,) = model.generate(IDS, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert completion.token_ids == GREEDY
    assert completion.prompt_ids == IDS
    assert completion.text == text_of(checkpoint, GREEDY)
    assert (completion.finish_reason, completion.logprobs) == ("length", None)


def test_more_prompts_than_rows_run_in_turns_and_keep_their_order(model: mmx_jax.Model) -> None:
    lengths = (75, 20, 33, 75, 7)
    prompts = [IDS[:n] for n in lengths]
    many = model.generate(prompts, SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [len(c.prompt_ids) for c in many] == list(lengths)
    assert many[0].token_ids == many[3].token_ids == GREEDY[:5]
    for prompt, completion in zip(prompts, many, strict=True):
        assert completion.token_ids == model.generate(prompt, SamplingParams(5, ignore_eos=True))[0].token_ids


def test_text_prompt_is_plain_text(model: mmx_jax.Model, checkpoint: Path) -> None:
    (completion,) = model.generate("the cat[e~[", SamplingParams(max_new_tokens=1))
    library = Library.from_file(str(checkpoint / "tokenizer.json"))
    markers = {library.token_to_id(m) for m in ("[e~[", "]~b]", "]~!b[", "<mm:think>")}
    assert not markers & set(completion.prompt_ids)
    assert text_of(checkpoint, completion.prompt_ids) == "the cat[e~["


def test_stream_is_the_text_in_pieces(model: mmx_jax.Model) -> None:
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=11, ignore_eos=True)
    pieces = list(model.stream(IDS, sampling))
    assert len(pieces) > 1
    assert "".join(pieces) == model.generate(IDS, sampling)[0].text


def test_stop_text_ends_the_answer(model: mmx_jax.Model, checkpoint: Path) -> None:
    whole = text_of(checkpoint, GREEDY)
    stop = whole[3:5]
    assert whole.index(stop) == 3
    (completion,) = model.generate(IDS, SamplingParams(max_new_tokens=24, stop=stop, ignore_eos=True))
    assert (completion.text, completion.finish_reason) == (whole[:3], "stop")
    kept = len(completion.token_ids)
    assert completion.token_ids == GREEDY[:kept]
    assert stop in text_of(checkpoint, GREEDY[:kept])
    assert stop not in text_of(checkpoint, GREEDY[: kept - 1])


def test_stop_id_of_the_generation_config_ends_the_answer(model: mmx_jax.Model) -> None:
    assert model.engine.stop_ids == (351, 350)
    end = GREEDY.index(351) + 1
    (completion,) = model.generate(IDS, SamplingParams(max_new_tokens=24))
    assert completion.token_ids == GREEDY[:end]
    assert completion.finish_reason == "stop"


def test_logprobs_are_log_softmax_of_the_raw_logits(model: mmx_jax.Model) -> None:
    sampling = SamplingParams(
        4, temperature=0.5, top_k=3, repetition_penalty=1.3, seed=1, logprobs=3, ignore_eos=True
    )
    (completion,) = model.generate(IDS, sampling)
    assert completion.logprobs is not None
    logits = model.logits(IDS + completion.token_ids).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for n, token in enumerate(completion.logprobs):
        row = expected[len(IDS) - 1 + n]
        assert token.token_id == completion.token_ids[n]
        assert token.logprob == pytest.approx(row[token.token_id], abs=1e-4)
        assert [i for i, _ in token.top] == np.argsort(-row)[:3].tolist()
        assert [p for _, p in token.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)


def test_a_seed_repeats_and_no_seed_does_not(model: mmx_jax.Model) -> None:
    def draw(seed: int | None) -> list[int]:
        sampling = SamplingParams(24, temperature=1.5, seed=seed, ignore_eos=True)
        return model.generate(IDS, sampling)[0].token_ids

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_turns_do_not_pile_up_their_pages(model: mmx_jax.Model) -> None:
    page_shape = (32, 2, 8, 32)  # 2 rows of 128 tokens, 8 to a page
    seen = set()
    for event in model.events([[5]] * 5, SamplingParams(3, ignore_eos=True)):
        seen.add(sum(a.shape == page_shape and not a.is_deleted() for a in jax.live_arrays()))
        assert event.n_tokens > 0
    assert seen == {10}  # K and V of five layers


def test_a_broken_row_is_named_by_its_prompt(checkpoint: Path) -> None:
    model = mmx_jax.load(checkpoint, dtype="float32", max_length=128, batch=2)
    data = model.tree.embed.data
    data[...] = data[...].at[7].set(np.nan)
    with pytest.raises(NonFiniteError, match="prompt 3 are not finite at new token 1"):
        model.generate([[1], [2], [3], [7]], SamplingParams(2, ignore_eos=True))


def test_numpy_numbers_and_arrays_are_welcome(model: mmx_jax.Model) -> None:
    sampling = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0), ignore_eos=True)
    for prompt in (np.asarray(IDS), jnp.asarray(IDS), tuple(IDS), [np.int64(i) for i in IDS]):
        assert model.generate(prompt, sampling)[0].token_ids == GREEDY[:3]


def test_each_prompt_may_have_its_own_sampling(model: mmx_jax.Model) -> None:
    both = model.generate([IDS, IDS], [SamplingParams(3), SamplingParams(9, ignore_eos=True)])
    assert [c.token_ids for c in both] == [GREEDY[:3], GREEDY[:9]]
    with pytest.raises(InputError, match="1 sampling parameters for 2 prompts"):
        model.generate([IDS, IDS], [SamplingParams(3)])


def test_surgery_shows_in_the_forward_and_new_values_in_the_programs(checkpoint: Path) -> None:
    model = mmx_jax.load(checkpoint, dtype="float32", max_length=128, batch=2)
    before = model.logits(IDS)
    router = model.tree.layers[3].moe.router
    router.bias[...] = router.bias[...] + 10 * (np.arange(9) < 4)  # always the first four experts
    trace = model.trace(IDS)
    assert set(trace.layers[3].experts.ravel()) == {0, 1, 2, 3}
    assert np.abs(trace.logits - before).max() > 0.1
    (completion,) = model.generate(IDS, SamplingParams(1, ignore_eos=True))
    assert completion.token_ids == [int(trace.logits[-1].argmax())]

    class Constant(nnx.Module):
        def __call__(self, x, ops):
            return 0 * x[None]

    model.tree.layers[0].mlp = Constant()
    assert np.abs(model.logits(IDS) - trace.logits).max() > 0.1
    with pytest.raises(InputError, match="shape was changed"):
        model.generate(IDS, SamplingParams(1))


def test_the_pure_forward_is_open_to_research(model: mmx_jax.Model) -> None:
    logits, layers = forward(model.tree, jnp.asarray([IDS[:16]]))
    np.testing.assert_allclose(logits[0], GOLDEN["logits"][0, :16], rtol=0, atol=2e-4)
    assert len(layers) == 5


def test_only_the_first_layers(checkpoint: Path) -> None:
    model = mmx_jax.load(checkpoint, dtype="float32", max_length=128, layers=3)
    trace = model.trace(IDS)
    assert len(trace.layers) == 3
    np.testing.assert_allclose(trace.layers[2].hidden, GOLDEN["hidden_2"][0], rtol=1e-4, atol=1e-4)


def test_dense_attention_needs_no_indexer(checkpoint: Path) -> None:
    source = Source(checkpoint, Settings("float32", attention="dense"))
    assert len(source.weights.skipped["dense attention was asked for"]) == 3 * 4
    assert not any("indexer" in path for path in source.weights.paths)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        (
            '{"do_sample": false, "temperature": 0.7, "repetition_penalty": 1.2}',
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
        ('{"do_sample": true}', {"temperature": 1.0}),
        ('{"temperature": 0.7, "top_k": 40, "top_p": 0.9}', {"temperature": 0.7, "top_k": 40, "top_p": 0.9}),
    ],
)
def test_sampling_defaults_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, text: str, expected: dict
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(text)
    assert Source(tmp_path, Settings()).sampling == SamplingParams(**expected)


def test_stop_ids_come_from_everywhere(checkpoint: Path, tmp_path: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"vocab_size"', '"eos_token_id": [5, 6], "vocab_size"')
    )
    (tmp_path / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "]~b]"}}')
    marker = Library.from_file(str(checkpoint / "tokenizer.json")).token_to_id
    assert Source(tmp_path, Settings()).stop_ids == (5, 6, marker("]~b]"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    assert Source(tmp_path, Settings()).stop_ids == (6, 5, marker("]~b]"))
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    assert Source(tmp_path, Settings()).stop_ids == (marker("[e~["),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**32),
        ("logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("temperature", 10**400),
        ("temperature", "hot"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([5, 352], "token id 352 is outside the vocabulary"),
        ([[5], [-1]], "token id -1 is outside the vocabulary"),
        ([5] * 128, "the prompt has 128 tokens and max_length is 128"),
        ([1, [2]], "a prompt is a text or a list of token ids"),
        (np.array([5.5]), "a prompt is a text or a list of token ids"),
        ([[5, 1.5]], "a prompt is a text or a list of token ids"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(model: mmx_jax.Model, prompt, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(prompt)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no token ids"),
        ([[1, 2], [3]], "must have the same length"),
        ([1, 352], "token id 352"),
        ([1.0], "expected token ids"),
        (["a"], "expected token ids"),
    ],
)
def test_bad_ids_are_refused_by_the_forward(model: mmx_jax.Model, ids, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.logits(ids)
