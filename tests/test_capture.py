"""The decode program as XLA makes it for a GPU: one CUDA graph, few launches, no copies of weights or pages.

For the GPU at hand under `pytest -m gpu`; for an H200 that is only described, with JAX's CUDA plugin:

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m pytest tests/test_capture.py
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from mmx_jax.config import bundled
from mmx_jax.engine import Engine, compiler_options
from mmx_jax.loading import Settings, Source
from mmx_jax.mesh import make_mesh

LAYERS, DENSE = 5, 3
LARGE = 3 << 20  # bytes: less than a router's weight, or pages of index keys; more than the noise of a row


@pytest.fixture(scope="module", params=["described", pytest.param("real", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    if request.param == "real":
        return make_mesh()
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="h200", topology="1x1x1", target_config=target
        )
    except NotImplementedError as error:
        pytest.skip(f"no plugin that compiles for a GPU: {error}")
    return Mesh(np.array(topology.devices), ("x",))


@pytest.fixture(scope="module")
def program(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The optimised HLO of eight steps of one row, and what the runtime makes of it."""
    dump = tmp_path_factory.mktemp("dump")
    known = xla_bridge.canonicalize_platform
    with pytest.MonkeyPatch.context() as patch:
        # Without a GPU, JAX knows its plugin by another name than the plugin's devices.
        patch.setattr(
            xla_bridge, "canonicalize_platform", lambda name: "cuda" if name == "gpu" else known(name)
        )
        patch.setattr("mmx_jax.loading.make_mesh", lambda: mesh)
        options = {
            "xla_dump_to": str(dump),
            "xla_gpu_autotune_level": "0",
            # Without a GPU, CUB would not be tried where it may be used; so it is an error.
            "xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_FORCE_ON_NO_FALLBACK",
        } | compiler_options("gpu")
        patch.setattr("mmx_jax.engine.compiler_options", lambda platform: options)
        settings = Settings(kernels="pallas", recipe="int4_g64", layers=LAYERS)
        source = Source(bundled("minimax_m3.json"), settings)
        model = source.in_memory(source.model, 1)
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # of the thread that compiles
        pool = partial(ThreadPoolExecutor, 1, initializer=context.__enter__)
        patch.setattr("mmx_jax.engine.ThreadPoolExecutor", pool)
        engine = Engine(model, source.ops, mesh, max_length=16384, chunks=(), steps=(8,))
    (thunks,) = (file for file in dump.glob("*thunk_sequence_after*") if "body" in file.read_text())
    return engine.programs["decode 1x8"].run.as_text(), thunks.read_text()


def test_a_decode_program_is_one_graph(program: tuple[str, str]) -> None:
    """Loop and conditions included: there is nothing else at the top of what the runtime does."""
    (top,) = re.findall(r"^\d+: (\w+)", program[1], re.MULTILINE)
    assert top == "kCommandBuffer"


def test_launches_of_a_layer(program: tuple[str, str]) -> None:
    launches = re.findall(r"(kCopy|kCustomKernel) +\[.*?\] (?:kernel=)?(\w+?)(?:__\d+)?[ ,]", program[1])
    names = [name for _, name in launches]
    ends = [i for i, name in enumerate(names) if name == "moe_down"]
    assert len(ends) == LAYERS - DENSE
    assert names[ends[0] + 1 : ends[1] + 1] == [
        "add_norm",
        "qmatmul",
        "qk_norm_rope",
        "block_scores",
        "block_attention",
        "merge",
        "qmatmul",
        "router_scores",
        "route",
        "moe_gate_up",
        "moe_down",
    ]


def n_bytes(shape: str) -> int:
    """Of an array or a tuple as HLO writes it."""
    bits = {"pred": 8, "bf16": 16}
    sizes = (
        (bits.get(kind) or int(re.sub(r"\D", "", kind)), [int(n) for n in dims.split(",") if n])
        for kind, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    )
    return sum(n * int(np.prod(dims)) // 8 for n, dims in sizes)


def test_no_weight_and_no_page_is_copied(program: tuple[str, str]) -> None:
    """Whatever makes an array as large as one of them, but for kernels, which change pages in place."""
    no_copies = {"parameter", "get-tuple-element", "tuple", "while", "conditional", "custom-call", "bitcast"}
    made = re.findall(r"^ +(?:ROOT )?%([\w.-]+) = (.*?) ([a-z-]+)\(", program[0], re.MULTILINE)
    kernels = [name for name, _, op in made if op == "custom-call"]
    assert len(kernels) >= 11 * (LAYERS - DENSE)
    large = {name: shape for name, shape, op in made if op not in no_copies and n_bytes(shape) >= LARGE}
    assert not large
