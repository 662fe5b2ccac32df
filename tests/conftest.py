"""Shapes and types of the project's own signatures are checked while tests run."""

import os
from pathlib import Path

# The suite is the CPU's unless `pytest -m gpu` asks for a device; either way JAX must not take all memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxtyping import install_import_hook

install_import_hook(["mmx_jax", "pallas_kernels"], "beartype.beartype")

import pytest  # noqa: E402

GOLDENS = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def m3_dir() -> Path:
    """The directory with the released config, template and tokenizer, named by MMX_M3_DIR."""
    directory = os.environ.get("MMX_M3_DIR")
    if not directory:
        pytest.skip("MMX_M3_DIR is not set")
    return Path(directory)
