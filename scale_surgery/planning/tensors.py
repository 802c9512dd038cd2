"""The new tensors of a plan, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scale_surgery.checkpoint.headers import DTYPE_BYTES

# how the values of a new tensor are made: of decompositions, at random, zero, one, the mean of old ones, copied, or as
# the gain with which a norm gives zeros
Init = Literal["svd", "random", "zero", "one", "mean", "copy", "mute"]


@dataclass(frozen=True)
class TensorPlan:
    """One new tensor: where it goes, and how its values are made from the base tensor `source`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    layer: int | None
    shard: str
    init: Init
    source: str

    @property
    def elements(self) -> int:
        """Number of parameters."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self.elements * DTYPE_BYTES[self.dtype]
