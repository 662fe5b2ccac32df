"""Which implementation runs: said before anything is compiled, and never the reference without a word."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mmx_jax import recipes
from mmx_jax.attention import Step
from mmx_jax.cache import make_pages
from mmx_jax.config import ModelConfig, bundled
from mmx_jax.errors import KernelError
from mmx_jax.generate import SamplingParams
from mmx_jax.loading import Settings, Source, load
from mmx_jax.model import abstract_model, packed
from mmx_jax.params import TiledWeight, Weight, parameters
from mmx_jax.rope import rope_tables
from pallas_kernels.call import Call
from pallas_kernels.ops import KERNELS, Ops, resolve
from pallas_kernels.paging import PAGE_FORMATS, PagedRows
from tests.conftest import GOLDENS, lowered_for_cuda
from tests.test_golden import golden


@dataclass
class Device:
    platform: str
    compute_capability: str = "9.0"


H200, CPU = Device("gpu"), Device("cpu")
DECODE = Call("bfloat16", rows=4, new_tokens=1)
ALL = set(KERNELS)


def chosen(ops: Ops) -> set[str]:
    return {name for name, text in ops.table().items() if text == "triton"}


def test_auto_takes_every_kernel_on_a_gpu() -> None:
    ops = resolve("auto", H200, DECODE)
    assert chosen(ops) == ALL
    assert ops.takes_packed
    assert not ops.refused


@pytest.mark.parametrize(
    ("device", "call", "reference", "reason"),
    [
        (CPU, DECODE, ALL, "the device is cpu, the kernels need an NVIDIA GPU"),
        (Device("gpu", "7.5"), DECODE, ALL, "compute capability 7.5, the kernels need 8.0"),
        (Device("gpu", "gfx90a"), DECODE, ALL, "compute capability gfx90a"),
        (H200, Call("float32", 4, 1), ALL, "the dtype is float32, the kernel takes bfloat16"),
        (
            H200,
            Call("bfloat16", 129, 1),
            {"moe", "mlp", "route", "qmatmul"},
            "129 tokens, the kernel takes 128",
        ),
    ],
)
def test_auto_says_why_it_takes_the_reference(device, call: Call, reference: set[str], reason: str) -> None:
    ops = resolve("auto", device, call)
    assert chosen(ops) == ALL - reference
    assert set(ops.refused) == reference
    for name in reference:
        assert getattr(ops, name) is getattr(Ops(), name)
        assert ops.table()[name].startswith(f"reference ({reason}")


@pytest.mark.parametrize(
    ("implementation", "device", "call", "message"),
    [
        ("pallas", CPU, DECODE, "kernels 'pallas': the device is cpu"),
        ("pallas", H200, Call("float32", 4, 1), "qmatmul: the dtype is float32"),
        ("pallas", H200, Call("bfloat16", 200, 1), "moe: 200 tokens, the kernel takes 128"),
        ("interpret", CPU, Call("float32", 1, 1), "block_attention: the dtype is float32"),
        ("fastest", H200, DECODE, "kernels 'fastest': expected one of auto, reference, pallas, interpret"),
    ],
)
def test_what_was_asked_for_by_name_is_an_error_where_it_cannot_be(
    implementation: str, device, call: Call, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(implementation, device, call)


def test_the_reference_needs_nothing() -> None:
    assert resolve("reference", H200, Call("float32", 500, 1)) == Ops()


@pytest.mark.parametrize("implementation", ["auto", "pallas", "interpret"])
def test_prefill_has_no_kernels(implementation: str) -> None:
    assert resolve(implementation, H200, Call("bfloat16", 1, 2048)) == Ops()


def test_a_checkpoint_that_the_kernels_do_not_take_is_refused_before_it_is_read() -> None:
    with pytest.raises(KernelError, match="the device is cpu"):
        Source(GOLDENS / "tiny_text", Settings(kernels="pallas"))


def test_packing_keeps_the_parameters_and_turns_every_weight_but_the_embedding() -> None:
    source = Source(GOLDENS / "tiny_text", Settings(recipe="int4_g64"))
    model = packed(source.model)
    kinds = {
        type(m) for p, m in nnx.iter_modules(model) if isinstance(m, Weight | TiledWeight) and p != ("embed",)
    }
    assert kinds == {TiledWeight}

    def count(tree) -> int:
        return sum(s.size for s in parameters(tree).values())

    assert count(model) == count(source.model)


def test_a_packed_model_decodes_through_its_programs() -> None:
    """Greedy tokens of the golden; the first has a margin that bfloat16 does not close."""
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    expected = golden("tiny_text")
    model = load(GOLDENS / "tiny_text", kernels="interpret", max_length=80, batch=2)
    completions = model.generate(expected["input_ids"].tolist(), sampling)
    assert [c.token_ids for c in completions] == expected["greedy"][:, :1].tolist()


@pytest.mark.parametrize("kv_format", [None, *PAGE_FORMATS])
def test_the_decode_program_lowers_for_cuda(kv_format: str | None) -> None:
    """M3's first five layers, three of them dense, with every kernel, on a machine without a GPU."""
    config = ModelConfig.from_file(bundled("minimax_m3.json")).first_layers(5)
    model = packed(abstract_model(config, "bfloat16", recipes.load("int4_g64"), kv_format))
    graphdef, state = nnx.split(model)
    ops = resolve("pallas", H200, DECODE)
    n_rows, blocks = DECODE.rows, 64

    def run(state, rope, pages, tokens, table, lengths):
        positions = lengths[:, None] - 1
        step = Step(PagedRows(table, positions, lengths, blocks), *rope.at(positions), ops)
        model = nnx.merge(graphdef, state)
        hidden, pages, _ = model(tokens, pages, step)
        return model.logits(hidden[:, 0], ops), pages

    shapes = (
        state,
        jax.eval_shape(partial(rope_tables, config, blocks * config.block_size)),
        jax.eval_shape(partial(make_pages, config, n_rows * blocks, model.dtype, kv_format)),
        *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((n_rows, 1), (n_rows, blocks), (n_rows,))),
    )
    names = re.findall(
        r'name = "(add_norm|qmatmul|qk_norm_rope|block_\w+|merge|mlp_\w+|route\w*|moe_\w+)"',
        lowered_for_cuda(run, *shapes),
    )
    found = Counter(names)
    dense, sparse = 3, 2
    assert found == {
        "add_norm": 2 * dense + sparse + 1,  # before the attention, before a dense MLP; and before the head
        "qmatmul": 3 * dense + 2 * sparse + 1,  # inputs, output, a dense MLP's down; and the head
        "qk_norm_rope": dense + sparse,
        "block_scores": sparse,
        "block_attention": dense + sparse,
        "merge": dense + sparse,
        "mlp_gate_up": dense,
        "router_scores": sparse,
        "route": sparse,
        "moe_gate_up": sparse,
        "moe_down": sparse,
    }
