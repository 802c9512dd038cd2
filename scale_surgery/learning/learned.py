"""The result of a job, from the record in its folder, so that it is the same after several runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.text.sources import NO_OLD_TEXT

# names of the rows of an evaluation by kind, with a router and without
NAMES = {
    True: {"base": "base", "adapt": "learned", "expanded": "routed"},
    False: {"base": "base", "expanded": "learned"},
}


@dataclass(frozen=True)
class Side:
    """Scores of a model on old or on new text.

    Attributes:
        loss: Nats per token.
        accuracy: Share of questions whose answer begins right; None without questions.
        change: Forgetting on old text, learning on new, in nats per token against the base; None of the base.
    """

    loss: float
    accuracy: float | None
    change: float | None


@dataclass(frozen=True)
class Row:
    """A model: the base, what was learned, and that with a router."""

    name: str
    old: Side | None
    new: Side | None


@dataclass(frozen=True)
class StageDone:
    """A stage that is done: its line, and the seconds of its last run, which may continue an interrupted one."""

    name: str
    line: str
    seconds: float


@dataclass(frozen=True)
class Learned:
    """Result of `learn`.

    Attributes:
        path: The folder of the job.
        model: The base model, as it was given.
        result: The model that the job ends with: routed, or trained where it has no router.
        layers: Layers that were expanded.
        parameters_added: Parameters that were added.
        router: The router of the result in words, or None.
        rows: Scores of the base, the learned and the routed model.
        verified: Whether every promise of the result holds.
        promises: Result and evidence of each promise, by its name.
        stages: The stages, in order.
        seconds: Wall time of all runs of this job, with what is before and between its stages.
        page: The page with all of it.
        warnings: Warnings of the job and its stages.
    """

    path: Path
    model: str
    result: Path
    layers: str
    parameters_added: int
    router: str | None
    rows: tuple[Row, ...]
    verified: bool
    promises: Mapping[str, str]
    stages: tuple[StageDone, ...]
    seconds: float
    page: Path
    warnings: tuple[str, ...]


def rows_of(evaluation: Mapping[str, Any], *, routed: bool, name: str | None = None) -> tuple[Row, ...]:
    """The rows of base, learned and routed model, from the JSON of `evaluate`; `name` is an expansion among several."""
    names = NAMES[routed or name is not None]
    called = {score["name"]: names.get(score["kind"]) for score in evaluation["scores"]}
    called |= {model: "learned" for model in called if model.endswith(f", {name} alone")}
    scores = {called[score["name"]]: score for score in evaluation["scores"] if called[score["name"]]}
    return tuple(
        Row(name, _side(scores[name], "old", "forgetting"), _side(scores[name], "new", "learning"))
        for name in names.values()
        if name in scores
    )


def _side(score: Mapping[str, Any], side: str, change: str) -> Side | None:
    measured = score.get(side)
    if measured is None:
        return None
    # JSON has the text "NaN" in place of a number that is not finite
    changed = None if score[change] is None else float(score[change])
    return Side(float(measured["nats_per_token"]), measured["accuracy"], changed)


def warnings_of(kept: Mapping[str, Mapping[str, Any]], *, has_old: bool, routed: bool) -> tuple[str, ...]:
    """Warnings of a job and its stages."""
    warnings = [warning for stage in ("expand", "train") for warning in kept.get(stage, {}).get("warnings", ())]
    if not has_old:
        warnings.append(
            "there was no old text, so nothing is known of what was forgotten. Give some with --old. " + NO_OLD_TEXT
        )
    if routed and not kept.get("calibrate", {}).get("within", True):
        warnings.append("every allowed setting of the router may forget more than was asked for; it keeps its own.")
    return tuple(warnings)
