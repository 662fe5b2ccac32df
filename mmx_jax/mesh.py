"""Devices as a mesh, and the one table that says how each array lies on them."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "device"

# Pattern of a parameter's path -> how it is split. One device holds everything whole; tensor and expert
# parallelism are rows of this table.
SHARDINGS: dict[str, PartitionSpec] = {"*": PartitionSpec()}


def make_mesh() -> Mesh:
    """A mesh of the first device that JAX sees."""
    return Mesh(np.asarray(jax.devices()[:1]), (AXIS,))


def sharding(mesh: Mesh) -> NamedSharding:
    """The placement of an array of the model, the cache or a batch."""
    return NamedSharding(mesh, SHARDINGS["*"])
