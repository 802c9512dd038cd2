"""Which layers: train a pilot for a few steps, and rank layers by how much training changed them.

plan and budget -> texts -> with old text: where W12 is worth it -> pilot -> scores -> what the budget pays for

Everything that can be refused is refused before a weight is read. The model's folder is only read; the pilot is thrown
away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.sources import Source, find_source, listed
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import PlanError
from scale_surgery.fields import problems_of
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request, complete
from scale_surgery.planning.selection import format_layers
from scale_surgery.progress import Track, no_track
from scale_surgery.running.device import choose_device
from scale_surgery.running.options import RunOptions
from scale_surgery.training.any_text import is_of_any_text
from scale_surgery.training.budget import (
    Price,
    check_budget,
    choose_layers,
    find_ties,
    last_of_ties,
    price_of,
    read_budget,
)
from scale_surgery.training.pilot_settings import PilotBudget, PilotSettings, budget_pilots
from scale_surgery.training.pilot_texts import read_texts
from scale_surgery.training.ranking import (
    SCORES,
    LayerScore,
    LayerWorth,
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

    from scale_surgery.running.sequences import Sequences
    from scale_surgery.training.pilot import PilotRun


@dataclass(frozen=True)
class Job:
    """A ranking that was checked and can begin: the model, its plan, what is asked for, and texts as tokens."""

    model: str
    revision: str | None
    source: Source
    checkpoint: Checkpoint
    plan: Plan
    settings: PilotSettings
    budget: int
    price: Price
    score: ScoreName
    texts: Mapping[str, Sequences]
    run: RunOptions


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
        run: How the pilot runs: device, and trust_remote_code.
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
    return run_ranking(prepare_ranking(model, data, pilot, wanted, old=old, run=run, revision=revision), track)


def prepare_ranking(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    pilot: PilotSettings | None = None,
    wanted: RankingRequest = RankingRequest(),
    *,
    old: str | Path | Sequence[str | Path] = (),
    run: RunOptions = RunOptions(),
    revision: str | None = None,
) -> Job:
    """Check everything that `rank_layers` is asked for and read the texts; its arguments, results and errors."""
    files = {"new": list(map(Path, listed(data))), "old": list(map(Path, listed(old)))}
    request = complete(wanted.expansion or Request("all", variant="adapt" if files["old"] else None))
    pilot = pilot or PilotSettings()
    _check_request(pilot, request, wanted.score, has_old=bool(files["old"]))
    source = find_source(model, revision)
    checkpoint = open_checkpoint(source.path)
    _refuse_expanded(checkpoint, source.name)
    plan = make_plan(checkpoint, request, name=source.name, revision=source.revision, run=run)
    if files["old"] and plan.architecture.own_code:
        raise PlanError("--old: cannot be asked of a model that has code of its own. Leave it out.")
    allowed = read_budget(wanted.budget, plan.costs.parameters_before)
    price = price_of(checkpoint, request, source.name)
    check_budget(allowed, plan.layers, price, wanted.budget)
    texts = read_texts(source, checkpoint, files, pilot, run)
    return Job(str(model), revision, source, checkpoint, plan, pilot, allowed, price, wanted.score, texts, run)


def run_ranking(
    job: Job, track: Track = no_track, tell: Callable[[PilotBudget], None] = lambda budget: None
) -> Ranking:
    """Do what `prepare_ranking` checked; see `rank_layers`.

    Args:
        job: What to do.
        track: Makes progress bars.
        tell: Called before the first step with how much pilots will read, and how long that will take.
    """
    from scale_surgery.training.layer_scores import score_layers

    place = _find_device(job.run.device)
    collaboration = _estimate(job, place, track) if "old" in job.texts else []
    budget, runs = _run_pilots(job, place, track, tell)
    layers = score_layers(runs, job.plan.layers)
    proposals = tuple(_propose(job, layers, name) for name in sorted(SCORES, key=lambda name: name != job.score))
    return Ranking(
        name=job.source.name,
        model=job.model,
        revision=job.revision,
        family=job.plan.family,
        pilot=_describe(job, budget, runs),
        layers=layers,
        score=job.score,
        request=job.plan.request,
        budget=job.budget,
        parameters=job.plan.costs.parameters_before,
        proposals=proposals,
        depth=_describe_depth(job, collaboration, proposals[0]) if collaboration else None,
    )


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
        # layers are chosen before an expansion
        refuse_form(name, "expanded", "base")


def _find_device(name: str) -> torch.device:
    import torch

    return torch.device(choose_device(name, only_trains=True))


def _estimate(job: Job, device: torch.device, track: Track) -> list[LayerWorth]:
    """What W12 is worth in each layer; in float32, so that small steps are seen."""
    from scale_surgery.training.w12_worth import estimate_worth

    request = replace(job.plan.request, dtype="float32")
    plan = make_plan(job.checkpoint, request, name=job.source.name, run=job.run)
    return estimate_worth(job.checkpoint, plan, job.texts["new"], job.texts["old"], device, track)


def _run_pilots(
    job: Job, device: torch.device, track: Track, tell: Callable[[PilotBudget], None]
) -> tuple[PilotBudget, list[PilotRun]]:
    """Run one pilot after the other, each on a model as it is stored and on its own share of the text."""
    from scale_surgery.deriving.base import read_base
    from scale_surgery.running.loading import loaded_whole
    from scale_surgery.running.texts import take_rows
    from scale_surgery.training.pilot import run_pilot, time_step

    text, settings = job.texts["new"], job.settings
    runs: list[PilotRun] = []
    budget = budget_pilots(settings, len(text), text.longest)
    for number in range(budget.pilots):
        with loaded_whole(job.source.path, job.source.name, replace(job.run, device=str(device))) as model:
            if not runs:
                budget = budget.within(settings.minutes, time_step(model, text, settings, device))
                tell(budget)
            own = replace(settings, seed=(settings.seed + number) % 2**32)
            share = take_rows(text, range(number, len(text), budget.pilots))
            base = read_base(job.checkpoint, job.run)
            runs.append(run_pilot(model, base, share, own, budget.steps, device, track))
    return budget, runs


def _propose(job: Job, layers: Sequence[LayerScore], score: ScoreName) -> Proposal:
    order = order_layers(layers, score)
    chosen = choose_layers(job.budget, order, job.price)
    of_any_text = score == "relative-norm" and is_of_any_text(layers)
    left = set(order) - set(chosen)
    tied = tuple(sorted(order)) if of_any_text and left else find_ties(layers, chosen, score)
    if tied:
        chosen = choose_layers(job.budget, last_of_ties(order, chosen, tied), job.price)
    return Proposal(score, chosen, format_layers(chosen), job.price(chosen), tied, of_any_text)


def _describe(job: Job, budget: PilotBudget, runs: Sequence[PilotRun]) -> Pilot:
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return Pilot(
        settings=job.settings,
        budget=budget,
        tokens=len(job.texts["new"].ids),
        passes=budget.passes,
        first_loss=sum(run.first_loss for run in runs) / len(runs),
        last_loss=sum(run.last_loss for run in runs) / len(runs),
        seconds=sum(run.seconds for run in runs),
        trained_parameters=runs[0].trained_parameters,
        peak_memory_bytes=max(peaks, default=None),
    )


def _describe_depth(job: Job, layers: Sequence[LayerWorth], proposal: Proposal) -> W12Estimate:
    from scale_surgery.training.w12_worth import PROMISED

    proposed = propose_collaboration({found.layer: found.worth for found in layers}, proposal.layers)
    return W12Estimate(PROMISED, len(job.texts["old"].ids), tuple(layers), proposed, format_layers(proposed))
