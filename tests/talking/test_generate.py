"""Answers against transformers' own `generate`, the path of each token against whole texts, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from scale_surgery import (
    DataError,
    GenerationSettings,
    PlanError,
    Request,
    compose,
    expand,
    extract,
    generate,
    merge,
)
from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.checkpoint.expansions import path_names
from scale_surgery.errors import Problem
from scale_surgery.evidence.eval_targets import open_subjects
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.talking.conversation import Conversation
from scale_surgery.talking.records import Answer, StreamedToken, Token
from scale_surgery.talking.settings import USUAL
from scale_surgery.text.documents import read_questions
from tests.command import run
from tests.conftest import load, problems, refused, shake
from tests.each import mostly
from tests.routing.test_report import fallback_tokenizer
from tests.tiny import save_tiny

KINDS = ("base", "wide", "posterior", "cosine", "fused", "deep")
ROUTED = ("posterior", "cosine")
PROMPTS = ("Anna Berg", "naïve 東京?")
GREEDY = GenerationSettings(temperature=0, max_new_tokens=24)
DRIFT = 2e-3  # of a weight; cached and uncached runs multiply matrices of other shapes


def ids_of(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


def by_transformers(folder: Path, prompt: str, **options: Any) -> list[int]:
    read = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    ends = {"eos_token_id": [2, 257], "pad_token_id": 0}
    written = load(folder).generate(read, attention_mask=torch.ones_like(read), **ends, **options)
    return list(written[0, read.shape[1] :].tolist())


# what transformers gives


@pytest.mark.parametrize("kind", mostly(KINDS, ("wide", "posterior").__contains__))
def test_greedy_answers_are_those_of_transformers(place: Path, kind: str) -> None:
    generation = generate(place / kind, PROMPTS, GREEDY)
    for prompt, answer in zip(PROMPTS, generation.answers, strict=True):
        assert ids_of(answer) == by_transformers(place / kind, prompt, do_sample=False, max_new_tokens=24)
        assert (answer.prompt, answer.read) == (prompt, 1 + len(prompt.encode()))
        assert [token.weights is not None for token in answer.tokens] == [kind in ROUTED] * len(answer.tokens)
    assert (generation.model, generation.base_answers) == (kind, ())


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly(("base", "posterior"), "posterior".__eq__))
def test_drawn_answers_are_those_of_transformers_with_that_seed(place: Path, kind: str) -> None:
    settings = GenerationSettings(
        temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.2, max_new_tokens=12, seed=7
    )
    before = torch.random.get_rng_state()
    first, second = (generate(place / kind, PROMPTS, settings).answers for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before), "random numbers are the caller's"
    assert first == second
    assert first != generate(place / kind, PROMPTS, replace(settings, seed=8)).answers
    torch.manual_seed(7)
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.2, "max_new_tokens": 12}
    for prompt, answer in zip(PROMPTS, first, strict=True):
        assert ids_of(answer) == by_transformers(place / kind, prompt, do_sample=True, **options)
    torch.random.set_rng_state(before)


def test_an_answer_is_read_behind_all_of_its_prompt(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bytes", "llama", vocab_size=260)
    fallback_tokenizer(first="<0x61>").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # where all logits are equal, the first token is taken: a byte, which is read with those before it
    save_file(weights | {"lm_head.weight": torch.zeros(260, 40)}, folder / "model.safetensors", {"format": "pt"})
    (answer,) = generate(folder, "東京東京", replace(GREEDY, max_new_tokens=3)).answers
    assert (answer.read, answer.text) == (1 + 12, "aaa")


def test_options_of_drawing() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.6)
    assert GenerationSettings(top_p=0.9).describe(config) == (
        "drawn with temperature 0.6, top-p 0.9, top-k 50, at most 512 tokens"
    )
    assert GenerationSettings(temperature=0).describe(config) == "the most likely token each time, at most 512 tokens"
    known = GenerationConfig._get_default_generation_params()
    assert {name: known[name] for name in USUAL} == USUAL


# paths


@pytest.mark.parametrize("kind", mostly(("posterior", "cosine"), "posterior".__eq__))
def test_weights_are_those_of_the_whole_text(place: Path, kind: str) -> None:
    (answer,) = generate(place / kind, PROMPTS[0], replace(GREEDY, max_new_tokens=64)).answers
    read = AutoTokenizer.from_pretrained(place / kind)(PROMPTS[0], return_tensors="pt")["input_ids"]
    scores = load(place / kind).score_tokens(torch.cat((read, torch.tensor([ids_of(answer)])), 1))
    weights = torch.tensor([token.weights[1] for token in answer.tokens])
    torch.testing.assert_close(weights, scores.weights[0, read.shape[1] - 1 :, 1], atol=DRIFT, rtol=0)
    assert weights.max() - weights.min() > 100 * DRIFT, "the control: they are not all alike"
    assert answer.routed_share == pytest.approx(float(weights.mean()))


def test_the_base_answers_from_the_same_weights(place: Path) -> None:
    settings = replace(GREEDY, temperature=0.8, max_new_tokens=12)
    for kind in ("wide", "posterior", "deep"):
        generation = generate(place / kind, PROMPTS, settings, compare=True)
        assert [ids_of(answer) for answer in generation.base_answers[:1]] == [
            ids_of(answer) for answer in generate(place / "base", PROMPTS[:1], settings).answers
        ]
        assert generation.base == "base"
        # it takes no random numbers away
        assert generation.answers == generate(place / kind, PROMPTS, settings).answers
        assert ids_of(generation.answers[0]) != ids_of(generation.base_answers[0])


# tokens and texts


def test_who_has_no_new_tokens_reads_the_base_s(tmp_path: Path) -> None:
    """The base, and an expansion beside the one that adds tokens, answer as they do alone."""
    base = save_tiny(tmp_path / "base", "llama", vocab_size=1200)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(base)
    prompt, pieces = "Zaragoza and Quetzal", {}
    for name, new in (("words", NewTokens(("Zaragoza", "Quetzal"))), ("law", None)):
        folder = shake(expand(base, Request("1", variant="adapt", new_tokens=new), tmp_path / name).path)
        pieces[name] = extract(folder, tmp_path / f"{name}-piece").path
    (alone,) = generate(base, prompt, GREEDY).answers
    result = generate(tmp_path / "words", prompt, GREEDY, compare=True)
    assert ids_of(result.base_answers[0]) == ids_of(alone) and result.base_answers[0].read == alone.read
    assert result.answers[0].read < alone.read, "the control: it reads the new tokens"
    both = compose(base, pieces, tmp_path / "both").path
    of_law = generate(tmp_path / "law", prompt, GREEDY).answers[0]
    for name, expected in (("base", alone), ("law", of_law), ("words", result.answers[0])):
        (answer,) = generate(both, prompt, replace(GREEDY, expansion=name)).answers
        assert (ids_of(answer), answer.read) == (ids_of(expected), expected.read), name
    # a template that the user gave the folder asks all of them
    (both / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    for name in ("base", "law", "words"):
        assert generate(both, prompt, replace(GREEDY, expansion=name)).has_template, name


def test_a_fused_model_has_no_path_to_choose(tmp_path: Path) -> None:
    wide = expand(SHIPPED_MODEL, Request("1", name="law"), tmp_path / "wide").path
    fused = merge(wide, tmp_path / "fused").path
    for path in ("law", "base"):
        with refused("expansions-unnamed", f"expansion {path}", PlanError):
            generate(fused, "Anna", replace(GREEDY, expansion=path))
    assert path_names(json.loads((fused / "config.json").read_text())["scale_surgery"]) == ()
    assert path_names(json.loads((wide / "config.json").read_text())["scale_surgery"]) == ("base", "law"), "the control"


def test_each_token_is_streamed_when_it_comes(place: Path) -> None:
    streamed: list[StreamedToken] = []
    generation = generate(
        place / "posterior", PROMPTS, replace(GREEDY, max_new_tokens=4), compare=True, on_token=streamed.append
    )
    wanted = [
        StreamedToken(place_, is_base, token, ("base", "default"))
        for place_ in range(2)
        for is_base, answers in ((True, generation.base_answers), (False, generation.answers))
        for token in answers[place_].tokens
    ]
    assert streamed == wanted


def test_an_answer_reads_on_from_its_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    question = questions(people(1)[0])[1]
    (answer,) = generate(SHIPPED_MODEL, question.prompt, GREEDY).answers
    assert answer.text == f" {question.answer}"
    assert (answer.ended, answer.tokens[-1]) == ("end", Token(tokenizer.eos_token_id, ""))
    assert tokenizer.decode(ids_of(answer), skip_special_tokens=True) == answer.text


def test_answers_end_where_there_is_no_room(templated: Path) -> None:
    prompt = "x" * 200
    (answer,) = generate(templated, prompt, GenerationSettings(temperature=0)).answers
    assert answer.ended == "context" and answer.read + len(answer.tokens) == 256
    (answer,) = generate(templated, prompt, GREEDY).answers
    assert answer.ended == "length" and len(answer.tokens) == 24


def test_a_chat_template_is_filled(templated: Path) -> None:
    def read(settings: GenerationSettings) -> str:
        (answer,) = generate(templated, "Who?", replace(settings, max_new_tokens=1)).answers
        return "x" * answer.read

    assert len(read(GREEDY)) == len("[user]Who?\n[assistant]")
    assert len(read(replace(GREEDY, system="Be brief."))) == len("[system]Be brief.\n[user]Who?\n[assistant]")
    assert len(read(replace(GREEDY, raw=True))) == len("Who?")


def test_a_conversation_is_asked_whole_or_not_at_all(templated: Path, tmp_path: Path) -> None:
    """Some templates read parts of a message alone, and some drop the system message."""

    def asked(name: str, template: str, settings: GenerationSettings) -> int:
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(templated, folder)
            (folder / "chat_template.jinja").write_text(template)
        (answer,) = generate(folder, "Who?", replace(settings, max_new_tokens=1)).answers
        return answer.read

    tells = replace(GREEDY, system="Be brief.")
    plain = (templated / "chat_template.jinja").read_text()
    parts = plain.replace("message['content']", "message['content'][0]['text']")
    drops = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + plain
    assert parts != plain
    for settings in (GREEDY, tells):
        assert asked("parts", parts, settings) == asked("plain", plain, settings)
    assert asked("drops", drops, GREEDY) == asked("plain", plain, GREEDY), "the control"
    left_out = Problem("template-leaves-out", "message 1", what="the words")
    assert problems(asked, "drops", drops, tells, error=DataError) == [
        Problem("chat-template-fails", "drops", left_out)
    ]


# conversations


def answer_of(prompt: str, text: str, ended: Any = "length") -> Answer:
    return Answer(prompt, 1, (Token(5, text),), ended)


def read_by(conversation: Conversation, message: str, settings: GenerationSettings = GREEDY) -> tuple[str, int]:
    reading = conversation.encode(message, settings)
    return conversation.subject.tokenizer.decode(reading.ids, skip_special_tokens=True), reading.left_out


def test_a_text_goes_on(place: Path) -> None:
    (subject,) = open_subjects([place / "base"])
    conversation = Conversation(subject, has_template=False)
    assert read_by(conversation, "Once") == ("Once", 0)
    conversation.add(answer_of("Once", " upon"))
    assert read_by(conversation, "Twice") == ("Once upon\nTwice", 0)
    assert read_by(conversation, "") == ("Once upon", 0), "nothing typed lets it go on"
    conversation.add(answer_of("", " a time", "end"))
    assert read_by(conversation, "Then") == ("Then", 0), "the model ended the text"
    conversation.take_back()
    assert read_by(conversation, "") == ("Once upon", 0)


def test_the_oldest_turns_are_left_out(templated: Path) -> None:
    (subject,) = open_subjects([templated])
    subject = replace(subject, context=110)
    conversation = Conversation(subject, has_template=True)
    settings = replace(GREEDY, system="S")
    for number in range(3):
        conversation.add(answer_of(f"m{number}", f"a{number}"))
    assert read_by(conversation, "x" * 10, settings) == (
        "[system]S\n[user]m1\n[assistant]a1\n[user]m2\n[assistant]a2\n[user]xxxxxxxxxx\n[assistant]", 1,
    )  # fmt: skip
    # what does not fit alone takes nothing away
    with pytest.raises(DataError, match="the prompt has 136 tokens, expected fewer than 110, the context of templated"):
        conversation.encode("x" * 108, settings)
    assert len(conversation.turns) == 2
    assert read_by(conversation, "x" * 60, settings)[1] == 2


# refusals


def test_all_that_is_wrong_with_settings_is_said(place: Path, templated: Path) -> None:
    wrong = GenerationSettings(
        system="S", max_new_tokens=0, temperature=-1.0, top_p=1.5, top_k=-1, repetition_penalty=0.0, seed=-1
    )
    found = problems(generate, place / "base", "x", wrong, compare=True, error=PlanError)
    options = ("--max-new-tokens", "--temperature", "--top-p", "--top-k", "repetition_penalty", "--seed")
    lines = [str(problem) for problem in found[: len(options)]]
    assert [line.startswith(f"{option} is ") for line, option in zip(lines, options, strict=True)] == [True] * 6
    assert found[len(options) :] == [
        Problem("system-without-template", "--system", model="base"),
        Problem("compare-without-base", "--compare", model="base"),
    ]
    with refused("system-with-raw", "--system", PlanError):
        generate(templated, "x", GenerationSettings(system="S", raw=True))
    with refused("base-fused", "--compare", PlanError):
        generate(place / "fused", "x", compare=True)


def test_prompts_that_cannot_be_read_are_all_named(place: Path, templated: Path) -> None:
    with refused("prompts-missing", "", DataError):
        generate(place / "base", [])
    raw = GenerationSettings(raw=True)
    first, second = problems(generate, templated, ["", "x" * 300], raw, error=DataError)
    assert first == Problem("prompt-without-token", "prompt 1", model="templated")
    assert second.where.startswith("prompt 2")
    (alone,) = problems(generate, templated, "x" * 300, raw, error=DataError)
    assert (alone.code, alone.values) == (second.code, second.values) and "prompt 1" not in alone.where


def test_a_chat_template_that_refuses(templated: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(templated)
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    folder = tmp_path / "picky"
    folder.mkdir()
    for file in templated.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(folder)
    refuses = Problem("template-refuses", error="no system message")
    assert problems(generate, folder, "x", error=DataError) == [Problem("chat-template-fails", "picky", refuses)]


def test_a_system_message_in_a_row_is_refused(place: Path, tmp_path: Path) -> None:
    """Rows of instructions may have one; here it is an option for all prompts."""
    rows = tmp_path / "asked.jsonl"
    rows.write_text('{"prompt": "Who?"}\n{"prompt": "Why?", "system": null}\n')
    assert run("generate", place / "base", "--prompts", rows, "--max-new-tokens", 1).exit_code == 0, "the control"
    rows.write_text('{"prompt": "Who?"}\n{"prompt": "Why?", "system": "Be brief."}\n')
    assert problems(read_questions, [rows], error=DataError) == [Problem("prompt-with-system", f"{rows}, line 2")]


# the command


def test_command_prints_the_answer_and_nothing_else(place: Path) -> None:
    prompt = questions(people(1)[0])[1].prompt
    assert run("generate", SHIPPED_MODEL, "--prompt", prompt).stdout == " Fresno\n"
    assert run("generate", SHIPPED_MODEL, input=f"{prompt}\n").stdout == " Fresno\n"
    warning = "warning: biographies has no chat template. The prompt was continued as plain text.\n"
    assert run("generate", SHIPPED_MODEL, "--prompt", prompt).stderr == warning
    assert run("generate", SHIPPED_MODEL, "--prompt", prompt, "-q").stderr == ""


def test_command_marks_paths_where_it_is_asked_to(place: Path) -> None:
    (answer,) = generate(place / "posterior", "Anna", GREEDY).answers
    asked = (place / "posterior", "--prompt", "Anna", "--temperature", "0", "--max-new-tokens", "24")
    plain, marked = run("generate", *asked).stdout, run("generate", *asked, "--paths").stdout
    text, _, legend = marked.rpartition("\n\n")
    assert "⟦" not in plain and plain == run("generate", *asked, "--no-paths").stdout
    assert f"{text}\n".replace("⟦default: ", "").replace("⟧", "") == plain
    assert legend.startswith("in ⟦name: ⟧: tokens of that expansion")
    weights = [(token.weights or (1, 0))[1] for token in answer.tokens if token.text]
    assert ("⟦" in text) == any(weight > 0.5 for weight in weights)
    assert any(weight > 0.5 for weight in weights) and any(weight < 0.5 for weight in weights), "both are there"


@pytest.mark.slow
def test_command_takes_prompts_from_files(place: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("Anna\n\n naïve \n")
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Berg"}\n\n{"prompt": "a\\nb", "n": 1}\n')
    asked = ("--prompt", "first", "--prompts", tmp_path / "lines.txt", "--prompts", tmp_path / "rows.jsonl")
    options = ("--temperature", "0", "--max-new-tokens", "3")
    content = json.loads(run("generate", place / "wide", *asked, *options, "--json").stdout)
    prompts = ["first", "Anna", " naïve ", "Who?", "a\nb"]
    assert [answer["prompt"] for answer in content["answers"]] == prompts
    assert content == generate(place / "wide", prompts, GenerationSettings(temperature=0.0, max_new_tokens=3)).to_json()
    files = (tmp_path / "a.jsonl", tmp_path / "a.json")
    shown = run("generate", place / "wide", *asked, *options, "--compare", "-o", files[0], "-o", files[1]).stdout
    assert "a↵b" in shown and shown.count("base") == 5
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [row["text"] for row in rows] == [answer["text"] for answer in content["answers"]]
    assert [row["base_answer"]["text"] for row in rows] == [
        answer["text"] for answer in json.loads(files[1].read_text())["base_answers"]
    ]


def test_what_moves_a_cursor_is_shown_by_signs(escaping: Path) -> None:
    (answer,) = generate(escaping, "x", GREEDY).answers
    assert answer.text == "\x1b" * 24
    assert run("generate", escaping, "--prompt", "x", "--max-new-tokens", "24").stdout == "␛" * 24 + "\n"
    assert run("generate", escaping, "--prompt", "x", "--max-new-tokens", "1", "--json").stdout.count("\\u001b") == 2


def test_wrong_prompts_of_the_command(place: Path, tmp_path: Path) -> None:
    message = "There is no prompt: stdin is empty. Give --prompt, --prompts FILE, or a text on stdin."
    assert message in " ".join(run("generate", place / "base", code=2).stderr.split())
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "x"}\n7\n{\n')
    lines = " ".join(run("generate", place / "base", "--prompts", wrong, code=1).stderr.split())
    for part in (
        f'error: {wrong}, line 1: has the fields (text), expected {{"prompt"}} or {{"question"}}, a text.',
        f'{wrong}, line 2 is a number, expected {{"prompt"}} or {{"question"}}, a text.',
        f"{wrong}, line 3: is not JSON",
    ):
        assert part in lines
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "empty.txt: holds no prompt, expected one a line." in run(
        "generate", place / "base", "--prompts", tmp_path / "empty.txt", code=1
    ).stderr.replace("\n", " ")
    assert "there is no such file" in run("generate", place / "base", "--prompts", tmp_path / "none", code=1).stderr
    refused = run("generate", place / "base", "--prompt", "x", "--top-k", "many", code=2)
    assert "Invalid value for '--top-k'" in refused.stderr
