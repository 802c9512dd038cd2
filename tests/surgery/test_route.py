"""A router given, changed and taken away on disk: which bytes change, which come back, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.evidence.inspect import inspect
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import RouterOptions, describe_router
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import Routed, route_export, set_routing, unroute
from scale_surgery.surgery.strip import strip
from tests import routed
from tests.command import run
from tests.conftest import digests, edited, flip, load, problems, refused
from tests.routed import REQUESTS, Trio, random_ids, train

trio_of = routed.trio_of
COSINE = CosineRouter(threshold=0.25)
EXTRAS = {
    "README.md": b"---\nlicense: mit\n---\r\n# caf\xc3\xa9, no final newline",
    "odd_bytes.dat": bytes(range(256)),
    "helper.py": b"print('code of the user')\n",
    "notes/deep/er/file.txt": b"below",
}


@pytest.fixture
def expanded(sharded_base: Path, tmp_path: Path) -> Path:
    """Several shards, every kind of side file, code of another release; verified and trained once by its record."""
    for name, content in EXTRAS.items():
        (sharded_base / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded_base / name).write_bytes(content)
    folder = expand(sharded_base, REQUESTS["adapt"], tmp_path / "expanded").path
    code = folder / "expanded_modules.py", folder / "a_file_that_this_release_has_not.py"
    with edited(folder / "surgery.json") as record:
        record["verification"] = {"passed": True, "date": "2026-01-01"}
        for file in code:
            with file.open("ab") as stream:
                stream.write(b"# of another release\r\n")
            record["code"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    add_run(folder, {"steps": 3})
    return folder


def add_run(folder: Path, run: dict[str, Any]) -> None:
    """Write a training run of its expansion into surgery.json."""
    with edited(folder / "surgery.json") as record:
        record["expansions"]["default"]["training"].append(run)


def weights(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.glob("*.safetensors"))}


def changed_files(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# ---- there and back


POSTERIOR = PosteriorRouter(prior=0.2, switch_rate=0.0), {"router": "posterior", "prior": [0.2, 0.8], "switch_rate": 0}
STRICT = CosineRouter(0.25, strict=True), {"router": "cosine", "threshold": 0.25, "strict": True}


@pytest.mark.parametrize(
    ("how", "asked", "settings"),
    (("auto", *POSTERIOR), ("copy", *STRICT), ("link", *STRICT)),
    ids=("auto", "copy", "link"),
)
def test_config_and_manifest_change_and_every_byte_comes_back(
    sharded_base: Path, expanded: Path, tmp_path: Path, how: Any, asked: Router, settings: dict[str, Any]
) -> None:
    before, shards, routing = digests(expanded), weights(expanded), asked.for_expansions(1)
    done = route_export(expanded, tmp_path / "routed", asked, base_weights=how)
    there = digests(done.path)
    assert changed_files(before, there) == {"config.json", "surgery.json"}
    config = json.loads((done.path / "config.json").read_text())
    assert config["scale_surgery"].pop("router") == settings, (
        "a prior for each path, and no numbers of the other router"
    )
    assert config == json.loads((expanded / "config.json").read_text()), "nothing else"
    assert read_manifest(done.path) == replace(read_manifest(expanded), routing=routing), "nothing else"
    assert len(shards) > 3
    written = 0 if how == "link" else sum(file.stat().st_size for file in shards.values())
    assert done == Routed(tmp_path / "routed", "sharded", routing, (0,), 3, written)
    assert done.cost == 2
    back = unroute(done.path, tmp_path / "back", base_weights=how)
    assert digests(back.path) == digests(expanded) == before and digests(done.path) == there, "inputs are as they were"
    assert (back.routing, back.cost, back.bytes_written) == (None, 1.0, written)
    for name, file in shards.items():
        assert [file.samefile(outcome.path / name) for outcome in (done, back)] == [how == "link"] * 2, name
    # what programs edit in place is never shared
    assert all((done.path / name).stat().st_nlink == 1 for name in ("config.json", *EXTRAS))
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(sharded_base)


def test_what_was_verified_was_another_model(expanded: Path, tmp_path: Path) -> None:
    """A verification names the router that it is about."""
    path = route_export(expanded, tmp_path / "routed").path
    added, before = inspect(path).expanded, inspect(expanded).expanded
    assert added is not None and before is not None
    assert (before.verified, before.changed_since) == ("passed 2026-01-01", None)
    assert (added.verified, added.changed_since) == ("passed 2026-01-01", "the router changed since")
    with edited(path / "surgery.json") as record:
        record["verification"]["routing"] = record["routing"]
    assert inspect(path).expanded.changed_since is None  # type: ignore[union-attr]
    set_routing(path, PosteriorRouter(prior=0.2))
    assert inspect(path).expanded.changed_since == "the router's numbers changed since"  # type: ignore[union-attr]


@pytest.mark.parametrize(("request_name", "forks", "cost"), (("preserve", (), 1.0), ("deep", (1,), 1 + 2 / 3)))
def test_where_the_paths_part_and_what_it_costs(
    trio_of: Callable[..., Trio], tmp_path: Path, request_name: str, forks: tuple[int, ...], cost: float
) -> None:
    done = route_export(trio_of("llama", request_name).expanded_path, tmp_path / "routed")
    assert (done.forks, done.cost) == (forks, pytest.approx(cost))


def test_a_cap_on_the_logits_stays_before_a_router(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("gemma2", "deep")
    for path in (trio.expanded_path, trio.path):
        config = json.loads((path / "config.json").read_text())
        assert config["final_logit_softcapping"] == 30.0, "as the base has it"
        facts = config["scale_surgery"]["base"]
        assert (facts["softcap"], facts["softcap_key"]) == (30.0, "final_logit_softcapping")
    base, unrouted, model = trio.load()
    for network in (base, unrouted, model):
        with torch.no_grad():
            network.get_output_embeddings().weight.mul_(40)
    ids = random_ids(2, 9)
    with torch.no_grad():
        wanted = base(ids).logits
        assert 25 < wanted.abs().max() <= 30, "the control: it caps"
        assert torch.equal(model(ids).logits, wanted)
        train(unrouted)
        train(model)
        assert torch.equal(model.path_logits(ids)[1], unrouted(ids).logits)
        for switch in (model.routing_disabled, model.expansion_disabled):
            with switch():
                assert model(ids).logits.abs().max() <= 30
        assert model(ids).logits.abs().max() <= 30 + 1e-3
    back = unroute(trio.path, tmp_path / "back").path
    assert (back / "config.json").read_bytes() == (trio.expanded_path / "config.json").read_bytes()
    assert digests(strip(trio.path, tmp_path / "stripped").path) == digests(trio.base_path)


@pytest.mark.parametrize(("changes", "softcap"), (({"final_logit_softcapping": None}, None), ({}, 30.0)))
def test_a_base_that_has_no_cap_gets_none_and_one_that_says_nothing_the_default(
    base_of: Callable[..., Path], tmp_path: Path, changes: dict[str, None], softcap: float | None
) -> None:
    base = Path(shutil.copytree(base_of("gemma2"), tmp_path / "base"))
    with edited(base / "config.json") as config:
        del config["final_logit_softcapping"]
        config |= changes
    path = route_export(expand(base, REQUESTS["deep"], tmp_path / "expanded").path, tmp_path / "routed").path
    assert json.loads((path / "config.json").read_text())["scale_surgery"]["base"]["softcap"] == softcap
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load(path)(ids).logits, load(base)(ids).logits)


def test_what_was_learned_since_stays(expanded: Path, tmp_path: Path) -> None:
    """Weights and the record of training are the routed model's."""
    path = route_export(expanded, tmp_path / "routed", base_weights="copy").path
    shard = next(file for name, file in weights(path).items() if name.startswith("expansion"))
    flip(shard)
    add_run(path, {"steps": 5, "begun": "2026-01-02"})
    (path / "note.txt").write_text("new")
    unroute(path, tmp_path / "back")
    assert changed_files(digests(expanded), digests(tmp_path / "back")) == {shard.name, "surgery.json", "note.txt"}
    manifest = read_manifest(tmp_path / "back")
    assert manifest.training == ({"steps": 3}, {"steps": 5, "begun": "2026-01-02"})
    assert manifest.routing is None
    assert inspect(tmp_path / "back").expanded.changed_since == "tensors (by training) changed since"  # type: ignore[union-attr]


# ---- other numbers


def test_set_routing(expanded: Path, tmp_path: Path) -> None:
    path, ids = route_export(expanded, tmp_path / "routed", PosteriorRouter(prior=0.5)).path, random_ids(2, 9)
    before = digests(path)
    with torch.no_grad():
        first = train(load(path))(ids).logits
        set_routing(path, PosteriorRouter(prior=0.2, switch_rate=0.0))
        second = train(load(path))(ids).logits
    assert changed_files(before, digests(path)) == {"config.json", "surgery.json"}
    assert not torch.equal(first, second)
    config = json.loads((path / "config.json").read_text())["scale_surgery"]["router"]
    assert (config["prior"], config["switch_rate"]) == ([0.2, 0.8], 0.0)
    assert read_manifest(path).routing == PosteriorRouter((0.2, 0.8), switch_rate=0.0)
    assert read_manifest(path).verification == read_manifest(expanded).verification
    assert digests(unroute(path, tmp_path / "back").path) == digests(expanded)
    set_routing(path, PosteriorRouter(prior=0.5))
    assert digests(path) == before


def test_an_interrupted_set_routing_changes_nothing(
    expanded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = route_export(expanded, tmp_path / "routed", PosteriorRouter(prior=0.5)).path
    before, replace = digests(path), Path.replace

    def interrupted(file: Path, target: Path) -> Path:
        if target.name == "surgery.json":
            raise KeyboardInterrupt
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        set_routing(path, PosteriorRouter(prior=0.2))
    assert digests(path) == before


@pytest.mark.parametrize(
    ("was", "asked", "code"),
    (
        (PosteriorRouter(), COSINE, "router-other"),
        (COSINE, CosineRouter(threshold=0.25, strict=True), "router-other"),
        (None, PosteriorRouter(), "model-unrouted"),
    ),
    ids=("another router", "another strictness", "no router"),
)
def test_set_routing_changes_numbers_only(
    expanded: Path, tmp_path: Path, was: Router | None, asked: Router, code: str
) -> None:
    path = expanded if was is None else route_export(expanded, tmp_path / "routed", was).path
    before = digests(path)
    with refused(code, path, CheckpointError):
        set_routing(path, asked)
    assert digests(path) == before


@pytest.mark.parametrize(
    "router", (CosineRouter(-1.0), CosineRouter(1.0), PosteriorRouter(switch_rate=0)), ids=describe_router
)
def test_a_router_at_an_end_of_its_range_takes_the_place_of_another(
    trio_of: Callable[..., Trio], tmp_path: Path, router: Router
) -> None:
    trio = trio_of("llama")
    rerouted = route_export(trio.path, tmp_path / "again", router, base_weights="link").path
    straight = route_export(trio.expanded_path, tmp_path / "straight", router, base_weights="link").path
    assert digests(rerouted) == digests(straight)
    assert load(rerouted).is_routing_enabled


def test_what_a_router_is_before_it_knows_how_many_paths_there_are() -> None:
    assert PosteriorRouter().bound is None and describe_router(PosteriorRouter()) == "posterior, switch rate 0.01"
    assert PosteriorRouter(0.2).for_expansions(1).bound == -math.log(0.2)
    of_four = PosteriorRouter().for_expansions(4)
    assert of_four.prior == (0.2,) * 5
    assert of_four == PosteriorRouter(0.2).for_expansions(4).without_prior().for_expansions(4)
    text = describe_router(PosteriorRouter((0.5, 0.2, 0.3)), ("law", "medicine"))
    assert text == "posterior, prior base 0.5, law 0.2, medicine 0.3, switch rate 0.01"
    assert problems(RouterOptions(strict=True, threshold=0.1).make, error=PlanError) == [
        Problem("option-of-other-router", "--threshold", router="posterior"),
        Problem("option-of-other-router", "--strict", router="posterior"),
    ]


# ---- refused


def out_of_range(key: str) -> list[tuple[str, str]]:
    """What the router itself says of a number, where its line begins with a key."""
    return [("other-program", f"{key}: is")]


@pytest.mark.parametrize(
    ("router", "wanted"),
    (
        (PosteriorRouter(0.0, 1.0), [*out_of_range("prior"), *out_of_range("switch_rate")]),
        (CosineRouter(-1.001), out_of_range("threshold")),
        (CosineRouter(2), out_of_range("threshold")),
        (CosineRouter(math.nan), out_of_range("threshold")),
        (CosineRouter(0.5, strict="yes"), [("value-unfit", "strict")]),  # type: ignore[arg-type]
        (CosineRouter(True), [("value-unfit", "threshold")]),
        (PosteriorRouter(1.0), out_of_range("prior")),
        (PosteriorRouter(math.nan), out_of_range("prior")),
        (PosteriorRouter(switch_rate=-0.001), out_of_range("switch_rate")),
        (PosteriorRouter(switch_rate=math.inf), out_of_range("switch_rate")),
        (PosteriorRouter(0.5, False), [("value-unfit", "switch_rate")]),
        (PosteriorRouter("x"), [("value-unfit", "prior")]),  # type: ignore[arg-type]
        (PosteriorRouter(10**400), [("value-unfit", "prior")]),
        (PosteriorRouter(switch_rate=np.float32(0.25)), [("value-unfit", "switch_rate")]),
        (Router(), [("value-unfit", "router")]),
        ({"prior": 0.5}, [("value-unfit", "router")]),
    ),
)
def test_a_router_that_makes_no_sense_is_refused_and_nothing_is_written(
    trio_of: Callable[..., Trio], tmp_path: Path, router: Any, wanted: list[tuple[str, str]]
) -> None:
    folder = trio_of("llama").path
    before = digests(folder)
    for operation in (lambda: route_export(folder, tmp_path / "out", router), lambda: set_routing(folder, router)):
        found = problems(operation, error=PlanError)
        places = [problem.where or problem.values["error"] for problem in found]
        assert [problem.code for problem in found] == [code for code, _ in wanted]
        assert all(place.startswith(start) for place, (_, start) in zip(places, wanted, strict=True)), places
    assert digests(folder) == before and not list(tmp_path.iterdir())


def test_what_has_no_router_or_no_expansion_is_refused(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("llama")
    with refused("model-unrouted", trio.expanded_path, CheckpointError):
        unroute(trio.expanded_path, tmp_path / "again")
    with refused("form-base-not-expanded", trio.base_path, CheckpointError):
        unroute(trio.base_path, tmp_path / "again")
    for operation in (route_export, unroute):
        with refused("folder-missing", tmp_path / "nowhere", CheckpointError):
            operation(tmp_path / "nowhere", tmp_path / "again")
    assert not list(tmp_path.iterdir())


def test_a_config_whose_router_is_none_is_not_written_into(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trio_of("llama").path, tmp_path / "routed"))
    with edited(folder / "config.json") as config:
        config["scale_surgery"]["router"] = "posterior"
    before = digests(folder)
    with refused("config-specs", f"{folder / 'config.json'}: scale_surgery.router", CheckpointError):
        set_routing(folder, PosteriorRouter())
    assert digests(folder) == before


def test_cosine_cannot_part_the_paths_of_a_preserve_model(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    folder = trio_of("llama", "preserve").expanded_path
    for routing in (COSINE, CosineRouter(strict=True)):
        with refused("paths-alike", "router", PlanError):
            route_export(folder, tmp_path / "routed", routing)
    assert not list(tmp_path.iterdir())


def test_a_missing_code_file_is_named(expanded: Path, tmp_path: Path) -> None:
    (expanded / "expanded_modules.py").unlink()
    (problem,) = problems(route_export, expanded, tmp_path / "routed", error=CheckpointError)
    assert problem == Problem("folder-damaged", expanded, Problem("file-missing", "expanded_modules.py"))
    assert not (tmp_path / "routed").exists()


# ---- the command


def test_the_command_and_back(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    folder, there, back = trio_of("llama", "deep").expanded_path, tmp_path / "there", tmp_path / "back"
    words = ("route-export", folder, "-o", there)
    text = run(*words, "--prior", "0.25", "--switch-rate", "0", "--base-weights", "link").output
    assert "posterior, prior 0.25, switch rate 0" in text
    assert "from layer 1 of 3 on" in text and "1.67 x" in text
    assert read_manifest(there).routing == PosteriorRouter((0.25, 0.75), switch_rate=0.0)
    content = json.loads(run("route-export", there, "-o", back, "--router", "none", "--json").output)
    assert content["routing"] is None
    assert digests(back) == digests(folder)
    text = run(*words, "--router", "cosine", "--threshold", "0", "--strict", "--overwrite").output
    assert "cosine, threshold 0, strict" in text
    assert read_manifest(there).routing == CosineRouter(threshold=0.0, strict=True)
    run(*words, "--overwrite", "--quiet")
    assert read_manifest(there).routing == PosteriorRouter((0.5, 0.5), switch_rate=0.01), "the default"


@pytest.mark.parametrize(
    ("options", "code", "text"),
    (
        ("--threshold 0.5", 2, "--threshold does not go with --router posterior"),
        ("--strict", 2, "--strict does not go with --router posterior"),
        (
            "--router cosine --prior 0.5 --switch-rate 0",
            2,
            "--prior, --switch-rate does not go with --router cosine",
        ),
        ("--router none --prior 0.5", 2, "--prior"),
        ("--router none --strict", 2, "--strict"),
        ("--router oracle", 2, "oracle"),
        ("--prior many", 2, "many"),
        ("--prior 1", 1, "--prior is 1.0, expected a probability"),
    ),
)
def test_options_that_are_wrong_or_of_another_router_are_refused(
    trio_of: Callable[..., Trio], tmp_path: Path, options: str, code: int, text: str
) -> None:
    trio = trio_of("llama", "deep")
    source = trio.path if "none" in options else trio.expanded_path
    output = run("route-export", source, "-o", tmp_path / "there", *options.split(), code=code).output
    assert text in " ".join(output.split()) and "Traceback" not in output
    assert not list(tmp_path.iterdir())
