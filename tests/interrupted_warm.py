"""What forks of `interrupted_steps` begin with: facts about the tiny llama, derived once and not in each of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from scale_surgery.deriving.planned import plan
from scale_surgery.planning.request import Request
from tests.tiny import save_tiny

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as _place:
    for _tied in (True, False):
        # of the model, and of the same with duplicated layers
        plan(save_tiny(Path(_place) / f"{_tied}", "llama", tie_word_embeddings=_tied), Request("0,2", method="depth"))
