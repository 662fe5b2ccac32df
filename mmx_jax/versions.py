"""Which versions run here, and whether they belong together."""

from importlib import metadata

import mmx_jax

# A plugin of another release than its jaxlib ends in a crash somewhere inside it.
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")


def installed() -> dict[str, str]:
    """Package -> version, of JAX and of those of its plugins that are installed."""
    found = {}
    for name in ("jax", "jaxlib", *_PLUGINS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def mismatches(found: dict[str, str]) -> list[str]:
    """One line for each package whose release differs from that of jax."""

    def release(version: str) -> list[str]:
        return version.split(".")[:3]

    wanted = found.get("jax", "")
    return [
        f"{name} {version} does not match jax {wanted}: install {name}=={wanted}"
        for name, version in found.items()
        if release(version) != release(wanted)
    ]


def report() -> str:
    """Project, JAX, plugin and device versions, and what does not match."""
    found = installed()
    lines = [f"mmx-jax {mmx_jax.__version__}", *(f"{name} {version}" for name, version in found.items())]
    problems = mismatches(found)
    try:
        import jax

        lines += [f"device {d.id}: {d.platform} {d.device_kind}" for d in jax.devices()]
    except Exception as error:  # whatever a mismatched installation throws belongs in the report
        problems.append(f"JAX does not start: {error}")
    return "\n".join([*lines, *(f"MISMATCH: {p}" for p in problems)])
