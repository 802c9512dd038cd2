"""The text of the model card of a composed folder: its expansions, its router, and how each is had by itself."""

from __future__ import annotations

from scale_surgery.errors import counted
from scale_surgery.evidence.several import ExpansionsSummary
from scale_surgery.hub.card_sections import CardFacts, promised, python_lines
from scale_surgery.hub.markdown import Markdown, code, joined, table
from scale_surgery.planning.methods import METHODS
from scale_surgery.planning.selection import format_layers

COMPOSED_TAGS = ("composed", "routed")


def composed_body(facts: CardFacts, held: ExpansionsSummary) -> str:
    """The text of a card below its metadata.

    Args:
        facts: What every card is written from.
        held: What lies in the folder.
    """
    parts = (
        _opening(facts, held),
        _held(facts, held),
        promised(facts),
        _loaded(facts, held),
        _taken_apart(facts, held),
    )
    return "\n\n".join([*parts, _cited(held)])


def _opening(facts: CardFacts, held: ExpansionsSummary) -> str:
    own_card = f"; its own card is [{facts.base_file}]({facts.base_file})" if facts.base_file else ""
    count = counted(len(held.expansions), "expansion")
    return (
        f"# {facts.repo.rpartition('/')[2]}\n\nA language model and {count} of it, composed "
        f"with `scale-surgery`: each learned by itself, and a router weighs {len(held.expansions) + 1} paths, the base "
        f"and every expansion, by how well each has predicted the text so far. Base: {facts.base}{own_card}."
    )


def _held(facts: CardFacts, held: ExpansionsSummary) -> str:
    commit = [Markdown(" at commit "), code(facts.base_revision)] if facts.base_revision else []
    rows = [
        ("base", joined([facts.base, *commit], "")),
        ("fingerprint of the base", code(facts.base_fingerprint)),
        ("paths", Markdown(held.paths)),
        ("router", Markdown(held.routing.description)),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in facts.tool.items())
    rows += [("made with", Markdown(versions))] if versions else []
    members = [
        (
            code(name),
            own.variant,
            format_layers(own.layers),
            f"{own.parameters:,}",
            f"{own.steps:,}" if own.steps else "–",
        )
        for name, own in held.expansions.items()
    ]
    head = "| expansion | variant | layers | parameters | steps of training |\n|---|---|---|--:|--:|"
    facts_table = table("| | |\n|---|---|", rows)
    return f"## What is in it\n\n{facts_table}\n\n{table(head, members)}"


def _loaded(facts: CardFacts, held: ExpansionsSummary) -> str:
    name = next(iter(held.expansions))
    lines = python_lines(facts.repo, ", trust_remote_code=True")
    return (
        "## How to load\n\nWith the code in this repository, which needs `torch` and `transformers` alone; loaded, the "
        f"model mixes all paths:\n\n{lines}\n\nOne of them by itself, the base, or some:\n\n```python\n"
        f'model.set_expansion("{name}")  # this one alone; None: the base; a list: the base and these, mixed\n'
        f'with model.use_expansion("{name}"):  # the same for a while\n    ...\n```'
    )


def _taken_apart(facts: CardFacts, held: ExpansionsSummary) -> str:
    name = next(iter(held.expansions))
    commands = [
        f"hf download {facts.repo} --local-dir composed",
        "scale-surgery strip composed -o base",
        f"scale-surgery extract composed --name {name} -o {name}",
    ]
    return (
        "## How to take it apart\n\nThe files of the base and of each expansion lie in this repository, and "
        "`surgery.json` has the sha256 of the base; it comes back byte for byte:\n\n```sh\n"
        + "\n".join(commands)
        + "\n```"
    )


def _cited(held: ExpansionsSummary) -> str:
    methods = [METHODS[own.method] for own in held.expansions.values()]
    sources = list(dict.fromkeys(method.source for method in methods))
    cited = list(dict.fromkeys(METHODS[name].citation for method in methods for name in method.cites))
    lines = "\n\n".join(cited)
    return f"## Citation\n\n{' '.join(sources)}\n\n```bibtex\n{lines}\n```"
