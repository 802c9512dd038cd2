"""transformers' own server, with an expanded model that it knows: `make test-serve` installs what the server needs."""

from __future__ import annotations

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
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.running.options import RunOptions
from scale_surgery.show.tables_push import render_served
from scale_surgery.talking import serve as serving
from tests.command import run
from tests.composed import Made
from tests.conftest import edited, shake
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
        ("law", None, PlanError, r"^law: names the folder and a path in it, .* Give the folder as \./law\.$"),
        ("models@home/wide", None, CheckpointError, r"^models@home/wide: .* follows @ as a revision\. Give a path"),
        ("empty", None, CheckpointError, "empty: the folder is empty"),
    ):
        with pytest.raises(error, match=message):
            serve(path, serving.Address(port=free_port()), expansion=name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"^127\.0\.0\.1, port {port}: cannot listen there .* --port\.$"):
            serve("nowhere", serving.Address(port=port))
    with pytest.raises(ServingError, match=r"^port: 70000, expected a port, from 1 to 65535"):
        serve("nowhere", serving.Address(port=70000))


def test_missing_packages_are_named_with_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NEEDED", ("json", "fastapi_of_nowhere", "uvicorn_of_nowhere"))
    result = run("serve", "nowhere", "--port", free_port(), code=1)
    assert "not installed: fastapi_of_nowhere, uvicorn_of_nowhere. " in result.output.replace("\n", " ")
    assert "pip install 'scale-surgery[serve]'" in result.output


def test_fields_that_would_be_ignored_are_refused_by_name() -> None:
    from scale_surgery.talking.server import CHAT, COMPLETIONS, Refusal, check_fields

    usual = {"n": 1, "logprobs": False, "top_logprobs": None, "presence_penalty": 0.0, "tool_choice": "auto"}
    check_fields(CHAT, usual | {"messages": [], "max_tokens": 5, "response_format": {"type": "text"}})
    for fields, named in (
        ({"n": 2, "logprobs": True, "prompt": "Q:"}, "logprobs, n"),
        ({"logprobs": 0}, "logprobs"),  # of one token each
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}, "what": 1}, "response_format, what"),
    ):
        with pytest.raises(Refusal, match=rf"^{named}: not offered by this server, expected some of ") as refused:
            check_fields(COMPLETIONS, usual | fields)
        assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")


def test_what_is_shown_of_a_server() -> None:
    rows = render_served(serving.Served("both", serving.Address().url, False, ("base", "law")))
    assert shown(rows).splitlines()[1:3] == ["model     both", "or alone  base, law"]
    assert "or alone" not in shown(render_served(serving.Served("wide", "http://127.0.0.1:8000/v1", False)))
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
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
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
