"""The errors a user can cause. Each message names the file, tensor, key or value and what would be right.

The programs print such an error as one line and exit with code 2; anything else is a defect of this project.
"""


class MmxError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(MmxError, ValueError):
    """A model configuration that is broken, or asks for something that is not implemented."""


class CheckpointError(MmxError, ValueError):
    """A checkpoint whose files or tensors are not what the configuration calls for."""


class TokenizerError(MmxError, ValueError):
    """A tokenizer file that cannot be read, or ids and text it cannot convert."""


class ChatError(MmxError, ValueError):
    """Messages or a template that cannot be rendered into a prompt."""


class InputError(MmxError, ValueError):
    """A prompt, an option or a sampling parameter that cannot be served."""


class KernelError(MmxError, ValueError):
    """A kernel implementation that was asked for by name and cannot serve this device or shape."""


class NonFiniteError(MmxError, ArithmeticError):
    """Logits with NaN or infinity: broken weights, or an overflow in the working precision."""
