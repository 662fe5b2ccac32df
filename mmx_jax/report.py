"""`--plan`: what would be loaded, the memory by kind and device, and the programs; for people to read."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from mmx_jax.command import readable
from mmx_jax.engine import Progress
from mmx_jax.loading import Source
from mmx_jax.plan import device_bytes, memory_plan


def print_plan(source: Source, batch: int, max_length: int, progress: Progress) -> None:
    """Check everything that can be checked without reading weights, and print it to stdout."""
    plan = source.weights if source.has_weights else None
    programs = source.programs(batch, max_length, progress)
    out = Console(highlight=False, soft_wrap=True, markup=False)
    c = source.config
    out.print(
        f"{source.path}: {c.num_layers} layers ({sum(c.sparse_layers)} block-sparse, {sum(c.moe_layers)} with"
        f" {c.num_experts} experts), dtype {source.settings.dtype}, attention {source.settings.attention}"
    )
    if plan is not None:
        formats = ", ".join(f"{n} in {name}" for name, n in Counter(plan.formats.values()).items())
        out.print(f"to read: {readable(plan.nbytes)} in {len(plan.paths)} parameters ({formats})")
        for reason, names in plan.skipped.items():
            out.print(f"skipped: {len(names)} tensors, {reason}")
    else:
        out.print("to read: nothing, there are no weights here")
    out.print(f"stop ids: {', '.join(map(str, source.stop_ids)) or 'none'}")

    device = source.mesh.devices.flat[0]
    memory = memory_plan(source.in_memory(source.model, batch), batch, max_length)
    table = Table("kind", title=f"batch {batch}, {max_length} tokens")
    for heading in ("parameters", "bytes", str(device)):
        table.add_column(heading, justify="right")
    for kind, size in memory.weight_bytes.items():
        table.add_row(kind, f"{memory.parameters[kind]:,}", f"{size:,}", readable(size))
    weights, parameters = sum(memory.weight_bytes.values()), sum(memory.parameters.values())
    table.add_row("all weights", f"{parameters:,}", f"{weights:,}", readable(weights), end_section=True)
    for kind, size in memory.state_bytes.items():
        table.add_row(kind, "", f"{size:,}", readable(size))
    table.add_row(
        "all", "", f"{memory.total:,}", f"{readable(memory.total)} of {readable(device_bytes(device))}"
    )
    out.print(table)

    table = Table("operation, decoding", "implementation")
    for name, implementation in source.ops(batch, 1).table().items():
        table.add_row(name, implementation)
    out.print(table)

    table = Table("program (rows x tokens)")
    table.add_column("scratch", justify="right")
    for name, program in programs.items():
        table.add_row(name, readable(program.temp_bytes))
    out.print(table)
