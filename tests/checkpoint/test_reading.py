"""Files that others made: only regular ones are opened, and JSON that is not ours is refused with its name."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import (
    PlanError,
    PosteriorRouter,
    Probes,
    Request,
    RunOptions,
    SurgeryError,
    TrainingSettings,
    evaluate,
    expand,
    extract,
    inspect,
    load_plan,
    merge,
    plan,
    report,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.checkpoint.folder import open_checkpoint, read_json
from scale_surgery.checkpoint.reading import (
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    collector_paused,
    differing_keys,
    parse_json,
    read_bytes,
)
from scale_surgery.errors import CheckpointError, DataError, Problem
from scale_surgery.running.prompts import read_prompts
from scale_surgery.text.documents import read_documents
from tests.conftest import problems


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """What waits for a pipe waits for ever: end such a test."""

    def give_up(*_: object) -> None:
        raise TimeoutError("still waiting")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_socket(file: Path) -> None:
    # a path of a socket is at most 108 bytes long
    before = Path.cwd()
    os.chdir(file.parent)
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(file.name)
    os.chdir(before)


NOT_REGULAR: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a socket": make_socket,
    "a folder": Path.mkdir,
}

OF_A_BASE: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda path, out: inspect(path),
    "plan": lambda path, out: plan(path, Request("0")),
    "expand": lambda path, out: expand(path, Request("0"), out),
    "expand --method depth": lambda path, out: expand(path, Request("0", method="depth"), out),
}
OF_AN_EXPANSION: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda path, out: verify(path, probes=None),
    "report": lambda path, out: report(path, files_only=True),
    "extract": lambda path, out: extract(path, out),
    "route-export": lambda path, out: route_export(path, out, PosteriorRouter()),
    "merge": lambda path, out: merge(path, out),
    "train": lambda path, out: train(path, [Path(__file__)], out, TrainingSettings(steps=1)),
}


def refusals(call: Callable[[Path, Path], object], path: Path, tmp_path: Path) -> list[Problem]:
    """The problems for which a public function refuses a folder; it leaves nothing behind."""
    before = {file.name for file in tmp_path.iterdir()}
    with pytest.raises(SurgeryError) as raised:
        call(path, tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == before
    str(raised.value).encode("utf-8")  # it can be printed
    return list(raised.value.problems)


VERBS = {**OF_A_BASE, **OF_AN_EXPANSION}
RECORDS = ("config.json", "surgery.json", "model.safetensors.index.json")


@pytest.fixture
def model(verb: str, llama_base: Path, pair_of: Callable[..., Any], tmp_path: Path) -> Path:
    """A copy of what a function works on: the tiny llama, or its expansion."""
    if verb in OF_A_BASE:
        return llama_base
    return Path(shutil.copytree(pair_of("llama", "adapt").path, tmp_path / "expanded"))


@pytest.mark.parametrize("kind", ("a pipe", "a device", "a socket"))
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *product(OF_A_BASE, ("config.json", "model.safetensors", "tokenizer.json", "LICENSE")),
        *product(OF_AN_EXPANSION, (*RECORDS, "expanded_model.py")),
    ],
)
def test_only_regular_files_are_opened(model: Path, tmp_path: Path, verb: str, name: str, kind: str) -> None:
    (model / name).unlink(missing_ok=True)
    NOT_REGULAR[kind](model / name)
    assert refusals(VERBS[verb], model, tmp_path) == [Problem("file-not-regular", model / name, kind=kind)]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="a file of Linux")
def test_files_of_the_system_give_nothing(llama_base: Path, tmp_path: Path) -> None:
    """They are regular by their mode, say that they have no bytes, and give what is nobody's business."""
    (llama_base / "config.json").unlink()
    (llama_base / "config.json").symlink_to("/proc/self/environ")
    assert read_bytes(llama_base / "config.json") == b""
    (problem,) = refusals(OF_A_BASE["plan"], llama_base, tmp_path)
    assert (problem.code, problem.where) == ("json-unreadable", str(llama_base / "config.json"))


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_texts_and_plans_are_regular_files_too(base_of: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file.jsonl"
    NOT_REGULAR[kind](file)
    with pytest.raises(CheckpointError, match=rf"file\.jsonl: cannot be read as text \(it is {kind}"):
        read_prompts(file)
    (problem,) = problems(load_plan, base_of("llama"), file, error=PlanError)
    assert (problem.code, problem.where) == ("plan-unreadable", str(file)) and f"it is {kind}" in problem.found
    if kind != "a folder":  # a saved dataset is one
        with pytest.raises(DataError, match=rf"file\.jsonl: cannot be read as text \(it is {kind}"):
            list(read_documents([file]))


def test_a_link_to_a_regular_file_is_one(llama_base: Path, tmp_path: Path) -> None:
    moved = (llama_base / "config.json").rename(llama_base / "moved.json")
    (llama_base / "config.json").symlink_to(moved.name)
    assert expand(llama_base, Request("0"), tmp_path / "out").path.is_dir()


def test_a_file_that_is_read_whole_has_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(MAX_TEXT_BYTES + 1)
    error = "it has 268,435,457 bytes, expected at most 268,435,456"
    assert problems(read_json, file, error=CheckpointError) == [Problem("json-unreadable", file, error=error)]


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested without end"),
    "rather deep": (b'{"a":' * 500 + b"1" + b"}" * 500, f"it is nested deeper than {MAX_DEPTH} levels"),
    "a byte order mark": (
        b"\xef\xbb\xbf{}",
        "it begins with a byte order mark, which transformers does not read either",
    ),
    "half a character": (b'{"a": "\\ud800"}', "it holds half a character, '\\ud800'"),
    "half a character as a key": (b'{"\\udfff": 1}', "it holds half a character, '\\udfff'"),
    "many digits": (b'{"a": ' + b"1" * 5000 + b"}", "it holds a number of 5000 digits, expected at most 100"),
    "no UTF-8": (b'{"a": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("bad", BAD_JSON)
def test_a_config_that_nobody_could_work_with(llama_base: Path, tmp_path: Path, bad: str) -> None:
    content, reason = BAD_JSON[bad]
    (llama_base / "config.json").write_bytes(content)
    (problem,) = refusals(OF_A_BASE["plan"], llama_base, tmp_path)
    assert (problem.code, problem.where) == ("json-unreadable", str(llama_base / "config.json"))
    assert problem.values["error"].startswith(reason)


def test_a_config_that_is_a_list(llama_base: Path, tmp_path: Path) -> None:
    (llama_base / "config.json").write_text("[1]")
    wanted = Problem("json-no-object", llama_base / "config.json", kind="list")
    assert refusals(OF_A_BASE["plan"], llama_base, tmp_path) == [wanted]


@pytest.mark.parametrize(("verb", "name"), [*product(OF_A_BASE, ("config.json",)), *product(OF_AN_EXPANSION, RECORDS)])
def test_every_function_reads_records_so(model: Path, tmp_path: Path, verb: str, name: str) -> None:
    content, reason = BAD_JSON["half a character"]
    (model / name).write_bytes(content)
    (problem,) = refusals(VERBS[verb], model, tmp_path)
    assert (problem.code, problem.where) == ("json-unreadable", str(model / name))
    assert problem.values["error"].startswith(reason)


def test_whole_characters_and_numbers_that_stand_for_no_limit_are_read() -> None:
    assert parse_json('{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}

    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] > 1e29


def first(record: dict[str, Any]) -> dict[str, Any]:
    return record["expansions"]["default"]


WRONG_KINDS: dict[str, tuple[Callable[[dict[str, Any]], object], dict[str, str]]] = {
    "several": (
        lambda record: (
            record.update(base_name=True, left_out="x", base_tensors={"a": 1}) or first(record).update(training=[3])
        ),
        {
            "base_name": "a text",
            "base_tensors.a": "an object",
            "left_out": "a list",
            "expansions.default.training[0]": "an object",
        },
    ),
    "a block": (
        lambda record: first(record)["facts"]["architecture"]["kinds"][0]["blocks"][0]["linears"][0].update(roles=3),
        {"expansions.default.facts.architecture.kinds[0].blocks[0].linears[0].roles": "a list"},
    ),
    "a verification": (
        lambda record: record.update(verification={"passed": 1}),
        {"verification.passed": "true or false"},
    ),
}


@pytest.mark.parametrize(
    ("verb", "wrong"), [*product(("verify",), WRONG_KINDS), *product((*OF_AN_EXPANSION, "strip"), ("several",))]
)
def test_values_of_other_kinds_are_refused_when_they_are_read(
    model: Path, tmp_path: Path, verb: str, wrong: str
) -> None:
    change, kinds = WRONG_KINDS[wrong]
    record = read_json(model / "surgery.json")
    change(record)
    (model / "surgery.json").write_text(json.dumps(record))
    (problem,) = refusals(OF_AN_EXPANSION.get(verb, strip), model, tmp_path)
    assert (problem.code, problem.where) == ("record-incomplete", str(model / "surgery.json"))
    unfit = [detail for detail in problem.details if detail.code == "value-unfit"]
    assert {detail.where: detail.values["kind"] for detail in unfit} == kinds


@pytest.mark.parametrize("verb", ("verify",))
def test_a_file_in_a_record_has_a_name_inside_the_folder(model: Path, tmp_path: Path, verb: str) -> None:
    record = read_json(model / "surgery.json")
    record["base_files"]["a\0b"] = record["base_files"]["generation_config.json"]
    (model / "surgery.json").write_text(json.dumps(record))
    (problem,) = refusals(VERBS[verb], model, tmp_path)
    assert problem == Problem("record-escape", model / "surgery.json", name="a\0b")


def test_names_that_no_record_can_hold(llama_base: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (llama_base / name).write_text("x")
    for call in OF_A_BASE.values():
        wanted = Problem("name-no-unicode", llama_base, name=b"caf\xe9.txt")
        assert refusals(call, llama_base, tmp_path) == [wanted]
    (llama_base / name).unlink()
    for name in ("a\\b.txt", "\\"):
        (llama_base / name).write_text("x")
    for call in OF_A_BASE.values():
        wrong = [llama_base / name for name in ("\\", "a\\b.txt")]
        assert refusals(call, llama_base, tmp_path) == [Problem("name-with-backslash", file) for file in wrong]


def test_an_index_without_metadata_is_one(sharded_base: Path) -> None:
    index = sharded_base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": read_json(index)["weight_map"]}))
    assert open_checkpoint(sharded_base).shards


@pytest.mark.parametrize(
    ("values", "place"),
    (
        ({"a": float("nan")}, "a"),
        ({"rope_scaling": {"factor": float("nan")}}, "rope_scaling.factor"),
        ({"limits": [0.0, float("nan")]}, "limits[1]"),
    ),
)
def test_a_config_whose_numbers_are_none(llama_base: Path, tmp_path: Path, values: dict[str, Any], place: str) -> None:
    (llama_base / "config.json").write_text(json.dumps(read_json(llama_base / "config.json") | values))
    for call in OF_A_BASE.values():
        wanted = Problem("config-nan", f"{llama_base / 'config.json'}: {place}")
        assert refusals(call, llama_base, tmp_path) == [wanted]


@pytest.mark.parametrize("values", ({"hidden_act": 3}, {"initializer_range": []}))
def test_a_config_that_transformers_refuses(llama_base: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    (llama_base / "config.json").write_text(json.dumps(read_json(llama_base / "config.json") | values))
    for call in OF_A_BASE.values():
        (problem,) = refusals(call, llama_base, tmp_path)
        assert "config.json: transformers does not read it (" in str(problem)


def test_infinity_in_a_config_is_kept(llama_base: Path, tmp_path: Path) -> None:
    config = read_json(llama_base / "config.json") | {"time_step_limit": [0.0, float("inf")]}
    (llama_base / "config.json").write_text(json.dumps(config))
    expanded = expand(llama_base, Request("0"), tmp_path / "expanded").path
    assert read_json(expanded / "config.json")["time_step_limit"] == [0.0, float("inf")]
    assert verify(expanded, probes=Probes(max_new_tokens=1), run=RunOptions()).passed


def test_a_model_whose_shard_is_empty(llama_base: Path, tmp_path: Path) -> None:
    (llama_base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for call in OF_A_BASE.values():
        assert refusals(call, llama_base, tmp_path) == [Problem("weights-empty", "model.safetensors")]


def test_the_garbage_collector_is_paused_and_runs_again() -> None:
    with pytest.raises(ValueError), collector_paused():
        assert not gc.isenabled()
        parse_json("{")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_damaged_tokenizer_is_none(llama_base: Path, tmp_path: Path) -> None:
    """tokenizers raises a bare Exception."""
    (llama_base / "tokenizer.json").write_text("{")
    text = tmp_path / "text.txt"
    text.write_text("Mara Lind")
    with pytest.raises(DataError, match="has no tokenizer that loads"):
        evaluate([llama_base], [text], [])


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (False, 0, False),
        (False, 0.0, False),
        (1, True, False),
        (1, 1.0, True),
        ([{"a": 0}], [{"a": False}], False),
        ([{"a": 1}], [{"a": 1.0}], True),
        ([1], [1, 1], False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_values_are_compared_as_json_has_them(left, right, is_same):
    """false is no number, though Python says so; how a number is written does not matter."""
    for first, second in ((left, right), (right, left)):
        assert differing_keys({"key": first, "same": [1]}, {"key": second, "same": [1]}) == ["key"] * (not is_same)


def test_null_is_not_the_same_as_nothing():
    assert differing_keys({"a": None}, {}) == differing_keys({}, {"a": None}) == ["a"]
