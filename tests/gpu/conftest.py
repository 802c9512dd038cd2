"""Tests of models on a GPU; every test here takes `device`.

`make test-gpu` runs all cases of all of them on CUDA, and with SCALE_SURGERY_TEST_DEVICE=cpu the very same on the CPU.
`make test-slow` takes the first case of each test, on the CPU, so that the code does not rot where nobody has a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = os.environ.get("SCALE_SURGERY_TEST_DEVICE", "cuda")
NO_GPU = (
    "no CUDA device here. Where there is one: make test-gpu. The same tests on the CPU: "
    "SCALE_SURGERY_TEST_DEVICE=cpu make test-gpu"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case on the device, and on the CPU where the test is not for the device alone."""
    if "device" in metafunc.fixturenames:
        is_for_device_alone = metafunc.definition.get_closest_marker("gpu") is not None
        places = [pytest.param(DEVICE, marks=pytest.mark.gpu)]
        also = [] if is_for_device_alone else [pytest.param("cpu", id="first-case-on-cpu", marks=pytest.mark.slow)]
        metafunc.parametrize("device", places + also)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases on the CPU, keep the first of each test."""
    kept, dropped, seen = [], [], set()
    for item in items:
        is_case = "first-case-on-cpu" in item.name
        test = getattr(item, "function", None)
        (dropped if is_case and test in seen else kept).append(item)
        if is_case:
            seen.add(test)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def pytest_runtest_setup(item: pytest.Item) -> None:
    device = item.callspec.params.get("device", "cpu") if hasattr(item, "callspec") else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip(NO_GPU)


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """What a test leaves on the device is free for the next one."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
