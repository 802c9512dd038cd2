"""What the numbers of a router do: one model taught the new people, and then routed in many ways.

    python -m benchmarks.biography.routers

The model trains without a router, at the rate that compare.py chose for it. What is measured there is
measured for every router; beside it texts about an old and a new person, one after the other in the same
context, where a router has to change its mind:

after    a question that follows a biography of a person of the other group, accuracy; every fifth question
joined   biographies of an old and a new person, both orders: nats per token more than if each half had the path that
         knows it
share    mean weight of the adapt path over the tokens of old and of new biographies, of one person each
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.biography.compare import QUICK
from benchmarks.biography.methods import ROUTED, Method
from benchmarks.biography.runs import Examination, Point, Settings, new_batches, train
from scale_surgery import register
from scale_surgery.biographies import SHIPPED_MODEL, Question, first_token_accuracy
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.surgery.routers import weights_of

LEGEND = """\
forgets, learns: nats per token; 1 after 0: new people's questions that follow
an old person's biography; joined: nats per token lost where a text is about
both; share: weight of the adapt path in old / new biographies. posterior:
prior, switch rate."""
UNROUTED = {method.name: method for method in ROUTED if method.unrouted is None}
RATES = {"adapt both 3": 3e-3, "adapt both 0": 1.7e-3, "preserve": 5.5e-3}  # those that the sweep chose
BETWEEN_TEXTS = "</s><s>"  # as training text is packed
POSTERIOR = (
    *(PosteriorRouter(switch_rate=rate) for rate in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)),
    *(PosteriorRouter(prior=prior) for prior in (0.1, 0.9)),
)
COSINE = (
    *(CosineRouter(threshold=threshold) for threshold in (0.3, 0.5, 0.7, 0.9)),
    CosineRouter(strict=True),
)


@dataclass(frozen=True)
class Finding:
    """What one router made of the trained model.

    Attributes:
        name: The router and its numbers.
        end: Accuracies and losses, as in benchmarks/biography/compare.py.
        old_after_new: Accuracy on old people's questions that follow a new person's biography, from 0 to 1.
        new_after_old: The other way round.
        joined: Nats per token of two biographies in one context above those of the right path for each half; None
            where the paths cannot be scored.
        old_share: Mean weight of the adapt path on old biographies; None where nothing routes.
        new_share: The same on new ones.
    """

    name: str
    end: Point
    old_after_new: float
    new_after_old: float
    joined: float | None
    old_share: float | None
    new_share: float | None


class Mixed:
    """Questions and biographies in which both groups of people occur."""

    def __init__(self, examination: Examination) -> None:
        self.tokenizer = examination.tokenizer
        old, new = examination.old_texts, examination.new_texts
        self.pairs = [(True, old, new), (False, new, old)]
        self.old_after_new = follow(new, examination.old_questions[::5])
        self.new_after_old = follow(old, examination.new_questions[::5])


def follow(texts: Sequence[str], questions: Sequence[Question]) -> list[Question]:
    """Put a text before each question, the texts taking turns."""
    return [
        Question(f"{texts[index % len(texts)]}{BETWEEN_TEXTS}{asked.prompt}", asked.answer, asked.attribute)
        for index, asked in enumerate(questions)
    ]


def name_router(routing: CosineRouter | PosteriorRouter) -> str:
    """Say in a few words how tokens are routed."""
    if isinstance(routing, PosteriorRouter):
        return f"posterior {weights_of(routing.for_expansions(1))[0]:g}, {routing.switch_rate:g}"
    return f"cosine {routing.threshold:g}" + (", strict" if routing.strict else "")


def examine(name: str, model: Any, examination: Examination, mixed: Mixed) -> Finding:
    """Measure a model whose adapt path is trained, with its router on where it has one."""
    end = examination.score(model, 0)
    model.eval()
    after = [
        first_token_accuracy(model, mixed.tokenizer, asked) for asked in (mixed.old_after_new, mixed.new_after_old)
    ]
    if not getattr(model, "is_routing_enabled", False):
        return Finding(name, end, *after, None, None, None)
    shares = [routed_share(model, mixed.tokenizer, texts) for texts in (examination.old_texts, examination.new_texts)]
    return Finding(name, end, *after, joined_loss(model, mixed), *shares)


def routed_share(model: Any, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """Mean weight of the adapt path over the tokens of texts."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    weight = model.score_tokens(batch["input_ids"], attention_mask=batch["attention_mask"]).weights[..., 1]
    return float(weight[batch["attention_mask"][:, 1:] == 1].mean())


def joined_loss(model: Any, mixed: Mixed) -> float:
    """Nats per token of joined biographies above those of the path that knows each half."""
    lost = torch.cat([_lost(model, mixed.tokenizer, *pair) for pair in mixed.pairs])
    return float(lost.mean())


def _lost(
    model: Any, tokenizer: PreTrainedTokenizerBase, is_old_first: bool, first: list[str], second: list[str]
) -> Tensor:
    """What each token of joined texts loses against the right path; (tokens,)."""
    texts = [BETWEEN_TEXTS.join(pair) for pair in zip(first, second, strict=False)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    scores = model.score_tokens(batch["input_ids"], attention_mask=batch["attention_mask"])
    # the second text begins with the second <s>
    is_second = (batch["input_ids"] == tokenizer.bos_token_id).cumsum(1)[:, 1:] == 2
    right = torch.where(is_second == is_old_first, scores.sides[..., 1], scores.base)
    return (right - scores.routed)[batch["attention_mask"][:, 1:] == 1]


def teach(method: Method, seed: int, examination: Examination, settings: Settings) -> dict[str, Tensor]:
    """Train a method without a router at its rate; return its tensors."""
    model = method.make(SHIPPED_MODEL, seed)
    points = train(
        model, RATES[method.name], new_batches(examination.tokenizer, settings, seed), Unmeasured(), settings
    )
    list(points)
    return model.state_dict()


class Unmeasured(Examination):
    """An examination that asks nothing."""

    def __init__(self) -> None:
        """Prepare nothing."""

    def score(self, model: Any, step: int) -> Point:
        """Return no scores."""
        return Point(step, 0.0, 0.0, 0.0, 0.0)


def compare(
    method: Method, routings: Sequence[Router], seed: int, settings: Settings, tell: Callable[[str], None]
) -> Iterator[Finding]:
    """Teach a model, then measure it without a router, and with each router."""
    examination = Examination(AutoTokenizer.from_pretrained(SHIPPED_MODEL), settings)
    mixed, tensors = Mixed(examination), teach(method, seed, examination, settings)
    for routing in (None, *routings):
        name = "none" if routing is None else name_router(routing)
        tell(name)
        model = method.make(SHIPPED_MODEL, 0, routing=routing)
        model.load_state_dict(tensors)
        yield examine(name, model, examination, mixed)


def render(findings: Sequence[Finding], base: Point) -> Table:
    """Lay findings out as a table."""
    table = Table("router", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for head in (
        "Task 1\n%",
        "Task 0\n%",
        "forgets",
        "learns",
        "1 after\n0 %",
        "0 after\n1 %",
        "joined",
        "share\n0 / 1 %",
    ):
        table.add_column(head, justify="right")
    for finding in findings:
        table.add_row(finding.name, *_cells(finding, base))
    return table


def _cells(finding: Finding, base: Point) -> list[str]:
    shares = "–" if finding.old_share is None else f"{100 * finding.old_share:.0f} / {100 * finding.new_share:.0f}"
    return [
        f"{100 * finding.end.new_accuracy:.1f}",
        f"{100 * finding.end.old_accuracy:.1f}",
        f"{finding.end.old_loss - base.old_loss:.4f}",
        f"{base.new_loss - finding.end.new_loss:.3f}",
        f"{100 * finding.new_after_old:.1f}",
        f"{100 * finding.old_after_new:.1f}",
        "–" if finding.joined is None else f"{finding.joined:.3f}",
        shares,
    ]


@click.command()
@click.option("--method", "name", type=click.Choice([*UNROUTED]), default="adapt both 3", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the training.")
@click.option("--quick", is_flag=True, help="Four people, eight steps and a few routers, to see that it works.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the findings as JSON.")
def main(name: str, seed: int, quick: bool, output: Path | None) -> None:
    """Teach the shipped model new people once, and measure what each router makes of it."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    register()
    console = Console(width=80)
    method, settings = UNROUTED[name], QUICK if quick else Settings()
    routings = [*([] if name == "preserve" else COSINE), *POSTERIOR][:: 4 if quick else 1]
    base = Examination(AutoTokenizer.from_pretrained(SHIPPED_MODEL), settings).score(method.make(SHIPPED_MODEL, 0), 0)
    with console.status("training") as status:
        findings = list(compare(method, routings, seed, settings, status.update))
    console.print(render(findings, base), LEGEND, sep="\n", highlight=False)
    if output is not None:
        output.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
