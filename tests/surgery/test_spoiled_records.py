"""What a spoiled surgery.json says of its plan is refused when it is read, by every command, in one line."""

from __future__ import annotations

import json
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
from tests.conftest import digests, edited, refusal, shake

Change = Callable[[dict[str, Any]], None]
POSTERIOR = PosteriorRouter().for_expansions(1).settings


@pytest.fixture
def adapt(base_of, tmp_path) -> Path:
    return expand(base_of("llama"), Request("1-2", variant="adapt", collaborate="both"), tmp_path / "adapt").path


@pytest.fixture
def grown(base_of, tmp_path) -> Path:
    return expand(base_of("llama"), Request("1-2", method="grow"), tmp_path / "grown").path


@pytest.fixture
def fused(adapt, tmp_path) -> Path:
    return merge(adapt, tmp_path / "fused", "fused").path


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


def refuse(path: Path, *reasons: str) -> None:
    readers = {
        "verify": lambda: verify(path, probes=None),
        "strip": lambda: strip(path, path.with_name("out")),
        "report": lambda: report(path, files_only=True),
        "extract": lambda: extract(path, path.with_name("out")),
    }
    for name, read in readers.items():
        message = refusal(read, error=CheckpointError)
        assert message.startswith(f"{path / 'surgery.json'}: ") and all(reason in message for reason in reasons), (
            name,
            message,
        )
    assert not path.with_name("out").exists() and not list(path.parent.rglob("outside.txt"))


SPOILED: dict[str, tuple[Change, str]] = {
    "layers": (lambda content: request(content).update(layers="99"), "layer 99"),
    "method": (lambda content: request(content).update(method="grow"), "--variant is adapt, expected"),
    "no method": (
        lambda content: request(content).update(method="foo"),
        "expansions.default: --method is 'foo', expected one of: scale, grow, depth)",
    ),
    "a list as method": (lambda content: request(content).update(method=["scale"]), "method is ['scale']"),
    "variant": (
        lambda content: request(content).update(variant="depth"),
        "expansions.default: --variant is depth, expected preserve or adapt or gated for --method scale)",
    ),
    "copies": (
        lambda content: request(content).update(copies=1),
        "(expansions.default.request.copies is 1, expected from 2 to 1000). Restore it from where you got it.",
    ),
    "no number of copies": (lambda content: request(content).update(copies="x"), "'x', expected a whole number"),
    "width": (lambda content: request(content).update(up_width="4"), "request.up_width is '4'"),
    "name": (lambda content: request(content).update(name="law"), "is called 'law' in its request"),
    "sizes": (lambda content: facts(content)["sizes"].update(hidden=17), "facts.sizes.hidden is 17, expected 40"),
    "heads": (
        lambda content: facts(content)["sizes"].update(key_value_heads=2),
        "facts.sizes.key_value_heads is 2, expected 4",
    ),
    "vocabulary": (
        lambda content: facts(content)["sizes"].update(vocabulary=96),
        "model.embed_tokens.weight: shape (97, 40), expected (96, 40)",
    ),
    "final norm": (
        lambda content: facts(content)["architecture"].update(final_norm={"name": "other", "style": "rms"}),
        "model.other.weight: no such tensor",
    ),
    "embedding": (lambda content: facts(content)["architecture"].update(embedding="wte"), "wte.weight"),
    "a name on disk": (
        lambda content: facts(content)["architecture"]["kinds"][0].update(stored_as={"input_layernorm": "other"}),
        "model.layers.0.other.weight: no such tensor",
    ),
    "kinds": (
        lambda content: facts(content)["architecture"].update(kind_of_layer=[0, 0, 7]),
        "names kinds that there are none of",
    ),
    "a number of heads": (
        lambda content: facts(content)["architecture"]["kinds"][0]["blocks"][0]["attributes"].update(heads="x"),
        ".attributes.heads is 'x', expected",
    ),
    "no kinds": (
        lambda content: facts(content)["architecture"].update(kinds=[]),
        "kind_of_layer names 3 layers, expected 3",
    ),
    "a shape of the base": (
        lambda content: content["base_tensors"]["model.norm.weight"].update(shape=[41]),
        "model.norm.weight: shape (41,), expected (40,)",
    ),
    "a dtype of the base": (
        lambda content: content["base_tensors"]["model.norm.weight"].update(dtype="foo"),
        "is quantised (foo), expected floating-point weights",
    ),
    "a tensor of the base": (
        lambda content: content["base_tensors"].pop("model.norm.weight"),
        "model.norm.weight: no such tensor",
    ),
    "no base tensors": (lambda content: content.update(base_tensors=None), "base_tensors is None, expected an object"),
    "no base files": (lambda content: content.update(base_files={}), "the base's config.json is missing"),
    "bytes of a file": (
        lambda content: content["base_files"]["config.json"].update(bytes=None),
        "base_files.config.json.bytes is None, expected a whole number",
    ),
    "no expansion": (lambda content: content.update(expansions={}), "expansions is empty"),
    "tensors": (
        lambda content: content["expansions"]["default"].update(tensors="x"),
        "expansions.default.tensors is 'x', expected an object",
    ),
    "trained": (
        lambda content: content["expansions"]["default"].update(trained=["x"]),
        "expansions.default.trained is ['x'], expected an object",
    ),
    "no sizes": (lambda content: facts(content).update(sizes=None), "facts.sizes is None, expected an object"),
    "code": (lambda content: content.update(code=[]), "code is [], expected an object"),
    "a text that is no JSON": (lambda content: content["replaced"].update({"config.json": "{"}), "Expecting property"),
    "a text that is no object": (
        lambda content: content["replaced"].update({"config.json": "[]"}),
        "(replaced.config.json)",
    ),
    "verification": (lambda content: content.update(verification={}), "verification.passed is missing"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_it_is_refused_when_it_is_read(adapt: Path, name: str) -> None:
    change, reason = SPOILED[name]
    refuse(edit(adapt, change), "is incomplete", reason)


def own_code(content: dict[str, Any]) -> None:
    facts(content)["architecture"]["own_code"] = {"AutoTokenizer": "own.Tokenizer"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_code, "facts.architecture.own_code names AutoTokenizer, expected AutoModelForImageTextToText or"),
        (
            lambda content: facts(content)["architecture"].update(classes={"x": "y"}),
            "facts.architecture.classes names x, expected AutoModelForImageTextToText or",
        ),
    ],
)
def test_classes_that_transformers_does_not_look_for_are_refused(adapt: Path, change: Change, reason: str) -> None:
    refuse(edit(adapt, change), "is incomplete", reason)


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
OF_FUSED: dict[str, tuple[Change, str]] = {
    **{
        f"a tensor called {name}": (
            lambda content, name=name: recorded(content).update({name: "0" * 64}),
            f"expansions.default.tensors names {name}, which this expansion does not have",
        )
        for name in ("x", "model.norm.weight", "a.expansions.b.expansions.c", BLOCK.replace("w12", "w13"))
    },
    "a trained tensor": (
        lambda content: content["expansions"]["default"].update(trained={"x": "0" * 64}),
        "expansions.default.trained names x, which this expansion does not have",
    ),
    "a header without a base tensor": (header_without("model.norm.weight"), "fused.shards names no model.norm.weight,"),
}


@pytest.mark.parametrize("name", OF_FUSED)
def test_a_record_of_a_fused_model_names_its_tensors(fused: Path, name: str) -> None:
    change, reason = OF_FUSED[name]
    refuse(edit(fused, change), "is incomplete", reason)
    assert refusal(merge, fused, fused.with_name("out"), "blocks").count(reason) == 1


def test_a_fused_model_whose_record_is_whole_is_stripped(fused: Path, base_of: Callable[[str], Path]) -> None:
    assert verify(fused, probes=None).problems == ()
    assert digests(strip(fused, fused.with_name("out")).path) == digests(base_of("llama"))


def file_of_base(content: dict[str, Any], name: str, **changes: object) -> None:
    content["base_files"][name] = content["base_files"]["config.json"] | changes


OUTSIDE = "outside.txt' is said to be a file of the model, expected a name inside the folder"
NAMES: dict[str, tuple[Change, str]] = {
    "up": (lambda content: file_of_base(content, "../outside.txt"), OUTSIDE),
    "of the system": (lambda content: file_of_base(content, "/tmp/outside.txt"), OUTSIDE),
    "stored": (lambda content: file_of_base(content, "inside.txt", stored_as="../outside.txt"), OUTSIDE),
    "code": (lambda content: content["code"].update({"config.json/../../outside.txt": "boo"}), OUTSIDE),
    "text": (lambda content: content["replaced"].update({"../outside.txt": "boo"}), "is no file of the base. Restore"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leaves_the_folder_is_refused(adapt: Path, name: str) -> None:
    """surgery.json may come from anybody: its names are paths inside the folder, or nothing is read or written."""
    change, reason = NAMES[name]
    refuse(edit(adapt, change), reason)


def test_a_grown_model_cannot_pass_for_another(grown: Path) -> None:
    """Its tensors are none that the other request plans, whatever config.json says."""

    def as_scale(content: dict[str, Any]) -> None:
        request(content).update(method="scale", variant="adapt", copies=None)

    verification = verify(edit(grown, as_scale), probes=None)
    assert not verification.passed
    assert any("is missing" in line for line in verification.problems)
    assert "config.json: scale_surgery is not what the expansion wrote." in verification.problems


@pytest.mark.parametrize(
    ("routing", "reason"),
    (
        ({}, "routing.router is None, expected one of"),
        ([], "routing is [], expected an object"),
        ("posterior", "routing is 'posterior', expected an object"),
        ({"router": "posterior"}, "routing.prior is missing"),
        (POSTERIOR | {"colour": "blue"}, "routing.colour is unknown"),
        (POSTERIOR | {"router": "oracle"}, "routing.router is 'oracle', expected one of"),
        (POSTERIOR | {"prior": [0.5, 0.4]}, "routing.prior: is [0.5, 0.4], expected 2 positive weights"),
        (POSTERIOR | {"prior": [0, 1]}, "routing.prior: is [0, 1], expected 2 positive weights"),
        (POSTERIOR | {"prior": 1}, "routing.prior is 1, expected a list of numbers"),
    ),
    ids=str,
)
def test_a_router_that_makes_no_sense_is_refused(adapt: Path, tmp_path: Path, routing: object, reason: str) -> None:
    routed = route_export(adapt, tmp_path / "routed", PosteriorRouter()).path
    refuse(edit(routed, lambda content: content.update(routing=routing)), "is incomplete (", reason)


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
