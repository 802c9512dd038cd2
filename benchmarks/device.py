"""Where a benchmark runs, and how time and memory are taken there; tables for the terminal and for a page.

On a GPU a call is timed from an idle device to an idle device, after calls that are not counted, and memory is what
torch has allocated. On the CPU it is anonymous memory, asked every few ms; Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import anonymous_bytes

POLL_SECONDS = 0.005
OWN_STATUS = Path("/proc/self/status")
# calls on a GPU that are not counted: kernels are loaded and chosen, and clocks rise
WARM_UP = 3


@dataclass(frozen=True)
class Place:
    """Where models run; how they are stored; threads of torch."""

    device: str
    dtype: str
    threads: int

    @property
    def is_cuda(self) -> bool:
        """Whether models run on a GPU, where calls must be waited for and memory is asked of torch."""
        return self.device.startswith("cuda")

    @property
    def warm_up(self) -> int:
        """Calls that are not counted."""
        return WARM_UP if self.is_cuda else 0

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass
class Peak:
    """Most memory above what was there at the start; known at the end."""

    bytes: int = 0


def timed(call: Callable[[], object], place: Place) -> tuple[float, float]:
    """Seconds and processor seconds of one call."""
    place.wait()
    start, processor_start = time.perf_counter(), time.process_time()
    call()
    place.wait()
    return time.perf_counter() - start, time.process_time() - processor_start


@contextmanager
def watched() -> Iterator[list[int]]:
    """Ask for this process' anonymous memory again and again; the answers are in the list that is given."""
    answers = [anonymous_bytes(OWN_STATUS) or 0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            answers.append(anonymous_bytes(OWN_STATUS) or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


@contextmanager
def peak_of(place: Place) -> Iterator[Peak]:
    """Take the most memory that a `with` block needs above what is there before it."""
    peak = Peak()
    if not place.is_cuda:
        # pages that are free and not handed back would be used, and not be seen
        hand_back()
        with watched() as answers:
            yield peak
        peak.bytes = max(answers) - answers[0]
        return
    place.wait()
    torch.cuda.reset_peak_memory_stats(place.device)
    before = torch.cuda.memory_allocated(place.device)
    yield peak
    peak.bytes = torch.cuda.max_memory_allocated(place.device) - before


def warm_up(call: Callable[[], object], place: Place) -> int | None:
    """Call as often as is not counted; gives the peak of the last of these calls, None where there are none."""
    peaks: list[int] = []
    for _ in range(place.warm_up):
        with peak_of(place) as peak:
            call()
        peaks.append(peak.bytes)
    return peaks[-1] if peaks else None


def settle(model: Any) -> None:
    """Copy the weights out of their files' pages, and hand back what loading had left: a peak counts from here."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
    hand_back()


def hand_back() -> None:
    """Give what is free back to the system, also where malloc was told to keep it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def as_milliseconds(value: float) -> str:
    """A time as tables show it; a GPU takes few milliseconds."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def as_mebibytes(size: int | None) -> str:
    """A peak as tables show it."""
    return "" if size is None else f"{size / 2**20:,.0f}"


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where a benchmark runs, and where its numbers go."""
    file = click.Path(path_type=Path, dir_okay=False)
    dtypes = click.Choice(["float32", "bfloat16"])
    threads = {"type": int, "default": torch.get_num_threads, "show_default": "as torch takes"}
    for option in reversed((
        click.option("--device", default="cpu", show_default=True, help="cpu or cuda."),
        click.option("--dtype", type=dtypes, default="float32", show_default=True),
        click.option("--threads", help="Of torch.", **threads),
        click.option("--quick", "is_quick", is_flag=True, help="A trial in seconds: tiny models and texts, one round."),
        click.option("-o", "--output", type=file, help="Write the numbers as JSON."),
        click.option("--markdown", type=file, help="Write the tables as Markdown."),
    )):  # fmt: skip
        command = option(command)
    return command


def as_markdown(part: Table | str) -> str:
    """A table, or a line below one, as Markdown."""
    if isinstance(part, str):
        return "\n".join(f"* {line.strip()}" for line in part.splitlines())
    rows = zip(*(column.cells for column in part.columns), strict=True)
    head = [str(column.header) for column in part.columns]
    marks = ["---", *["--:"] * (len(head) - 1)]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, marks, *rows)]
    return "\n".join([*([f"**{part.title}**", ""] if part.title else []), *lines])


def publish(
    parts: Iterable[Table | str], report: dict[str, Any], output: Path | None, markdown: Path | None, width: int = 80
) -> None:
    """Print tables and lines; write them as Markdown, and the numbers as JSON, where they are asked for."""
    shown, console = list(parts), Console(width=width)
    for part in shown:
        console.print(part)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text("\n\n".join(map(as_markdown, shown)) + "\n", encoding="utf-8")
