"""Answers of models to probes, generated greedily and judged, and their counts by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.records import open_record
from scale_surgery.evidence.greedy import Said, answer_greedily
from scale_surgery.evidence.probe_file import EncodedProbes, Probe
from scale_surgery.evidence.probe_rules import is_exact, is_number, passes
from scale_surgery.progress import Progress

if TYPE_CHECKING:
    from accelerate import PartialState


@dataclass(frozen=True)
class ProbeAnswer:
    """The answer of a model to a probe.

    Attributes:
        group: Group of the probe.
        text: The generated text.
        is_right: True if the rule of the probe accepts it.
    """

    group: str
    text: str
    is_right: bool


@open_record  # its JSON also has shares
@dataclass(frozen=True)
class GroupCount:
    """Right answers of a model to the probes of a group.

    Attributes:
        group: Name of the group; empty for all probes.
        asked: Number of probes.
        right: Number of right answers.
        known: Number of probes that the base answers right; None without a base.
        kept: Number of these that the model answers right, too; None without a base.
    """

    group: str
    asked: int
    right: int
    known: int | None = None
    kept: int | None = None

    @property
    def share(self) -> float:
        """Share of right answers, from 0 to 1."""
        return self.right / self.asked

    @property
    def kept_share(self) -> float | None:
        """Share of the base's right answers that the model has, too; None without any."""
        return self.kept / self.known if self.known and self.kept is not None else None


@dataclass(frozen=True)
class ProbeScore:
    """The answers of a model to probes.

    Attributes:
        total: Counts of all probes.
        groups: Counts by group, in the order of the file.
        answers: The answers, in the order of the file.
    """

    total: GroupCount
    groups: tuple[GroupCount, ...]
    answers: tuple[ProbeAnswer, ...]

    @property
    def lost_share(self) -> float | None:
        """Share of the base's right answers that the model has lost, from 0 to 1; None without any."""
        if not self.total.known or self.total.kept is None:
            return None
        # 1 - 49 / 50 is above 0.02
        return (self.total.known - self.total.kept) / self.total.known

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain JSON values, with the shares."""
        total, *groups = (
            {**asdict(count), "share": count.share, "kept_share": count.kept_share}
            for count in (self.total, *self.groups)
        )
        lost = {"lost_share": self.lost_share}
        return {"total": total | lost, "groups": groups, "answers": [asdict(answer) for answer in self.answers]}

    def against(self, base: ProbeScore) -> ProbeScore:
        """Return the score with counts of what the base knows, and of what is kept of it."""
        return score_answers(self.answers, base.answers)


def score_answers(answers: Sequence[ProbeAnswer], base: Sequence[ProbeAnswer] | None = None) -> ProbeScore:
    """Count right answers by group; `base` has the answers of the base to the same probes."""
    groups = {"": list(range(len(answers)))}
    for place, answer in enumerate(answers):
        groups.setdefault(answer.group, []).append(place)
    total, *counts = (_count(group, places, answers, base) for group, places in groups.items())
    return ProbeScore(total, tuple(counts), tuple(answers))


def _count(
    group: str, places: Sequence[int], answers: Sequence[ProbeAnswer], base: Sequence[ProbeAnswer] | None
) -> GroupCount:
    right = {place for place in places if answers[place].is_right}
    if base is None:
        return GroupCount(group, len(places), len(right))
    known = {place for place in places if base[place].is_right}
    return GroupCount(group, len(places), len(right), len(known), len(known & right))


def ask_probes(
    model: Any,
    encoded: EncodedProbes,
    batch_size: int,
    seconds: float,
    advance: Progress,
    processes: PartialState | None = None,
) -> ProbeScore:
    """Generate the answers of a model greedily, and judge them. Several processes share the batches.

    Args:
        model: A loaded model, with its present choice of paths.
        encoded: Probes in its tokens.
        batch_size: Prompts in one batch.
        seconds: Most seconds for the code of one probe.
        advance: Reports the tokens that were read or are generated at most.
        processes: The processes that share the batches; None for one.
    """

    def judged(place: int, said: Said) -> ProbeAnswer:
        return judge(encoded.probes[place], said.text, seconds)

    return score_answers(answer_greedily(model, encoded.prompts, judged, batch_size, advance, processes))


def judge(probe: Probe, text: str, seconds: float) -> ProbeAnswer:
    """Judge the answer to a probe by its rule; code has so many seconds."""
    right = str(probe.answer)
    match probe.kind:
        case "exact":
            is_right = is_exact(text, right)
        case "number":
            is_right = is_number(text, right)
        case "python":
            is_right = passes(probe.prompt, text, probe.test, seconds)
    return ProbeAnswer(probe.group or probe.kind, text, is_right)
