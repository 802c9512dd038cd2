"""The named promises: which a model claims in its present state, which hold, and on what evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.numbering import CONFIG_KEY, numbering_of
from scale_surgery.errors import counted
from scale_surgery.evidence.integrity import Integrity
from scale_surgery.running.drift import TOLERANCES
from scale_surgery.surgery.record import Manifest

if TYPE_CHECKING:
    from scale_surgery.evidence.path_probes import MixtureNumbers
    from scale_surgery.running.probe import Numbers

OF_ONE, OF_SEVERAL = ("output_at_init", "near_output_at_init"), ("paths_as_alone",)
PROMISES = ("recoverable", *OF_ONE, "base_stream_always", *OF_SEVERAL, "bounded_forgetting")


@dataclass(frozen=True)
class Promise:
    """One named promise: whether the model claims it in its present state, whether it holds, and why.

    `holds` is None where files alone cannot show it and no model was run.
    """

    name: str
    claimed: bool
    holds: bool | None
    evidence: str
    problems: tuple[str, ...]


def promises_of(expansions: int) -> tuple[str, ...]:
    """Names of the promises that can be asked of a folder of so many expansions."""
    others = OF_SEVERAL if expansions == 1 else OF_ONE
    return tuple(name for name in PROMISES if name not in others)


def judge(
    checkpoint: Checkpoint,
    manifest: Manifest,
    integrity: Integrity,
    numbers: Numbers | MixtureNumbers | None,
    problems: tuple[str, ...],
    required: tuple[str, ...],
) -> tuple[Promise, ...]:
    """Judge every promise by what was found.

    Args:
        checkpoint: The expanded checkpoint.
        manifest: Its surgery.json.
        integrity: What its files showed, beside a given base too.
        numbers: What the probe prompts showed, of several expansions about each path; None where no model was run.
        problems: What speaks against every promise about outputs: structure, config, code, recorded
            facts, loading, token ids.
        required: Promises that are asked for by name.

    Returns:
        The promises, those that are not claimed too.
    """
    recoverable = Promise("recoverable", True, not integrity.base, _recoverable_evidence(integrity), integrity.base)
    bounded = _bounded_forgetting(manifest, numbers, problems)
    if len(manifest.expansions) > 1:
        mixture: Any = numbers
        return (recoverable, *_judge_paths(manifest, integrity, mixture, problems), bounded)
    alone: Any = numbers
    return (recoverable, *_judge_one(checkpoint, manifest, integrity, alone, problems, required, bounded))


def _judge_paths(
    manifest: Manifest, integrity: Integrity, numbers: MixtureNumbers | None, problems: tuple[str, ...]
) -> tuple[Promise, ...]:
    """What is promised of each path of a folder with several expansions."""
    paths = () if numbers is None else numbers.paths
    general = () if numbers is None else problems
    base = tuple(line for path in paths[:1] for line in path.problems)
    others = tuple(line for path in paths[1:] for line in path.problems)
    count = counted(len(manifest.expansions), "expansion")
    on_base, beside = (*integrity.base, *general, *base), (*integrity.structure, *general, *others)
    return (
        _about_paths("base_stream_always", "no block on its path", "", numbers, on_base, slice(1)),
        _about_paths("paths_as_alone", count, "each ", numbers, beside, slice(1, None)),
    )


def _judge_one(
    checkpoint: Checkpoint,
    manifest: Manifest,
    integrity: Integrity,
    numbers: Numbers | None,
    problems: tuple[str, ...],
    required: tuple[str, ...],
    bounded: Promise,
) -> tuple[Promise, ...]:
    """What is promised of the outputs and the base stream of a model with one expansion."""
    plan, routing = manifest.plan, manifest.routing
    is_exact, is_initial = plan.method.is_exact_at_init(plan), not integrity.trained
    is_always = plan.variant in plan.method.preserving or routing is not None
    near: tuple[Promise, ...] = ()
    if not is_exact or "near_output_at_init" in required:
        near = (_near_output_at_init(integrity, numbers, problems, manifest, claimed=is_initial and not is_exact),)
    promises: tuple[Promise, ...] = (
        _output_at_init(integrity, numbers, problems, manifest, claimed=is_initial and is_exact),
        *near,
        _base_stream_always(checkpoint, integrity, numbers, problems, claimed=is_always, is_routed=routing is not None),
        bounded,
    )
    if manifest.fused is not None:
        promises = tuple(_fused(promise, manifest.fused["drift"]) for promise in promises)
    if manifest.forced_base is not None:
        promises = tuple(_forced(promise, manifest.forced_base) for promise in promises)
    return promises


def _fused(promise: Promise, drift: Mapping[str, Any]) -> Promise:
    """Of a fused model, whose sums run in another order, no promise about logits is made."""
    found = f"drift {drift['drift']:.3g} in {drift['dtype']} when it was merged"
    return replace(promise, claimed=False, evidence=f"fused: logits are its blocks' but for rounding, {found}")


def _forced(promise: Promise, forced: Mapping[str, Any]) -> Promise:
    """Of an expansion that was put on another base by force, no promise about outputs is made."""
    count, expected = len(forced["differing"]), forced["expected_name"]
    differing = "1 tensor is not that" if count == 1 else f"{count} tensors are not those"
    found = f"put by --force on a base of which {differing} of {expected}"
    return replace(promise, claimed=False, evidence=f"{found}; {promise.evidence}")


def _recoverable_evidence(integrity: Integrity) -> str:
    """What was compared of the base, and how much of it is not as it was."""
    evidence = f"{counted(integrity.base_tensors, 'base tensor')}, {integrity.base_bytes:,} bytes, sha256 compared"
    count = len(integrity.base)
    return f"{evidence}; {counted(count, 'problem')}" if count else evidence


def _output_at_init(
    integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...], manifest: Manifest, *, claimed: bool
) -> Promise:
    found, problems = [], []
    if numbers is not None:
        found.append(f"logits {_equality(numbers.is_bit_equal, numbers.drift, numbers)}")
        if not numbers.is_bit_equal:
            problems.append(f"logits: drift {numbers.drift:.3g} in {numbers.dtype}, expected bit-equal.")
        if numbers.generation_equal is False or numbers.uncached_equal is False:
            problems.append("greedy continuation differs, with or without KV cache.")
    return _at_init("output_at_init", integrity, manifest, found, (*general, *problems), claimed=claimed)


def _near_output_at_init(
    integrity: Integrity, numbers: Numbers | None, general: tuple[str, ...], manifest: Manifest, *, claimed: bool
) -> Promise:
    """Claimed where copies count other shares than a half, or in float16, whose small numbers cannot be halved."""
    found, problems = [], []
    if numbers is not None:
        most = TOLERANCES[numbers.dtype] * numbers.largest_logit
        equality = _equality(numbers.is_bit_equal, numbers.drift, numbers)
        found.append(f"logits {equality}, rounding explains {most:.3g}")
        if not numbers.drift <= most:
            problems.append(f"logits: drift {numbers.drift:.3g} in {numbers.dtype}, expected at most {most:.3g}.")
    return _at_init("near_output_at_init", integrity, manifest, found, (*general, *problems), claimed=claimed)


def _at_init(
    name: str, integrity: Integrity, manifest: Manifest, found: list[str], problems: tuple[str, ...], *, claimed: bool
) -> Promise:
    """A promise about the start: what files say of it, and what was found where models were run."""
    evidence = "; ".join([manifest.plan.method.start(len(integrity.nonzero)), *(found or ["no model was run"])])
    every = (*integrity.nonzero, *(problems if found else ()))
    return Promise(name, claimed, (not every) if found or every else None, evidence, every)


def _base_stream_always(
    checkpoint: Checkpoint,
    integrity: Integrity,
    numbers: Numbers | None,
    general: tuple[str, ...],
    *,
    claimed: bool,
    is_routed: bool,
) -> Promise:
    blocks = [name for name in checkpoint.tensors if name.endswith(".w12")]
    problems = [f"{name}: writes into the base stream." for name in blocks if not is_routed] + [*integrity.base]
    evidence = f"{len(blocks)} W12 block{'s exist' if len(blocks) > 1 else ' exists'}" if blocks else "no W12 exists"
    evidence += ", on the adapt path alone" if blocks and is_routed else ""
    if numbering_of(checkpoint.config.get(CONFIG_KEY)) is not None:
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
    return Promise("base_stream_always", claimed, _holds(problems, numbers), evidence, tuple(problems))


def _about_paths(
    name: str, evidence: str, each: str, numbers: MixtureNumbers | None, problems: tuple[str, ...], which: slice
) -> Promise:
    """A promise that paths are models, bit for bit."""
    if numbers is None:
        return Promise(name, True, False if problems else None, f"{evidence}; no model was run", problems)
    others = [path for path in numbers.paths[which] if not path.is_bit_equal]
    equality = f"{each}bit-equal" if not others else f"differ on {', '.join(path.name for path in others)}"
    how = f"{counted(numbers.tokens, 'token')} ({numbers.dtype}, {numbers.attention}, {numbers.device})"
    return Promise(name, True, not problems, f"{evidence}; logits {equality} on {how}", problems)


def _bounded_forgetting(
    manifest: Manifest, numbers: Numbers | MixtureNumbers | None, general: tuple[str, ...]
) -> Promise:
    """Claimed without switching; with it, what a text can lose grows with its length."""
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
    if numbers is not None:
        problems += general
        best = "the base" if count == 1 else "its best path"
        lose = "lose" if numbers.texts > 1 else "loses"
        bests = best.replace("its", "their") if numbers.texts > 1 else best
        evidence += f"; {counted(numbers.texts, 'text')} {lose} at most {max(0.0, numbers.excess):.3g} against {bests}"
        evidence += f", of which rounding explains {numbers.rounding:.2g}" if numbers.excess > bound else ""
        most = bound + each * numbers.longest + numbers.rounding
        if not numbers.excess <= most:
            problems.append(
                f"a text ({numbers.worst}) loses {numbers.excess:.3g} nats against {best}, expected at most {most:.3g}."
            )
        problems += numbers.path_problems
    return Promise(name, not each, _holds(problems, numbers), evidence, tuple(problems))


def _holds(problems: list[str], numbers: object) -> bool | None:
    return None if numbers is None and not problems else not problems


def _equality(is_equal: bool, drift: float, numbers: Numbers) -> str:
    found = "bit-equal" if is_equal else f"differ by {drift:.3g}"
    return f"{found} on {counted(numbers.tokens, 'token')} ({numbers.dtype}, {numbers.attention}, {numbers.device})"
