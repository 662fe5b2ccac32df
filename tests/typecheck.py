"""The checker that the import hook of `conftest.py` uses: beartype, with an int accepted for a float."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable) -> Callable:
    """Check calls of `function`, unless it is a constructor: JAX builds pytrees of shapes too."""
    return function if function.__name__ == "__init__" else _check(function)
