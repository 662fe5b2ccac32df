"""Shapes and types of the project's own signatures are checked while tests run."""

import os
from pathlib import Path

# The suite is the CPU's unless `pytest -m gpu` asks for a device; either way JAX must not take all memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  the hook looks it up by name

install_import_hook(["mmx_jax", "pallas_kernels"], "tests.typecheck.checked")

import jax  # noqa: E402
import pytest  # noqa: E402

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
