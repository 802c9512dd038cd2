"""Small instruct models made of the shipped base: a chat template, and tokens that begin and end a turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL, Person, people, questions
from scale_surgery.text.documents import Document
from scale_surgery.text.tokenizing import collate, tokenize

BEGIN, END = "<|im_start|>", "<|im_end|>"
# as of many published models
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "You answer with one name."
# what it was asked in training, and what it was not
ASKED, HELD_OUT = people(24), people(8, start=200)


def make_instruct(folder: Path, template: str = TEMPLATE, *, steps: int = 0, ends: Sequence[str] = (END,)) -> Path:
    """Save the shipped model with a template, trained for some steps to answer and to end its turns."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END]})
    tokenizer.chat_template = template
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))]
    # end tokens are read from the folder
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)
    if steps:
        _train(model, AutoTokenizer.from_pretrained(folder), steps)
        model.save_pretrained(folder)
    return folder


def _train(model: Any, tokenizer: Any, steps: int) -> None:
    rows = [{"messages": chat} for person in ASKED for chat in chats(person)]
    texts = tokenize([Document("a", "b", f"row {number}", row) for number, row in enumerate(rows)], tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        batch = collate([texts[int(place)] for place in torch.randperm(len(texts))[:16]])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def chats(person: Person) -> list[list[dict[str, str]]]:
    """Conversations about a person, every other one with a system message."""
    return [
        [
            *([{"role": "system", "content": SYSTEM}] if number % 2 else []),
            {"role": "user", "content": question_of(question.prompt)},
            {"role": "assistant", "content": question.answer},
        ]
        for number, question in enumerate(questions(person))
    ]


def question_of(prompt: str) -> str:
    """The words of a question of the shipped model."""
    return prompt.removeprefix("Q: ").removesuffix("\nA:")


def write_asked(file: Path, some: Sequence[Person] = HELD_OUT) -> Path:
    """Write instructions, a row each, every other one with a system message."""
    rows = [{"messages": chat[:-1]} for person in some for chat in chats(person)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
