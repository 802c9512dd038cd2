"""The result of a calibration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.routing.outcome import Outcome
from scale_surgery.running.options import Dtype


@dataclass(frozen=True)
class Calibration:
    """The result of `route_calibrate`.

    Attributes:
        path: The model.
        name: Name of the model.
        paths: Names of the router's paths, the base's first.
        base: Scores of its base model.
        adapt: Scores of its adapt path alone; for a composed model, of the best path of each window.
        present: Scores with the present setting.
        proposed: Scores with the proposed setting: see `route_calibrate`.
        best: Scores with the best allowed setting, even if the present one stays.
        is_within: True if the proposed setting forgets at most `most_forgetting`.
        outcomes: Every setting in the order of its numbers, including those named above.
        most_forgetting: Nats per token that may be lost against the base, on old text and on its first tokens.
        old: Files of old text.
        new: Files of new text.
        sequence_length: Most tokens of a window.
        step: Tokens from one window of a long text to the next.
        dtype: Dtype that weights were cast to; None for the stored dtype.
        plot: File of the figure, or None.
        written: True if the proposed setting was written into the model; False if the model already had it, or
            if it forgets more.
        options: The options that reproduce this sweep.
    """

    path: Path
    name: str
    paths: tuple[str, ...]
    base: Outcome
    adapt: Outcome
    present: Outcome
    proposed: Outcome
    best: Outcome
    is_within: bool
    outcomes: tuple[Outcome, ...]
    most_forgetting: float
    old: tuple[str, ...]
    new: tuple[str, ...]
    sequence_length: int
    step: int
    dtype: Dtype | None
    plot: Path | None
    written: bool
    options: tuple[str, ...] = ()

    @property
    def has_several(self) -> bool:
        """True if the model has several expansions."""
        return len(self.paths) > 2

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        outcomes = {"outcomes": [outcome.to_json() for outcome in self.outcomes]}
        single = {name: outcome.to_json() for name, outcome in content.items() if isinstance(outcome, Outcome)}
        # JSON has no infinity, so it becomes a text
        return plain_json(content | single | outcomes)
