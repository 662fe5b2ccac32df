"""The model's dimensions and constants, from any of the shapes a `config.json` comes in.

Reads released files (nested `sparse_attention_config`), the shape transformers 5 writes on save (flat
`index_*`, `layer_types`), bare text configs, and the project's own schema. Refuses what the code does not
implement, by key and value; warns of keys it does not know. Knows no weights and no tokens.
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmx_jax.errors import ConfigError, InputError

ATTENTION = ("sparse", "dense")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that tells one model of the M3 family from another; the field names are our own schema."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position: int
    dense_intermediate_size: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    experts_per_token: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    index_head_dim: int
    block_size: int
    top_blocks: int
    local_blocks: int
    init_blocks: int
    moe_layers: tuple[bool, ...]  # per layer: mixture of experts, or one dense MLP
    sparse_layers: tuple[bool, ...]  # per layer: block-sparse attention, or dense
    eos_token_ids: tuple[int, ...] = ()  # stop ids named by the model config itself

    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and name not in ("init_blocks",) and not value > 0:
                raise ConfigError(f"{name} is {value}: it must be positive")
        rules = [
            (len(self.moe_layers) > 0, "the model has no layers"),
            (
                len(self.moe_layers) == len(self.sparse_layers),
                f"moe_layers has {len(self.moe_layers)} entries and sparse_layers {len(self.sparse_layers)}: "
                "each needs one per layer",
            ),
            (
                self.num_heads % self.num_kv_heads == 0,
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}",
            ),
            (
                self.rotary_dim % 2 == 0 and self.rotary_dim <= min(self.head_dim, self.max_rotary_dim),
                f"rotary_dim {self.rotary_dim} must be even and within a head's {self.head_dim} dims"
                f" and an index head's {self.index_head_dim}",
            ),
            (
                self.experts_per_token <= self.num_experts,
                f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}",
            ),
            (self.init_blocks >= 0, f"init_blocks is {self.init_blocks}: it cannot be negative"),
            (
                self.init_blocks + self.local_blocks <= self.top_blocks,
                f"init_blocks {self.init_blocks} and local_blocks {self.local_blocks} do not fit into"
                f" top_blocks {self.top_blocks}",
            ),
        ]
        for holds, message in rules:
            if not holds:
                raise ConfigError(message)

    @property
    def max_rotary_dim(self) -> int:
        """The indexer rotates as many dims as attention does, so its heads bound them too."""
        return self.index_head_dim if any(self.sparse_layers) else self.head_dim

    def first_layers(self, count: int) -> "ModelConfig":
        """The same model cut after `count` layers."""
        if not 1 <= count <= self.num_layers:
            raise ConfigError(f"layers {count}: the model has {self.num_layers}, ask for 1 to that many")
        return dataclasses.replace(
            self, moe_layers=self.moe_layers[:count], sparse_layers=self.sparse_layers[:count]
        )

    def with_attention(self, kind: str) -> "ModelConfig":
        """The same model for "sparse"; for "dense" without block selection, and so without an indexer."""
        if kind not in ATTENTION:
            raise InputError(f"attention {kind!r}: expected {' or '.join(ATTENTION)}")
        return (
            self if kind == "sparse" else dataclasses.replace(self, sparse_layers=(False,) * self.num_layers)
        )

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        """Read a config file in any of the known shapes. Raises ConfigError naming the file and the key."""
        data = read_json(path)
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dir(cls, directory: Path) -> "ModelConfig":
        """Read `config.json` of a checkpoint directory."""
        return cls.from_file(Path(directory) / "config.json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """From a parsed config: our own schema where it has `num_layers`' fields, else Hugging Face's."""
        return _from_own(data) if "moe_layers" in data else _from_hf(data)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError too
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or None for none. Raises ConfigError naming `where` it stands."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**31 for x in ids):
        raise ConfigError(f"{where} is {value!r}: expected token ids")
    return tuple(ids)


def bundled(name: str) -> Path:
    """A file of `configs/`: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs" / name
    return installed if installed.exists() else package.parent / "configs" / name


def _from_own(data: Mapping[str, Any]) -> ModelConfig:
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    required = {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    if unknown := sorted(data.keys() - names):
        raise ConfigError(f"unknown keys {', '.join(unknown)}")
    if missing := sorted(required - data.keys()):
        raise ConfigError(f"missing keys {', '.join(missing)}")
    reader = _Reader(data)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        if field.name not in data:
            continue
        if field.type is float or field.type is int:
            values[field.name] = reader.number(field.name, kind=field.type)
        elif field.name == "eos_token_ids":
            values[field.name] = reader.ids(field.name)
        else:
            values[field.name] = reader.per_layer(field.name, None, 0, 1)
    return ModelConfig(**values)


class _Reader:
    """Typed access to one config object that remembers which keys were asked for."""

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.data, self.where, self.seen = data, where, set()

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where}{key} is missing")
            return default
        return value

    def number(self, key: str, default: int | None = None, kind: type = int) -> Any:
        value = self.raw(key, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63  # no NaN
        if not ok or (kind is int and value != int(value)):
            expected = "an integer" if kind is int else "a number"
            raise ConfigError(f"{self.where}{key} is {value!r}: expected {expected}")
        return kind(value)

    def object(self, key: str) -> "_Reader":
        value = self.raw(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}{key} is {value!r}: expected an object")
        return _Reader(value, f"{self.where}{key}.")

    def per_layer(self, key: str, n_layers: int | None, no: Any, yes: Any) -> tuple[bool, ...]:
        """One of two values for each layer; `n_layers` is None where no other key says how many there are."""
        value = self.raw(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}{key} is {value!r}: expected a list, one entry per layer")
        for i, x in enumerate(value):
            if x not in (no, yes):
                raise ConfigError(f"{self.where}{key}[{i}] is {x!r}: expected {no!r} or {yes!r}")
        if n_layers not in (None, len(value)):
            raise ConfigError(
                f"{self.where}{key} lists {len(value)} layers but num_hidden_layers is {n_layers}"
            )
        return tuple(x == yes for x in value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list, or none at all."""
        self.seen.add(key)
        return token_ids(self.data.get(key), self.where + key)

    def require(self, key: str, *allowed: Any) -> None:
        """A value that, where it is given, has to be one of those the code implements."""
        self.seen.add(key)
        value = self.data.get(key)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(a) for a in allowed) or "null"
            raise ConfigError(f"{self.where}{key} is {value!r}: only {expected} is implemented")

    def warn_unknown(self, ignored: frozenset[str]) -> None:
        for key in sorted(self.data.keys() - self.seen - ignored):
            warnings.warn(f"config: unknown key {self.where}{key} is ignored", stacklevel=2)


# Keys that say nothing about the text model's inference.
_IGNORED = frozenset(
    "architectures attention_dropout auto_map bos_token_id dtype initializer_range max_length"
    " model_type num_hidden_layers num_mtp_modules output_attentions output_hidden_states"
    " output_router_logits pad_token_id return_dict router_aux_loss_coef router_jitter_noise torch_dtype"
    " transformers_version use_cache quantization_config layer_types mlp_layer_types moe_layer_freq"
    " rotary_dim partial_rotary_factor rope_parameters rope_scaling chunk_size_feed_forward"
    " problem_type id2label label2id is_encoder_decoder _name_or_path".split()
)
_IGNORED_TOP = frozenset(
    "text_config vision_config image_token_index video_token_index image_token_id video_token_id"
    " projector_hidden_size merged_hidden_size tie_word_embeddings img_token_compression_config"
    " image_grid_pinpoints image_seq_length multimodal_projector_bias num_reward_heads"
    " process_image_mode projector_hidden_act vision_feature_layer vision_feature_select_strategy"
    " eos_token_id vision_start_token_id vision_end_token_id".split()
)


def _from_hf(data: Mapping[str, Any]) -> ModelConfig:
    model_type = data.get("model_type")
    if model_type not in ("minimax_m3_vl", "minimax_m3_vl_text", None):
        raise ConfigError(f"model_type is {model_type!r}: expected 'minimax_m3_vl' or 'minimax_m3_vl_text'")
    top = _Reader(data)
    top_eos = top.ids("eos_token_id")
    reader = top
    if "text_config" in data:
        reader = top.object("text_config")
        top.require("tie_word_embeddings", False)
        top.warn_unknown(_IGNORED | _IGNORED_TOP)
    elif model_type == "minimax_m3_vl":
        raise ConfigError("text_config is missing from a 'minimax_m3_vl' config")

    reader.require("hidden_act", "swigluoai", "silu")  # transformers rewrites the key; it means the same
    reader.require("tie_word_embeddings", False)
    reader.require("use_gemma_norm", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_head")
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("attention_output_gate", False)
    reader.require("attention_bias", False)
    reader.require("n_shared_experts", 1)
    reader.require("sliding_window")

    n_layers = reader.number("num_hidden_layers")
    head_dim = reader.number("head_dim")
    moe_layers = (
        reader.per_layer("mlp_layer_types", n_layers, "dense", "sparse")
        if reader.has("mlp_layer_types")
        else reader.per_layer("moe_layer_freq", n_layers, 0, 1)
    )
    num_kv_heads = reader.number("num_key_value_heads")
    config = ModelConfig(
        vocab_size=reader.number("vocab_size"),
        hidden_size=reader.number("hidden_size"),
        num_heads=reader.number("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        **_rotary(reader, head_dim),
        rms_norm_eps=reader.number("rms_norm_eps", kind=float),
        max_position=reader.number("max_position_embeddings"),
        dense_intermediate_size=reader.number("dense_intermediate_size"),
        expert_intermediate_size=reader.number("intermediate_size"),
        shared_intermediate_size=reader.number("shared_intermediate_size"),
        num_experts=reader.number("num_local_experts"),
        experts_per_token=reader.number("num_experts_per_tok"),
        routed_scaling_factor=reader.number("routed_scaling_factor", kind=float),
        swiglu_alpha=reader.number("swiglu_alpha", kind=float),
        swiglu_limit=reader.number("swiglu_limit", kind=float),
        moe_layers=moe_layers,
        **_sparse(reader, n_layers, num_kv_heads),
        eos_token_ids=tuple(dict.fromkeys(reader.ids("eos_token_id") + top_eos)),
    )
    reader.warn_unknown(_IGNORED)
    return config


def _rotary(text: _Reader, head_dim: int) -> dict[str, Any]:
    """rotary_dim and rope_theta; a config that gives no rotary fraction is an error, not full rotation."""
    if text.has("rope_scaling"):
        raise ConfigError(f"{text.where}rope_scaling is {text.raw('rope_scaling')!r}: none is implemented")
    places = [text]
    if text.has("rope_parameters"):
        rope = text.object("rope_parameters")
        rope.require("rope_type", "default")
        rope.require("type", "default")  # the older name of rope_type
        places.append(rope)

    def given(key: str) -> float | None:
        values = {place.where + key: place.number(key, kind=float) for place in places if place.has(key)}
        if len(set(values.values())) > 1:
            raise ConfigError(" but ".join(f"{name} is {value}" for name, value in values.items()))
        return next(iter(values.values()), None)

    theta, factor = given("rope_theta"), given("partial_rotary_factor")
    rotary_dim = text.number("rotary_dim") if text.has("rotary_dim") else None
    for rope in places[1:]:
        rope.warn_unknown(frozenset())
    if theta is None:
        raise ConfigError(f"{text.where}rope_theta is missing")
    if factor is None and rotary_dim is None:
        raise ConfigError(
            f"{text.where}rotary_dim and partial_rotary_factor are both missing: one of them must say how"
            " many dims of a head rotate"
        )
    by_factor = None if factor is None else round(factor * head_dim)
    if None not in (by_factor, rotary_dim) and by_factor != rotary_dim:
        raise ConfigError(
            f"{text.where}rotary_dim is {rotary_dim} but partial_rotary_factor {factor} of head_dim"
            f" {head_dim} is {by_factor}"
        )
    return {"rope_theta": theta, "rotary_dim": rotary_dim if rotary_dim is not None else by_factor}


def _sparse(text: _Reader, n_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """The indexer's and block selection's values, from the nested or the flat shape."""
    if text.has("sparse_attention_config"):
        sparse = text.object("sparse_attention_config")
        prefix = "sparse_"
        names = ("index_dim", "num_index_heads", "topk_blocks", "block_size", "local_block", "init_block")
        sparse.require("sparse_score_type", "max")
        layers = sparse.per_layer("sparse_attention_freq", n_layers, 0, 1)
        sparse.require("use_sparse_attention", True, False)
        if not sparse.raw("use_sparse_attention", True):
            layers = (False,) * n_layers
        key = "sparse_disable_index_value"
        no_values = sparse.per_layer(key, n_layers, 0, 1) if sparse.has(key) else layers
        for i, (is_sparse, no_value) in enumerate(zip(layers, no_values, strict=True)):
            if is_sparse and not no_value:
                raise ConfigError(
                    f"{sparse.where}{key}[{i}] is 0: an indexer with a value path is not implemented"
                )
    else:
        sparse = text
        prefix = "index_"
        names = ("head_dim", "n_heads", "topk_blocks", "block_size", "local_blocks", "init_blocks")
        layers = text.per_layer("layer_types", n_layers, "full_attention", "minimax_m3_sparse")
    sparse.require("index_topk_freq", 1)
    dim, heads, top, block, local, init = (prefix + name for name in names)
    n_heads = sparse.number(heads)
    if n_heads != num_kv_heads:
        raise ConfigError(
            f"{sparse.where}{heads} is {n_heads} and num_key_value_heads {num_kv_heads}: each KV head"
            " needs one index head"
        )
    values = {
        "index_head_dim": sparse.number(dim),
        "block_size": sparse.number(block),
        "top_blocks": sparse.number(top),
        "local_blocks": sparse.number(local, default=1),
        "init_blocks": sparse.number(init, default=0),
        "sparse_layers": layers,
    }
    if sparse is not text:
        sparse.warn_unknown(frozenset())
    return values
