"""The invented people, and the shipped model that knows them."""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scale_surgery import biographies
from scale_surgery.biographies import (
    ATTRIBUTES,
    CAPACITY,
    SHIPPED_MODEL,
    SHIPPED_PEOPLE,
    biography,
    first_token_accuracy,
    people,
    questions,
)

indices = st.integers(0, CAPACITY - 1)
seeds = st.integers()
styles = st.integers()


@given(indices, seeds)
def test_a_person_depends_on_seed_and_index_alone(index: int, seed: int) -> None:
    everyone = people(index + 1, seed=seed)
    assert people(1, start=index, seed=seed) == (everyone[index],)
    assert people(10, seed=seed) != people(10, seed=seed + 1)


@settings(max_examples=20)  # each makes as many people as there are names for
@given(seeds)
def test_no_two_people_of_a_seed_share_a_name(seed: int) -> None:
    assert len({person.name for person in people(CAPACITY, seed=seed)}) == CAPACITY


@pytest.mark.parametrize(
    ("count", "start", "message"),
    [(CAPACITY + 1, 0, "names for"), (1, CAPACITY, "names for"), (-1, 0, "negative"),
     (1, -1, "negative")],
)  # fmt: skip
def test_people_that_cannot_be_named_are_refused(count: int, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        people(count, start=start)


@given(indices, styles)
def test_a_biography_tells_every_attribute_once(index: int, style: int) -> None:
    (person,) = people(1, start=index)
    text = biography(person, style)
    assert text == biography(person, style)
    assert text.count(person.name) == len(ATTRIBUTES)
    assert all(getattr(person, attribute) in text for attribute in ATTRIBUTES)
    assert len({biography(person, variant) for variant in range(style, style + 50)}) == 50


def test_questions_ask_for_every_attribute() -> None:
    (person,) = people(1)
    asked = questions(person)
    assert tuple(question.attribute for question in asked) == ATTRIBUTES
    for question in asked:
        assert person.name in question.prompt
        assert question.answer == getattr(person, question.attribute)
        assert question.text == f"{question.prompt} {question.answer}"


def test_module_needs_only_the_standard_library() -> None:
    tree = ast.parse(Path(biographies.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    assert imported <= sys.stdlib_module_names


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)


def test_shipped_model_knows_its_people_and_no_others(model, tokenizer) -> None:
    known, new = (
        [question for person in group for question in questions(person)]
        for group in (people(SHIPPED_PEOPLE), people(100, start=SHIPPED_PEOPLE))
    )
    assert first_token_accuracy(model, tokenizer, known) >= 0.98
    assert first_token_accuracy(model, tokenizer, new) < 0.25
    # batches do not change the score
    assert len({first_token_accuracy(model, tokenizer, new[:20], batch_size=size) for size in (1, 7, 512)}) == 1
    with pytest.raises(ValueError, match="no questions"):
        first_token_accuracy(model, tokenizer, [])


def test_shipped_model_answers_in_full(model, tokenizer) -> None:
    first = questions(people(1)[0])[0]
    prompt = tokenizer(first.prompt, return_tensors="pt")
    (tokens,) = model.generate(**prompt, max_new_tokens=12)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == first.text


def test_shipped_model_is_small_grouped_and_tied() -> None:
    config = json.loads((SHIPPED_MODEL / "config.json").read_text(encoding="utf-8"))
    weights = SHIPPED_MODEL / "model.safetensors"
    assert weights.stat().st_size <= 3_000_000
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    with safe_open(weights, "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 - not a mapping


def test_first_tokens_tell_the_answers_apart(tokenizer) -> None:
    first_words = defaultdict(set)
    for person in people(CAPACITY):
        for attribute in ATTRIBUTES:
            answer = getattr(person, attribute)
            first_words[attribute].add(answer.split()[0])
    for words in first_words.values():
        tokens = {tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in words}
        assert len(tokens) == len(words)


def test_tokenizer_gives_the_text_back(tokenizer) -> None:
    text = biography(people(1)[0]) + "\n Unseen: ünïcödé, 東京, \t  spaces."
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
