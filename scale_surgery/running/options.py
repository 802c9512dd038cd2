"""Options of running models: device, dtype, code, memory, batch size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from scale_surgery.errors import PlanError
from scale_surgery.fields import Count, Range, problems_of

Dtype = Literal["float32", "float16", "bfloat16"]
# default number of windows in one forward pass
WINDOWS = 8
# report keeps hidden states of all layers
REPORT_WINDOWS = 1


@dataclass(frozen=True)
class RunOptions:
    """Options of running models. Each function names the fields that it uses.

    The operation chooses the values of omitted fields.

    Attributes:
        device: Device of the models: cpu, cuda, ... auto uses a CUDA GPU if there is one, and to train any GPU.
        dtype: Dtype to cast the weights to. Default: the stored dtype.
        trust_remote_code: Run the code in the folders of model and tokenizer instead of this program's.
        memory_bytes: Memory for weights on the CPU, in bytes. A larger model is streamed from its files.
        batch_size: Windows in one forward pass. Default: set by the operation.
    """

    device: str = "auto"
    dtype: Dtype | None = None
    trust_remote_code: bool = False
    memory_bytes: int = 4 * 1024**3
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        _refuse_out_of_range(self)

    def windows(self, usual: int = WINDOWS) -> int:
        """Return the windows in one forward pass of an operation with the default `usual`."""
        return usual if self.batch_size is None else self.batch_size

    def placed(self) -> RunOptions:
        """Return the options with "auto" resolved for inference and decompositions on this machine."""
        from scale_surgery.running.device import choose_device

        return replace(self, device=choose_device(self.device))


@dataclass(frozen=True)
class Probes:
    """The prompts and the number of generated tokens for comparing models.

    Attributes:
        prompts_file: Text file with one prompt a line, for comparing logits. Default: built-in prompts.
        max_new_tokens: Tokens to generate for each prompt. 0 skips generation.
    """

    prompts_file: Path | None = field(default=None, metadata={"option": "prompts"})
    max_new_tokens: Annotated[int, Range(least=0)] = 8

    def __post_init__(self) -> None:
        _refuse_out_of_range(self)


def _refuse_out_of_range(options: RunOptions | Probes) -> None:
    if problems := problems_of(options):
        raise PlanError(*problems)
