"""The manager of adapters that vLLM's runner asks, for a model that holds all of its expansions already."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from scale_surgery.errors import Problem, ServingError
from scale_surgery.serving.plugin import number_of

# vLLM's names of adapters that it makes up to measure memory
MADE_UP = "warmup_"


class ExpansionManager:
    """The methods of vLLM's `WorkerLoRAManager`: nothing is loaded or unloaded, and tokens get their expansions.

    Attributes:
        names: Names of the expansions; that of number 1 comes first.
        numbers: Number of the expansion of each token of the next forward, 0 for the base; None if nobody has said it.
    """

    is_enabled = True

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.numbers: tuple[int, ...] | None = None

    def set_active_adapters(self, requests: Collection[Any], mapping: Any) -> None:
        """Store the expansion of each token of the next forward."""
        is_made_up = any(request.lora_name.startswith(MADE_UP) for request in requests)
        for request in requests:
            if not is_made_up and number_of(request.lora_name, self.names) != request.lora_int_id:
                raise ServingError(Problem("served-number", request.lora_name, number=request.lora_int_id))
        self.numbers = tuple(min(number, len(self.names)) for number in mapping.index_mapping)

    def take_numbers(self, tokens: int) -> tuple[int, ...]:
        """Return the numbers for a forward of so many tokens, once: the next forward has its own."""
        numbers, self.numbers = self.numbers, None
        if numbers is None or len(numbers) > tokens:
            raise ServingError(Problem("served-tokens", "vLLM", tokens=tokens, named=len(numbers or ())))
        return numbers

    def add_adapter(self, request: Any) -> bool:
        """Check a name; it was loaded with the model."""
        return number_of(request.lora_name, self.names) > 0

    def list_adapters(self) -> set[int]:
        """Return the numbers of all expansions."""
        return set(range(1, len(self.names) + 1))

    def pin_adapter(self, number: int) -> bool:
        """Return whether an expansion stays in memory; each of them does."""
        return number in self.list_adapters()

    def remove_adapter(self, number: int) -> bool:
        """Return False: no expansion is unloaded."""
        return False

    def remove_all_adapters(self) -> None:
        """Unload nothing."""

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        """Add nothing: vLLM measures memory with the expansions."""
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return the default."""
        return default_rank

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """Store nothing."""
        yield

    def supports_tower_connector_lora(self) -> bool:
        """Return False: no images."""
        return False
