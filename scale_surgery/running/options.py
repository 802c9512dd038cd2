"""How models run: where, in which dtype, whose code, how much memory, how many texts at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from scale_surgery.fields import Count, Range

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class RunOptions:
    """How models run. No function reads all of it; each says which fields it reads.

    Attributes:
        device: Where models run: cpu, cuda, ...
        dtype: Cast the weights to this dtype. Default: as they are stored.
        trust_remote_code: Run the code in a model's folder, and a tokenizer's own, instead of this program's.
        memory_bytes: On the CPU, weights above this are streamed from their files.
        batch_size: Windows in one forward pass.
    """

    device: str = "cpu"
    dtype: Dtype | None = None
    trust_remote_code: bool = False
    memory_bytes: int = 4 * 1024**3
    batch_size: Count = 8


@dataclass(frozen=True)
class Probes:
    """What models are run on to compare what comes out.

    Attributes:
        prompts_file: Text file with one prompt a line, for comparing logits. Default: built-in prompts.
        new_tokens: Tokens to generate for each prompt; 0 skips generation.
    """

    prompts_file: Path | None = field(default=None, metadata={"option": "prompts"})
    new_tokens: Annotated[int, Range(least=0)] = 8
