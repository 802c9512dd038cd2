"""What benchmarks that train share: steps, records of runs, and the sweep of a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from benchmarks.records import append_line, read_lines
from scale_surgery.running.gates import gated_blocks
from scale_surgery.training.gates import loss_of_gates
from scale_surgery.training.rehearsal import Divergence

WARM_UP = 0.06  # share of the steps; a straight line to zero takes the rest
GRADIENT_NORM = 1.0


class Recorded(Protocol):
    """A run that has ended: a dataclass, which can be told from others by its key."""

    @property
    def key(self) -> Hashable:
        """Settings that no other run has."""
        ...


RunT = TypeVar("RunT", bound=Recorded)
AnyRun = TypeVar("AnyRun")
Rate = TypeVar("Rate", bound=float)


class Records(Generic[RunT]):
    """Runs in a file that grows as they end, a line each; other processes may add to it."""

    def __init__(self, file: Path, kind: type[RunT], say: Callable[[RunT], object] = lambda run: None) -> None:
        self.file, self.say = file, say
        self._parse = TypeAdapter(kind).validate_python

    def read(self) -> list[RunT]:
        """Return all runs."""
        return list(map(self._parse, read_lines(self.file)))

    def append(self, done: RunT) -> None:
        """Write a run as a line at the end of the file."""
        append_line(self.file, asdict(done))  # type: ignore[call-overload]

    def once(self, key: Hashable, make: Callable[[], RunT]) -> RunT:
        """Return the run of a key; make, record and describe it if there is none."""
        for done in self.read():
            if done.key == key:
                return done
        made = make()
        self.append(made)
        self.say(made)
        return made


def sweep(
    run_at: Callable[[Rate], AnyRun],
    rate: Rate,
    neighbours: Callable[[Rate], Collection[Rate]],
    choose: Callable[[Collection[AnyRun]], AnyRun],
) -> list[AnyRun]:
    """Run at a rate and at its neighbours until the chosen run is not at the edge; return all runs.

    Args:
        run_at: Trains at a learning rate, or at what stands for one.
        rate: Where the sweep begins.
        neighbours: Gives the rates beside one.
        choose: Picks the best of some runs.
    """
    tried: dict[Rate, AnyRun] = {}
    wanted = {rate, *neighbours(rate)}
    while wanted - tried.keys():
        tried |= {rate: run_at(rate) for rate in sorted(wanted - tried.keys())}
        best = choose(tuple(tried.values()))
        (rate,) = (rate for rate, run in tried.items() if run is best)
        wanted = {rate, *neighbours(rate)}
    return list(tried.values())


def beside(rate: float) -> tuple[float, float]:
    """Return the rates below and above one of 1, 3, 10, 30, ... times a power of ten."""
    digit, power = f"{rate:.0e}".split("e")
    between = (f"3e{int(power) - 1}", f"3e{power}") if digit == "1" else (f"1e{power}", f"1e{int(power) + 1}")
    return float(between[0]), float(between[1])


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step: a straight line up, then one down to zero."""
    warm_up = max(1, round(WARM_UP * steps))
    return min((step + 1) / warm_up, (steps - step) / (steps - warm_up))


def stepping(
    model: Any, rate: float, steps: int, share: Callable[[int, int], float] = share_of_rate
) -> Callable[[], None]:
    """Return a function that takes a step of AdamW on all that trains, with gradients clipped and a scheduled rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, steps))

    def take_step() -> None:
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return take_step


def keep_gate_scores(model: Any) -> None:
    """Let the gates of a model keep their scores, which their loss needs; most models have none."""
    for blocks in gated_blocks(model):
        blocks.keeps_scores = True


def with_gates(loss: Tensor, model: Any, rows: Tensor, *, is_new: bool) -> Tensor:
    """Return a loss on rows (b, t) with that of the model's gates, if it has any."""
    return loss + loss_of_gates(model, torch.ones_like(rows), is_new=is_new) if gated_blocks(model) else loss


def learn(model: Any, rows: Tensor) -> None:
    """Add the gradients of cross entropy on new rows (b, t)."""
    with_gates(model(input_ids=rows, labels=rows, use_cache=False).loss, model, rows, is_new=True).backward()


def rehearse(model: Any, base: Any, rows: Tensor, weight: float) -> None:
    """Add the gradients of `weight` times KL(base || model) on rows (b, t) that the base wrote."""
    with torch.no_grad():
        wanted = base(input_ids=rows, use_cache=False).logits
    logits = model(input_ids=rows, use_cache=False).logits
    loss = weight * Divergence.apply(logits.flatten(0, 1), wanted.flatten(0, 1))  # type: ignore[no-untyped-call]
    with_gates(loss, model, rows, is_new=False).backward()
