"""The operations of MiniMax-M3's forward: arrays in, arrays out.

Each operation is a package with its plain JAX definition in `reference.py`; a Pallas kernel stands beside it
under the same signature. `ops.resolve` chooses one implementation per operation, once, before compilation.
This package knows no model, no files and no Flax.
"""
