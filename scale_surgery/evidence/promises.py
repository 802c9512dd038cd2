"""The named promises: those that a model claims in its present state, those that hold, and the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.numbering import CONFIG_KEY, numbering_of
from scale_surgery.errors import counted
from scale_surgery.evidence.integrity import Integrity
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.record import Manifest
from scale_surgery.running.drift import TOLERANCES

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Numbers

PROMISES = (
    "recoverable",
    "output_at_init",
    "near_output_at_init",
    "old_vocabulary",
    "base_stream_always",
    "shut_gates",
    "paths_as_alone",
    "bounded_forgetting",
)
# those that a fused model can keep: its sums run in another order
FUSED = ("recoverable", "near_output_at_init")


@dataclass(frozen=True)
class Promise:
    """A named promise: a claim of the model in its present state, its result, and the evidence.

    `holds` is None if files alone cannot show it, and no model was run or no prompt shows it.
    """

    name: str
    claimed: bool
    holds: bool | None
    evidence: str
    problems: tuple[str, ...]


def verdict(*, holds: bool | None, claimed: bool, required: bool) -> str:
    """Say in a word or two how a promise came out."""
    counts = claimed or required
    if holds:
        return "holds" if counts else "holds (unclaimed)"
    if not counts:
        return "not claimed"
    return "not checked" if holds is None else "BROKEN"


def judge(
    folder: Folder,
    integrity: Integrity,
    numbers: Numbers | None,
    problems: tuple[str, ...],
    required: tuple[str, ...],
) -> tuple[Promise, ...]:
    """Judge every promise that a model of this kind can claim, or that is required."""
    manifest = folder.manifest
    promises = (
        Promise("recoverable", True, not integrity.base, _recoverable_evidence(integrity), integrity.base),
        _output_at_init(manifest, integrity, numbers, problems),
        _near_output_at_init(manifest, integrity, numbers, problems),
        _old_vocabulary(manifest, integrity, numbers, problems),
        _base_stream_always(folder, integrity, numbers, problems),
        _shut_gates(manifest, integrity, numbers, problems),
        _paths_as_alone(manifest, integrity, numbers, problems),
        _bounded_forgetting(manifest, numbers, problems),
    )
    # promises that a model of this kind never claims are not shown
    shown = [promise for promise in promises if promise.name in required or promise.name in promises_of(manifest)]
    if manifest.fused is not None:
        drift = manifest.fused["drift"]
        shown = [promise if promise.name in FUSED else _fused(promise, drift) for promise in shown]
    return tuple(shown)


def promises_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the promises of a folder, including those not claimed in its present state."""
    near = [] if _is_exact(manifest) and manifest.fused is None else ["near_output_at_init"]
    starts = [] if len(manifest.expansions) > 1 else ["output_at_init", *near]
    tokens = ["old_vocabulary"] if manifest.adds_tokens else []
    gates = ["shut_gates"] if any(plan.has_gates for plan in manifest.plans.values()) else []
    paths = ["paths_as_alone"] if manifest.routing is not None else []
    return ("recoverable", *starts, *tokens, "base_stream_always", *gates, *paths, "bounded_forgetting")


def _is_exact(manifest: Manifest) -> bool:
    """Return True if an untrained expansion changes no bit of the output."""
    return all(plan.is_exact_at_init for plan in manifest.plans.values())


def _fused(promise: Promise, drift: Mapping[str, Any]) -> Promise:
    """Withdraw a promise about logits: sums of a fused model run in another order."""
    measured = f"drift {drift['drift']:.3g} in {drift['dtype']} when it was merged"
    return replace(promise, claimed=False, evidence=f"fused: logits are its blocks' but for rounding, {measured}")


def _recoverable_evidence(integrity: Integrity) -> str:
    """Describe the comparison of the base, with the number of problems."""
    evidence = f"{counted(integrity.base_tensors, 'base tensor')}, {integrity.base_bytes:,} bytes, sha256 compared"
    count = len(integrity.base)
    return f"{evidence}; {counted(count, 'problem')}" if count else evidence


def _output_at_init(
    manifest: Manifest, integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...]
) -> Promise:
    findings, problems = [], []
    if numbers is not None:
        findings.append(f"logits {_equality(numbers.is_bit_equal, numbers.drift, numbers)}")
        if not numbers.is_bit_equal:
            problems.append(f"logits: drift {numbers.drift:.3g} in {numbers.dtype}, expected bit-equal.")
        if numbers.generation_equal is False or numbers.uncached_equal is False:
            problems.append("greedy continuation differs, with or without KV cache.")
    claimed = _begins_as_base(manifest, integrity) and _is_exact(manifest)
    return _at_init("output_at_init", integrity, manifest, findings, (*general, *problems), claimed=claimed)


def _near_output_at_init(
    manifest: Manifest, integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...]
) -> Promise:
    """Judge near_output_at_init, claimed if sums round otherwise: of shares of copies, or in another order if fused."""
    findings, problems = [], []
    if numbers is not None:
        most = TOLERANCES[numbers.dtype] * numbers.largest_logit
        equality = _equality(numbers.is_bit_equal, numbers.drift, numbers)
        findings.append(f"logits {equality}, rounding explains {most:.3g}")
        if not numbers.drift <= most:
            problems.append(f"logits: drift {numbers.drift:.3g} in {numbers.dtype}, expected at most {most:.3g}.")
    is_rounded = manifest.fused is not None or not _is_exact(manifest)
    claimed = _begins_as_base(manifest, integrity) and is_rounded
    return _at_init("near_output_at_init", integrity, manifest, findings, (*general, *problems), claimed=claimed)


def _begins_as_base(manifest: Manifest, integrity: Integrity) -> bool:
    """Return True if the output must be the base's: one untrained expansion, without new tokens in a mixture."""
    is_mixture = manifest.routing is not None and not manifest.routing.is_hard
    return len(manifest.expansions) == 1 and not integrity.trained and not (is_mixture and manifest.adds_tokens)


def _at_init(
    name: str,
    integrity: Integrity,
    manifest: Manifest,
    findings: list[str],
    problems: tuple[str, ...],
    *,
    claimed: bool,
) -> Promise:
    """Judge a promise about the initial state, by the files, and by a run if there was one."""
    start = manifest.first_plan.method.start(len(integrity.nonzero))
    every = (*integrity.nonzero, *(problems if findings else ()))
    evidence = "; ".join([start, *(findings or ["no model was run"])])
    return Promise(name, claimed, (not every) if findings or every else None, evidence, every)


def _old_vocabulary(
    manifest: Manifest, integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...]
) -> Promise:
    """Judge old_vocabulary, claimed as long as only rows of new tokens may have changed."""
    name = "old_vocabulary"
    plan = manifest.first_plan
    if not manifest.adds_tokens:
        return Promise(name, False, False, "no tokens were added", ("no tokens were added.",))
    is_alone = len(manifest.expansions) == 1 and manifest.routing is None and not plan.layers
    evidence, problems = f"{plan.sizes.vocabulary:,} tokens of the base", list(integrity.base)
    if numbers is None:
        evidence += "; no model was run"
    else:
        problems += general
        evidence += f", logits {_equality(numbers.is_bit_equal, numbers.drift, numbers)}"
        if not numbers.is_bit_equal:
            problems.append(f"logits of the base's tokens: drift {numbers.drift:.3g} in {numbers.dtype}.")
    claimed = is_alone or (_begins_as_base(manifest, integrity) and _is_exact(manifest))
    return Promise(name, claimed, _holds(problems, numbers), evidence, tuple(problems))


def _base_stream_always(
    folder: Folder,
    integrity: Integrity,
    numbers: Numbers | None,
    general: tuple[str, ...],
) -> Promise:
    is_routed, plan = folder.manifest.routing is not None, folder.manifest.first_plan
    blocks = [name for name in folder.tensors if name.endswith(".w12")]
    problems = [f"{name}: writes into the base stream." for name in blocks if not is_routed] + [*integrity.base]
    evidence = f"{len(blocks)} W12 block{'s exist' if len(blocks) > 1 else ' exists'}" if blocks else "no W12 exists"
    evidence += ", on paths of expansions alone" if blocks and is_routed else ""
    if numbering_of(folder.config.get(CONFIG_KEY)) is not None:
        evidence = "new layers write into the base stream once they are trained"
        problems.append(f"{evidence}.")
    if numbers is None:
        evidence += "; no model was run"
    else:
        problems += general
        drifted = [layer for layer in numbers.layers if not layer.is_bit_equal]
        evidence += f"; base logits {_equality(numbers.base_logits_bit_equal, numbers.base_logits_drift, numbers)}"
        problems += [f"base stream after layer {layer.layer}: drift {layer.drift:.3g}." for layer in drifted]
        if not numbers.base_logits_bit_equal:
            problems.append(f"base logits: drift {numbers.base_logits_drift:.3g} in {numbers.dtype}.")
        problems += [line for path in numbers.paths[:1] for line in path.problems]
    claimed = is_routed or plan.variant in plan.method.preserving
    return Promise("base_stream_always", claimed, _holds(problems, numbers), evidence, tuple(problems))


def _shut_gates(manifest: Manifest, integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...]) -> Promise:
    """Judge shut_gates: a text has the base's logits up to the first open gate, regardless of training."""
    name, is_routed = "shut_gates", manifest.routing is not None
    if name not in promises_of(manifest) or is_routed:
        reason = "this model routes" if is_routed else "this model has no gates"
        return Promise(name, False, False, reason, (f"{reason}.",))
    problems = list(integrity.base)
    if numbers is None or numbers.shut is None:
        return Promise(name, True, _holds(problems, None), "no model was run", tuple(problems))
    shut = numbers.shut
    problems += general
    if not shut.is_bit_equal:
        problems.append(f"logits where all gates were shut so far: drift {shut.drift:.3g}, expected bit-equal.")
    equality = "bit-equal" if shut.is_bit_equal else f"differ by {shut.drift:.3g}"
    evidence = f"all gates shut so far at {shut.tokens:,} of {numbers.tokens:,} tokens"
    evidence += f", logits there {equality}" if shut.tokens else "; give --prompts with text that the base knows"
    return Promise(name, True, _holds(problems, shut.tokens or None), evidence, tuple(problems))


def _paths_as_alone(
    manifest: Manifest, integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...]
) -> Promise:
    """Judge paths_as_alone: each expansion equals its model alone, bit for bit, by name and in parallel."""
    name = "paths_as_alone"
    if manifest.routing is None:
        reason = "this model has one path"
        return Promise(name, False, False, reason, (f"{reason}.",))
    evidence, problems = counted(len(manifest.expansions), "expansion"), [*integrity.structure]
    if numbers is None or not numbers.paths:
        return Promise(name, True, _holds(problems, None), f"{evidence}; no path was run", tuple(problems))
    problems += [*general, *(line for path in numbers.paths[1:] for line in path.problems)]
    differing = [path.name for path in numbers.paths[1:] if not path.is_bit_equal]
    equality = f"differ on {', '.join(differing)}" if differing else "each bit-equal"
    return Promise(name, True, not problems, f"{evidence}; logits {equality} {_on_tokens(numbers)}", tuple(problems))


def _bounded_forgetting(manifest: Manifest, numbers: Numbers | None, general: tuple[str, ...]) -> Promise:
    """Judge bounded_forgetting, claimed without switching; with it, the possible loss grows with the text's length."""
    name, routing, count = "bounded_forgetting", manifest.routing, len(manifest.expansions)
    if routing is None or routing.bound is None:
        reason = "this model does not route" if routing is None else f"the {routing.router} router promises no bound"
        return Promise(name, False, False, reason, (f"{reason}.",))
    bound, each = routing.bound, routing.bound_per_token or 0.0
    is_even = math.isclose(bound, math.log(count + 1))
    how = f"ln {count + 1} = {bound:.3g} nats" if is_even else f"{bound:.3g} nats by the prior"
    evidence, problems = f"at most {how} a text", list[str]()
    if each:
        evidence = f"no bound for all lengths: {how} a text and {each:.2g} more a token, by switching"
        problems = [f"each further token adds {each:.2g} nats to the bound, expected none: switch rate 0."]
    mixture = None if numbers is None else numbers.mixture
    if numbers is not None and mixture is not None:
        problems += general
        best = "the base" if count == 1 else "its best path"
        lose, bests = ("lose", best.replace("its", "their")) if mixture.texts > 1 else ("loses", best)
        evidence += f"; {counted(mixture.texts, 'text')} {lose} at most {max(mixture.excess, 0.0):.3g} against {bests}"
        if mixture.excess > bound + mixture.own_rounding:
            evidence += f", {max(mixture.own_excess, 0.0):.3g} before logits are rounded"
        most = bound + each * mixture.longest
        for text, excess, rounding, of in (
            (mixture.own_worst, mixture.own_excess, mixture.own_rounding, " by the router's own numbers"),
            (mixture.worst, mixture.excess, mixture.rounding, ""),
        ):
            if not excess <= most + rounding:
                problems.append(
                    f"a text ({text}) loses {excess:.3g} nats against {best}{of}, expected at most "
                    f"{most + rounding:.3g}."
                )
        problems += [line for path in numbers.paths for line in path.problems]
    # no path of a fused model can be run, so the loss of its mixture is unknown
    return Promise(name, not each, _holds(problems, mixture), evidence, tuple(problems))


def _holds(problems: list[str], numbers: object) -> bool | None:
    return None if numbers is None and not problems else not problems


def _equality(is_equal: bool, drift: float, numbers: Numbers) -> str:
    return f"{'bit-equal' if is_equal else f'differ by {drift:.3g}'} {_on_tokens(numbers)}"


def _on_tokens(numbers: Numbers) -> str:
    return f"on {counted(numbers.tokens, 'token')} ({numbers.dtype}, {numbers.attention}, {numbers.device})"
