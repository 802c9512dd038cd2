"""What a spoiled surgery.json says of its plan is refused when it is read, by every command, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import (
    CheckpointError,
    PosteriorRouter,
    Request,
    expand,
    extract,
    merge,
    report,
    route_export,
    strip,
    verify,
)
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.errors import Problem
from scale_surgery.modeling import AUTO_CLASSES
from tests.conftest import digests, edited, problems, shake

Change = Callable[[dict[str, Any]], None]
POSTERIOR = PosteriorRouter().for_expansions(1).settings


@pytest.fixture(scope="module")
def expanded(base_of, tmp_path_factory) -> Path:
    request = Request("1-2", variant="adapt", collaborate="both")
    return expand(base_of("llama"), request, tmp_path_factory.mktemp("expanded") / "adapt").path


@pytest.fixture
def adapt(expanded, tmp_path) -> Path:
    return Path(shutil.copytree(expanded, tmp_path / "adapt"))


@pytest.fixture
def grown(base_of, tmp_path) -> Path:
    return expand(base_of("llama"), Request("1-2", method="grow"), tmp_path / "grown").path


@pytest.fixture(scope="module")
def merged(expanded, tmp_path_factory) -> Path:
    return merge(expanded, tmp_path_factory.mktemp("merged") / "fused", "fused").path


@pytest.fixture
def fused(merged, tmp_path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "fused"))


def edit(path: Path, change: Change) -> Path:
    with edited(path / "surgery.json") as record:
        change(record)
    return path


def request(content: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = content["expansions"]["default"]["request"]
    return asked


def facts(content: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = content["expansions"]["default"]["facts"]
    return known


def refuse(path: Path) -> list[Problem]:
    """The problems for which each reader refuses a folder."""
    readers = {
        "verify": lambda: verify(path, probes=None),
        "strip": lambda: strip(path, path.with_name("out")),
        "report": lambda: report(path, files_only=True),
        "extract": lambda: extract(path, path.with_name("out")),
    }
    found = {name: problems(read, error=CheckpointError) for name, read in readers.items()}
    assert not path.with_name("out").exists() and not list(path.parent.rglob("outside.txt"))
    assert all(each == found["verify"] for each in found.values()), found
    return found["verify"]


def unfit(path: Path) -> list[Problem]:
    """The entries of surgery.json for which each reader refuses a folder."""
    (problem,) = refuse(path)
    assert (problem.code, problem.where) == ("record-incomplete", str(path / "surgery.json"))
    return list(problem.details)


DEFAULT = "expansions.default"
SPOILED: dict[str, tuple[Change, list[Problem]]] = {
    "a list as method": (
        lambda content: request(content).update(method=["scale"]),
        [Problem("value-unfit", f"{DEFAULT}.request.method", value="['scale']", kind="a text")],
    ),
    "copies": (
        lambda content: request(content).update(copies=1),
        [Problem("value-unfit", f"{DEFAULT}.request.copies", value="1", kind="from 2 to 1000")],
    ),
    "no number of copies": (
        lambda content: request(content).update(copies="x"),
        [Problem("value-unfit", f"{DEFAULT}.request.copies", value="'x'", kind="a whole number")],
    ),
    "width": (
        lambda content: request(content).update(up_width="4"),
        [Problem("value-unfit", f"{DEFAULT}.request.up_width", value="'4'", kind="a whole number")],
    ),
    "name": (
        lambda content: request(content).update(name="law"),
        [Problem("value-unfit", f"{DEFAULT}.request.name", value="'law'", kind="'default'")],
    ),
    "no name": (
        lambda content: content.update(expansions={"a b": content["expansions"].pop("default")}),
        [
            Problem(
                "value-unfit", "expansions.a b.request.name", value="'default'", kind="letters, digits and underscores"
            )
        ],
    ),
    "a number of heads": (
        lambda content: facts(content)["architecture"]["kinds"][0]["blocks"][0]["attributes"].update(heads="x"),
        [
            Problem(
                "value-unfit",
                f"{DEFAULT}.facts.architecture.kinds[0].blocks[0].attributes.heads",
                value="'x'",
                kind="'query_heads', 'key_value_heads' or 'query_features'",
            )
        ],
    ),
    "no base tensors": (
        lambda content: content.update(base_tensors=None),
        [Problem("value-unfit", "base_tensors", value="None", kind="an object")],
    ),
    "no base files": (
        lambda content: content.update(base_files={}),
        [Problem("key-unknown", "replaced.config.json"), Problem("key-missing", "base_files.config.json")],
    ),
    "a text of no base file": (
        lambda content: content["replaced"].update({"../outside.txt": "boo"}),
        [Problem("key-unknown", "replaced.../outside.txt")],
    ),
    "bytes of a file": (
        lambda content: content["base_files"]["config.json"].update(bytes=None),
        [Problem("value-unfit", "base_files.config.json.bytes", value="None", kind="a whole number")],
    ),
    "no expansion": (lambda content: content.update(expansions={}), [Problem("value-empty", "expansions")]),
    "tensors": (
        lambda content: content["expansions"]["default"].update(tensors="x"),
        [Problem("value-unfit", f"{DEFAULT}.tensors", value="'x'", kind="an object")],
    ),
    "trained": (
        lambda content: content["expansions"]["default"].update(trained=["x"]),
        [Problem("value-unfit", f"{DEFAULT}.trained", value="['x']", kind="an object")],
    ),
    "no sizes": (
        lambda content: facts(content).update(sizes=None),
        [Problem("value-unfit", f"{DEFAULT}.facts.sizes", value="None", kind="an object")],
    ),
    "code": (
        lambda content: content.update(code=[]),
        [Problem("value-unfit", "code", value="[]", kind="an object")],
    ),
    "a text that is no object": (
        lambda content: content["replaced"].update({"config.json": "[]"}),
        [Problem("value-unfit", "replaced.config.json", value="'[]'", kind="a JSON object")],
    ),
    "verification": (
        lambda content: content.update(verification={}),
        [Problem("key-missing", "verification.passed"), Problem("key-missing", "verification.date")],
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_entries_are_checked_when_it_is_read(adapt: Path, name: str) -> None:
    change, wanted = SPOILED[name]
    assert unfit(edit(adapt, change)) == wanted


def test_a_text_that_is_no_json_is_refused_when_it_is_read(adapt: Path) -> None:
    (problem,) = unfit(edit(adapt, lambda content: content["replaced"].update({"config.json": "{"})))
    assert problem.code == "other-program" and "Expecting property" in problem.values["error"]


FACTS = f"{DEFAULT}: facts"
UNPLANNED: dict[str, tuple[Change, Problem]] = {
    "layers": (
        lambda content: request(content).update(layers="99"),
        Problem("layer-out-of-range", f"{DEFAULT}: --layers 99", layer=99, last=2),
    ),
    "method": (
        lambda content: request(content).update(method="grow"),
        Problem(
            "variant-of-other-method",
            f"{DEFAULT}: --variant",
            variant="adapt",
            variants=("grow-freeze", "grow-train"),
            method="grow",
        ),
    ),
    "no method": (
        lambda content: request(content).update(method="foo"),
        Problem("value-unfit", f"{DEFAULT}: --method", value="'foo'", kind="one of: scale, grow, depth"),
    ),
    "variant": (
        lambda content: request(content).update(variant="depth"),
        Problem(
            "variant-of-other-method",
            f"{DEFAULT}: --variant",
            variant="depth",
            variants=("preserve", "adapt", "gated"),
            method="scale",
        ),
    ),
    "sizes": (
        lambda content: facts(content)["sizes"].update(hidden=17),
        Problem("facts-size", f"{FACTS}.sizes.hidden", size=17, expected=40),
    ),
    "heads": (
        lambda content: facts(content)["sizes"].update(key_value_heads=2),
        Problem("facts-size", f"{FACTS}.sizes.key_value_heads", size=2, expected=4),
    ),
    "vocabulary": (
        lambda content: facts(content)["sizes"].update(vocabulary=96),
        Problem("tensor-unlike-config", f"{DEFAULT}: model.embed_tokens.weight", shape=(97, 40), wanted=(96, 40)),
    ),
    "final norm": (
        lambda content: facts(content)["architecture"].update(final_norm={"name": "other", "style": "rms"}),
        Problem("weight-missing", f"{DEFAULT}: model.other.weight", shape=(40,)),
    ),
    "embedding": (
        lambda content: facts(content)["architecture"].update(embedding="wte"),
        Problem("weight-missing", f"{DEFAULT}: model.wte.weight", shape=(97, 40)),
    ),
    "a name on disk": (
        lambda content: facts(content)["architecture"]["kinds"][0].update(stored_as={"input_layernorm": "other"}),
        Problem("weight-missing", f"{DEFAULT}: model.layers.0.other.weight", shape=(40,)),
    ),
    "kinds": (
        lambda content: facts(content)["architecture"].update(kind_of_layer=[0, 0, 7]),
        Problem("facts-kind-unknown", f"{FACTS}.architecture.kind_of_layer", numbers=[7], kinds=1),
    ),
    "too few kinds": (
        lambda content: facts(content)["architecture"].update(kind_of_layer=[0, 0]),
        Problem("facts-layer-count", f"{FACTS}.architecture.kind_of_layer", found=2, expected=3),
    ),
    "no kinds": (
        lambda content: facts(content)["architecture"].update(kinds=[]),
        Problem("value-empty", f"{FACTS}.architecture.kinds"),
    ),
    "own code": (
        lambda content: facts(content)["architecture"].update(own_code={"AutoTokenizer": "own.Tokenizer"}),
        Problem("facts-class-unknown", f"{FACTS}.architecture.own_code", names=["AutoTokenizer"], classes=AUTO_CLASSES),
    ),
    "classes": (
        lambda content: facts(content)["architecture"].update(classes={"x": "y"}),
        Problem("facts-class-unknown", f"{FACTS}.architecture.classes", names=["x"], classes=AUTO_CLASSES),
    ),
    "a shape of the base": (
        lambda content: content["base_tensors"]["model.norm.weight"].update(shape=[41]),
        Problem("tensor-unlike-config", f"{DEFAULT}: model.norm.weight", shape=(41,), wanted=(40,)),
    ),
    "a tensor of the base": (
        lambda content: content["base_tensors"].pop("model.norm.weight"),
        Problem("weight-missing", f"{DEFAULT}: model.norm.weight", shape=(40,)),
    ),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_an_expansion_that_cannot_be_planned_again_is_refused_when_it_is_read(adapt: Path, name: str) -> None:
    change, wanted = UNPLANNED[name]
    found = unfit(edit(adapt, change))
    assert found[0] == wanted
    assert all(problem.where.startswith(DEFAULT) for problem in found)


def test_a_dtype_of_the_base_is_refused_when_it_is_read(adapt: Path) -> None:
    found = unfit(edit(adapt, lambda content: content["base_tensors"]["model.norm.weight"].update(dtype="foo")))
    assert found == [Problem("base-quantised", f"{DEFAULT}: {adapt}", schemes=["foo"])]


def recorded(content: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = content["expansions"]["default"]["tensors"]
    return tensors


def header_without(name: str) -> Change:
    def drop(content: dict[str, Any]) -> None:
        for shard in content["fused"]["shards"].values():
            header = json.loads(shard["header"])
            header.pop(name, None)
            shard["header"] = json.dumps(header)

    return drop


BLOCK = "model.layers.1.mlp.up_proj.expansions.default.w12"
OF_FUSED: dict[str, tuple[Change, Problem]] = {
    **{
        f"a tensor called {name}": (
            lambda content, name=name: recorded(content).update({name: "0" * 64}),
            Problem("record-tensor-unknown", f"{DEFAULT}.tensors", names=[name]),
        )
        for name in ("x", "model.norm.weight", "a.expansions.b.expansions.c", BLOCK.replace("w12", "w13"))
    },
    "a trained tensor": (
        lambda content: content["expansions"]["default"].update(trained={"x": "0" * 64}),
        Problem("record-tensor-unknown", f"{DEFAULT}.trained", names=["x"]),
    ),
    "a header without a base tensor": (
        header_without("model.norm.weight"),
        Problem("record-tensor-missing", "fused.shards", names=["model.norm.weight"]),
    ),
    "no shards": (
        lambda content: content["fused"].update(shards={}),
        Problem("value-empty", "fused.shards"),
    ),
}


@pytest.mark.parametrize("name", OF_FUSED)
def test_a_record_of_a_fused_model_names_its_tensors(fused: Path, name: str) -> None:
    change, wanted = OF_FUSED[name]
    assert unfit(edit(fused, change)) == [wanted]
    (problem,) = problems(merge, fused, fused.with_name("out"), "blocks")
    assert problem.details == (wanted,)


def test_a_header_that_is_no_json_is_refused_when_it_is_read(fused: Path) -> None:
    def spoil(content: dict[str, Any]) -> None:
        shard = min(content["fused"]["shards"])
        content["fused"]["shards"] = {"x.safetensors": content["fused"]["shards"][shard] | {"header": "{"}}

    (problem,) = unfit(edit(fused, spoil))
    assert (problem.code, problem.where) == ("record-header-unreadable", "fused.shards.x.safetensors")


def test_a_fused_model_whose_record_is_whole_is_stripped(fused: Path, base_of: Callable[[str], Path]) -> None:
    assert verify(fused, probes=None).problems == ()
    assert digests(strip(fused, fused.with_name("out")).path) == digests(base_of("llama"))


def file_of_base(content: dict[str, Any], name: str, **changes: object) -> None:
    content["base_files"][name] = content["base_files"]["config.json"] | changes


NAMES: dict[str, tuple[Change, str]] = {
    "up": (lambda content: file_of_base(content, "../outside.txt"), "../outside.txt"),
    "of the system": (lambda content: file_of_base(content, "/tmp/outside.txt"), "/tmp/outside.txt"),
    "stored": (lambda content: file_of_base(content, "inside.txt", stored_as="../outside.txt"), "../outside.txt"),
    "code": (
        lambda content: content["code"].update({"config.json/../../outside.txt": "boo"}),
        "config.json/../../outside.txt",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leaves_the_folder_is_refused(adapt: Path, name: str) -> None:
    """surgery.json may come from anybody: its names are paths inside the folder, or nothing is read or written."""
    change, outside = NAMES[name]
    record = edit(adapt, change) / "surgery.json"
    assert set(refuse(adapt)) == {Problem("record-escape", record, name=outside)}


def test_a_grown_model_cannot_pass_for_another(grown: Path) -> None:
    """Its tensors are none that the other request plans, whatever config.json says."""

    def as_scale(content: dict[str, Any]) -> None:
        request(content).update(method="scale", variant="adapt", copies=None)

    verification = verify(edit(grown, as_scale), probes=None)
    assert not verification.passed
    assert any("is missing" in line for line in verification.problems)
    assert "config.json: scale_surgery is not what the expansion wrote." in verification.problems


def not_a_router(value: str) -> Problem:
    return Problem("value-unfit", "routing", value=value, kind="an object")


def no_weights(value: str) -> Problem:
    words = f"prior: is {value}, expected 2 positive weights of sum 1, the base's first"
    return Problem("other-program", "routing", error=words)


@pytest.mark.parametrize(
    ("routing", "wanted"),
    (
        ({}, Problem("router-unknown", "routing.router", name=None, choices=["posterior", "cosine"])),
        ([], not_a_router("[]")),
        ("posterior", not_a_router("'posterior'")),
        (
            POSTERIOR | {"router": "oracle"},
            Problem("router-unknown", "routing.router", name="oracle", choices=["posterior", "cosine"]),
        ),
        ({"router": "posterior", "prior": [0.5, 0.5]}, Problem("key-missing", "routing.switch_rate")),
        (POSTERIOR | {"colour": "blue"}, Problem("key-unknown", "routing.colour")),
        (POSTERIOR | {"prior": [0.5, 0.4]}, no_weights("[0.5, 0.4]")),
        (POSTERIOR | {"prior": [0, 1]}, no_weights("[0, 1]")),
        (POSTERIOR | {"prior": 1}, Problem("value-unfit", "routing.prior", value="1", kind="a list of numbers")),
    ),
    ids=str,
)
def test_a_router_that_makes_no_sense_is_refused(adapt: Path, tmp_path: Path, routing: object, wanted: Problem) -> None:
    routed = route_export(adapt, tmp_path / "routed", PosteriorRouter()).path
    assert unfit(edit(routed, lambda content: content.update(routing=routing))) == [wanted]


def test_trained_tensors_do_not_pass_for_untrained_ones(adapt: Path) -> None:
    """Hashes that were written anew make the tensors look untouched; zeros are looked for all the same."""
    shake(adapt)
    checkpoint = open_checkpoint(adapt)

    def hash_again(content: dict[str, Any]) -> None:
        record = content["expansions"]["default"]
        record["tensors"] = hash_tensors(checkpoint, list(record["tensors"]))

    verification = verify(edit(adapt, hash_again), probes=None)
    (promise,) = [promise for promise in verification.promises if promise.name == "output_at_init"]
    assert not verification.passed
    assert promise.holds is False
    assert "15 tensors of W12 and the head's up part left zero" in promise.evidence
