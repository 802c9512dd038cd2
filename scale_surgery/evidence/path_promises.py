"""The named promises of a folder with several expansions: which hold, and on what evidence.

Of the base they are those of an expanded model. `paths_as_alone` says that the path of each expansion gives, bit for
bit, the logits of the model that it is alone; `bounded_forgetting` that without switching the mixture loses at most
ln(K + 1) nats on a text that it reads in one context, against the best path for it, and with a prior that is not
uniform at most -ln of its smallest weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scale_surgery.errors import counted
from scale_surgery.evidence.integrity import Integrity
from scale_surgery.evidence.promises import Promise, recoverable_evidence
from scale_surgery.planning.routing_specs import Routing
from scale_surgery.surgery.record import Manifest

if TYPE_CHECKING:
    from scale_surgery.evidence.path_probes import MixtureNumbers, PathNumbers

PATH_PROMISES = ("recoverable", "base_stream_always", "paths_as_alone", "bounded_forgetting")


def judge_paths(
    manifest: Manifest, integrity: Integrity, numbers: MixtureNumbers | None, problems: tuple[str, ...]
) -> tuple[Promise, ...]:
    """Judge every promise of a folder with several expansions by what was found.

    Args:
        manifest: Its surgery.json.
        integrity: What its files showed, beside a given base too.
        numbers: What the probe prompts showed, or None where no model was run.
        problems: What speaks against every promise about outputs: structure, config, code, loading, token ids.

    Returns:
        The promises.
    """
    base, *expansions = ((), *((),) * len(manifest.expansions)) if numbers is None else map(_problems, numbers.paths)
    found = () if numbers is None else problems
    return (
        Promise("recoverable", True, not integrity.base, recoverable_evidence(integrity), integrity.base),
        _about_paths(
            "base_stream_always", "no block on its path", "", numbers, (*integrity.base, *found, *base), slice(1)
        ),
        _about_paths(
            "paths_as_alone",
            counted(len(manifest.expansions), "expansion"),
            "each ",
            numbers,
            (*integrity.structure, *found, *(line for own in expansions for line in own)),
            slice(1, None),
        ),
        _bounded_forgetting(manifest, numbers, problems),
    )


def _problems(path: PathNumbers) -> tuple[str, ...]:
    return path.problems


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


def _bounded_forgetting(manifest: Manifest, numbers: MixtureNumbers | None, general: tuple[str, ...]) -> Promise:
    """Claimed without switching; with it, what a text can lose grows with its length."""
    routing, count = manifest.routing or Routing(), len(manifest.expansions)
    bound, each = routing.largest_loss(count) or 0.0, routing.bound_per_token or 0.0
    how = f"ln {count + 1} = {bound:.3g} nats" if routing.is_even else f"{bound:.3g} nats by the prior"
    evidence = f"at most {how} a text"
    problems: tuple[str, ...] = ()
    if each:
        evidence = f"no bound for all lengths: {how} a text and {each:.2g} more a token, by switching"
        problems = (f"switch rate {routing.switch_rate:g}: the bound grows with the text, expected 0.",)
    if numbers is not None:
        problems += general
        lose = "lose" if numbers.texts > 1 else "loses"
        evidence += f"; {counted(numbers.texts, 'text')} {lose} at most {max(0.0, numbers.excess):.3g} against "
        evidence += "their best path" if numbers.texts > 1 else "its best path"
        evidence += f", of which rounding explains {numbers.rounding:.2g}" if numbers.excess > bound else ""
        most = bound + each * numbers.longest + numbers.rounding
        if not numbers.excess <= most:
            problems += (
                f"a text ({numbers.worst}) loses {numbers.excess:.3g} nats against its best path, expected at most "
                f"{most:.3g}.",
            )
        problems += tuple(line for path in numbers.paths for line in path.problems)
    holds = None if numbers is None and not problems else not problems
    return Promise("bounded_forgetting", not each, holds, evidence, problems)
