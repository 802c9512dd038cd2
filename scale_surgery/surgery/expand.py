"""Execute a plan: a base checkpoint and a plan become an expanded checkpoint beside it.

plan            --tensor by tensor-> expansion-*.safetensors   (new tensors only)
everything else --as files, edited-> what stands around them: see `write_folder`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import BaseWeights, check_base_weights, write_tensors
from scale_surgery.checkpoint.folder import Checkpoint, read_rows
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import counted
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.folder import Folder, named_base, open_given, refuse_linked
from scale_surgery.folder.record import ExpansionRecord
from scale_surgery.folder.write import room_for_base, tool_on, write_folder
from scale_surgery.planning.base import base_in, remarks_on
from scale_surgery.planning.plan import Plan, check_fits
from scale_surgery.planning.request import Request
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Track, no_track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.running.loading import load_config
from scale_surgery.running.new_tokens import check_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import load_tokenizer
from scale_surgery.surgery.compose import check_beside, routing_beside

# untrained rows of the embedding lie nearer to the mean of all than this share of the usual distance; transformers
# begins new rows at a hundred-thousandth of it
NEAR_THE_MEAN = 0.01
SAMPLE = 1000
MOST_NAMED = 3


@dataclass(frozen=True)
class Expansion:
    """Result of `expand`.

    Attributes:
        path: The expanded checkpoint.
        plan: The plan that was executed.
        base_bytes_written: Bytes of base shards that were written; 0 with hard links.
        left_out: Base files that were not taken along: weights in another format, links that lead out of its folder.
        pinned_tokenizer: The tokenizer class that tokenizer_config.json now names, where it had to.
        warnings: What may surprise: tensors that the base's class does not load, a head that is not tied after all,
            tokens that were added to the base and never trained.
    """

    path: Path
    plan: Plan
    base_bytes_written: int
    left_out: tuple[str, ...]
    pinned_tokenizer: str | None
    warnings: tuple[str, ...] = ()


def default_output(plan: Plan) -> Path:
    """Return the default output folder: `<name>-<method>` in the current folder."""
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
    planned = plan_or_request if isinstance(plan_or_request, Plan) else None
    # a branch of the Hub may have moved since the plan was made: its commit is what was planned
    commit = planned.base_revision if planned else None
    source = find_source(model, None if commit else revision, recorded=commit)
    given = open_given(source.path)
    before = given.manifest.expansions if isinstance(given, Folder) else {}
    made, run = _plan_for(source, given, plan_or_request, run), run.placed()
    target = Path(output) if output is not None else default_output(made)
    check_target(target, [source.path], overwrite=overwrite)
    load_config(source.path, source.name, run)  # what transformers refuses is known before anything is written
    check_name(made.request.name, before)
    expansions = {**before, made.request.name: ExpansionRecord(made, {})}
    if before:
        check_beside(record.plan for record in expansions.values())
    refuse_linked(given)
    tokenizer = load_tokenizer(source.path, run)
    if made.request.new_tokens is not None:
        check_new_tokens(source.path, tokenizer, made.request.new_tokens, made.sizes.embedded, run)
    routing = routing_beside(given, len(expansions))
    base = base_in(given, made.request.name)
    check_space(target, room_for_base(given, made, target, base_weights) + made.costs.bytes_added)
    if isinstance(given, Folder):
        refuse_damaged(given, track, is_trusted=run.trust_remote_code)
    state = {
        # costs depend on what is in the cache, and decide no tensor
        "plan": {name: value for name, value in made.to_json().items() if name != "costs"},
        "base_weights": base_weights,
        # tensors of two devices are not mixed
        "tool": tool_on(run),
    }
    # once the folder has its name, nothing may fail
    warnings = (*remarks_on(made.facts), *_warn_of_untrained_tokens(base, made, tokenizer))
    with staged(target, state, given.stamps, overwrite=overwrite) as partial:
        _write_new_tensors(made, base, partial, run.device, tokenizer, track)
        written = write_folder(given, expansions, routing, partial, base_weights, track, run)
    return Expansion(
        path=target,
        plan=made,
        base_bytes_written=written.base_bytes,
        left_out=(*given.left_out, *written.left_out),
        pinned_tokenizer=written.pinned_tokenizer,
        warnings=warnings,
    )


def _plan_for(source: Source, given: Checkpoint, plan_or_request: Plan | Request, run: RunOptions) -> Plan:
    # surgery.json names the model that was read, not one of the same shapes elsewhere
    name, revision = named_base(given, source)
    if not isinstance(plan_or_request, Plan):
        return make_plan(given, plan_or_request, name=name, revision=revision, run=run)
    base = base_in(given, plan_or_request.request.name)
    check_fits(plan_or_request, base)
    check_clashes(base, plan_or_request.tensors)
    if plan_or_request.sizes.is_tied and f"{plan_or_request.head}.weight" in base.tensors:
        # a plan from the headers of a repository could not see whether this head has the embedding's bytes
        return make_plan(given, plan_or_request.request, name=name, revision=revision, run=run)
    return replace(plan_or_request, base_name=name, base_revision=revision)


def _write_new_tensors(
    plan: Plan, base: Checkpoint, partial: Path, device: str, tokenizer: Any | None, track: Track
) -> None:
    """Write the shards of new tensors; a shard of an interrupted run stays."""
    from scale_surgery.tensors.initialise import Initialiser

    initialiser = Initialiser(plan, base, device, tokenizer)
    with track("new tensors", plan.costs.parameters_added) as advance:
        for shard in plan.shards:
            planned = [tensor for tensor in plan.tensors if tensor.shard == shard]
            if (partial / shard).exists():
                advance(sum(tensor.elements for tensor in planned))
                continue
            tensors = {}
            for tensor in planned:
                tensors[plan.stored_name(tensor.name)] = initialiser.make(tensor)
                advance(tensor.elements)
            write_tensors(partial / shard, tensors)


def _warn_of_untrained_tokens(base: Checkpoint, plan: Plan, tokenizer: Any | None) -> tuple[str, ...]:
    """Return a warning if tokens were added to the base's tokenizer and their embeddings never trained."""
    name = plan.embedding
    if tokenizer is None or name not in base.tensors:
        return ()
    # chat models have added tokens that are trained, and special ones that no text has
    added = {
        number: str(token)
        for number, token in tokenizer.added_tokens_decoder.items()
        if tokenizer.vocab_size <= number < plan.sizes.embedded and not token.special
    }
    # without older tokens there are no rows to compare with
    if not (first := min(added, default=0)):
        return ()
    near = _near_the_mean(base, name, first, max(added) + 1)
    untrained = [repr(token) for number, token in added.items() if number in near]
    if not untrained:
        return ()
    return (
        f"the tokenizer has {counted(len(untrained), 'added token')} that nobody trained, such as "
        f"{', '.join(untrained[:MOST_NAMED])}. Their rows of embedding and head belong to the base, which stays "
        "as it is, so the expansion cannot learn them. Train these rows first, or use the base without them.",
    )


def _near_the_mean(base: Checkpoint, name: str, first: int, end: int) -> set[int]:
    """Find the rows from the first on that lie near the mean of the rows below it.

    What `resize_token_embeddings` makes lies there, and two such rows cannot be told apart.
    """
    import torch

    # of the embedding, which may be the largest tensor of a model, one chunk and a sample are in memory
    every, sample = max(1, first // SAMPLE), []
    mean = torch.zeros(base.tensors[name].shape[1], dtype=torch.float64)
    for start, rows in read_rows(base, name, 0, first):
        mean += rows.sum(0, dtype=torch.float64) / first
        sample.append(rows[-start % every :: every].clone())
    # the sample says how far rows usually are from their mean
    usual, near = (torch.cat(sample) - mean).norm(dim=-1).median(), set[int]()
    for start, rows in read_rows(base, name, first, end):
        is_near = (rows - mean).norm(dim=-1) < NEAR_THE_MEAN * usual
        near |= {start + row for row in is_near.nonzero().flatten().tolist()}
    return near
