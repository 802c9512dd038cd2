"""transformers' own server, with an expanded model that it knows: `make test-serve` installs what the server needs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import transformers

from scale_surgery import (
    CosineRouter,
    GenerationSettings,
    PosteriorRouter,
    Probes,
    Request,
    ServingError,
    compose,
    expand,
    extract,
    generate,
    merge,
    route_export,
    serve,
)
from scale_surgery.biographies import people, questions
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.running.options import RunOptions
from scale_surgery.show.tables_push import render_served
from scale_surgery.talking import serve as serving
from tests.command import run
from tests.composed import Made
from tests.conftest import edited, refused, shake
from tests.routed import random_ids
from tests.show.test_console import shown
from tests.test_docs import ROOT, SHIPPED, blocks, run_python

needs_server = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in serving.NEEDED),
    reason="what transformers' server needs is not installed: make test-serve",
)
CHAT = "{% for message in messages %}Q: {{ message.content }}\n{% endfor %}A:"
# prompts of different lengths, each with the number of tokens to generate
QUESTIONS = [question.prompt for person in people(3) for question in questions(person)]
ASKED = [(QUESTIONS[0], 5), ("\n".join(QUESTIONS[:4]), 40), (QUESTIONS[1], 24), ("Q:", 60), (QUESTIONS[2], 12)]
GREEDY = GenerationSettings(temperature=0, max_new_tokens=20)
# never ends by itself
ENDLESS = {"generation_config": json.dumps({"min_new_tokens": 10**7, "max_new_tokens": 10**7, "do_sample": False})}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An expanded model with tensors that differ from the base's, the same with a router, and that fused."""
    place = tmp_path_factory.mktemp("served")
    wide = shake(expand(SHIPPED, Request("last:2", variant="adapt", collaborate="both"), place / "expanded").path)
    route_export(wide, place / "routed", PosteriorRouter(switch_rate=0.05))
    paper = route_export(wide, place / "paper", CosineRouter(threshold=0.9)).path
    merge(paper, place / "fused", probes=Probes(max_new_tokens=0))
    (place / "routed" / "chat_template.jinja").write_text(CHAT)
    shutil.copytree(SHIPPED, place / "stock")
    return lambda form: place / form


# ---- what needs no server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("expanded", "routed", "fused", "stock"))
def test_the_loader_of_transformers_server_loads_what_is_made_known(
    form: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what pytest imports first is another object than the one that modules of transformers find
    known = importlib.import_module("transformers")
    from transformers.cli.serving.model_manager import ModelManager

    folder = folders(form)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    if form != "stock":
        monkeypatch.setattr(known, name, None, raising=False)  # taken away afterwards
        monkeypatch.delattr(known, name)
        with pytest.raises(AttributeError, match=name):
            ModelManager(device="cpu", force_model=str(folder))
    serving._make_known(open_checkpoint(folder), RunOptions())
    manager = ModelManager(device="cpu", force_model=str(folder))
    (loaded,) = manager.loaded_models.values()
    assert type(loaded.model).__name__ == name
    # a class of transformers' own stays what it is
    assert (getattr(known, name) is type(loaded.model)) is (form == "stock")
    manager.shutdown()


@torch.no_grad()
def test_paths_of_a_composed_folder_compute_on_one_thread_each_as_it_is_alone(
    speaking: tuple[Made, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, (made, folder) = importlib.import_module("transformers"), speaking
    from transformers.cli.serving.model_manager import ModelManager

    from scale_surgery.talking.server import InferenceThread, OnePath

    (name,) = open_checkpoint(folder).config["architectures"]
    monkeypatch.setattr(known, name, None, raising=False)  # taken away afterwards
    serving._make_known(open_checkpoint(folder), RunOptions())
    manager, ids = ModelManager(device="cpu", force_model=str(folder)), random_ids(1, 7)
    (model,), thread = (entry.model for entry in manager.loaded_models.values()), InferenceThread()
    expected = {None: model(ids).logits, "base": made.alone(None)(ids).logits, "law": made.alone("law")(ids).logits}
    asked = [(path, OnePath(thread, model, path).submit(model, ids)) for path in (*expected, *reversed(expected))]
    matches = [
        [path for path, logits in expected.items() if torch.equal(logits, future.result().logits)]
        for _, future in asked
    ]
    assert matches == [[path] for path, _ in asked]
    manager.shutdown()


def test_what_cannot_be_served_is_said_before_anything_is_loaded(
    speaking: tuple[Made, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, folder = speaking
    monkeypatch.setattr(serving, "NEEDED", ("json",))
    monkeypatch.chdir(tmp_path)
    Path("law").symlink_to(folder)
    Path("empty").mkdir()
    for path, name, error, message in (
        (folder, "lw", PlanError, r"^expansion lw: is no path of composed, expected base or medicine or"),
        (made.base, "law", PlanError, r"^expansion law: base has no expansions under names, expected a composed fo"),
    ):
        with pytest.raises(error, match=message):
            serve(path, serving.Address(port=free_port()), expansion=name)
    for path, code in (("law", "name-of-two"), ("models@home/wide", "name-with-at-sign"), ("empty", "folder-empty")):
        with refused(code, path, PlanError if path == "law" else CheckpointError):
            serve(path, serving.Address(port=free_port()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refused("address-unavailable", f"127.0.0.1, port {port}", ServingError):
            serve("nowhere", serving.Address(port=port))
    with refused("value-unfit", "--port", ServingError):
        serve("nowhere", serving.Address(port=70000))


def test_missing_packages_are_named_with_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NEEDED", ("json", "fastapi_of_nowhere", "uvicorn_of_nowhere"))
    missing = Problem("server-without-packages", packages=["fastapi_of_nowhere", "uvicorn_of_nowhere"])
    assert run("serve", "nowhere", "--port", free_port(), code=1).output == f"error: {missing}\n"


def test_fields_that_would_be_ignored_are_refused_by_name() -> None:
    from scale_surgery.talking.request_fields import CHAT, COMPLETIONS, Refusal, check_fields

    usual = {"n": 1, "logprobs": False, "top_logprobs": None, "presence_penalty": 0.0, "tool_choice": "auto"}
    check_fields(CHAT, usual | {"messages": [{}], "max_tokens": 5, "response_format": {"type": "text"}})
    for fields, named in (
        ({"n": 2, "logprobs": True, "prompt": "Q:"}, "logprobs, n"),
        ({"logprobs": 0}, "logprobs"),  # of one token each
        ({"suffix": "\n", "prompt": "Q:"}, "suffix"),  # which the model would not read
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}, "what": 1}, "response_format, what"),
    ):
        with pytest.raises(Refusal, match=rf"^{named}: not offered by this server, expected some of ") as refused:
            check_fields(COMPLETIONS, usual | fields)
        assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")


# a field, a value that it may not have, one that it may, and what is expected
@pytest.mark.parametrize(
    ("name", "wrong", "right", "expected"),
    (
        ("prompt", ["Once"], "", "one text"),
        ("max_tokens", 0, 1, "a whole number, at least 1"),
        ("max_tokens", "ten", 10, "a whole number, at least 1"),
        ("temperature", -1, 0, "a number, at least 0"),
        ("temperature", True, 1.5, "a number, at least 0"),
        ("top_p", 1.5, 1, "a number, from 0 to 1"),
        ("frequency_penalty", -1, -0.5, "a number, more than -1"),
        ("seed", 0.5, -1, "a whole number, from -9223372036854775808 to 18446744073709551615"),
        ("stop", "", ".", "text, or a list of texts, none of them empty"),
        ("stop", ["."] * 2 + [""], ["."], "text, or a list of texts, none of them empty"),
        ("stream", 1, False, "true or false"),
        ("generation_config", "{do}", "{}", "text that is an object in JSON"),
        ("generation_config", {}, '{"top_k": 1}', "text that is an object in JSON"),
    ),
)
def test_fields_hold_what_they_should(name: str, wrong: Any, right: Any, expected: str) -> None:
    from scale_surgery.talking.request_fields import COMPLETIONS, Refusal, check_fields

    with pytest.raises(Refusal) as refused:
        check_fields(COMPLETIONS, {"prompt": "Q:", name: wrong})
    assert str(refused.value) == f"{name} is {wrong!r}, expected {expected}."
    assert (refused.value.parameter, refused.value.code, refused.value.status) == (name, "invalid_value", 400)
    check_fields(COMPLETIONS, {"prompt": "Q:", name: right})


def test_null_is_as_good_as_nothing() -> None:
    from scale_surgery.talking.request_fields import CHAT, RESPONSES, Refusal, check_fields

    body = {"messages": [{}], "chat_template_kwargs": None, "stop": [], "logit_bias": {}, "tools": []}
    check_fields(CHAT, body)
    assert body == {"messages": [{}]}
    for read, body, message in (
        (CHAT, {"messages": None}, r"^messages is missing, expected a list of objects, at least one\.$"),
        (CHAT, {"messages": [{}], "logit_bias": {"Q": 1}}, "^logit_bias is {'Q': 1}, expected an object of token ids"),
        (RESPONSES, {}, r"^input is missing, expected text, or a list of objects\.$"),
    ):
        with pytest.raises(Refusal, match=message):
            check_fields(read, body)


@pytest.fixture(scope="module")
def short_stories(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context ends soon, and whose tokenizer writes no space where a text begins."""
    folder = Path(shutil.copytree(stories, tmp_path_factory.mktemp("short") / "stories"))
    with edited(folder / "config.json") as config:
        config["max_position_embeddings"] = 32
    return folder


def test_settings_that_nothing_reads_are_refused() -> None:
    from scale_surgery.talking.request_fields import COMPLETIONS, Refusal, check_fields

    with pytest.raises(Refusal, match=r"^generation_config has 'temprature', which"):
        check_fields(COMPLETIONS, {"prompt": "Q:", "generation_config": '{"top_k": 1, "temprature": 2}'})


def test_parts_of_a_message_that_a_model_of_text_cannot_read_are_refused() -> None:
    from transformers.cli.serving.utils import BaseHandler, Modality

    from scale_surgery.talking.server import Refusal, _read

    stock = BaseHandler.get_processor_inputs_from_messages
    text, picture = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [text]}]
    assert _read(stock, messages, Modality.LLM) == [{"role": "user", "content": "x"}] * 2
    assert _read(stock, [{"role": "user", "content": [picture]}], Modality.VLM)[0]["content"][0]["type"] == "image"
    with pytest.raises(Refusal, match=r"^A message has a part of type image_url, which this model does not read"):
        _read(stock, [{"role": "user", "content": [text, picture]}], Modality.LLM)


def test_a_message_is_whole_for_the_template() -> None:
    """The server alone would drop the text beside calls, the thought and the name, and join parts by blanks."""
    from transformers.cli.serving.utils import BaseHandler, Modality

    from scale_surgery.talking.server import _read

    stock = BaseHandler.get_processor_inputs_from_messages
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "def f"}, {"type": "text", "text": "(x):"}]},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "A tool.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "rain", "content": "dry"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    asked, called, told, silent = _read(stock, messages, Modality.LLM)
    assert asked == {"role": "user", "content": "def f(x):"}
    assert (called["content"], called["reasoning_content"]) == ("Let me look.", "A tool.")
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert told == messages[2] and silent["content"] == ""
    assert stock(messages, Modality.LLM)[1]["content"] == "", "as long as the server drops it"


def test_a_conversation_that_the_template_does_not_write_whole_is_refused() -> None:
    from scale_surgery.talking.request_fields import Refusal
    from scale_surgery.talking.server import _fill_template

    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "tool", "content": '{"sky": "dry"}'}]
    offers = "{% for tool in tools or [] %}{{ tool.function.name }}{{ day }}\n{% endfor %}"
    drops = "{% set messages = messages[1:] %}"

    def filled(template: str, tools: Any, said: Any = messages) -> Any:
        tokenizer.chat_template = template
        return _fill_template(tokenizer, said, tools=tools, tokenize=False, load_audio_from_video=False, day="today")

    said = 'Q: Be brief.\nQ: {"sky": "dry"}\nA:'
    assert filled(offers + CHAT, [tool]) == f"raintoday\n{said}"
    assert filled(CHAT.replace("message.content", "message.content[0].text"), None) == said, "in parts"
    escaped = filled(CHAT.replace("message.content", "message.content | tojson"), None)
    assert '{\\"sky\\": \\"dry\\"}' in escaped, "nothing is lost, and quotes are escaped"
    for template, tools, missing in (
        (CHAT, [tool], '"tools": the chat template leaves out rain'),
        (drops + CHAT, None, "message 1: the chat template leaves out the words"),
    ):
        with pytest.raises(Refusal, match=missing) as refusal:
            filled(template, tools)
        assert refusal.value.status == 400


def answers_of(folder: Path, prompt: str, **settings: Any) -> list[tuple[str, int, bool]]:
    """Text of an answer, its tokens, and whether the server says that it was cut: at once, and streamed."""
    from scale_surgery.talking.server import InferenceThread, OnePath

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    path, inputs = (
        OnePath(InferenceThread(), model, None, continues_prompt=True),
        tokenizer(prompt, return_tensors="pt"),
    )
    configs = [transformers.GenerationConfig(do_sample=False, **settings) for _ in range(2)]

    async def asked() -> list[tuple[str, int]]:
        whole, _, ids = await path.generate_non_streaming(model, tokenizer, inputs, configs[0], request_id="1")
        queue, streamer = path.generate_streaming(model, tokenizer, inputs, configs[1], request_id="2")
        pieces = []
        while (piece := await queue.get()) is not None:
            pieces.append(piece)
        return [(whole, len(ids)), ("".join(pieces), streamer.total_tokens)]

    # as the server decides
    return [
        (text, count, config.max_new_tokens is not None and count >= config.max_new_tokens)
        for (text, count), config in zip(asyncio.run(asked()), configs, strict=True)
    ]


def test_an_answer_ends_where_the_context_does(short_stories: Path) -> None:
    prompt, read = "Once upon a time", 5
    (expected,) = generate(short_stories, prompt, GenerationSettings(temperature=0)).answers
    assert (expected.read, len(expected.tokens), expected.ended) == (read, 32 - read, "context")
    # without a length it is the server's, not the 20 tokens of transformers
    for settings in ({"max_new_tokens": 60}, {}, {"max_length": 60}):
        assert answers_of(short_stories, prompt, **settings) == [(expected.text, 32 - read, True)] * 2
    assert [count for _, count, _ in answers_of(short_stories, prompt, max_length=9)] == [9 - read] * 2


def test_a_prompt_with_its_own_start_token_is_read_as_generate_reads_it(short_stories: Path) -> None:
    prompt = "<s>Once upon a time"
    (expected,) = generate(short_stories, prompt, GenerationSettings(temperature=0, max_new_tokens=6)).answers
    assert expected.read == 5
    assert [text for text, _, _ in answers_of(short_stories, prompt, max_new_tokens=6)] == [expected.text] * 2


def test_a_prompt_needs_tokens_that_the_model_has(short_stories: Path) -> None:
    from scale_surgery.talking.server import Refusal, _fit

    model = transformers.AutoModelForCausalLM.from_pretrained(short_stories)
    tokenizer = transformers.AutoTokenizer.from_pretrained(short_stories)
    for ids, message in (
        ([], "^The prompt has no token, expected"),
        ([1, 512], r"^The model: .* the id 512 for a text, expected"),
    ):
        with pytest.raises(Refusal, match=message):
            _fit(model, tokenizer, {"input_ids": torch.tensor([ids])}, transformers.GenerationConfig())


def test_an_answer_goes_on_with_its_prompt_up_to_a_stop(short_stories: Path) -> None:
    prompt, story = "Once upon a", " time, there was a little girl named Lily."
    for length, stops, text in (
        (2, None, " time,"),
        (24, ["."], story[:-1]),
        (24, ["girl named", "Lily"], " time, there was a little "),
        # what may begin a stop and begins none is not lost
        (12, ["Lily. And"], story),
        (2, [","], " time"),
    ):
        answers = answers_of(short_stories, prompt, max_new_tokens=length, stop_strings=stops)
        is_cut = text in (" time,", story)
        assert [(answer, cut) for answer, _, cut in answers] == [(text, is_cut)] * 2
        assert (generate(short_stories, prompt, GREEDY).answers[0].text).startswith(text)


def test_a_stop_that_begins_in_the_prompt_is_none(short_stories: Path) -> None:
    prompt = "Once upon a"
    for stop in ("a time", " a time,"):
        assert answers_of(short_stories, prompt, max_new_tokens=2, stop_strings=[stop]) == [(" time,", 2, True)] * 2


def test_an_answer_ends_at_the_token_of_the_tokenizer_too(short_stories: Path, tmp_path: Path) -> None:
    """As `generate` does; and one that ends at the greatest length was not cut."""
    folder = Path(shutil.copytree(short_stories, tmp_path / "stories"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    comma = tokenizer("Once upon a time,")["input_ids"][-1]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(comma)
    tokenizer.save_pretrained(folder)
    for length, is_cut in ((9, False), (2, False), (1, True)):
        answers = answers_of(folder, "Once upon a", max_new_tokens=length)
        assert [(count, cut) for _, count, cut in answers] == [(min(length, 2), is_cut)] * 2
    # the request's own end
    (whole, _) = answers_of(folder, "Once upon a", max_new_tokens=9, eos_token_id=[2])
    assert whole[1] == 9


def test_a_prompt_may_end_with_half_a_character(short_stories: Path) -> None:
    whole, streamed = answers_of(short_stories, "Once upon\ufffd", max_new_tokens=4)
    assert whole[0].strip() == streamed[0].strip() and "Once" not in streamed[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"num_beams": 3, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
    ],
)
def test_settings_of_the_folder_that_the_server_cannot_answer_with(
    short_stories: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(short_stories, tmp_path / "stories"))
    with edited(folder / "generation_config.json") as content:
        content.update(settings)
    # a request may come with settings of its own, and with those of the folder
    for own in ({}, settings):
        whole, streamed = answers_of(folder, "Once upon a time", max_new_tokens=6, **own)
        assert whole[1] == streamed[1] == 6 and streamed[0].startswith(", there was")
        assert whole == streamed or "num_beams" in settings


def test_an_error_in_a_stream_can_stand_between_quotes(short_stories: Path) -> None:
    from scale_surgery.talking.server import InferenceThread, OnePath

    def fail(**options: Any) -> None:
        raise ValueError('no "such"\nthing \\ here')

    model = transformers.AutoModelForCausalLM.from_pretrained(short_stories)
    model.generate = fail
    tokenizer = transformers.AutoTokenizer.from_pretrained(short_stories)
    inputs, config = tokenizer("Once", return_tensors="pt"), transformers.GenerationConfig()

    async def asked() -> Any:
        path = OnePath(InferenceThread(), model, None)
        return await path.generate_streaming(model, tokenizer, inputs, config, request_id="1")[0].get()

    assert json.loads(f'"{asyncio.run(asked()).msg}"') == "no 'such' thing / here"


def test_what_is_shown_of_a_server() -> None:
    rows = render_served(serving.Served("both", serving.Address().url, False, ("base", "law")))
    assert shown(rows).splitlines()[1:3] == ["model         both", "single paths  base, law"]
    assert "single paths" not in shown(render_served(serving.Served("wide", "http://127.0.0.1:8000/v1", False)))
    assert serving.Address().url == "http://127.0.0.1:8000/v1"
    assert serving.Address("::1", 80).url == "http://[::1]:80/v1"


# ---- what needs one ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A server in a process of its own, with a client, and the same model alone in this process."""

    process: subprocess.Popen[str]
    folder: Path
    served: dict[str, Any]
    client: Any

    def complete(self, prompt: str, tokens: int = 1, model: str | None = None, **options: Any) -> Any:
        name = model or self.served["model"]
        return self.client.completions.create(model=name, prompt=prompt, max_tokens=tokens, temperature=0, **options)

    @property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    def answer(self, asked: tuple[str, int], model: str | None = None) -> str:
        return str(self.complete(*asked, model).choices[0].text)

    def streamed(self, asked: tuple[str, int], model: str | None = None) -> str:
        return "".join(part.choices[0].text for part in self.complete(*asked, model, stream=True))

    def converse(self, question: str, model: str | None = None) -> str:
        messages = [{"role": "user", "content": question}]
        name = model or self.served["model"]
        made = self.client.chat.completions.create(model=name, messages=messages, max_tokens=5, temperature=0)
        return str(made.choices[0].message.content)

    def alone(self, *asked: tuple[str, int]) -> list[str]:
        """What `generate` gives without a server."""
        tokenizer = self.tokenizer
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).eval()
        answers = []
        for prompt, tokens in asked:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            answers.append(tokenizer.decode(made, skip_special_tokens=True))
        return answers


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Running]:
    import openai

    command = [sys.executable, "-m", "scale_surgery", "serve", str(folder), "--port", str(free_port()), "--json"]
    with (
        (folder.parent / f"{folder.name}.log").open("w+") as log,
        subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT, text=True) as process,
    ):
        try:
            url = f"http://127.0.0.1:{command[6]}"
            wait_for(f"{url}/health", process, Path(log.name))
            text = Path(log.name).read_text()
            served = json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]
            client = openai.OpenAI(base_url=served["url"], api_key="none", max_retries=0, timeout=120)
            yield Running(process, folder, served, client)
        finally:
            process.kill()


def wait_for(url: str, process: subprocess.Popen[str], log: Path) -> None:
    end = monotonic() + 120
    while monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module", params=("routed", "fused", "expanded"))
def server(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Iterator[Running]:
    # one by the code in its folder
    with running(folders(request.param), *(["--trust-remote-code"] if request.param == "expanded" else [])) as made:
        yield made


@needs_server
def test_answers_alone_streamed_and_at_once_are_those_of_generate(server: Running) -> None:
    expected = server.alone(*ASKED)
    assert len(set(expected)) == len(ASKED)  # an answer to another request would be seen
    assert [server.answer(asked) for asked in ASKED] == expected
    with ThreadPoolExecutor(len(ASKED)) as pool:
        assert list(pool.map(server.answer, ASKED)) == expected
        assert list(pool.map(server.streamed, ASKED)) == expected


@needs_server
def test_the_example_of_the_documentation(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [body for body in blocks(ROOT / "docs" / "serving.md", "text") if "from openai import" in body]
    url, model = "http://127.0.0.1:8000/v1", 'model="routed"'
    assert url in example and model in example
    run_python(example.replace(url, server.served["url"]).replace(model, f"model={server.served['model']!r}"))
    question = "Q: What is the birth city of Hugo Pickett?\nA:"
    assert question.replace("\n", "\\n") in example
    assert capsys.readouterr().out == server.alone((question, 8))[0] != ""


@needs_server
def test_a_model_without_paths_has_one_name(server: Running) -> None:
    import openai

    assert [model.id for model in server.client.models.list()] == [server.served["model"]]
    assert server.complete("Q:").model == server.served["model"]
    with pytest.raises(openai.NotFoundError, match="The model 'base' is not served here"):
        server.answer(ASKED[0], "base")


@needs_server
def test_conversations_need_a_chat_template(server: Running) -> None:
    import openai

    question = QUESTIONS[0].removeprefix("Q: ").removesuffix("\nA:")

    assert server.served["has_chat_template"] is (server.folder.name == "routed")
    if server.served["has_chat_template"]:
        assert server.converse(question) == server.alone((QUESTIONS[0], 5))[0]
    else:
        with pytest.raises(openai.BadRequestError, match=r"has no chat template, .* Ask /v1/completions\."):
            server.converse(question)


@needs_server
def test_a_request_that_cannot_be_answered_is_a_bad_one(server: Running) -> None:
    import openai

    name, create = server.served["model"], server.client.completions.create
    context = json.loads((server.folder / "config.json").read_text())["max_position_embeddings"]
    for options in ({}, {"stream": True}):
        with pytest.raises(
            openai.BadRequestError, match=rf"has \d+ tokens, expected fewer than {context}, the context"
        ) as refused:
            create(model=name, prompt="Anna " * context, max_tokens=2, **options)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", None)
    with pytest.raises(openai.BadRequestError, match="logprobs, n: not offered") as refused:
        create(model=name, prompt="Q:", max_tokens=2, n=2, logprobs=1)
    assert refused.value.code == "unsupported_parameter"
    assert create(model=name, prompt="Q:", max_tokens=2, n=1).choices, "and the next one is answered"


@needs_server
def test_mistakes_are_errors_in_the_form_of_openai(server: Running) -> None:
    import openai

    def failed(path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        with pytest.raises(openai.APIStatusError) as refused:
            server.client.post(path, cast_to=object, body=body, **options)
        error = refused.value.response.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        return refused.value.status_code, error

    question = {"prompt": "Q:"}
    for body, named, message in (
        ({"prompt": ["Q:"]}, "prompt", "prompt is ['Q:'], expected one text."),
        (question | {"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected a whole number, at least 1."),
        (question | {"generation_config": '{"max_length": 1}'}, None, "`max_new_tokens` must be greater than 0"),
        (["Q:"], None, "Input should be a valid dictionary, expected an object in JSON."),
    ):
        status, error = failed("/completions", body)
        assert (status, error["param"], error["code"]) == (400, named, "invalid_value") and message in error["message"]
    status, error = failed("/chat/completions", {"stream": True})
    assert (status, error["param"], error["code"]) == (400, "messages", "missing_required_parameter")
    assert failed("/nowhere", {})[0] == 404
    if server.served["has_chat_template"]:
        asked = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
        status, error = failed("/chat/completions", asked | {"logit_bias": {"9999999": 1}})
        assert (status, error["param"]) == (400, "logit_bias") and "names the token 9999999" in error["message"]
        status, error = failed("/chat/completions", {"messages": [{"content": "Who?"}]})
        assert status == 400 and "The conversation cannot be read (KeyError('role'))" in error["message"]
        biased = server.client.chat.completions.create(
            model=server.served["model"], logit_bias={"5": 100}, **asked, temperature=0
        )
        assert biased.choices[0].message.content == server.tokenizer.decode([5])


@needs_server
def test_answers_end_at_a_stop_or_where_the_context_does(server: Running) -> None:
    context = json.loads((server.folder / "config.json").read_text())["max_position_embeddings"]
    (whole,) = server.alone(ASKED[1])
    assert len(whole) > 4
    stop = whole[3:5]
    for options in ({"stop": stop}, {"stop": ["nowhere", stop], "stream": True}):
        made = server.complete(*ASKED[1], **options)
        parts = list(made) if "stream" in options else [made]
        assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"
    # a generation config that says nothing of the length
    endless = {"generation_config": json.dumps({"min_new_tokens": 10**7, "do_sample": False})}
    made = server.client.completions.create(model=server.served["model"], prompt="Q:", extra_body=endless)
    assert (made.usage.total_tokens, made.choices[0].finish_reason) == (context, "length")


@pytest.fixture(scope="module")
def mixed(folders: Callable[[str], Path]) -> Iterator[Running]:
    """A composed folder, served so that one of its expansions answers for its own name."""
    place = folders("expanded").parent
    art_folder = shake(expand(SHIPPED, Request("0-1", init_w22="random"), place / "other").path, 1)
    extracts = {
        name: extract(folder, place / name).path for name, folder in (("law", folders("expanded")), ("art", art_folder))
    }
    made = compose(SHIPPED, extracts, place / "mixed").path
    (made / "chat_template.jinja").write_text(CHAT)
    with running(made, "--expansion", "art") as server:
        yield server


def by_generate(folder: Path, name: str | None, *asked: tuple[str, int], raw: bool = True) -> list[str]:
    """What scale-surgery generate gives, --expansion NAME or without."""
    answers = []
    for prompt, tokens in asked:
        settings = GenerationSettings(temperature=0, max_new_tokens=tokens, expansion=name, raw=raw)
        answers.append(generate(folder, prompt, settings).answers[0].text)
    return answers


@needs_server
def test_requests_at_once_choose_their_paths_by_name(mixed: Running) -> None:
    names = {None: "art", "base": "base", "law": "law", "art": "art"}
    expected = {path: by_generate(mixed.folder, path, *ASKED) for path in names.values()}
    assert len({str(answers) for answers in expected.values()}) == 3, "the control: paths differ"
    assert expected["base"] == by_generate(SHIPPED, None, *ASKED)
    wanted = [(asked, name, expected[names[name]][place]) for place, asked in enumerate(ASKED) for name in names]
    with ThreadPoolExecutor(len(wanted)) as pool:
        for ask in (mixed.answer, mixed.streamed):
            assert list(pool.map(lambda case, ask=ask: ask(*case[:2]), wanted)) == [case[2] for case in wanted]


@needs_server
def test_conversations_choose_their_paths_by_name(mixed: Running) -> None:
    question = QUESTIONS[0].removeprefix("Q: ").removesuffix("\nA:")
    for name in mixed.served["paths"]:
        assert [mixed.converse(question, name)] == by_generate(mixed.folder, name, (question, 5), raw=False)
        made = mixed.client.responses.create(
            model=name, input=question, max_output_tokens=5, temperature=0, stream=False
        )
        assert (made.output_text, made.model) == (mixed.converse(question, name), name)


@needs_server
def test_a_cancelled_request_leaves_no_path_behind(mixed: Running) -> None:
    stream = mixed.complete("Q:", 10**7, "law", stream=True, extra_body=ENDLESS)
    assert [part.choices[0].text for part, _ in zip(stream, range(3), strict=False)]
    stream.close()
    assert mixed.answer(ASKED[1], "base") == by_generate(SHIPPED, None, ASKED[1])[0]
    assert mixed.answer(ASKED[1]) == by_generate(mixed.folder, "art", ASKED[1])[0]


@needs_server
def test_names_are_listed_and_others_refused(mixed: Running) -> None:
    import openai

    names = [mixed.served["model"], "base", "law", "art"]
    assert [model.id for model in mixed.client.models.list()] == names and mixed.served["paths"] == names[1:]
    assert [mixed.complete("Q:", model=name).model for name in names] == names
    for ask in (mixed.answer, mixed.streamed):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(ASKED[0], "lw")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert f"The model 'lw' is not served here, expected {' or '.join(names)}." in refused.value.message
    with pytest.raises(openai.NotFoundError, match="The model 'lw' is not served here"):
        mixed.converse("Who?", "lw")


@needs_server
def test_another_models_code_is_not_run(server: Running, folders: Callable[[str], Path], tmp_path: Path) -> None:
    stranger, mark = tmp_path / "stranger", tmp_path / "was-run"
    shutil.copytree(folders("stock"), stranger)
    with edited(stranger / "config.json") as config:
        config.update(model_type="strange", auto_map={"AutoConfig": "strange.Strange"})
    code = f"import pathlib, transformers\npathlib.Path({str(mark)!r}).touch()\n"
    (stranger / "strange.py").write_text(
        f"{code}class Strange(transformers.LlamaConfig):\n    model_type = 'strange'\n"
    )
    body = json.dumps({"model": str(stranger)}).encode()
    url = server.served["url"].replace("/v1", "/load_model")
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert '"error"' in reply.read().decode()
    assert not mark.exists()
    # with trust it is
    transformers.AutoConfig.from_pretrained(stranger, trust_remote_code=True)
    assert mark.exists()


@needs_server
def test_ctrl_c_ends_it_without_an_error(folders: Callable[[str], Path]) -> None:
    with running(folders("stock")) as server:
        assert server.answer(ASKED[0]) == server.alone(ASKED[0])[0]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
    assert "Traceback" not in (folders("stock").parent / "stock.log").read_text()
