"""Verify the claims of an expanded checkpoint: check which of the named promises hold, and collect the evidence.

    recoverable         every base tensor and file has its original bytes
    output_at_init      W12 and the head's up part are zero, or copies equal the base's, and logits equal the base
                        model's bit for bit
    near_output_at_init the same up to rounding: in float16, or for a grown model with more than two copies
    old_vocabulary      for an expansion with new tokens: on every text without them, logits of the base's tokens equal
                        the base model's bit for bit. It holds before training, and after it if nothing else was added
    base_stream_always  the base stream and base logits equal the base model's bit for bit: without W12, or on the
                        preserve path of a routed model, which has no W12
    shut_gates          for an expansion with gates: up to the first token at which one opens, the logits of a text
                        equal the base model's bit for bit, regardless of training
    paths_as_alone      for several expansions: the path of each gives the logits of the model with that expansion
                        alone, bit for bit
    bounded_forgetting  a model routed by posterior without switching is a Bayes mixture of its K + 1 paths. On a text
                        within one context it loses at most ln(K + 1) nats against any path, or -ln of the path's prior
                        if priors are uneven

A promise is *claimed* if the variant makes it in its present state. By default every claimed promise must hold. A
trained model no longer claims `output_at_init`.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.code_names import code_elsewhere
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_json
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.evidence.integrity import Integrity, asking_warnings, bytes_to_check, check_files
from scale_surgery.evidence.promises import PROMISES, judge
from scale_surgery.evidence.recorded_facts import fact_problems
from scale_surgery.evidence.verification import OTHER_BASE, Verification, decide, says_more
from scale_surgery.folder.folder import Folder, open_folder
from scale_surgery.folder.parts import link_base
from scale_surgery.folder.record import Manifest, read_manifest, tool_versions
from scale_surgery.folder.write import write_record
from scale_surgery.progress import Track, no_track
from scale_surgery.running.loading import needs_own_code
from scale_surgery.running.options import Probes, RunOptions

if TYPE_CHECKING:
    from scale_surgery.evidence.probes import Numbers

# variant of several expansions
SEVERAL = "composed"


def verify(
    expanded: str | Path,
    base: str | Path | None = None,
    *,
    probes: Probes | None = Probes(),
    required: tuple[str, ...] = (),
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    record: bool = True,
    track: Track = no_track,
) -> Verification:
    """Check which promises hold for an expanded checkpoint.

    Without `base`, the base model is the one inside the checkpoint, and its bytes are compared with the hashes
    that were recorded when it was expanded.

    Args:
        expanded: Folder of the expanded checkpoint.
        base: Its base model, a folder or a Hub id.
        probes: Prompts, and tokens to generate for each with and without KV cache. None: check bytes and structure,
            run no model.
        required: Promises that must hold; default: all that the variant claims in its present state.
        run: Options of the run: device, trust_remote_code, memory_bytes.
        revision: Branch, tag or commit of the base's Hub repository.
        record: Write the result into surgery.json, unless `base` is another model.
        track: Makes progress bars.

    Returns:
        The promises with their evidence.

    Raises:
        CheckpointError: If this is no expanded checkpoint, or it or the base cannot be read.
        PlanError: If a required promise is unknown, or a revision is given without a base.
    """
    _check_request(base, required, revision)
    path = Path(expanded)
    folder = open_folder(path)
    manifest = folder.manifest
    given = _open_base(path, base, revision)
    with track("check of files", bytes_to_check(folder, given)) as advance:
        integrity = check_files(folder, given, advance)
    is_unknown = needs_own_code(manifest.base_config) and not run.trust_remote_code
    facts = () if is_unknown else fact_problems(folder, run)
    numbers: Numbers | None = None
    reason = "files only" if probes is None and not integrity.is_other_base else _why_not(integrity, run)
    if reason is None and is_unknown:
        reason = "the base has code of its own; --trust-remote-code runs it"
    if reason is None and manifest.fused is not None and given is None:
        reason = "a fused model holds no base shards to compare with; --base compares its logits"
    if reason is None and probes is not None:
        numbers = _run_probes(folder, given, probes, run, track)
    result = replace(_judge(folder, integrity, numbers, facts, required), not_run=reason)
    # a wrong --base says nothing about the folder
    if not record or reason == OTHER_BASE:
        return result
    # the record is about all that is claimed, whatever was asked for
    required_by_claim, passed = decide(result.promises, (), result.problems)
    whole = replace(result, required=required_by_claim, passed=passed)
    return replace(result, recorded=_record(path, manifest, whole))


def _open_base(path: Path, base: str | Path | None, revision: str | None) -> Checkpoint | None:
    """Open the given base, or return None; refuse an expanded folder, or the verified folder itself."""
    if base is None:
        return None
    source = find_source(base, revision)
    if source.path.resolve() == path.resolve():
        raise CheckpointError(Problem("base-is-verified", "--base", base=base))
    given = open_checkpoint(source.path)
    if given.recorded is not None:
        refuse_form(base, "expanded", "base")
    return given


def _check_request(base: str | Path | None, required: tuple[str, ...], revision: str | None) -> None:
    """Refuse unknown promises, and a revision without a base."""
    unknown = [name for name in required if name not in PROMISES]
    problems = [Problem("promise-unknown", "--promise", name=name, promises=list(PROMISES)) for name in unknown]
    if revision is not None and base is None:
        problems.append(Problem("revision-without-base", "--revision", revision=revision))
    if problems:
        raise PlanError(*problems)


def _why_not(integrity: Integrity, run: RunOptions) -> str | None:
    """Return the reason why no model is run; None if it is run."""
    if not integrity.is_loadable:
        return "tensors are missing or damaged"
    if integrity.is_other_base:
        return OTHER_BASE
    if run.trust_remote_code or not (integrity.code or integrity.foreign_code or integrity.config):
        return None
    if integrity.code or integrity.config:
        return "code or config.json is not what was written"
    return "another release of this program wrote its code; --trust-remote-code runs that"


def _record(path: Path, manifest: Manifest, result: Verification) -> bool:
    if says_more(manifest.verification, result):
        return True
    try:
        # changes that another command wrote meanwhile stay, and were not verified
        if read_manifest(path) != manifest:
            return False
        write_record(path, replace(manifest, verification=result.to_json()))
    except (OSError, CheckpointError):
        # a read-only folder can be verified too
        return False
    return True


def _run_probes(
    folder: Folder,
    given: Checkpoint | None,
    probes: Probes,
    run: RunOptions,
    track: Track,
) -> Numbers:
    """Run the base, the expanded model, and each path alone."""
    from scale_surgery.evidence.probes import probe

    run = replace(run.placed(), dtype=None)  # promises are about weights in their stored dtype
    with tempfile.TemporaryDirectory() as scratch:
        renamed = link_base(folder, Path(scratch)) if given is None else {}
        base = Path(scratch) if given is None else given.path
        return probe(folder, base, probes, run, track, renamed)


def _judge(
    folder: Folder,
    integrity: Integrity,
    numbers: Numbers | None,
    facts: tuple[str, ...],
    required: tuple[str, ...],
) -> Verification:
    manifest = folder.manifest
    problems = integrity.structure + integrity.config + integrity.code + facts
    if numbers is not None:
        problems += numbers.load_problems + numbers.token_problems
        if math.isfinite(numbers.largest_logit) and not math.isfinite(numbers.drift):
            problems += (f"logits: drift {numbers.drift:.3g} from the base's, expected numbers.",)
        problems += () if numbers.kept_state is None else tuple(numbers.kept_state.problems)
    promises = judge(folder, integrity, numbers, problems, required)
    decisive, passed = decide(promises, required, problems)
    return Verification(
        path=folder.path,
        base_name=manifest.base_name,
        variant=SEVERAL if len(manifest.expansions) > 1 else manifest.plan.variant,
        routing=manifest.routing,
        state="trained" if integrity.trained else "initial",
        trained_tensors=len(integrity.trained),
        promises=promises,
        required=decisive,
        problems=problems,
        warnings=(*_code_warnings(manifest, integrity), *_names_elsewhere(folder), *asking_warnings(folder)),
        numbers=numbers,
        passed=passed,
        fingerprint=integrity.fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=tool_versions(),
        machine=f"{platform.machine()} {platform.system()}",
        expansions=tuple(manifest.expansions),
    )


def _code_warnings(manifest: Manifest, integrity: Integrity) -> Iterator[str]:
    """Generate warnings about code in the folder that this release did not write."""
    without = "no model of this base" if manifest.first_plan.architecture.own_code else "the code of this program"
    for file in integrity.unreleased_code:
        origin = _origin(file, manifest)
        yield f"{file}: {origin}. Read it before you let it run with trust_remote_code; without, {without} runs."


def _names_elsewhere(folder: Folder) -> Iterator[str]:
    """Generate warnings about classes of other repositories that configs of the folder name; the base's stay."""
    for file in sorted(folder.path.glob("*config.json")):
        for problem in code_elsewhere(read_json(file)):
            yield f"{problem.within(file.name)} trust_remote_code would fetch and run it."


def _origin(file: str, manifest: Manifest) -> str:
    """Describe a code file that this release did not write."""
    if file in manifest.first_plan.code_files:
        return "differs from the code of this release"
    return "is code of the base model, not of this program"
