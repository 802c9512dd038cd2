"""Plan an expansion of a model: derive the facts about its architecture, then decide everything from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import TOKENIZER_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.deriving.base import code_folder, derive_config, read_base
from scale_surgery.deriving.configs import config_of
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.base import Base, base_in
from scale_surgery.planning.depth import deepened_config, per_layer_lists
from scale_surgery.planning.methods import METHODS
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
    asked = METHODS.get(request.method) if isinstance(request.method, str) else None
    # what the config rules out is refused before facts are derived
    if asked is not None and (problems := asked.config_problems(checkpoint.config)):
        raise PlanError(*problems)
    # a tiny twin is built, run and expanded: a second or a few
    with track("architecture", 1) as advance:
        base = read_base(checkpoint, run)
        advance(1)
    made = plan_expansion(base, request, name=name, revision=revision)
    check_clashes(checkpoint, made.tensors)
    if made.numbering is not None:
        _check_kinds(base, made, code_folder(checkpoint, run))
    return made


def _check_kinds(base: Base, made: Plan, code: Path | None) -> None:
    """Check that layers keep their kind where copies below them change their numbers."""
    if base.architecture.is_numbered:
        raise PlanError(Problem("layers-use-numbers", "--method depth", model_type=base.architecture.model_type))
    deep = deepened_config(base.checkpoint.config, made.specs, base.architecture)
    del deep[CONFIG_KEY]
    # every layer may be there twice
    deep_facts = derive_config(deep, str(base.checkpoint.path), 2 * len(base.checkpoint.tensors), code).architecture
    order = [layer for layer in range(base.sizes.layers) for _ in range(2 if layer in made.layers else 1)]
    before, after = (config_of(config, code).to_dict() for config in (base.checkpoint.config, deep))
    _check_lists(before, after, order)
    for position, layer in enumerate(order):
        # names on disk are those of a checkpoint
        if deep_facts.kind(position) != replace(base.architecture.kind(layer), stored_as={}):
            raise PlanError(Problem("kind-by-number", "--layers", layer=layer, position=position))


def _check_lists(before: Mapping[str, Any], after: Mapping[str, Any], order: list[int]) -> None:
    """Check the lists with an entry for each layer that transformers makes where config.json has none."""
    for key, values in per_layer_lists(before, max(order) + 1).items():
        if after.get(key) != [values[layer] for layer in order]:
            raise PlanError(Problem("list-by-number", "--layers", key=key))


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
