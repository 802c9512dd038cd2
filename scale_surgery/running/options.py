"""How a model runs: where, in which dtype, whose code, how much memory, how many texts at once."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]


DEFAULT_MEMORY_BYTES = 4 * 1024**3
