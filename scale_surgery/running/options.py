"""How models run: where, in which dtype, whose code, how much memory, how many texts at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from scale_surgery.errors import PlanError
from scale_surgery.fields import Count, Range, problems_of

Dtype = Literal["float32", "float16", "bfloat16"]
# default windows in one forward pass
WINDOWS = 8
# report holds hidden states of all layers
REPORT_WINDOWS = 1


@dataclass(frozen=True)
class RunOptions:
    """How models run. No function reads all of it; each says which fields it reads.

    Fields that are left out are the operation's choice.

    Attributes:
        device: Where models run: cpu, cuda, ...; auto takes a GPU if there is one.
        dtype: Cast the weights to this dtype. Default: as they are stored.
        trust_remote_code: Run the code in a model's folder, and a tokenizer's own, instead of this program's.
        memory_bytes: On the CPU, weights above this are streamed from their files.
        batch_size: Windows in one forward pass. Default: what suits the operation.
    """

    device: str = "auto"
    dtype: Dtype | None = None
    trust_remote_code: bool = False
    memory_bytes: int = 4 * 1024**3
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        _refuse_out_of_range(self)

    def windows(self, usual: int = WINDOWS) -> int:
        """Windows in one forward pass of an operation whose own number is `usual`."""
        return usual if self.batch_size is None else self.batch_size

    def placed(self) -> RunOptions:
        """The same, with the device that "auto" stands for on this machine, for inference and for decompositions."""
        from scale_surgery.running.device import choose_device

        return replace(self, device=choose_device(self.device))


@dataclass(frozen=True)
class Probes:
    """Prompts and generated tokens by which models are compared.

    Attributes:
        prompts_file: Text file with one prompt a line, for comparing logits. Default: built-in prompts.
        max_new_tokens: Tokens to generate for each prompt; 0 skips generation.
    """

    prompts_file: Path | None = field(default=None, metadata={"option": "prompts"})
    max_new_tokens: Annotated[int, Range(least=0)] = 8

    def __post_init__(self) -> None:
        _refuse_out_of_range(self)


def _refuse_out_of_range(options: RunOptions | Probes) -> None:
    if problems := problems_of(options):
        raise PlanError(*problems)
