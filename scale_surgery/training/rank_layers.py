"""Which layers: train a pilot for a few steps, and rank layers by how much training changed them.

plan and budget -> texts -> with old text: where W12 is worth it -> pilot -> scores -> what the budget pays for

Everything that can be refused is refused before a weight is read. The model's folder is only read; the pilot is thrown
away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.sources import Source, find_source, listed
from scale_surgery.errors import CheckpointError, DataError, PlanError
from scale_surgery.fields import problems_of
from scale_surgery.planning.families import get_family, read_sizes
from scale_surgery.planning.plan import Plan, make_plan
from scale_surgery.planning.request import Request, complete
from scale_surgery.planning.selection import format_layers
from scale_surgery.progress import Track, no_track
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.device import choose_device
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.training.budget import Price, check_budget, choose_layers, price_of, read_budget
from scale_surgery.training.pilot_settings import PilotSettings
from scale_surgery.training.ranking import (
    SCORES,
    LayerScore,
    LayerWorth,
    MatrixScore,
    Pilot,
    Proposal,
    Ranking,
    RankingRequest,
    ScoreName,
    W12Estimate,
    order_layers,
    propose_collaboration,
)

if TYPE_CHECKING:
    import torch

    from scale_surgery.planning.families import Role
    from scale_surgery.running.texts import Sequences
    from scale_surgery.training.pilot import PilotRun
    from scale_surgery.training.update_scores import Update

# a text that is read more often than this is learned by heart, whatever it is
MOST_PASSES = 50
# a drift that is measured on fewer says more about them than about what the base knows
LEAST_OLD_TOKENS = 256


@dataclass(frozen=True)
class Job:
    """A ranking that was checked and can begin: the model, its plan, what is asked for, and texts as tokens."""

    source: Source
    checkpoint: Checkpoint
    plan: Plan
    settings: PilotSettings
    budget: int
    price: Price
    texts: Mapping[str, Sequences]


def rank_layers(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    pilot: PilotSettings | None = None,
    wanted: RankingRequest = RankingRequest(),
    *,
    old: str | Path | Sequence[str | Path] = (),
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    track: Track = no_track,
) -> Ranking:
    """Rank the layers of a base model by what a short training run on a text changes in them.

        relative norm   |W' - W| / |W|
        effective rank  exp(- sum_i p_i ln p_i),  p the normalised singular values of W' - W

    Grow, Don't Overwrite (arXiv 2603.08647) ranks layers by the size of their update in a pilot run and looks at the
    effective rank of updates; the exact scores are ours.

    Args:
        model: A base model, a folder or a Hub id; nothing is written to it.
        data: Files to learn from; see `data.read_documents`.
        pilot: How the pilot trains.
        wanted: For which expansion layers are proposed, and by which score.
        old: Files that tell what the base knows; with them a preserved depth is proposed.
        run: How the pilot runs: device; and trust_remote_code, for the tokenizer alone.
        revision: Branch, tag or commit of a Hub repository.
        track: Makes progress bars.

    Returns:
        Scores of all layers, what the budget pays for, and with old text where W12 is worth it.

    Raises:
        CheckpointError: If the model cannot be read, or is expanded.
        PlanError: If settings make no sense, the request does not fit the model, the budget cannot be read or pays for
            no layer, or old text is given for an expansion that has no choice of W12.
        DataError: If texts cannot be read, or are too short for the pilot, or the model has no tokenizer.
        TrainingError: If the loss is not a number.
    """
    texts = {"new": list(map(Path, listed(data))), "old": list(map(Path, listed(old)))}
    request = complete(wanted.expansion or Request("all", variant="adapt" if texts["old"] else None))
    job = _prepare(model, texts, pilot or PilotSettings(), request, wanted, run, revision)
    place = _find_device(run)
    collaboration = _estimate(job, place, track) if texts["old"] else []
    pilot_run = _run_pilot(job, place, track)
    layers = tuple(_score_layer(layer, pilot_run.updates[layer]) for layer in job.plan.layers)
    proposals = tuple(_propose(job, layers, name) for name in sorted(SCORES, key=lambda name: name != wanted.score))
    return Ranking(
        name=job.source.name,
        model=str(model),
        revision=revision,
        family=job.plan.family,
        pilot=_describe(job, pilot_run),
        layers=layers,
        score=wanted.score,
        request=request,
        budget=job.budget,
        parameters=job.plan.costs.parameters_before,
        proposals=proposals,
        depth=_describe_depth(job, collaboration, proposals[0]) if collaboration else None,
    )


def _prepare(
    model: str | Path,
    files: Mapping[str, Sequence[Path]],
    settings: PilotSettings,
    request: Request,
    wanted: RankingRequest,
    run: RunOptions,
    revision: str | None,
) -> Job:
    """Check everything that is asked for, and read the texts."""
    _check_request(settings, request, wanted.score, has_old=bool(files["old"]))
    source = find_source(model, revision)
    checkpoint = open_checkpoint(source.path)
    _refuse_expanded(checkpoint, source.name)
    plan = make_plan(checkpoint, request, name=source.name, revision=source.revision)
    allowed = read_budget(wanted.budget, plan.costs.parameters_before)
    price = price_of(checkpoint, request, source.name)
    check_budget(allowed, plan.layers, price, wanted.budget)
    texts = _read_texts(source, checkpoint, files, settings, run)
    return Job(source, checkpoint, plan, settings, allowed, price, texts)


def _check_request(settings: PilotSettings, request: Request, score: str, *, has_old: bool) -> None:
    problems = problems_of(settings)
    if score not in SCORES:
        problems.append(f"--score is {score!r}, expected one of: {', '.join(SCORES)}.")
    if request.collaborative_layers is not None:
        problems.append(
            f"--collaborative-layers {request.collaborative_layers}: is proposed by rank-layers. Leave it out."
        )
    if has_old and request.variant != "adapt":
        problems.append(
            f"--old with --variant {request.variant}: old text tells in which layers W12 is worth it, and that is a "
            "choice of --variant adapt alone (--method scale). Take that, or leave --old out."
        )
    if problems:
        raise PlanError.from_problems(problems)


def _refuse_expanded(checkpoint: Checkpoint, name: str) -> None:
    if "scale_surgery" in checkpoint.config or checkpoint.manifest is not None:
        raise CheckpointError(
            f"{name}: is expanded already, expected the base model: layers are chosen before an expansion. Rank its "
            "base, or give that back first (scale-surgery strip)."
        )


def _read_texts(
    source: Source,
    checkpoint: Checkpoint,
    files: Mapping[str, Sequence[Path]],
    settings: PilotSettings,
    run: RunOptions,
) -> dict[str, Sequences]:
    """Token sequences of the new text, and of the old where there is any; all of one length but the last."""
    from scale_surgery.running.documents import read_documents
    from scale_surgery.running.texts import pack, tokenize, without_unscored

    length = choose_length(settings.sequence_length, {source.name: context_of(checkpoint.config)})
    tokenizer = need_tokenizer(source.path, source.name, run)
    texts = {
        side: without_unscored(pack(tokenize(read_documents(given), tokenizer), length))
        for side, given in files.items()
        if given
    }
    if "new" not in texts:
        raise DataError("There is no text for the pilot. Give files with --data.")
    _check_ids(
        texts, source.name, read_sizes(get_family(checkpoint.config["model_type"]), checkpoint.config).vocabulary
    )
    _check_amount({side: len(text.ids) for side, text in texts.items()}, settings, length)
    return texts


def _check_ids(texts: Mapping[str, Sequences], name: str, vocabulary: int) -> None:
    highest = max(int(text.ids.max()) for text in texts.values())
    if highest >= vocabulary:
        raise DataError(
            f"{name}: its tokenizer gives the id {highest}, expected ids below {vocabulary}, the size of its "
            "embedding. Use the tokenizer that the model was trained with."
        )


def _check_amount(tokens: Mapping[str, int], settings: PilotSettings, length: int) -> None:
    needed = math.ceil(settings.steps * settings.batch_size * length / MOST_PASSES)
    fitting = tokens["new"] * MOST_PASSES // (settings.batch_size * length)
    problems = []
    if tokens["new"] < needed:
        problems.append(
            f"--data: {tokens['new']:,} tokens found, at least {needed:,} needed: the pilot takes "
            f"{settings.steps} steps of {settings.batch_size} x {length} tokens, and what is read more than "
            f"{MOST_PASSES} times is learned by heart. Give more text, or lower --steps"
            + (f" (to {fitting})" if fitting else "")
            + ", --batch-size or --sequence-length."
        )
    if tokens.get("old", LEAST_OLD_TOKENS) < LEAST_OLD_TOKENS:
        problems.append(
            f"--old: {tokens['old']:,} tokens found, at least {LEAST_OLD_TOKENS:,} needed: the drift of a step is "
            "measured on them. Give more text, or leave --old out."
        )
    if problems:
        raise DataError.from_problems(problems)


def _find_device(run: RunOptions) -> torch.device:
    import torch

    return torch.device(choose_device(run.device, only_trains=True))


def _estimate(job: Job, device: torch.device, track: Track) -> list[LayerWorth]:
    """What W12 is worth in each layer; in float32, so that small steps are seen."""
    from scale_surgery.training.w12_worth import estimate_worth

    request = replace(job.plan.request, dtype="float32")
    plan = make_plan(job.checkpoint, request, name=job.source.name)
    return estimate_worth(job.checkpoint, plan, job.texts["new"], job.texts["old"], device, track)


def _run_pilot(job: Job, device: torch.device, track: Track) -> PilotRun:
    from scale_surgery.running.loading import loaded_whole
    from scale_surgery.training.pilot import run_pilot

    with loaded_whole(job.source.path, job.source.name, RunOptions(device=str(device))) as model:
        return run_pilot(model, job.checkpoint, job.texts["new"], job.settings, device, track)


def _score_layer(layer: int, updates: Mapping[Role, Update]) -> LayerScore:
    from scale_surgery.training.update_scores import effective_rank, relative_norm

    together = list(updates.values())
    return LayerScore(
        layer=layer,
        relative_norm=relative_norm(together),
        effective_rank=effective_rank(together),
        matrices={
            role: MatrixScore(relative_norm([update]), effective_rank([update]), len(update.values))
            for role, update in updates.items()
        },
    )


def _propose(job: Job, layers: Sequence[LayerScore], score: ScoreName) -> Proposal:
    chosen = choose_layers(job.budget, order_layers(layers, score), job.price)
    return Proposal(score, chosen, format_layers(chosen), job.price(chosen))


def _describe(job: Job, run: PilotRun) -> Pilot:
    text, settings = job.texts["new"], job.settings
    return Pilot(
        settings=settings,
        tokens=len(text.ids),
        passes=settings.steps * settings.batch_size / len(text),
        first_loss=run.first_loss,
        last_loss=run.last_loss,
        seconds=run.seconds,
        trained_parameters=run.trained_parameters,
        peak_memory_bytes=run.peak_memory_bytes,
    )


def _describe_depth(job: Job, layers: Sequence[LayerWorth], proposal: Proposal) -> W12Estimate:
    from scale_surgery.training.w12_worth import PROMISED

    proposed = propose_collaboration({found.layer: found.worth for found in layers}, proposal.layers)
    return W12Estimate(PROMISED, len(job.texts["old"].ids), tuple(layers), proposed, format_layers(proposed))
