"""Plan an expansion of a model: derive the facts about its architecture, then decide everything from headers alone."""

from __future__ import annotations

from pathlib import Path

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.deriving.base import code_folder, read_base
from scale_surgery.planning.base import Base, base_in
from scale_surgery.planning.depth import deepened_config
from scale_surgery.planning.plan import Plan, plan_expansion
from scale_surgery.planning.request import Request, check_is_request
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.planning.saved import check_same, read_plan
from scale_surgery.progress import Track, no_track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.running.new_tokens import check_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import load_tokenizer


def plan(
    model: str | Path,
    request: Request,
    *,
    revision: str | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Plan:
    """Decide everything that `expand` would do, from headers and config only.

    Args:
        model: A folder or a Hub id.
        request: The expansion to plan.
        revision: Branch, tag or commit of a Hub repository.
        run: Whether the model's own code may run, where transformers does not have its type: trust_remote_code.
        track: Makes progress bars.

    Returns:
        The plan.

    Raises:
        SurgeryError: If the model cannot be read or the request does not fit it.
    """
    source, checkpoint = open_model(model, revision)
    made = make_plan(checkpoint, request, name=source.name, revision=source.revision, run=run, track=track)
    # of a repository on the Hub, the tokenizer may not be here yet
    if made.request.new_tokens is not None and (source.revision is None or (source.path / TOKENIZER_FILE).is_file()):
        check_new_tokens(
            source.path, load_tokenizer(source.path, run), made.request.new_tokens, made.sizes.embedded, run
        )
    return made


def make_plan(
    checkpoint: Checkpoint,
    request: Request,
    *,
    name: str,
    revision: str | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Plan:
    """Decide everything that an expansion will do; no weight is read."""
    check_is_request(request)
    checkpoint = base_in(checkpoint, request.name)
    check_name(request.name, ())
    # a tiny twin is built, run and expanded: a second or a few
    with track("architecture", 1) as advance:
        base = read_base(checkpoint, run)
        advance(1)
    made = plan_expansion(base, request, name=name, revision=revision)
    check_clashes(checkpoint, made.tensors)
    if made.numbering is not None:
        _check_copies(base, made, code_folder(checkpoint, run))
    return made


def _check_copies(base: Base, made: Plan, code: Path | None) -> None:
    """Check that copies of layers change nothing: not what other layers are, and not what they give."""
    # torch and transformers take seconds to import
    from scale_surgery.deriving.deepened import prove_copies

    deep = deepened_config(base.checkpoint.config, made.specs, base.architecture)
    del deep[CONFIG_KEY]
    prove_copies(base.checkpoint.config, deep, code, base.architecture, made.layers)


def load_plan(
    model: str | Path,
    file: Path,
    *,
    revision: str | None = None,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Plan:
    """Make the plan that a file holds, for a base model.

    Args:
        model: The base model, a folder or a Hub id.
        file: A plan that `save_plan` wrote.
        revision: Branch, tag or commit of a Hub repository.
        run: Whether the model's own code may run: trust_remote_code.
        track: Makes progress bars.

    Returns:
        The plan.

    Raises:
        PlanError: If the file is no plan, or planning again gives another plan; the differences are named.
        CheckpointError: If the model cannot be read.
    """
    saved = read_plan(file)
    source, checkpoint = open_model(model, revision)
    made = make_plan(checkpoint, saved.request, name=source.name, revision=source.revision, run=run, track=track)
    check_same(saved, Base(base_in(checkpoint, made.request.name), made.facts), made, file)
    return made
