"""A Hub that lives as long as one push; nothing leaves this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import huggingface_hub
from huggingface_hub import constants

from tests.hub_server import running


@contextmanager
def hub_for_one() -> Iterator[None]:
    """Run a Hub with one writer, and let this process ask it."""
    huggingface_hub.utils.disable_progress_bars()
    with (
        patch.object(constants, "HF_HUB_OFFLINE", new=False),
        patch.object(constants, "HF_HUB_DISABLE_XET", new=True),
        running() as hub,
        patch.object(constants, "ENDPOINT", hub.address),
    ):
        try:
            yield
        finally:
            huggingface_hub.close_session()
