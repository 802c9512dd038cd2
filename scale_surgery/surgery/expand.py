"""Execute a plan: a base checkpoint and a plan become an expanded checkpoint beside it.

plan            --tensor by tensor-> expansion-*.safetensors   (new tensors only)
everything else --as files, edited-> what stands around them: see `write_folder`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, check_base_weights, write_tensors
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.deriving.planned import make_plan
from scale_surgery.planning.base import base_in
from scale_surgery.planning.plan import Plan, check_fits
from scale_surgery.planning.request import Request
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Track, no_track
from scale_surgery.running.loading import load_base_config
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.added_tokens import warn_of_untrained_tokens
from scale_surgery.surgery.beside import check_beside, with_expansions
from scale_surgery.surgery.intact import refuse_damaged
from scale_surgery.surgery.record import ExpansionRecord, Manifest, read_manifest, refuse_linked
from scale_surgery.surgery.renumbered import renumbered_shards
from scale_surgery.surgery.write_folder import tool_on, write_anew, write_around


@dataclass(frozen=True)
class Expansion:
    """What `expand` did.

    Attributes:
        path: The expanded checkpoint.
        plan: The plan that was executed.
        base_bytes_written: Bytes of base shards that were written; 0 with hard links.
        left_out: Base files that were not taken along: weights in another format, links that lead out of its folder.
        pinned_tokenizer: The tokenizer class that tokenizer_config.json now names, where it had to.
        warnings: What may surprise: tokens that were added to the base and never trained.
    """

    path: Path
    plan: Plan
    base_bytes_written: int
    left_out: tuple[str, ...]
    pinned_tokenizer: str | None
    warnings: tuple[str, ...] = ()


def default_output(plan: Plan) -> Path:
    """Where an expanded model goes when nothing is said: `<name>-<method>` in the current folder."""
    return Path(f"{plan.base_name.rsplit('/', 1)[-1]}-{plan.method.name}")


def expand(
    model: str | Path,
    plan_or_request: Plan | Request,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Expansion:
    """Widen chosen layers of a checkpoint; every base tensor keeps its bytes.

    Args:
        model: A folder or a Hub id; of a base model, or an expanded folder that gets one more expansion of its base.
        plan_or_request: What is to be done, or what is asked for.
        output: Folder to be; default `<name>-scale` in the current folder, or `-grow` or `-depth`.
        revision: Branch, tag or commit of a Hub repository; a plan brings its own.
        base_weights: How base files are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        run: Where the decompositions are computed, and whether the base's own code may run: device,
            trust_remote_code.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        PlanError: If the plan or the request does not fit the model.
        CheckpointError: If the model cannot be read or the output cannot be written.
    """
    check_base_weights(base_weights)
    planned = None if isinstance(plan_or_request, Request) else plan_or_request
    # a branch of the Hub may have moved since the plan was made: its commit is what was planned
    source = find_source(model, (planned.base_revision if planned else None) or revision)
    checkpoint = open_checkpoint(source.path)
    before = read_manifest(source.path) if checkpoint.manifest is not None else None
    made, run = _plan_for(source, checkpoint, plan_or_request, run, before), run.placed()
    target = Path(output) if output is not None else default_output(made)
    check_target(target, [source.path], overwrite=overwrite)
    load_base_config(source.path, source.name, run)  # what transformers refuses is known before anything is written
    if before is not None:
        check_beside([*before.plans.values(), made])
        refuse_linked(source.path, before)
    base = base_in(checkpoint, made.request.name)
    check_space(target, least_base_bytes(base, made, base_weights) + made.costs.bytes_added)
    if before is not None:
        refuse_damaged(checkpoint, before, track, is_trusted=run.trust_remote_code)
    state = {
        "plan": made.to_json(),
        "base_weights": base_weights,
        # tensors of two devices are not mixed
        "tool": tool_on(run),
    }
    with staged(target, state, checkpoint.stamps, overwrite=overwrite) as partial:
        write_expansion(made, base, partial, run.device, track)
        added = {made.request.name: ExpansionRecord(made, {})}
        if before is None:
            written, pinned = write_around(added, checkpoint, partial, base_weights, run, track)
        else:
            grown = with_expansions(before, {**before.expansions, **added})
            written, pinned = write_anew(checkpoint, grown, list(added), partial, base_weights, track), None
    return Expansion(target, made, written, checkpoint.left_out, pinned, warn_of_untrained_tokens(base, made, run))


def _plan_for(
    source: Source, checkpoint: Checkpoint, plan_or_request: Plan | Request, run: RunOptions, before: Manifest | None
) -> Plan:
    # surgery.json names the model that was read, not one of the same shapes elsewhere
    name, revision = (source.name, source.revision) if before is None else (before.base_name, before.base_revision)
    if isinstance(plan_or_request, Request):
        return make_plan(checkpoint, plan_or_request, name=name, revision=revision, run=run)
    base = base_in(checkpoint, plan_or_request.request.name)
    check_fits(plan_or_request, base)
    check_clashes(base, plan_or_request.tensors)
    return replace(plan_or_request, base_name=name, base_revision=revision)


def least_base_bytes(checkpoint: Checkpoint, plan: Plan, base_weights: BaseWeights) -> int:
    """Bytes that a base takes on disk for sure, beside an expansion of it."""
    # a reflink takes no space either, but whether it works is only known when it is tried
    copied = checkpoint.shards if base_weights == "copy" else renumbered_shards(checkpoint, plan.numbering)
    return sum((checkpoint.path / shard).stat().st_size for shard in copied)


def write_expansion(plan: Plan, checkpoint: Checkpoint, partial: Path, device: str, track: Track) -> None:
    """Write the shards of new tensors; one that is there already, from an interrupted run, stays.

    Args:
        plan: What to write.
        checkpoint: The base.
        partial: Where the shards go.
        device: Where the decompositions are computed.
        track: Makes progress bars.
    """
    from scale_surgery.surgery.initialise import make_tensor

    with track("new tensors", plan.costs.parameters_added) as advance:
        for shard in plan.shards:
            planned = [tensor for tensor in plan.tensors if tensor.shard == shard]
            if not (partial / shard).exists():
                tensors = {}
                for tensor in planned:
                    stored = plan.stored_name(tensor.name)
                    tensors[stored] = make_tensor(plan, tensor, checkpoint, device)
                    advance(tensor.elements)
                write_tensors(partial / shard, tensors)
            else:
                advance(sum(tensor.elements for tensor in planned))
