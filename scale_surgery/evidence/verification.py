"""What `verify` finds: a certificate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.evidence.promises import Promise
from scale_surgery.modeling.expanded_routers import Router

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Numbers

# reason for running no model beside a wrong base
OTHER_BASE = "the given base is another one"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        path: The expanded folder.
        base_name: Name of its base model.
        variant: Its variant; of several expansions "composed".
        routing: Its router, or None.
        state: "initial", or "trained" where expansion tensors changed since the expansion.
        trained_tensors: Number of changed tensors.
        promises: Every promise.
        required: Promises that decide `passed`.
        problems: Problems that no promise covers: code, structure, tokenizer, recorded facts, loading, token ids.
        warnings: What a user should know before running the folder's own code or asking the model; does not decide
            `passed`.
        numbers: Results of the probe prompts; None where no model was run.
        passed: Whether all is as required.
        fingerprint: sha256 over what the model computes with, tensors, router and code; what the result is about.
        date: When, in UTC.
        versions: Versions that were used.
        machine: Processor architecture and system.
        not_run: Why no model was run, or None.
        recorded: Whether it stands in the folder's record, surgery.json: this result, or one of the
            same bytes that says more.
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

    def to_json(self) -> dict[str, Any]:
        """The certificate as plain JSON values; the folder's name stands for its path."""
        content = asdict(replace(self, path=Path(self.path.resolve().name)))
        del content["recorded"]
        # JSON has no NaN: a drift that is none becomes the text "NaN"
        return plain_json(content)


def says_more(recorded: Mapping[str, Any] | None, verification: Verification) -> bool:
    """Whether the recorded verification of the same bytes ran a model, and this one ran none and found no fault."""
    # a wrong --base says nothing about the folder
    is_whole = verification.passed or verification.not_run == OTHER_BASE
    if recorded is None or verification.not_run is None or not is_whole:
        return False
    return recorded.get("numbers") is not None and recorded.get("fingerprint") == verification.fingerprint


def changed_since(
    verification: Mapping[str, Any], runs: Iterable[Mapping[str, Any]], routing: Mapping[str, Any] | None
) -> str | None:
    """What changed since a verification, by the records alone; None where nothing did."""
    # dates are in UTC and of one form, so their order is that of the texts; adopt drops the verification itself
    is_trained = any(str(run.get("begun", "")) >= str(verification.get("date")) for run in runs)
    before = verification.get("routing")
    is_other = (before is None) != (routing is None)
    changed = ["tensors (by training)"] * is_trained
    changed += ["the router"] * is_other + ["the router's numbers"] * (not is_other and before != routing)
    return f"{' and '.join(changed)} changed since" if changed else None


def decide(
    promises: Sequence[Promise], required: tuple[str, ...], problems: tuple[str, ...]
) -> tuple[tuple[str, ...], bool]:
    """Names of the promises that decide, by default those that are claimed, and whether all is as required."""
    # a promise for which no model was run decides only if it is required by name
    defaults = (promise for promise in promises if promise.claimed and promise.holds is not None)
    decisive = required or tuple(promise.name for promise in defaults)
    failed = [promise for promise in promises if promise.name in decisive and not promise.holds]
    return decisive, not failed and not (problems and not required)
