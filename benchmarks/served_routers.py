"""What comes nearest to the posterior router where a server keeps no state: losses on old and new questions.

    python -m benchmarks.served_routers [--steps 120] [--seed 0] [-o numbers.json]

The shipped model learns 20 new people (`adapt`, attention and MLP of all layers), once without rehearsal and once with.
Asked are 100 people that its base knows and the 20 new ones; nats per token of the answers, and right first tokens.

    base, alone       the base, and the expansion without a router
    posterior         the router of which this is about; it has a state
    cosine            the paper's, its threshold fitted to the posterior's weights
    gate              sigmoid of a linear function of the last features of both paths, trained to give the posterior's
                      weights; the head reads the mean of both features by that weight
    rehearsed         the expansion without a router, trained with rehearsal: what any server runs as a fused model

Threshold and gate are fitted on the texts that were learned and on 100 other people that the base knows.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rehearsal import FIRST_NEW, NEW, OLD, write_texts
from scale_surgery import Request, TrainingSettings, TrainingStart, expand, register, train
from scale_surgery.biographies import SHIPPED_MODEL, people, questions

Row = tuple[list[int], int]
RATE, GATE_STEPS, GATE_RATE = 3e-3, 400, 0.02


def rows(tokenizer: Any, some: Any) -> list[Row]:
    """Token ids of each question with its answer, and where the answer begins."""
    token_rows = []
    for person in some:
        for question in questions(person):
            prompt = tokenizer(question.prompt).input_ids
            token_rows.append(
                (prompt + tokenizer(f" {question.answer}", add_special_tokens=False).input_ids, len(prompt))
            )
    return token_rows


class Scorer:
    """Scores answers by each way to make one prediction of two paths."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.norm = self.model.get_submodule(self.model.config.scale_surgery["base"]["base_model"]).norm
        self.threshold, self.gate = 0.5, torch.nn.Linear(1, 1)

    @torch.no_grad()
    def features(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Last features of the base, with zeros for its up stream, and of the expansion (t, d + u)."""
        seen: list[Tensor] = []
        hook = self.norm.register_forward_hook(lambda module, args, output: seen.append(output))
        with self.model.use_expansion(["default"], router="cosine", strict=True):
            self.model(ids)
        hook.remove()
        base, adapted = seen[0]
        return base, adapted

    def logits(self, features: Tensor) -> Tensor:
        """Logits of features of both streams."""
        head = self.model.get_output_embeddings()
        blocks = head.expansions["default"]
        width = head.weight.shape[1]
        return functional.linear(features[..., :width], head.weight) + functional.linear(
            features[..., width:], blocks.up_weight
        )

    @torch.no_grad()
    def posterior_weights(self, ids: Tensor) -> Tensor:
        """Weight of the expansion where each token is predicted (t - 1)."""
        with self.model.use_expansion(["default"], router="posterior"):
            return self.model.score_tokens(ids).weights[0, :, 1]

    def fit(self, some: list[Row]) -> None:
        """Fit threshold and gate to the posterior's weights."""
        pairs, targets, cosines = [], [], []
        for ids, _ in some:
            tokens = torch.tensor([ids])
            base, adapted = self.features(tokens)
            pairs.append(torch.cat((base, adapted), dim=-1)[:-1])
            targets.append(self.posterior_weights(tokens))
            with self.model.use_expansion(["default"], router="cosine"), torch.no_grad():
                cosines.append(self.model.score_tokens(tokens).observed[0])
        x, y, cosine = torch.cat(pairs), torch.cat(targets), torch.cat(cosines)
        grid = cosine.sort().values[:: max(1, len(cosine) // 400)]
        errors = [(((cosine <= threshold).float() - y) ** 2).mean() for threshold in grid]
        self.threshold = float(grid[int(torch.stack(errors).argmin())])
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(x.shape[1], 1)
        scale = x.std(0) + 1e-6
        optimizer = torch.optim.Adam(self.gate.parameters(), lr=GATE_RATE)
        for _ in range(GATE_STEPS):
            loss = functional.binary_cross_entropy_with_logits(self.gate(x / scale)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.gate.weight.data /= scale

    @torch.no_grad()
    def log_probs(self, way: str, ids: Tensor) -> Tensor:
        """Log-probability of each token but the first, and of the most likely one's being it: (2, t - 1)."""
        if way == "gate":
            base, adapted = self.features(ids)
            weight = torch.sigmoid(self.gate(torch.cat((base, adapted), dim=-1)))
            logits = self.logits((1 - weight) * base + weight * adapted)[:-1]
        elif way in ("base", "alone"):
            with self.model.use_expansion(None if way == "base" else "default"):
                logits = self.model(ids).logits[0, :-1]
        else:
            numbers = {"threshold": self.threshold} if way == "cosine" else {}
            with self.model.use_expansion(["default"], router=way, **numbers):
                logits = self.model(ids).logits[0, :-1]
        scores = logits.log_softmax(-1)
        return torch.stack((scores.gather(-1, ids[0, 1:, None])[:, 0], (scores.argmax(-1) == ids[0, 1:]).float()))

    def score(self, way: str, some: list[Row]) -> dict[str, float]:
        """Nats per token of answers, and the share of right first tokens."""
        losses, right = [], []
        for ids, start in some:
            scores = self.log_probs(way, torch.tensor([ids]))[:, start - 1 :]
            losses.append(-scores[0])
            right.append(scores[1, 0])
        return {"nats": float(torch.cat(losses).mean()), "right": float(torch.stack(right).mean())}


@click.command()
@click.option("--steps", default=120, show_default=True, help="Optimizer steps.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random in training.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(steps: int, seed: int, output: Path | None) -> None:
    """Train twice, and print a table."""
    torch.set_num_threads(1)
    register()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    known, new = rows(tokenizer, people(OLD)), rows(tokenizer, people(NEW, start=FIRST_NEW))
    fitted = rows(tokenizer, people(OLD, start=OLD)) + new
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        request = Request("all", variant="adapt", collaborate="both")
        wide = expand(SHIPPED_MODEL, request, folder / "wide").path
        start = TrainingStart(overwrite=True)
        for rehearse in ((), ("self",)):
            settings = TrainingSettings(
                steps=steps,
                sequence_length=128,
                seed=seed,
                learning_rate=RATE,
                rehearse=rehearse,
                rehearsal_samples=800,
            )
            scorer = Scorer(train(wide, [folder / "learn.jsonl"], folder / "learned", settings, start=start).path)
            ways = ("alone",) if rehearse else ("base", "alone", "posterior", "cosine", "gate")
            if not rehearse:
                scorer.fit(fitted)
            for way in ways:
                called = "rehearsed" if rehearse else way
                table[called] = {"old": scorer.score(way, known), "new": scorer.score(way, new)}
                old, learned = table[called]["old"], table[called]["new"]
                click.echo(
                    f"{called:10} old {old['nats']:.3f} nats {old['right']:6.1%}   "
                    f"new {learned['nats']:.3f} nats {learned['right']:6.1%}"
                )
            if not rehearse:
                table["threshold"] = scorer.threshold
    if output is not None:
        output.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
