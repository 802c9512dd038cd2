"""A folder of several expansions of which one adds tokens: each comes out, and is trained, as if it were alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from transformers import AutoTokenizer

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    MergedPart,
    PosteriorRouter,
    Probes,
    Request,
    TrainingSettings,
    compose,
    expand,
    extract,
    merge,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import Problem
from scale_surgery.planning.new_tokens import NewTokens
from tests.conftest import digests, problems, shake
from tests.each import mostly, woven
from tests.tiny import save_tiny

ROWS = 1200
QUICK = Probes(max_new_tokens=0)
NAMES = ("words", "law")
REQUESTS = {
    "words": Request("0,2", variant="adapt", new_tokens=NewTokens(("Xylophone", " Zürich")), name="words"),
    "law": Request("1-2", variant="adapt", name="law"),
}


ORDERS = {"tokens first": NAMES, "tokens last": NAMES[::-1]}


@pytest.fixture(scope="module", params=ORDERS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, each expansion alone, and both in one folder in either order."""
    folder = tmp_path_factory.mktemp("beside")
    save_tiny(folder / "base", "llama", vocab_size=ROWS)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(folder / "base")
    for name in NAMES:
        shake(expand(folder / "base", REQUESTS[name], folder / name).path)
    first, second = ORDERS[request.param]
    expand(folder / first, REQUESTS[second], folder / "unshaken")
    for file in (folder / second).glob("expansion-*.safetensors"):
        shutil.copyfile(file, folder / "unshaken" / file.name)
    (folder / "unshaken").rename(folder / "both")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_each_is_taken_out_as_it_is_alone(place: Path, tmp_path: Path, name: str) -> None:
    extract(place / "both", tmp_path / "out", name=name)
    extract(place / name, tmp_path / "alone")
    made, alone = digests(tmp_path / "out"), digests(tmp_path / "alone")
    # the record knows which hashes the tensors had when they were put beside others
    for file in ("surgery.json", "extract.json"):
        made.pop(file), alone.pop(file)
    assert made == alone


@pytest.mark.parametrize("name", NAMES)
def test_each_stays_alone_where_the_other_is_removed(place: Path, tmp_path: Path, name: str) -> None:
    (other,) = set(NAMES) - {name}
    compose(place / "both", (), tmp_path / "out", remove=other, routing=None)
    assert verify(tmp_path / "out", probes=None, record=False).passed
    tokenizers = {file: digest for file, digest in digests(place / name).items() if "token" in file}
    assert tokenizers.items() <= digests(tmp_path / "out").items()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(AutoTokenizer.from_pretrained(place / name))


@pytest.mark.parametrize(("place", "name"), woven(list(ORDERS), NAMES), indirect=["place"])
def test_each_is_merged_and_trained_beside_the_other(
    place: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # named as one who stands in the folder does
    monkeypatch.chdir(place / "both")
    merge(".", tmp_path / "deep" / "fused", part=MergedPart(name), probes=QUICK)
    merge(place / name, tmp_path / "alone", probes=QUICK)
    weights = [
        {file: digest for file, digest in digests(folder).items() if file.endswith(".safetensors")}
        for folder in (tmp_path / "deep" / "fused", tmp_path / "alone")
    ]
    assert weights[0] == weights[1]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["fused"], "nothing else stays"
    (tmp_path / "text.txt").write_text("Zürich has a Xylophone. " * 20, encoding="utf-8")
    settings = TrainingSettings(steps=1, warmup=0, sequence_length=32, name=name)
    for folder in ("both", name):
        train(place / folder, [tmp_path / "text.txt"], tmp_path / folder, settings)
    assert verify(tmp_path / "both", probes=None, record=False).passed
    # an expansion without tokens reads texts as the base does
    extract(tmp_path / "both", tmp_path / "from-both", name=name)
    extract(tmp_path / name, tmp_path / "from-alone")
    made, alone = (digests(tmp_path / folder) for folder in ("from-both", "from-alone"))
    assert {file for file in made if file.startswith("expansion-")} and all(
        made[file] == alone[file] for file in made if file.startswith("expansion-")
    )


def test_base_and_folder_come_back(place: Path, tmp_path: Path) -> None:
    strip(place / "both", tmp_path / "base")
    assert digests(tmp_path / "base") == digests(place / "base")
    extracts = [extract(place / "both", tmp_path / name, name=name).path for name in NAMES]
    compose(place / "base", extracts, tmp_path / "again")
    assert verify(tmp_path / "again", probes=None, record=False).passed


@pytest.mark.parametrize("name", NAMES)
def test_what_is_changed_in_the_folder_is_seen_whichever_is_taken_out(place: Path, tmp_path: Path, name: str) -> None:
    damaged = Path(shutil.copytree(place / "both", tmp_path / "damaged"))
    for code, file, key in (
        ("config-key-changed", "config.json", "vocab_size"),
        ("tokenizer-key-changed", "tokenizer.json", "normalizer"),
    ):
        content = json.loads((damaged / file).read_text(encoding="utf-8"))
        (damaged / file).write_text(json.dumps({**content, key: 7 if key == "vocab_size" else {"type": "Lowercase"}}))
        (problem,) = problems(extract, damaged, tmp_path / "out", name=name, error=CheckpointError)
        assert problem.code == "folder-damaged" and Problem(code, f"{file}: {key}") in problem.details
        shutil.copyfile(place / "both" / file, damaged / file)


@pytest.mark.parametrize("place", mostly(ORDERS, "tokens last".__eq__), indirect=True)
def test_a_mixture_does_not_claim_to_begin_as_the_base(place: Path, tmp_path: Path) -> None:
    expand(place / "base", REQUESTS["words"], tmp_path / "words")
    route_export(tmp_path / "words", tmp_path / "routed", PosteriorRouter())
    result = verify(tmp_path / "routed", probes=QUICK)
    claims = {promise.name: promise.claimed for promise in result.promises}
    assert result.passed and not claims["output_at_init"] and not claims["old_vocabulary"]
    assert {promise.name for promise in verify(tmp_path / "words", probes=QUICK).promises if promise.claimed} >= {
        "output_at_init",
        "old_vocabulary",
    }, "the control"
    # a router that gives out one path as it is mixes nothing
    result = verify(route_export(tmp_path / "words", tmp_path / "cosine", CosineRouter()).path, probes=QUICK)
    assert result.passed and {"output_at_init", "old_vocabulary"} <= {
        promise.name for promise in result.promises if promise.claimed
    }


def test_what_cannot_be_merged_is_refused_before_anything_is_copied(place: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("somebody's")
    there = tmp_path / "there"
    for output, form, wanted in ((there, "fused", "output-exists"), (tmp_path / "out", "stock", "stock-stream-wider")):
        found = problems(merge, place / "both", output, form, part=MergedPart("law"), track=no_bars)
        assert wanted in [problem.code for problem in found]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def no_bars(name: str, total: float) -> NoReturn:
    """Nothing long is done, so no bar is shown."""
    raise AssertionError(name)
