"""Several model types in a process of their own, which can be found by its name."""

from __future__ import annotations

import warnings
from dataclasses import asdict

from tests.sweep.reader import Reader
from tests.sweep.take import take_through


def take_several(types: list[str]) -> list[dict[str, object]]:
    """Take types through in a process of their own."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reader = Reader()
    try:
        return [asdict(take_through(name, reader)) for name in types]
    finally:
        reader.close()
