"""Configurations: every shape a `config.json` comes in, what is refused and how, and damage of any kind."""

import copy
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmx_jax.config import ModelConfig, bundled
from mmx_jax.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


def read(name: str) -> dict[str, Any]:
    """A golden's config, or one of our own."""
    path = bundled(f"{name}.json") if name in ("tiny", "minimax_m3") else GOLDEN / name / "config.json"
    return json.loads(path.read_text())


def put(data: dict[str, Any], path: str, *value: Any) -> dict[str, Any]:
    """A copy with `value` at the dotted path, or without that key if no value is given."""
    data = copy.deepcopy(data)
    *parents, key = path.split(".")
    node = data
    for parent in parents:
        node = node[parent]
    if value:
        node[key] = value[0]
    else:
        del node[key]
    return data


# --- Shapes ---

TINY = {
    "vocab_size": 352,
    "hidden_size": 80,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "max_position": 512,
    "dense_intermediate_size": 112,
    "expert_intermediate_size": 64,
    "shared_intermediate_size": 96,
    "num_experts": 9,
    "experts_per_token": 4,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_head_dim": 24,
    "block_size": 8,
    "top_blocks": 3,
    "local_blocks": 1,
    "init_blocks": 0,
}
TEXT = TINY | {
    "num_experts": 8,
    "moe_layers": (False, True, True, True),
    "sparse_layers": (False, True, True, True),
}
VL = TINY | {
    "moe_layers": (False, False, True, True, True),
    "sparse_layers": (False, False, True, True, True),
}
SHAPES = {
    "tiny_vl": VL | {"eos_token_ids": ()},  # the released shape
    "tiny_text": TEXT | {"eos_token_ids": (2,)},  # a bare text config, saved by transformers
    "block128": TINY  # transformers' shape with a `text_config`
    | {
        "hidden_size": 96,
        "num_heads": 8,
        "num_kv_heads": 4,
        "max_position": 2048,
        "block_size": 128,
        "top_blocks": 2,
        "moe_layers": (False, True, True),
        "sparse_layers": (False, True, True),
        "eos_token_ids": (2,),
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_field_of_each_shape(name: str):
    assert ModelConfig.from_dir(GOLDEN / name) == ModelConfig(**SHAPES[name])


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/config.json")))
def test_every_golden_is_read_without_a_warning(name: str):
    config = ModelConfig.from_dir(GOLDEN / name)
    assert config.num_layers == (read(name).get("text_config") or read(name))["num_hidden_layers"]


def test_own_schema():
    c = ModelConfig.from_file(bundled("tiny.json"))
    assert (c.num_layers, c.moe_layers, c.eos_token_ids) == (4, (False, True, True, True), (256,))
    assert (c.hidden_size, c.rotary_dim, c.index_head_dim, c.rope_theta) == (96, 12, 20, 5e6)


def test_bundled_m3_has_the_published_dimensions():
    c = ModelConfig.from_file(bundled("minimax_m3.json"))
    assert (c.hidden_size, c.num_layers, c.vocab_size, c.max_position) == (6144, 60, 200064, 1048576)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim, c.rope_theta) == (64, 4, 128, 64, 5e6)
    assert (c.num_experts, c.experts_per_token, c.expert_intermediate_size) == (128, 4, 3072)
    assert (c.index_head_dim, c.block_size, c.top_blocks, c.local_blocks, c.init_blocks) == (
        128,
        128,
        16,
        1,
        0,
    )
    assert c.moe_layers == c.sparse_layers == (False,) * 3 + (True,) * 57


def test_released_file_is_the_bundled_config(m3_dir: Path):
    assert ModelConfig.from_dir(m3_dir) == ModelConfig.from_file(bundled("minimax_m3.json"))


def test_m31_values():
    """M3.1 has M3's model type: nothing but the values tells them apart."""
    data = put(read("tiny_vl"), "text_config.num_experts_per_tok", 8)
    layers = 60
    data = put(data, "text_config.num_hidden_layers", layers)
    data = put(data, "text_config.moe_layer_freq", [0, 0, 0] + [1] * 57)
    for key in ("sparse_attention_freq", "sparse_disable_index_value"):
        data = put(data, f"text_config.sparse_attention_config.{key}", [1] * layers)
    data = put(data, "text_config.sparse_attention_config.sparse_init_block", 1)
    c = ModelConfig.from_dict(data)
    assert (c.experts_per_token, c.init_blocks, c.local_blocks, c.num_layers) == (8, 1, 1, 60)
    assert c.sparse_layers == (True,) * 60
    assert c.moe_layers == (False,) * 3 + (True,) * 57


def test_init_blocks_in_the_flat_shape():
    assert ModelConfig.from_dict(read("tiny_text") | {"index_init_blocks": 2}).init_blocks == 2


@pytest.mark.parametrize("act", ["silu", "swigluoai"])
def test_both_names_of_the_activation(act: str):
    assert ModelConfig.from_dict(put(read("tiny_vl"), "text_config.hidden_act", act)).swiglu_alpha == 1.702


@pytest.mark.parametrize("off", [False, 0])
def test_sparse_attention_switched_off(off: Any):
    data = put(read("tiny_vl"), "text_config.sparse_attention_config.use_sparse_attention", off)
    assert ModelConfig.from_dict(data).sparse_layers == (False,) * 5


def test_rotary_from_either_key_alone():
    data = put(read("tiny_vl"), "text_config.rotary_dim")
    assert ModelConfig.from_dict(data).rotary_dim == 16
    data = put(read("tiny_vl"), "text_config.partial_rotary_factor")
    assert ModelConfig.from_dict(put(data, "text_config.rotary_dim", 12)).rotary_dim == 12


def test_value_path_of_a_layer_without_an_indexer_is_no_matter():
    data = put(
        read("tiny_vl"), "text_config.sparse_attention_config.sparse_disable_index_value", [1, 0, 1, 1, 1]
    )
    assert ModelConfig.from_dict(data).sparse_layers == (False, False, True, True, True)


@pytest.mark.parametrize(
    ("text", "top", "expected"),
    [(2, 7, (2, 7)), ([5, 2], [2, 9], (5, 2, 9)), (None, [4], (4,)), (3, None, (3,)), (None, None, ())],
)
def test_eos_ids_of_both_levels(text: Any, top: Any, expected: tuple[int, ...]):
    data = put(put(read("block128"), "text_config.eos_token_id", text), "eos_token_id", top)
    assert ModelConfig.from_dict(data).eos_token_ids == expected


# --- Smaller models of the same kind ---


def test_first_layers():
    c = ModelConfig.from_dir(GOLDEN / "tiny_vl")
    cut = c.first_layers(3)
    assert (cut.moe_layers, cut.sparse_layers) == ((False, False, True), (False, False, True))
    assert cut == ModelConfig(**VL | {"moe_layers": cut.moe_layers, "sparse_layers": cut.sparse_layers})
    assert c.first_layers(5) == c
    for count in (0, -1, 6):
        with pytest.raises(ConfigError, match=rf"layers {count}: the model has 5"):
            c.first_layers(count)


def test_with_dense_attention():
    c = ModelConfig.from_dir(GOLDEN / "tiny_vl").with_attention("dense")
    assert c == ModelConfig(**VL | {"sparse_layers": (False,) * 5})


# --- Refusals: each names the key and the value ---

SPARSE = "text_config.sparse_attention_config."
REFUSED = [
    ("tiny_vl", "model_type", "llama", "model_type is 'llama'"),
    ("tiny_vl", "tie_word_embeddings", True, "tie_word_embeddings is True"),
    ("tiny_vl", "text_config.tie_word_embeddings", True, "text_config.tie_word_embeddings is True"),
    ("tiny_text", "tie_word_embeddings", True, "tie_word_embeddings is True"),
    ("tiny_vl", "text_config.scoring_func", "softmax", "text_config.scoring_func is 'softmax'"),
    ("tiny_vl", "text_config.hidden_act", "gelu", "text_config.hidden_act is 'gelu'"),
    ("tiny_text", "hidden_act", "relu", "hidden_act is 'relu'"),
    ("tiny_vl", "text_config.use_gemma_norm", False, "text_config.use_gemma_norm is False"),
    ("tiny_vl", "text_config.use_qk_norm", False, "text_config.use_qk_norm is False"),
    ("tiny_vl", "text_config.qk_norm_type", "per_layer", "text_config.qk_norm_type is 'per_layer'"),
    ("tiny_vl", "text_config.use_routing_bias", False, "text_config.use_routing_bias is False"),
    ("tiny_vl", "text_config.attention_output_gate", True, "text_config.attention_output_gate is True"),
    ("tiny_vl", "text_config.attention_bias", True, "text_config.attention_bias is True"),
    ("tiny_vl", "text_config.n_shared_experts", 2, "text_config.n_shared_experts is 2: only 1"),
    ("tiny_vl", "text_config.sliding_window", 4096, "text_config.sliding_window is 4096"),
    ("tiny_vl", SPARSE + "sparse_score_type", "mean", SPARSE + "sparse_score_type is 'mean'"),
    ("tiny_vl", SPARSE + "index_topk_freq", 4, SPARSE + "index_topk_freq is 4"),
    ("tiny_text", "index_topk_freq", 4, "index_topk_freq is 4"),
    # rotation
    ("tiny_vl", "text_config.rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling is {'type': 'yarn'"),
    ("tiny_text", "rope_scaling", {"rope_type": "linear"}, "rope_scaling is {'rope_type': 'linear'}"),
    ("tiny_text", "rope_parameters.rope_type", "yarn", "rope_parameters.rope_type is 'yarn'"),
    ("tiny_text", "rope_parameters.type", "yarn", "rope_parameters.type is 'yarn'"),
    ("tiny_vl", "text_config.rotary_dim", 32, "text_config.rotary_dim is 32 but partial_rotary_factor 0.5"),
    ("tiny_vl", "text_config.partial_rotary_factor", 1, "rotary_dim is 16 but partial_rotary_factor 1.0"),
    ("tiny_text", "rope_theta", 10000, "rope_theta is 10000.0 but rope_parameters.rope_theta is 5000000.0"),
    ("tiny_text", "partial_rotary_factor", 0.25, "is 0.25 but rope_parameters.partial_rotary_factor is 0.5"),
    ("tiny", "rotary_dim", 22, "rotary_dim 22 must be even and within"),  # an index head has 20
    ("tiny", "rotary_dim", 11, "rotary_dim 11 must be even"),
    # heads, experts and blocks that do not fit together
    (
        "tiny_vl",
        SPARSE + "sparse_num_index_heads",
        3,
        "sparse_num_index_heads is 3 and num_key_value_heads 2",
    ),
    ("tiny_text", "index_n_heads", 1, "index_n_heads is 1 and num_key_value_heads 2"),
    ("tiny", "num_heads", 7, "num_heads 7 is no multiple of num_kv_heads 2"),
    ("tiny", "experts_per_token", 11, "experts_per_token 11 exceeds num_experts 10"),
    ("tiny", "init_blocks", 4, "init_blocks 4 and local_blocks 1 do not fit into top_blocks 4"),
    ("tiny", "init_blocks", -1, "init_blocks is -1"),
    ("tiny", "vocab_size", 0, "vocab_size is 0: it must be positive"),
    ("tiny", "rope_theta", -1.5, "rope_theta is -1.5: it must be positive"),
    # layers
    ("tiny_vl", "text_config.moe_layer_freq", [0, 1], "text_config.moe_layer_freq lists 2 layers"),
    ("tiny_vl", SPARSE + "sparse_attention_freq", [1] * 6, "sparse_attention_freq lists 6 layers"),
    ("tiny_vl", SPARSE + "sparse_disable_index_value", [1], "sparse_disable_index_value lists 1 layers"),
    ("tiny_vl", SPARSE + "sparse_disable_index_value", [0, 0, 1, 0, 1], "sparse_disable_index_value[3] is 0"),
    ("tiny_vl", "text_config.num_hidden_layers", 7, "lists 5 layers but num_hidden_layers is 7"),
    ("tiny_text", "mlp_layer_types", ["dense"], "mlp_layer_types lists 1 layers"),
    ("tiny_text", "layer_types", ["full_attention"], "layer_types lists 1 layers"),
    ("tiny_text", "layer_types", ["sliding_attention"] * 4, "layer_types[0] is 'sliding_attention'"),
    ("tiny_text", "mlp_layer_types", "dense", "mlp_layer_types is 'dense': expected a list"),
    ("tiny_vl", "text_config.moe_layer_freq", 1, "moe_layer_freq is 1: expected a list"),
    ("tiny_vl", "text_config.moe_layer_freq", [0, 0, 2, 1, 1], "moe_layer_freq[2] is 2: expected 0 or 1"),
    ("tiny", "moe_layers", [1], "moe_layers has 1 entries and sparse_layers 4"),
    # values of another type
    ("tiny_vl", "text_config.hidden_size", "80", "text_config.hidden_size is '80': expected an integer"),
    ("tiny_vl", "text_config.hidden_size", 80.5, "text_config.hidden_size is 80.5: expected an integer"),
    ("tiny_vl", "text_config.hidden_size", True, "text_config.hidden_size is True: expected an integer"),
    ("tiny_vl", "text_config.rms_norm_eps", [1e-6], "text_config.rms_norm_eps is [1e-06]: expected a number"),
    (
        "tiny_vl",
        "text_config.swiglu_limit",
        float("nan"),
        "text_config.swiglu_limit is nan: expected a number",
    ),
    ("tiny_vl", "text_config.vocab_size", float("inf"), "text_config.vocab_size is inf: expected an integer"),
    ("tiny_vl", "text_config.rope_theta", 10**400, "expected a number"),
    ("tiny_vl", "text_config", ["a"], "text_config is ['a']: expected an object"),
    ("tiny_vl", "text_config.sparse_attention_config", 3, "sparse_attention_config is 3: expected an object"),
    ("tiny_text", "rope_parameters", "default", "rope_parameters is 'default': expected an object"),
    ("tiny_vl", SPARSE + "sparse_disable_index_value", 1, "sparse_disable_index_value is 1: expected a list"),
    ("tiny_text", "eos_token_id", [2, -1], "eos_token_id is [2, -1]: expected token ids"),
    ("tiny_text", "eos_token_id", "2", "eos_token_id is '2': expected token ids"),
    ("tiny_text", "eos_token_id", 2**31, "eos_token_id is 2147483648: expected token ids"),
    ("tiny", "num_heads", None, "num_heads is missing"),
    ("tiny", "hidden", 96, "unknown keys hidden"),  # our own schema has no unknown keys
]


@pytest.mark.parametrize(("name", "path", "value", "message"), REFUSED)
def test_refused(name: str, path: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelConfig.from_dict(put(read(name), path, value))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tiny_vl", f"text_config.{key}")
        for key in "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        " rms_norm_eps max_position_embeddings dense_intermediate_size intermediate_size"
        " shared_intermediate_size num_local_experts num_experts_per_tok routed_scaling_factor swiglu_alpha"
        " swiglu_limit rope_theta moe_layer_freq".split()
    ]
    + [("tiny_vl", SPARSE + key) for key in "sparse_index_dim sparse_num_index_heads".split()]
    + [
        ("tiny_vl", SPARSE + key)
        for key in "sparse_topk_blocks sparse_block_size sparse_attention_freq".split()
    ]
    + [("tiny_text", key) for key in "layer_types index_head_dim index_n_heads index_topk_blocks".split()]
    + [("tiny_text", "index_block_size"), ("tiny", "hidden_size"), ("tiny", "sparse_layers")],
)
def test_a_missing_key_is_named(name: str, path: str):
    key = path.rsplit(".", 1)[-1]
    with pytest.raises(ConfigError, match=rf"missing.*\b{key}\b|\b{key} is missing"):
        ModelConfig.from_dict(put(read(name), path))


def test_missing_rotary_fraction_is_not_full_rotation():
    data = put(put(read("tiny_vl"), "text_config.rotary_dim"), "text_config.partial_rotary_factor")
    with pytest.raises(ConfigError, match=r"rotary_dim and partial_rotary_factor are both missing"):
        ModelConfig.from_dict(data)


def test_missing_text_config():
    with pytest.raises(ConfigError, match="text_config is missing"):
        ModelConfig.from_dict({"model_type": "minimax_m3_vl"})


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tiny_vl", "new_key"),
        ("tiny_vl", "text_config.new_key"),
        ("tiny_vl", SPARSE + "new_key"),
        ("tiny_text", "new_key"),
        ("tiny_text", "rope_parameters.new_key"),
        ("block128", "text_config.rope_parameters.new_key"),
    ],
)
def test_an_unknown_key_is_a_warning_that_names_it(name: str, path: str):
    with pytest.warns(UserWarning, match=rf"unknown key {re.escape(path)} is ignored"):
        config = ModelConfig.from_dict(put(read(name), path, 1))
    assert config == ModelConfig(**SHAPES[name])


# --- Files ---

NO_JSON = [b"", b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("content", NO_JSON, ids=range(len(NO_JSON)))
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not readable as JSON")):
        ModelConfig.from_file(path)


def test_other_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'}: no such file")):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: not readable")):
        ModelConfig.from_file(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object, found list"):
        ModelConfig.from_file(path)
    path.write_text('{"model_type": "qwen"}')
    with pytest.raises(ConfigError, match=re.escape(str(path)) + r".*'qwen'"):
        ModelConfig.from_file(path)


# --- Damage: whatever the JSON holds, it parses or is refused ---

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2.5,
    float("nan"),
    float("inf"),
    10**18,
    10**400,
    "",
    "1",
]
VALUES += ["\ud800", [], [1], [0, 1], [None], [[1]], ["dense"], {}, {"rope_theta": []}]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def parses_or_is_refused(data: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = ModelConfig.from_dict(data)
        except ConfigError:
            return
    assert config.num_layers == len(config.sparse_layers) >= 1


@pytest.mark.parametrize("name", ["tiny_vl", "tiny_text", "block128", "tiny"])
def test_any_value_anywhere(name: str):
    data = read(name)
    for *parents, key in list(places(data)):
        if "vision_config" in parents:  # never looked into
            continue
        node = data
        for parent in parents:
            node = node[parent]
        original = node[key]
        for value in VALUES:
            node[key] = value
            parses_or_is_refused(data)
        node[key] = original


def anything(data: st.DataObject) -> Any:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    keys = st.sampled_from(["rope_theta", "rotary_dim", "sparse_attention_config", "a"])
    return data.draw(
        st.recursive(
            scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(keys, x, max_size=3), max_leaves=6
        )
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["tiny_vl", "tiny_text", "tiny"]))
def test_several_damages_at_once(data: st.DataObject, name: str):
    config = read(name)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(list(places(config))))
        node = config
        for key in path[:-1]:
            node = node[key]
        if isinstance(node, dict) and data.draw(st.booleans()):
            del node[path[-1]]
        else:
            node[path[-1]] = anything(data)
        if not config:
            break
    parses_or_is_refused(config)
