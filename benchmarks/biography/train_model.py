"""Train the biography model that ships with scale-surgery, from nothing.

Run from the root of the repository, with the package installed:

    python benchmarks/biography/train_model.py

It writes the tokenizer, the model and the model card that reports what the model scores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from scale_surgery.biographies import (
    ATTRIBUTES,
    SHIPPED_MODEL,
    SHIPPED_PEOPLE,
    Person,
    biography,
    first_token_accuracy,
    people,
    questions,
)

NEW_PEOPLE = 100
STYLES = 100_000  # training draws styles below this number, evaluation takes those above

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CONTEXT = 256
ROWS = 16
STEPS = 1200
WARM_UP = 0.07  # share of the steps; a cosine to zero takes the rest
PEAK_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.01
THREADS = 1  # so that the order of sums, and the weights, do not depend on the number of cores

ARCHITECTURE = {
    "vocab_size": 1152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}

COLUMNS = ("", "known people", "new people")
LOSS = "biography text, nats per token"

MODEL_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags:
- llama
- synthetic-biographies
- continual-learning
---

# Biographies

A small Llama that has memorised {people} people who do not exist.  It is made for experiments
on continual learning that run in minutes on a CPU, and for nothing else: every fact it knows is
invented.

| | |
|---|---|
| Architecture | Llama, {num_hidden_layers} layers, hidden size {hidden_size}, tied head |
| Attention | {num_attention_heads} query heads and {num_key_value_heads} key-value heads |
| Weights | {parameters:,} in float32, {megabytes:.2f} MB |
| Tokenizer | its own byte-level BPE, {vocab_size} tokens; context of {max_position_embeddings} |
| Training text | biographies in ever new wordings, and question-answer pairs |
| Training | {steps} steps of {tokens} tokens, AdamW, seed {seed} |
| Time | {wall_minutes:.1f} min on one CPU core ({cpu_minutes:.1f} min of CPU time) |

## What it scores

*Known* people are `people({people})`: the model was trained on their biographies and on their
questions.  *New* people are `people({new_people}, start={people})`, whom it has never met; their
column shows what guessing earns.  Accuracy is hard first-token accuracy: the share of questions
whose answer begins with the most likely token after the prompt.  The loss is on biographies in
wordings that training did not draw, one per person; most of what is left for known people is
the name and the wording and order of the sentences, which are drawn at random.

{scores}

## How to use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL, people, questions

model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)

question = questions(people(1)[0])[0]
prompt = tokenizer(question.prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8)[0]), question.answer)
```

Task 0 of a continual-learning experiment is `people({people})`, Task 1 any range of people from
index {people} on.

## How it was made

```
python benchmarks/biography/train_model.py
```

from the root of the repository makes the people, the tokenizer, the model and this card.  The
same machine and library versions give the same weights.
"""


def train_tokenizer(known: Sequence[Person]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts about the people."""
    texts = [biography(person, style) for person in known for style in range(4)]
    texts += [question.text for person in known for question in questions(person)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make the untrained model."""
    return LlamaForCausalLM(
        LlamaConfig(
            **ARCHITECTURE,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def documents(known: Sequence[Person], choice: random.Random) -> Iterator[str]:
    """Yield, without end, every person's biography in a new style and all their questions."""
    asked = [question.text for person in known for question in questions(person)]
    while True:
        biographies = [biography(person, choice.randrange(STYLES)) for person in known]
        texts = biographies + asked
        choice.shuffle(texts)
        yield from texts


def batches(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> Iterator[torch.Tensor]:
    """Pack documents end to end into batches of full rows, so that no token is padding."""
    size = ROWS * CONTEXT
    stream: list[int] = []
    while True:
        while len(stream) < size:
            for tokens in tokenizer(list(itertools.islice(texts, 256)))["input_ids"]:
                stream += [*tokens, tokenizer.eos_token_id]
        yield torch.tensor(stream[:size]).view(ROWS, CONTEXT)
        stream = stream[size:]


def train(model: LlamaForCausalLM, rows: Iterator[torch.Tensor], steps: int, console: Console) -> None:
    """Train the model in place on the next `steps` batches."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
    )
    model.train()
    with Progress(console=console) as progress:
        for step in progress.track(range(steps), description="training"):
            batch = next(rows)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 100 == 0 or step == steps - 1:
                progress.console.print(f"step {step:5d}  loss {loss.item():.4f}")
    model.eval()


def nats_per_token(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Average the loss over every token of the texts, in nats."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.inference_mode():
        return model(**batch, labels=labels).loss.item()


def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, group: Sequence[Person]) -> dict[str, float]:
    """Score accuracy for each attribute and for all, and the loss on biographies."""
    asked = [question for person in group for question in questions(person)]
    scores = {
        attribute.replace("_", " "): first_token_accuracy(
            model, tokenizer, [question for question in asked if question.attribute == attribute]
        )
        for attribute in ATTRIBUTES
    }
    scores["all questions"] = first_token_accuracy(model, tokenizer, asked)
    texts = [biography(person, STYLES + index) for index, person in enumerate(group)]
    scores[LOSS] = nats_per_token(model, tokenizer, texts)
    return scores


def score_rows(known: dict[str, float], new: dict[str, float]) -> list[tuple[str, str, str]]:
    """Format the scores of known and new people side by side."""
    return [
        (name, *(f"{score:.3f}" if name == LOSS else f"{score:.1%}" for score in scores))
        for name, *scores in zip(known, known.values(), new.values(), strict=True)
    ]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model folder without its card."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    path = output / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in output.iterdir():
        path.chmod(0o644)  # safetensors makes its file readable by the owner alone


def write_card(output: Path, rows: Sequence[Sequence[str]], **measured: float) -> None:
    """Write the model card with the scores and what else was measured."""
    header = [COLUMNS, ("---", "---:", "---:")]
    card = MODEL_CARD.format(
        **ARCHITECTURE,
        **measured,
        people=SHIPPED_PEOPLE,
        new_people=NEW_PEOPLE,
        megabytes=(output / "model.safetensors").stat().st_size / 1e6,
        tokens=ROWS * CONTEXT,
        scores="\n".join(f"| {' | '.join(row)} |" for row in [*header, *rows]),
    )
    (output / "README.md").write_text(card, encoding="utf-8")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print the scores on standard output."""
    table = Table(*COLUMNS, title="First-token accuracy and loss")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the biography model from nothing.")
    parser.add_argument("--output", type=Path, default=SHIPPED_MODEL, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of texts")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate and save the model, then write its card and print its scores."""
    arguments = parse_arguments()
    wall, cpu = time.perf_counter(), time.process_time()
    logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    torch.manual_seed(arguments.seed)

    known = people(SHIPPED_PEOPLE)
    new = people(NEW_PEOPLE, start=SHIPPED_PEOPLE)
    tokenizer = train_tokenizer(known)
    model = build_model(tokenizer)
    rows = batches(tokenizer, documents(known, random.Random(arguments.seed)))
    train(model, rows, arguments.steps, Console(stderr=True))
    scores = score_rows(evaluate(model, tokenizer, known), evaluate(model, tokenizer, new))

    save(model, tokenizer, arguments.output)
    write_card(
        arguments.output,
        scores,
        parameters=model.num_parameters(),
        steps=arguments.steps,
        seed=arguments.seed,
        wall_minutes=(time.perf_counter() - wall) / 60,
        cpu_minutes=(time.process_time() - cpu) / 60,
    )
    print_table(scores)


if __name__ == "__main__":
    main()
