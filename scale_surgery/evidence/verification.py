"""The certificate of `verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.names import as_unicode
from scale_surgery.evidence.promises import Promise
from scale_surgery.modeling.expanded_routers import Router

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Numbers

# reason for running no model if the given base is wrong
OTHER_BASE = "the given base is another one"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        path: The expanded folder.
        base_name: Name of its base model.
        variant: Its variant; "composed" for several expansions.
        routing: Its router, or None.
        state: "initial", or "trained" if expansion tensors changed since the expansion.
        trained_tensors: Number of changed tensors.
        promises: Every promise.
        required: Promises that decide `passed`.
        problems: Problems that no promise covers: code, structure, tokenizer, recorded facts, loading, token ids.
        warnings: Warnings to read before running the folder's own code or prompting the model; they do not affect
            `passed`.
        numbers: Results of the probe prompts; None if no model was run.
        passed: True if all required promises hold, without problems.
        fingerprint: sha256 over tensors, router and code, which the result is about.
        date: Date and time, in UTC.
        versions: Versions of the software.
        machine: Processor architecture and system.
        not_run: Reason why no model was run, or None.
        recorded: True if surgery.json has this result, or a more complete one of the same bytes.
        expansions: Names of the expansions, in the order of the paths.
    """

    path: Path
    base_name: str
    variant: str
    routing: Router | None
    state: Literal["initial", "trained"]
    trained_tensors: int
    promises: tuple[Promise, ...]
    required: tuple[str, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    numbers: Numbers | None
    passed: bool
    fingerprint: str
    date: str
    versions: dict[str, str]
    machine: str
    not_run: str | None = None
    recorded: bool = False
    expansions: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """Each problem once, those of broken promises first: a wrong base causes others."""
        broken = (promise for promise in self.promises if promise.name in self.required and not promise.holds)
        return tuple(dict.fromkeys([*(line for promise in broken for line in promise.problems), *self.problems]))

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain JSON values; the path is reduced to the folder's name."""
        content = asdict(replace(self, path=Path(as_unicode(self.path.resolve().name))))
        del content["recorded"]
        # JSON has no NaN, so a drift of NaN becomes the text "NaN"
        return plain_json(content)


def says_more(recorded: Mapping[str, Any] | None, verification: Verification) -> bool:
    """Return True if the recorded verification of the same bytes ran a model on more than this one did.

    Exception: False if this one found a fault, if it ran a model and the recorded one did not pass, or if it decides a
    claimed promise on which the recorded one is silent.
    """
    before = None if recorded is None else recorded.get("numbers")
    if recorded is None or before is None or not verification.passed:
        return False
    if recorded.get("fingerprint") != verification.fingerprint:
        return False
    if (now := verification.numbers) is None:
        return True
    silent = {promise["name"] for promise in recorded.get("promises", ()) if promise.get("holds") is None}
    if any(
        promise.claimed and promise.holds is not None and promise.name in silent for promise in verification.promises
    ):
        return False
    is_shorter = now.tokens < before["tokens"] or (
        now.generation_equal is None and before["generation_equal"] is not None
    )
    return bool(recorded.get("passed") and is_shorter)


def changed_since(
    verification: Mapping[str, Any], runs: Iterable[Mapping[str, Any]], routing: Mapping[str, Any] | None
) -> str | None:
    """Describe the changes since a verification, by the records alone; None if there are none."""
    # dates are in UTC and of one format, so they can be compared as texts; adopt drops the verification itself
    is_trained = any(str(run.get("begun", "")) >= str(verification.get("date")) for run in runs)
    before = verification.get("routing")
    is_other = (before is None) != (routing is None)
    changed = ["tensors (by training)"] * is_trained
    changed += ["the router"] * is_other + ["the router's numbers"] * (not is_other and before != routing)
    return f"{' and '.join(changed)} changed since" if changed else None


def decide(
    promises: Sequence[Promise], required: tuple[str, ...], problems: tuple[str, ...]
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the deciding promises, by default the claimed ones, and the overall result."""
    # a promise for which no model was run decides only if it is required by name
    defaults = (promise for promise in promises if promise.claimed and promise.holds is not None)
    decisive = required or tuple(promise.name for promise in defaults)
    failed = [promise for promise in promises if promise.name in decisive and not promise.holds]
    return decisive, not failed and not (problems and not required)
