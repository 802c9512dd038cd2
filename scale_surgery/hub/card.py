"""The model card of a folder: facts of surgery.json or merge.json, and of nothing else, put into one template.

The metadata name the base only by a Hub id, and take its licence from the base's own card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.folder import read_config
from scale_surgery.checkpoint.licence import read_licence
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import CheckpointError, Problem, counted, problems_of
from scale_surgery.evidence.promises import verdict
from scale_surgery.evidence.rehearsed import rehearsed_text
from scale_surgery.folder.routers import describe_router
from scale_surgery.hub.markdown import code, plain
from scale_surgery.hub.method_cards import CARDS, MethodCard
from scale_surgery.hub.repository import Card, marked
from scale_surgery.planning.method import Method
from scale_surgery.planning.methods import get_method
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers
from scale_surgery.running.loading import auto_class_of, needs_own_code

if TYPE_CHECKING:
    from scale_surgery.folder.record import ExpansionRecord
    from scale_surgery.hub.repository import Contents
    from scale_surgery.planning.plan import Plan

TEMPLATE = Path(__file__).with_name("card.md.jinja")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    """The values of the template; texts of records are raw, and the template escapes them."""

    repo: str
    form: str
    base_id: str | None  # None if it is not on a Hub
    base_revision: str | None
    base_fingerprint: str
    base_file: str | None  # file of the base's own card
    method: Method  # the first expansion's
    about: MethodCard  # text on this method
    variants: Sequence[str]
    description: str
    expansions: Mapping[str, Plan]  # empty for a stock export
    rows: Sequence[tuple[str, str]]  # facts of the plan, in Markdown
    router: str | None
    is_fused: bool
    drift: str | None
    tool: Mapping[str, str]
    strengths: Mapping[str, float]  # of each expansion, in the folder
    runs: Sequence[Mapping[str, Any]]
    has_curves: bool
    promises: Sequence[tuple[str, str, str]]  # name, result, evidence; empty without verification
    checked_with: Sequence[str]  # date, versions, machine; empty if no model was run
    auto_class: str  # of transformers, which loads the form
    has_own_code: bool  # True if the base has its own code
    loads_in_memory: bool
    code_files: Sequence[str]  # of a checkpoint that loads without our code
    sources: Sequence[str]
    citations: Sequence[str]


def make_card(
    contents: Contents,
    repo: str,
    base_text: str | None,
    base_file: str | None,
    certificate: Mapping[str, Any] | None,
    license: str | None = None,
) -> Card:
    """Write the card of a folder from its records; `certificate` is the result of its verification."""
    from huggingface_hub import ModelCard

    known = read_licence(base_text) or contents.licence
    try:
        facts = card_facts(contents, repo, base_file, certificate)
        data = _card_data(facts, {"license": license} if license else known)
        values: dict[str, Any] = {"plain": plain, "code": code, "format_layers": format_layers, **vars(facts)}
        text = str(ModelCard.from_template(data, template_path=str(TEMPLATE), **values))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        place = contents.path / contents.record_file
        raise CheckpointError(Problem("record-incomplete", place, *problems_of(error))) from error
    notes = []
    if facts.base_id is None:
        notes.append("base_model is left out of the card: the base is a local folder, no Hub id is known.")
    if not (license or known):
        notes.append("license is left out of the card: no README.md of the base here names one. Give --license.")
    if license and known.get("license") not in (None, license):
        notes.append(f"license is {license}, as --license says; the base's card names {known['license']}.")
    running = "is code, or names some, which trust_remote_code=True runs. Read it before you publish it."
    notes += [f"{name}: {running}" for name in facts.code_files]
    return Card(marked(text), notes=tuple(notes))


def card_facts(
    contents: Contents, repo: str, base_file: str | None, certificate: Mapping[str, Any] | None
) -> CardFacts:
    """Take the facts of a card from the records of a folder."""
    record, manifest = contents.record, contents.manifest
    held = {} if manifest is None else manifest.expansions
    plans = {name: expansion.plan for name, expansion in held.items()}
    plan = next(iter(plans.values()), None)
    requests = [plan.request for plan in plans.values()] or [Request(**record["request"])]
    method, cards = get_method(requests[0].method), [CARDS[request.method] for request in requests]
    about = cards[0]
    name, revision = record.get("base_name"), record.get("base_revision")
    is_on_hub = isinstance(name, str) and revision is not None and HUB_ID.fullmatch(name) is not None
    config = read_config(contents.path / CONFIG_FILE)
    has_own_code = needs_own_code(config)
    is_plain_code = contents.form == "stock" or (manifest is not None and not manifest.code)
    training = {name: expansion.training for name, expansion in held.items()} or {"": record.get("training", ())}
    strengths = {name: expansion.strength for name, expansion in held.items()} or {"": record.get("strength", 1.0)}
    description = about.description(
        requests[0],
        is_stock=contents.form == "stock",
        has_up_stream=plan is None or plan.widths.up_width > 0,
    )
    return CardFacts(
        repo=repo,
        form=contents.form,
        base_id=name if is_on_hub else None,
        base_revision=revision if is_on_hub else None,
        base_fingerprint=record["base_fingerprint"] if plan is None else plan.base_fingerprint,
        base_file=base_file,
        method=method,
        about=about,
        variants=list(dict.fromkeys(str(request.variant) for request in requests)),
        description=description if len(plans) < 2 else "",
        expansions=plans,
        rows=_rows(about, record, held, next(iter(strengths.values()))),
        router=None if manifest is None or manifest.routing is None else describe_router(manifest.routing),
        is_fused=record.get("fused") is not None,
        drift=_drift((record.get("fused") or record).get("drift")),
        tool=record.get("tool", {}),
        runs=list(_runs(training, strengths)),
        strengths=strengths,
        has_curves="training/curves.png" in contents.files,
        promises=_promises(certificate),
        checked_with=_checked_with(certificate),
        auto_class=auto_class_of(config).__name__,
        has_own_code=has_own_code,
        loads_in_memory="load_expansion" not in method.refused and not has_own_code,
        code_files=contents.code if is_plain_code else (),
        sources=list(dict.fromkeys(each.source for each in cards)),
        citations=list(dict.fromkeys(CARDS[name].citation for each in cards for name in each.cites)),
    )


def _card_data(facts: CardFacts, licence: Mapping[str, Any]) -> Any:
    from huggingface_hub import ModelCardData

    tags = ["scale-surgery", "continual-learning", "model-expansion", *facts.variants]
    tags += ["composed"] * (len(facts.expansions) > 1) + ["routed"] * (facts.router is not None)
    # an extract is added to the base; any other form contains it and has learned more
    relation = "adapter" if facts.form == "extract" else "finetune"
    base: dict[str, Any] = {"base_model": facts.base_id, "base_model_relation": relation} if facts.base_id else {}
    sees = facts.auto_class == "AutoModelForImageTextToText"
    task = "image-text-to-text" if sees else "text-generation"
    return ModelCardData(library_name="transformers", pipeline_tag=task, tags=tags, **licence, **base)


def _rows(
    about: MethodCard, record: Mapping[str, Any], held: Mapping[str, ExpansionRecord], strength: float
) -> Sequence[tuple[str, str]]:
    """Return the rows of the only expansion, or of a stock export."""
    if len(held) > 1:
        return ()
    expansion = next(iter(held.values()), None)
    rows = _stock_rows(record) if expansion is None else about.card_rows(expansion.plan)
    return rows if strength == 1 else [*rows, ("strength", f"{strength:g} of what was learned; 0 is the base")]


def _stock_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    request, padding = record["request"], record["padding"]
    filled = f"; {padding:,} of them are zeros that fill up the other layers" if padding else ""
    return [
        ("variant", code(request["variant"])),
        ("expanded layers", code(request["layers"])),
        ("parameters", f"{record['parameters']:,}{filled}"),
    ]


def _drift(drift: Mapping[str, Any] | None) -> str | None:
    if drift is None:
        return None
    differ = "bit-equal" if drift["is_bit_equal"] else f"differ by at most {drift['drift']:.3g}"
    return f"{differ} on {counted(drift['tokens'], 'token')} ({plain(drift['dtype'])})"


def _runs(
    training: Mapping[str, Sequence[Mapping[str, Any]]], strengths: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Generate the facts of each training run on the card."""
    number = 0
    for expansion, runs in training.items():
        for run in runs:
            number += 1
            settings = run.get("settings") or {}
            rate = settings.get("learning_rate")
            yield {
                "number": number,
                "expansion": expansion,
                "is_last": run is runs[-1],
                "steps": run.get("steps", "–"),
                "parameters": f"{run['trained_parameters']:,}",
                "learning_rate": "–" if rate is None else f"{rate:g}",
                "begun": (run.get("begun") or run["adopted"])[:10],
                "is_adopted": "adopted" in run,
                "is_unseen": run.get("base_compared") == 0,
                "is_routed": bool(run.get("routed")),
                "strength": strengths[expansion],
                "rehearsed": rehearsed_text(run),
                "measured": _measured(run.get("measured") or {}),
            }


def _measured(measured: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """Return text, loss, accuracy and change against the base, for old and new text."""
    return [
        (
            f"{side} text",
            f"{measured[f'{side}_nats_per_token']:.4f}",
            "–" if (accuracy := measured.get(f"{side}_accuracy")) is None else f"{accuracy:.1%}",
            f"{change} {measured[change]:+z.4f}",
        )
        for side, change in (("old", "forgetting"), ("new", "learning"))
        if f"{side}_nats_per_token" in measured and change in measured
    ]


def _promises(certificate: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """Return name, result and evidence of each promise."""
    if certificate is None:
        return []
    required = certificate["required"]
    return [
        (promise["name"], _verdict(promise, required=promise["name"] in required), promise["evidence"])
        for promise in certificate["promises"]
    ]


def _verdict(promise: Mapping[str, Any], *, required: bool) -> str:
    result = verdict(holds=promise["holds"], claimed=promise["claimed"], required=required)
    return f"**{result}**" if result == "BROKEN" else result


def _checked_with(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return date, versions and machine; empty if no model was run, so that a second push writes the same card."""
    if certificate is None or certificate.get("not_run") == "files only":
        return []
    versions = [f"{name} {version}" for name, version in certificate["versions"].items()]
    return [certificate["date"], *versions, certificate["machine"]]
