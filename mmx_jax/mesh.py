"""Devices as a mesh, and the one table that says how each array lies on them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "device"

# Pattern of a parameter's path -> how it is split. One device holds everything whole; tensor and expert
# parallelism are rows of this table.
SHARDINGS: dict[str, PartitionSpec] = {"*": PartitionSpec()}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the given devices; by default of the first one JAX sees."""
    return Mesh(np.asarray(devices or jax.devices()[:1]), (AXIS,))


def sharding(mesh: Mesh) -> NamedSharding:
    """The placement of an array of the model, the cache or a batch."""
    return NamedSharding(mesh, SHARDINGS["*"])
