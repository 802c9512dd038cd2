"""How models run: where, in which dtype, whose code, how much memory, how many texts at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class RunOptions:
    """How models run. No function reads all of it; each says which fields it reads.

    Attributes:
        device: Where models run: cpu, cuda, ...
        dtype: Cast weights to it. Default: as they are stored.
        trust_remote_code: Run the code in a model's folder, and a tokenizer's own, instead of this program's.
        memory_bytes: On the CPU, weights above this are streamed from their files.
        batch_size: Windows in one forward pass.
    """

    device: str = "cpu"
    dtype: Dtype | None = None
    trust_remote_code: bool = False
    memory_bytes: int = 4 * 1024**3
    batch_size: int = 8


@dataclass(frozen=True)
class Probes:
    """What models are run on to compare what comes out.

    Attributes:
        prompts_file: Probe prompts, one a line. Default: built-in ones.
        new_tokens: Tokens to generate for each prompt; 0 for none.
    """

    prompts_file: Path | None = None
    new_tokens: int = 8
