"""Choose layers: train a pilot for a few steps, and propose the most changed layers that fit a budget.

plan and budget -> text -> pilot -> layers

All checks run before any weight is read. Nothing is written to the model's folder, and the pilot is discarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.sources import Source, find_source, listed
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import DataError, PlanError, Problem
from scale_surgery.fields import problems_of
from scale_surgery.planning.base import Base, base_in, check_is_base
from scale_surgery.planning.methods import complete
from scale_surgery.planning.plan import plan_expansion
from scale_surgery.planning.request import NO_LAYERS, Request, check_is_request
from scale_surgery.planning.selection import format_layers
from scale_surgery.progress import Track, no_track
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.device import choose_device
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import check_token_ids, need_tokenizer
from scale_surgery.training.ranking import LayerChange, Ranking, RankingSettings

if TYPE_CHECKING:
    from scale_surgery.planning.plan import Plan
    from scale_surgery.text.sequences import Sequences

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
# default steps, and most passes by default: a memorised text says little about layers
USUAL_STEPS, USUAL_PASSES = 100, 4
# changes within this share of the least proposed one count as tied
TIED_WITHIN = 0.1

# number of parameters that an expansion of some layers adds
Price = Callable[[Sequence[int]], int]


def rank_layers(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    request: Request = Request("all"),
    settings: RankingSettings = RankingSettings(),
    *,
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    track: Track = no_track,
) -> Ranking:
    """Rank the layers of a base model by how much a short training run on a text changes them.

        change of a layer = |W' - W| / |W|        W its matrices before the run, W' after it, |.| the Frobenius norm

    Grow, Don't Overwrite (arXiv 2603.08647) ranks layers by the size of their update in a pilot run. The division by
    |W| and the choice of matrices are ours.

    Args:
        model: A base model, a folder or a Hub id; nothing is written to it.
        data: Files to learn from; see `documents.read_documents`.
        request: The planned expansion, which sets the cost of layers; its `layers` are the candidates.
        settings: The budget, and the settings of the pilot.
        run: Options of the pilot's run: device, and trust_remote_code.
        revision: Branch, tag or commit of a Hub repository.
        track: Makes progress bars.

    Returns:
        The change of each layer, and the layers that fit the budget.

    Raises:
        CheckpointError: If the model cannot be read, or is expanded.
        PlanError: If settings make no sense, the request does not fit the model, or the budget cannot be read or pays
            for no layer.
        DataError: If texts cannot be read, or the model has no tokenizer.
        TrainingError: If the loss, or a weight at the end, is not a number.
    """
    source = find_source(model, revision)
    checkpoint = open_checkpoint(source.path)
    plan, budget, price = plan_candidates(source, checkpoint, request, settings, run)
    text = _read_text(source, checkpoint, data, settings, run, plan.sizes.vocabulary)
    steps_a_pass = ceil(len(text) / settings.batch_size)
    steps = settings.steps or min(USUAL_STEPS, USUAL_PASSES * steps_a_pass)
    from scale_surgery.running.loading import loaded_whole
    from scale_surgery.training.pilot import run_pilot

    device = choose_device(run.device, only_trains=True)
    with loaded_whole(checkpoint, source.name, replace(run, device=device)) as network:
        pilot = run_pilot(network, plan.architecture, text, settings, steps, track)
    changes = {layer: pilot.changes[layer] for layer in plan.layers}
    proposed, tied = propose_layers(budget, changes, price)
    return Ranking(
        name=source.name,
        model=str(model),
        revision=revision,
        trust_remote_code=run.trust_remote_code,
        family=plan.family,
        request=plan.request,
        settings=settings,
        steps=steps,
        tokens=len(text.ids),
        passes=steps / steps_a_pass,
        trained_parameters=pilot.trained_parameters,
        first_loss=pilot.first_loss,
        last_loss=pilot.last_loss,
        layers=tuple(LayerChange(layer, changes[layer]) for layer in order_layers(changes)),
        parameters=plan.costs.parameters_before,
        budget=budget,
        proposed=proposed,
        argument=format_layers(proposed),
        parameters_added=price(proposed),
        tied=tied,
    )


def plan_candidates(
    source: Source, checkpoint: Checkpoint, request: Request, settings: RankingSettings, run: RunOptions
) -> tuple[Plan, int, Price]:
    """Return the plan of all candidates, the budget, and the price of any choice; check everything except the texts."""
    request = _checked(request, settings)
    check_is_base(checkpoint, source.path)  # layers are chosen before a model is expanded
    choose_length(settings.sequence_length, {source.name: context_of(checkpoint.config)})
    plan = make_plan(checkpoint, request, name=source.name, revision=source.revision, run=run)

    # read once, since many choices have a price
    base = Base(base_in(checkpoint, request.name), plan.facts)

    def price(layers: Sequence[int]) -> int:
        wanted = replace(request, layers=",".join(map(str, layers)))
        return plan_expansion(base, wanted, name=source.name).costs.parameters_added

    budget = read_budget(settings.budget, plan.costs.parameters_before)
    check_budget(budget, plan.layers, price, settings.budget)
    return plan, budget, price


def _checked(request: Request, settings: RankingSettings) -> Request:
    check_is_request(request)
    problems = problems_of(settings)
    if (layers := request.collaborative_layers) is not None:
        problems.append(Problem("collaborative-too-early", "--collaborative-layers", layers=layers))
    if request.layers == NO_LAYERS:
        problems.append(Problem("value-unfit", "--layers", value=NO_LAYERS, kind="layers to choose from"))
    if problems:
        raise PlanError(*problems)
    return complete(request)


def _read_text(
    source: Source,
    checkpoint: Checkpoint,
    data: str | Path | Sequence[str | Path],
    settings: RankingSettings,
    run: RunOptions,
    vocabulary: int,
) -> Sequences:
    """Read the text as token sequences of equal length, except the last."""
    from scale_surgery.text.documents import read_documents
    from scale_surgery.text.tokenizing import pack, start_tokens, tokenize, without_unscored

    if not (files := list(map(Path, listed(data)))):
        raise DataError(Problem("data-not-given", "data"))
    length = choose_length(settings.sequence_length, {source.name: context_of(checkpoint.config)})
    tokenizer = need_tokenizer(source.path, source.name, run)
    text = without_unscored(pack(tokenize(read_documents(files), tokenizer), length, start_tokens(tokenizer)))
    check_token_ids(source.name, text.highest, vocabulary)
    return text


def read_budget(text: str, parameters: int) -> int:
    """Parse a budget such as 30%, 200M or 250000 into a number of parameters."""
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*)\s*(%|[kKmMbB]?)", text.strip())
    number = float(match[1].replace("_", "")) if match else 0.0
    if match is None or not number or not isfinite(number):
        raise PlanError(Problem("budget-unreadable", "--budget", budget=text))
    return int(number / 100 * parameters if match[2] == "%" else number * UNITS[match[2].upper()])


def check_budget(budget: int, layers: Sequence[int], price: Price, text: str) -> None:
    """Check that a budget pays for at least one layer."""
    if any(price([layer]) <= budget for layer in reversed(layers)):  # the lowest layer often costs most
        return
    costs = {layer: price([layer]) for layer in layers}
    layer = min(costs, key=lambda layer: costs[layer])
    values = {"text": text, "parameters": budget, "layer": layer, "cost": costs[layer]}
    raise PlanError(Problem("budget-too-small", "--budget", **values))


def order_layers(changes: Mapping[int, float]) -> list[int]:
    """Return the layers from the largest change to the smallest; if equal, the higher layer first."""
    return sorted(changes, key=lambda layer: (changes[layer], layer), reverse=True)


def propose_layers(budget: int, changes: Mapping[int, float], price: Price) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most changed layers that fit a budget, and the tied layers if the budget does not pay for all.

    Of tied layers, the last are proposed.
    """
    order = order_layers(changes)
    chosen = _affordable(budget, order, price)
    least = min(changes[layer] for layer in chosen)
    low, high = least / (1 + TIED_WITHIN), least * (1 + TIED_WITHIN)
    tied = sorted(layer for layer in order if low <= changes[layer] <= high)
    if set(tied) <= set(chosen):
        return tuple(sorted(chosen)), ()
    above = [layer for layer in order if changes[layer] > high]
    below = [layer for layer in order if changes[layer] < low]
    return tuple(sorted(_affordable(budget, [*above, *reversed(tied), *below], price))), tuple(tied)


def _affordable(budget: int, order: Sequence[int], price: Price) -> list[int]:
    """Take layers while the budget pays for them, and skip those that do not fit."""
    chosen: list[int] = []
    for layer in order:
        # layer 0 may cost more than layer 1, since it also widens the embedding
        if price(sorted([*chosen, layer])) <= budget:
            chosen.append(layer)
    return chosen
