"""The text of a model card, a function for each section; each says only what the facts hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scale_surgery.errors import counted
from scale_surgery.evidence.rehearsed import rehearsed_text, rehearsed_texts
from scale_surgery.hub.markdown import Markdown, code, joined, link, table
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.planning.method import Method
from scale_surgery.planning.methods import METHODS, get_method
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers
from scale_surgery.surgery.record import ExpansionRecord
from scale_surgery.surgery.routers import describe

FORMS = {
    "expanded": "A language model with new blocks beside its pretrained tensors, made with `scale-surgery`.",
    "extract": "The new blocks of an expanded language model, without the model itself, made with `scale-surgery`.",
    "stock": "A language model whose layers were widened with `scale-surgery`, in the form of its own architecture.",
}


@dataclass(frozen=True)
class CardFacts:
    """What a model card is written from.

    Attributes:
        repo: Hub id of the model.
        form: "expanded", "extract" or "stock".
        base_id: Hub id of the base; None where it is not on a Hub.
        base_revision: Commit of the base; None likewise.
        base_fingerprint: sha256 over the base's config and the names, dtypes and shapes of its tensors.
        record: surgery.json, or merge.json of a stock export.
        expansions: What surgery.json says of each expansion, by its name; none for a stock export.
        routing: How it routes, or None.
        is_fused: Whether blocks and base tensors are joined for serving.
        drift: How far a merged model's logits are from those of the model it was made from, or None.
        certificate: What verification found, or None.
        code: Files of a stock checkpoint that are Python, or that name some.
        base_file: File of the repository that holds the base's own card, or None.
        has_curves: Whether the curves of the last training run lie in the repository.
        tool: Versions with which it was made.
    """

    repo: str
    form: str
    base_id: str | None
    base_revision: str | None
    base_fingerprint: str
    record: Mapping[str, Any]
    expansions: Mapping[str, ExpansionRecord]
    routing: Router | None
    is_fused: bool
    drift: Mapping[str, Any] | None
    certificate: Mapping[str, Any] | None
    code: tuple[str, ...]
    base_file: str | None
    has_curves: bool
    tool: Mapping[str, str]

    @property
    def are_several(self) -> bool:
        """Whether it has more than one expansion."""
        return len(self.expansions) > 1

    @property
    def plan(self) -> Plan | None:
        """What was planned, of the first expansion; None for a stock export."""
        return next((own.plan for own in self.expansions.values()), None)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What was asked for; a stock export records its request alone."""
        asked = tuple(own.plan.request for own in self.expansions.values())
        return asked or (Request(**self.record["request"]),)

    @property
    def method(self) -> Method:
        """How the model grew; of several expansions how it did with the first."""
        return get_method(self.requests[0].method)

    @property
    def runs(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Each training run, with the name of its expansion."""
        if not self.expansions:
            return tuple(("", run) for run in self.record.get("training", ()))
        return tuple((name, run) for name, own in self.expansions.items() for run in own.training)

    @property
    def training(self) -> tuple[Mapping[str, Any], ...]:
        """Records of training runs."""
        return tuple(run for _, run in self.runs)

    @property
    def forced(self) -> Mapping[str, Any] | None:
        """What differs from the base that it was made on, where an expansion was put on another by force; else None."""
        return next((own.forced_base for own in self.expansions.values() if own.forced_base is not None), None)

    @property
    def base(self) -> str:
        """The base, as a card may name it: a link, or no name."""
        if self.base_id is None:
            return "a checkpoint that is not on the Hub"
        return link(self.base_id, f"https://huggingface.co/{self.base_id}")


def body(facts: CardFacts) -> str:
    """The text of a card below its metadata."""
    parts = (_opening, _widened, _trained, _evaluated, _promised, _loaded, _taken_back, _cited)
    return "\n\n".join(text for part in parts if (text := part(facts)))


def _opening(facts: CardFacts) -> str:
    own_card = f"; its own card is [{facts.base_file}]({facts.base_file})" if facts.base_file else ""
    opening = _several(facts) if facts.are_several else {**FORMS, **facts.method.opening}[facts.form]
    return f"# {facts.repo.rpartition('/')[2]}\n\n{opening} Base: {facts.base}{own_card}."


def _several(facts: CardFacts) -> str:
    return (
        f"A language model and {counted(len(facts.expansions), 'expansion')} of it, made with `scale-surgery`: each "
        f"learned by itself, and a router weighs {len(facts.expansions) + 1} paths, the base and every expansion, by "
        "how well each has predicted the text so far."
    )


def _widened(facts: CardFacts) -> str:
    commit = [Markdown(" at commit "), code(facts.base_revision)] if facts.base_revision else []
    rows: list[tuple[str, str]] = [("base", joined([facts.base, *commit], ""))]
    rows += [("fingerprint of the base", code(facts.base_fingerprint))]
    if facts.are_several:
        rows += [("paths", joined(["base", *map(code, facts.expansions)]))]
    else:
        rows += _stock_rows(facts.record) if facts.plan is None else _plan_rows(facts.method, facts.plan)
    if facts.routing is not None:
        says = "" if facts.are_several else "; one forward pass, two paths, a choice for each token"
        rows += [("router", f"{describe(facts.routing)}{says}")]
    if facts.is_fused:
        rows += [("form", "fused for serving: each linear of an expanded layer is one matrix")]
    for name, own in facts.expansions.items():
        if own.forced_base is not None:
            count = len(own.forced_base["differing"])
            differing = "1 tensor differs" if count == 1 else f"{count} tensors differ"
            which = joined([code(name), "put on it by force"], " ") if facts.are_several else "put on it by force"
            rows += [(which, f"{differing} from the base it was made on")]
    rows += _drift_rows(facts.drift)
    versions = ", ".join(f"{name} {version}" for name, version in facts.tool.items())
    rows += [("made with", versions)] if versions else []
    head = "| | |\n|---|---|"
    if facts.are_several:
        return f"## What is in it\n\n{table(head, rows)}\n\n{_members(facts)}"
    description = facts.method.description(
        facts.requests[0],
        is_stock=facts.form == "stock",
        has_up_stream=facts.plan is None or facts.plan.widths.up_width > 0,
    )
    return f"## {facts.method.title}\n\n{description}\n\n{table(head, rows)}"


def _members(facts: CardFacts) -> str:
    """A row for each expansion."""
    plans = {name: own.plan for name, own in facts.expansions.items()}
    rows = [
        (code(name), plan.variant, format_layers(plan.layers), f"{plan.costs.parameters_added:,}")
        for name, plan in plans.items()
    ]
    return table("| expansion | variant | layers | parameters |\n|---|---|---|--:|", rows)


def _plan_rows(method: Method, plan: Plan) -> list[tuple[str, str]]:
    """What was planned; names in it are those of this program, a plan with others is not read."""
    return [(name, Markdown(value)) for name, value in method.card_rows(plan)]


def _stock_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = {"variant": "variant", "layers": "expanded layers"}
    rows: list[tuple[str, str]] = [(text, code(record["request"][key])) for key, text in named.items()]
    filled = f"; {record['padding']:,} of them are zeros that fill up the other layers" if record["padding"] else ""
    return [*rows, ("parameters", f"{record['parameters']:,}{filled}")]


def _drift_rows(drift: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if drift is None:
        return []
    differ = "bit-equal" if drift["is_bit_equal"] else f"differ by at most {drift['drift']:.3g}"
    found = f"{differ} on {counted(drift['tokens'], 'token')} ({drift['dtype']})"
    return [("logits against the model it was merged from", found)]


def _trained(facts: CardFacts) -> str:
    if not facts.training:
        return "## Training\n\nThe new blocks have not been trained with `scale-surgery train`."
    rows = [
        (
            number,
            *([code(name)] if facts.are_several else []),
            run.get("steps", "–"),
            f"{run['trained_parameters']:,}",
            _learning_rate(run),
            (run.get("begun") or run["adopted"])[:10],
        )
        for number, (name, run) in enumerate(facts.runs, 1)
    ]
    which = ("expansion | ", "---|") if facts.are_several else ("", "")
    head = f"| run | {which[0]}steps | parameters trained | learning rate | begun |\n|---|{which[1]}--:|--:|--:|---|"
    adopted = [str(number) for number, run in enumerate(facts.training, 1) if "adopted" in run]
    others = f" Another trainer made run {', '.join(adopted)}, adopted on that date." if adopted else ""
    unseen = [str(number) for number, run in enumerate(facts.training, 1) if run.get("base_compared") == 0]
    base = f" The base that run {', '.join(unseen)} had was not saved, so it could not be compared." if unseen else ""
    curves = "\n\n![Curves of the last run](training/curves.png)" if facts.has_curves else ""
    said = f"{'' if unseen else 'Only new tensors were trained, none of the base.'}{others}{base}".strip()
    return f"## Training\n\n{said}{_rehearsed(facts)}\n\n{table(head, rows)}{curves}"


def _rehearsed(facts: CardFacts) -> str:
    """On what runs stayed what the base is, and that this is no promise."""
    which = rehearsed_texts(facts.training)
    if not which:
        return ""
    numbers = ", ".join(str(number) for number, run in enumerate(facts.training, 1) if rehearsed_text(run))
    return (
        f" In run {numbers} the model was also asked to stay what its base is, on {which}; what that keeps is "
        "measured, and not proved."
    )


def _learning_rate(run: Mapping[str, Any]) -> str:
    rate = (run.get("settings") or {}).get("learning_rate")
    return "–" if rate is None else f"{rate:g}"


def _evaluated(facts: CardFacts) -> str:
    rows = [row for name, run in dict(facts.runs).items() for row in _measured_rows(facts, name, run)]
    if not rows:
        return ""
    record = "merge.json" if facts.form == "stock" else "surgery.json"
    head = "| | loss, nats per token | first-token accuracy | against the base |\n|---|--:|--:|--:|"
    return (
        f"## Evaluation\n\nMeasured at the end of the last training run{_measured_on(facts)}, on texts of who "
        f"trained it; `{record}` has their sha256.\n\n{table(head, rows)}"
    )


def _measured_rows(facts: CardFacts, name: str, run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    measured = run.get("measured", {})
    whose = f"{name}{', routed' * _is_routed(run)}: " if facts.are_several else ""
    return [
        (
            f"{whose}{text} text",
            f"{measured[f'{side}_nats_per_token']:.4f}",
            _share(measured.get(f"{side}_accuracy")),
            f"{change} {measured[change]:+z.4f}",
        )
        for side, text, change in (("old", "old", "forgetting"), ("new", "new", "learning"))
        if f"{side}_nats_per_token" in measured and change in measured
    ]


def _measured_on(facts: CardFacts) -> str:
    """What the numbers are about, where that is not the model of this card."""
    if facts.are_several:
        routed = any(_is_routed(run) for name, run in dict(facts.runs).items() if _measured_rows(facts, name, run))
        return " of each expansion, alone beside the base" + "; routed: by a router between the two" * routed
    is_routed = _is_routed(facts.training[-1])
    text = ", on the base that the blocks were made on" if facts.forced is not None else ""
    if is_routed == (facts.routing is not None):
        return text
    return (
        f"{text}, {'with its router, which it has no longer' if is_routed else 'of the adapt path alone, not routed'}"
    )


def _is_routed(run: Mapping[str, Any]) -> bool:
    """Whether a run learned, and was measured, on what a router gave out."""
    return bool((run.get("settings") or {}).get("routed"))


def _share(accuracy: float | None) -> str:
    return "–" if accuracy is None else f"{accuracy:.1%}"


def _promised(facts: CardFacts) -> str:
    """What was found of the promises."""
    if facts.form == "stock":
        return ""
    if facts.certificate is None:
        return "## Promises\n\nNo verification is recorded: `scale-surgery verify` finds out which promises hold."
    found = facts.certificate
    # a base that is a folder is not named
    expected = (facts.forced or {}).get("expected_name")
    rows = [
        (
            code(promise["name"]),
            _verdict(promise, found["required"]),
            re.sub(
                rf"\b(those|that) of {re.escape(str(expected))}",
                r"\1 of the base that it was made on",
                promise["evidence"],
            ),
        )
        for promise in found["promises"]
    ]
    head = "| promise | result | evidence |\n|---|---|---|"
    versions = [f"{name} {version}" for name, version in found["versions"].items()]
    where = f"`scale-surgery verify`, {joined([found['date'], *versions, found['machine']])}."
    if found.get("not_run") == "files only":
        # without a date, so that a second push of the same folder has the same card
        where = "`scale-surgery verify --files-only`: bytes and structure were checked, no model was run."
    record = "surgery.json"
    subject = " They are about the whole model, applied to its base." if facts.form == "extract" else ""
    return f"## Promises\n\n{where}{subject} `{record}` holds the hashes behind them.\n\n{table(head, rows)}"


def _verdict(promise: Mapping[str, Any], required: Any) -> Markdown:
    if promise["holds"] is None:
        return Markdown("not checked")
    if promise["holds"]:
        return Markdown("holds" if promise["claimed"] or promise["name"] in required else "holds (unclaimed)")
    return Markdown("**BROKEN**" if promise["name"] in required else "not claimed")


def _loaded(facts: CardFacts) -> str:
    base = facts.base_id or "BASE"
    has_own_code = facts.plan is not None and bool(facts.plan.architecture.own_code)
    if facts.form == "extract" and ("load_expansion" in facts.method.refused or has_own_code):
        parts = "blocks on" if has_own_code else "layers back among those of"
        return (
            f"## How to load\n\nThis repository holds no whole model. Put the {parts} their base:"
            f"\n\n```sh\nscale-surgery apply {facts.repo} --base {base} -o expanded\n```"
        )
    if facts.form == "extract":
        return (
            "## How to load\n\nThis repository holds no whole model. Put the blocks on their base, on disk or in "
            f"memory:\n\n```sh\nscale-surgery apply {facts.repo} --base {base} -o expanded\n```\n\n```python\n"
            f'from scale_surgery import load_expansion\n\nmodel = load_expansion("{base}", "{facts.repo}")\n```'
        )
    if facts.form == "stock" or facts.method.adds_layers:
        names = joined(map(code, facts.code))
        running = f"these lines do not run the code of {names}" if names else "no remote code is run"
        freezing = f"\n\n{facts.method.about_loading}" if facts.method.about_loading else ""
        loading = _python_lines(facts.repo, "")
        return f"## How to load\n\nAs any model of its architecture; {running}.\n\n{loading}{freezing}"
    trusting = _python_lines(facts.repo, ", trust_remote_code=True")
    own = _python_lines(facts.repo, "", "import scale_surgery\n", "\nscale_surgery.register()")
    switch = "" if facts.is_fused else _switches(facts)
    if has_own_code:
        needs = "With the code in this repository, that of the base included, which may need more packages:"
        return f"## How to load\n\n{needs}\n\n{trusting}{switch}"
    return (
        "## How to load\n\nWith the code in this repository, which needs `torch` and `transformers` alone:\n\n"
        f"{trusting}"
        f"\n\nOr with the package `scale-surgery` installed, and no remote code:\n\n{own}{switch}"
    )


def _python_lines(repo: str, option: str, imports: str = "", register: str = "") -> str:
    """The lines of Python that load a model and its tokenizer."""
    return (
        f"```python\n{imports}from transformers import AutoModelForCausalLM, AutoTokenizer\n{register}\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}"{option})\n'
        f'model = AutoModelForCausalLM.from_pretrained("{repo}"{option})\n```'
    )


def _switches(facts: CardFacts) -> str:
    if facts.are_several:
        name = next(iter(facts.expansions))
        return (
            "\n\nLoaded, the model mixes all paths. One of them by itself, the base, or some:\n\n```python\n"
            f'model.set_expansion("{name}")  # this one alone; None: the base; a list: the base and these, mixed\n'
            f'with model.use_expansion("{name}"):  # the same for a while\n    ...\n```'
        )
    text = "\n\n`with model.expansion_disabled():` the same model is its base."
    return text if facts.routing is None else f"{text} `with model.routing_disabled():` it is its adapt path alone."


def _taken_back(facts: CardFacts) -> str:
    if facts.form != "expanded":
        one_way = "This form does not go back: the expanded model, or its extract, gives the base and the blocks apart."
        return f"## How to get the base back\n\n{one_way}" if facts.form == "stock" else ""
    lines = [f"hf download {facts.repo} --local-dir expanded", "scale-surgery strip expanded -o base"]
    where = "The base's files lie in this repository, byte for byte, and `surgery.json` has the sha256 of each"
    if facts.is_fused:
        lines[1:] = ["scale-surgery merge expanded --to blocks -o blocks", "scale-surgery strip blocks -o base"]
        where = "The bytes of every base tensor lie in this repository, and `surgery.json` has the sha256 of each"
    if facts.method.adds_layers:
        where = "The bytes of every base tensor lie in this repository, and `surgery.json` has the sha256 of each file"
    if facts.are_several:
        lines += [f"scale-surgery extract expanded --name {name} -o {name}" for name in facts.expansions]
    commands = "\n".join(lines)
    return f"## How to get the base back\n\n{where}:\n\n```sh\n{commands}\n```"


def _cited(facts: CardFacts) -> str:
    methods = [get_method(request.method) for request in facts.requests]
    sources = " ".join(dict.fromkeys(method.source for method in methods))
    cited = dict.fromkeys(METHODS[name].citation for method in methods for name in method.cites)
    lines = "\n\n".join(cited)
    return f"## Citation\n\n{sources}\n\n```bibtex\n{lines}\n```"
