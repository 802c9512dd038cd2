"""Answers of composed folders: each token with the weights of its paths, and one path alone by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scale_surgery import PlanError, generate
from tests.command import run
from tests.composed import Made
from tests.conftest import load, refusal
from tests.talking.test_generate import DRIFT, GREEDY, PROMPTS, by_transformers, ids_of

NAMES = ("base", "medicine", "law", "music")


@torch.no_grad()
def test_the_mixture_answers_and_says_whom_each_token_came_from(speaking: tuple[Made, Path]) -> None:
    folder = speaking[1]
    generation = generate(folder, PROMPTS[0], replace(GREEDY, max_new_tokens=48))
    (answer,) = generation.answers
    assert ids_of(answer) == by_transformers(folder, PROMPTS[0], do_sample=False, max_new_tokens=48)
    read = AutoTokenizer.from_pretrained(folder)(PROMPTS[0], return_tensors="pt")["input_ids"]
    scores = load(folder).score_tokens(torch.cat((read, torch.tensor([ids_of(answer)])), 1))
    weights = torch.tensor([token.weights for token in answer.tokens])
    torch.testing.assert_close(weights, scores.weights[0, read.shape[1] - 1 :], atol=DRIFT, rtol=0)
    assert (weights.amax(0) - weights.amin(0)).max() > 50 * DRIFT, "the control: they are not all alike"
    assert generation.base == "base" and generation.routing is not None
    content = generation.to_json()
    assert content["routing"]["prior"] == [0.25] * len(NAMES)
    first = content["answers"][0]["tokens"][0]
    assert content["paths"] == list(NAMES) and sum(first["weights"]) == pytest.approx(1)


@pytest.mark.slow
def test_one_path_answers_alone(speaking: tuple[Made, Path]) -> None:
    made, folder = speaking
    answers = {}
    for name in NAMES:
        generation = generate(folder, PROMPTS, replace(GREEDY, expansion=name), compare=name == "law")
        alone = made.base if name == "base" else made.folders[name]
        answers[name] = tuple(map(ids_of, generation.answers))
        expected = [by_transformers(alone, prompt, do_sample=False, max_new_tokens=24) for prompt in PROMPTS]
        assert list(answers[name]) == expected
        assert all(token.weights is None for answer in generation.answers for token in answer.tokens)
        if name == "law":
            assert tuple(map(ids_of, generation.base_answers)) == answers["base"]
    assert len({str(answer) for answer in answers.values()}) == len(NAMES), "the control: they differ"


def test_a_name_that_is_none_is_refused(speaking: tuple[Made, Path]) -> None:
    made, folder = speaking
    text = refusal(generate, folder, "a", replace(GREEDY, expansion="lw", max_new_tokens=0), error=PlanError)
    assert text.splitlines()[-1] == "expansion lw: is no path of composed, expected base or medicine or law or music."
    with pytest.raises(PlanError, match=r"law: is no path of medicine, expected base or medicine\."):
        generate(made.folders["medicine"], "a", replace(GREEDY, expansion="law"))
    with pytest.raises(PlanError, match="has no expansions under names, expected a composed folder, or one exp"):
        generate(made.base, "a", replace(GREEDY, expansion="law"))


@pytest.mark.slow
def test_a_conversation_changes_who_answers(speaking: tuple[Made, Path]) -> None:
    typed = "Anna\n/set expansion law\n/reset\nAnna\n/set expansion\n/reset\nAnna\n"
    asked = ["--temperature", "0", "--max-new-tokens", "12", "--json"]
    content = json.loads(run("chat", speaking[1], *asked, input=typed).output)
    first, second, third = content["answers"]
    assert first == third and first["text"] != second["text"]
    alone = generate(speaking[0].folders["law"], "Anna", replace(GREEDY, max_new_tokens=12))
    assert second["text"] == alone.answers[0].text
    assert first["tokens"][0]["weights"] and second["tokens"][0]["weights"] is None
    output = run("chat", speaking[1], input="/set expansion history\n").output
    assert "composed, routed: posterior, all paths alike" in output
    assert "expansion history: is no path of this model, expected base or medicine or law or music." in output.replace(
        "\n", " "
    )
    stock = run("chat", speaking[0].base, input="/set expansion law\n").output
    assert "/set expansion: cannot be set here" in stock
