"""Shapes and types of the project's own signatures are checked while tests run."""

import os
import shutil
from pathlib import Path

# The suite is the CPU's unless `pytest -m gpu` asks for a device; either way JAX must not take all memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  the hook looks it up by name

# Modules that take user's input check it themselves, and tests hand them wrong types on purpose.
_ARRAYS = ("attention", "cache", "compare", "engine", "graph", "model", "moe", "params", "rope", "sampling")
install_import_hook(["pallas_kernels", *(f"mmx_jax.{name}" for name in _ARRAYS)], "tests.typecheck.checked")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.mesh import AbstractDevice  # noqa: E402
from jax.sharding import AbstractMesh  # noqa: E402

# The same examples every time; a slow machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

GOLDENS = Path(__file__).parent / "golden"


@pytest.fixture(scope="session", autouse=True)
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests that compile the same program share it."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="session")
def m3_dir() -> Path:
    """The directory with the released config, template and tokenizer, named by MMX_M3_DIR."""
    directory = os.environ.get("MMX_M3_DIR")
    if not directory:
        pytest.skip("MMX_M3_DIR is not set")
    return Path(directory)


def lowered_for_cuda(function, *arguments, device: str = "NVIDIA H200") -> str:
    """The program of a function for a GPU, on a machine without one."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


CHAT_TEMPLATE = """\
{{- ']~!b[' -}}
{%- for message in messages -%}{{ ']~b]' ~ message.role ~ '\\n' ~ message.content ~ '[e~[\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ ']~b]ai\\n' }}{%- endif -%}
{%- if thinking_mode == 'enabled' -%}{{ '<mm:think>' }}{%- endif -%}
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny_vl golden with a tokenizer, a chat template and stop ids: all that a release has."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    directory = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(GOLDENS / "tiny_vl", directory, dirs_exist_ok=True)
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    split = pre_tokenizers.Split(Regex(r" ?[^\s]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["the cat and the dog and the hen then"] * 9, trainer)
    markers = ("[e~[", "]~b]", "]~!b[", "<mm:think>")
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in markers])
    library.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "generation_config.json").write_text('{"eos_token_id": [351, 350]}')
    return directory
