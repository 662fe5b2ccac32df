"""What a program will ask of the kernels: enough to say, before it is compiled, which of them take it."""

from dataclasses import dataclass

DTYPE = "bfloat16"
DECODE_TOKENS = 128


@dataclass(frozen=True)
class Call:
    """`rows` sequences with `new_tokens` each, in a working dtype."""

    dtype: str
    rows: int
    new_tokens: int

    def wrong_dtype(self) -> str | None:
        return None if self.dtype == DTYPE else f"the dtype is {self.dtype}, the kernel takes {DTYPE}"

    def too_many_tokens(self) -> str | None:
        tokens = self.rows * self.new_tokens
        return None if tokens <= DECODE_TOKENS else f"{tokens} tokens, the kernel takes {DECODE_TOKENS}"

    def no_decoding(self) -> str | None:
        return None if self.new_tokens == 1 else f"{self.new_tokens} new tokens a row, the kernel takes 1"
