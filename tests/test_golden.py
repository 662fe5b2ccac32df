"""The model against what transformers computed on the same tiny checkpoints, in float32."""

from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

import mmx_jax
from mmx_jax import SamplingParams
from tests.conftest import GOLDENS

TRANSFORMERS = ["tiny_vl", "tiny_text", "block128", "real_heads"]
QUANTISED = ["tiny_mxfp8", "tiny_nvfp4"]  # float64 logits on the dequantised weights
# float32 against float32, summed in another order: observed differences are 1e-5 at logits of 7.
LOGITS = 2e-4
HIDDEN = 1e-4


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDENS / name / "golden.safetensors")


@cache
def model(name: str) -> mmx_jax.Model:
    rows, length = golden(name)["input_ids"].shape
    return mmx_jax.load(GOLDENS / name, dtype="float32", max_length=length + 24, batch=rows)


@cache
def trace(name: str):
    return model(name).trace(golden(name)["input_ids"])


@pytest.mark.parametrize("name", TRANSFORMERS + QUANTISED)
def test_logits(name: str) -> None:
    np.testing.assert_allclose(trace(name).logits, golden(name)["logits"], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_hidden_states(name: str) -> None:
    for i, layer in enumerate(trace(name).layers):
        expected = golden(name)[f"hidden_{i}"]
        assert np.abs(layer.hidden - expected).max() <= HIDDEN * np.abs(expected).max(), i


@pytest.mark.parametrize("name", TRANSFORMERS + QUANTISED)
def test_experts_and_blocks(name: str) -> None:
    expected, config = golden(name), model(name).config
    assert any(config.moe_layers)
    for i, layer in enumerate(trace(name).layers):
        assert (layer.experts is not None) == config.moe_layers[i]
        assert (layer.blocks is not None) == config.sparse_layers[i]
        if layer.experts is not None:
            flat = layer.experts.reshape(-1, config.experts_per_token)
            order = np.argsort(flat, axis=-1)
            np.testing.assert_array_equal(np.take_along_axis(flat, order, -1), expected[f"experts_{i}"])
            if f"expert_weights_{i}" in expected:
                # The golden holds the weights before the routed scaling factor.
                weights = np.take_along_axis(layer.expert_weights.reshape(flat.shape), order, -1)
                np.testing.assert_allclose(
                    weights, expected[f"expert_weights_{i}"] * config.routed_scaling_factor, rtol=1e-5
                )
        if layer.blocks is not None:
            by_head = np.sort(layer.blocks.transpose(0, 2, 1, 3), axis=-1)
            np.testing.assert_array_equal(by_head, np.sort(expected[f"blocks_{i}"], axis=-1))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_greedy_tokens(name: str) -> None:
    expected = golden(name)["greedy"]
    sampling = SamplingParams(max_new_tokens=expected.shape[1], ignore_eos=True)
    completions = model(name).generate(golden(name)["input_ids"].tolist(), sampling)
    assert [c.token_ids for c in completions] == expected.tolist()
    assert {c.finish_reason for c in completions} == {"length"}


def test_one_list_of_ids_has_no_batch_axis() -> None:
    ids = golden("tiny_vl")["input_ids"][0].tolist()
    logits = model("tiny_vl").logits(ids)
    assert logits.shape == (len(ids), 352)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, golden("tiny_vl")["logits"][0], rtol=0, atol=LOGITS)
