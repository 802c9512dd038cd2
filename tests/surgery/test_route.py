"""A router given, changed and taken away on disk: which bytes change, which come back, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from scale_surgery.cli.program import main
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.evidence.inspect import inspect
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter, Router
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.record import read_manifest
from scale_surgery.surgery.route import Routed, route_export, set_routing, unroute
from scale_surgery.surgery.routers import RouterOptions, describe_router
from scale_surgery.surgery.strip import strip
from tests import routed
from tests.conftest import digests, load
from tests.routed import REQUESTS, Trio, random_ids, train

trio_of = routed.trio_of
COSINE = CosineRouter(threshold=0.25)
EXTRAS = {
    "README.md": b"---\nlicense: mit\n---\r\n# caf\xc3\xa9, no final newline",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "odd_bytes.dat": bytes(range(256)),
    "helper.py": b"print('code of the user')\n",
    "notes/deep/er/file.txt": b"below",
}


@pytest.fixture
def expanded(sharded_base: Path, tmp_path: Path) -> Path:
    """An expanded model in several shards, with every kind of side file, verified and trained once by its record."""
    for name, content in EXTRAS.items():
        (sharded_base / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded_base / name).write_bytes(content)
    folder = expand(sharded_base, REQUESTS["adapt"], tmp_path / "expanded").path
    edit_manifest(folder, lambda own: own | {"verification": {"passed": True, "date": "2026-01-01"}})
    add_run(folder, {"steps": 3})
    return folder


def add_run(folder: Path, run: dict[str, Any]) -> None:
    """Write a training run of its expansion into surgery.json."""

    def edit(content: dict[str, Any]) -> dict[str, Any]:
        content["expansions"]["default"]["training"].append(run)
        return content

    edit_manifest(folder, edit)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "surgery.json"
    content = edit(json.loads(file.read_text()))
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))


def weights(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.glob("*.safetensors"))}


def changed_files(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# ---- there


@pytest.mark.parametrize("how", ("auto", "copy", "link"))
@pytest.mark.parametrize("routing", (PosteriorRouter().for_expansions(1), COSINE), ids=("posterior", "cosine"))
def test_only_config_and_manifest_change(expanded: Path, tmp_path: Path, routing: Router, how: Any) -> None:
    before = digests(expanded)
    done = route_export(expanded, tmp_path / "routed", routing, base_weights=how)
    assert digests(expanded) == before, "the input is as it was"
    assert changed_files(before, digests(done.path)) == {"config.json", "surgery.json"}
    shards = weights(expanded)
    assert len(shards) > 3
    written = sum(file.stat().st_size for file in shards.values())
    assert done == Routed(tmp_path / "routed", "sharded", routing, (0,), 3, 0 if how == "link" else written)
    assert done.cost == 2
    for name, file in shards.items():
        assert (file.stat().st_ino == (done.path / name).stat().st_ino) == (how == "link"), name
    # what programs edit in place is never shared
    assert all((done.path / name).stat().st_nlink == 1 for name in ("config.json", *EXTRAS))


def test_what_config_and_manifest_say(expanded: Path, tmp_path: Path) -> None:
    before = json.loads((expanded / "config.json").read_text())
    route = CosineRouter(threshold=0.25, strict=True)
    path = route_export(expanded, tmp_path / "routed", route).path
    config, manifest = json.loads((path / "config.json").read_text()), read_manifest(path)
    own = config["scale_surgery"].pop("router")
    assert config == before, "nothing else"
    assert own == {"router": "cosine", "threshold": 0.25, "strict": True}, "no numbers of the other router"
    assert manifest == replace(read_manifest(expanded), routing=route), "nothing else"
    assert manifest.training == ({"steps": 3},)
    assert read_manifest(expanded).routing is None
    posterior = route_export(expanded, tmp_path / "posterior", PosteriorRouter(prior=0.2, switch_rate=0.0)).path
    own = json.loads((posterior / "config.json").read_text())["scale_surgery"]["router"]
    assert own == {"router": "posterior", "prior": [0.2, 0.8], "switch_rate": 0.0}, "a prior for each path"


def test_what_was_verified_was_another_model(expanded: Path, tmp_path: Path) -> None:
    """A verification names the router that it is about."""
    path = route_export(expanded, tmp_path / "routed").path
    added, before = inspect(path).expanded, inspect(expanded).expanded
    assert added is not None and before is not None
    assert (before.verified, before.changed_since) == ("passed 2026-01-01", None)
    assert (added.verified, added.changed_since) == ("passed 2026-01-01", "the router changed since")
    edit_manifest(path, lambda own: own | {"verification": own["verification"] | {"routing": own["routing"]}})
    assert inspect(path).expanded.changed_since is None  # type: ignore[union-attr]
    set_routing(path, PosteriorRouter(prior=0.2))
    assert inspect(path).expanded.changed_since == "the router's numbers changed since"  # type: ignore[union-attr]


@pytest.mark.parametrize("request_name", ("preserve", "deep", "adapt"))
def test_where_the_paths_part_and_what_it_costs(
    trio_of: Callable[..., Trio], tmp_path: Path, request_name: str
) -> None:
    fork = {"preserve": None, "deep": 1, "adapt": 0}[request_name]
    done = route_export(trio_of("llama", request_name).expanded_path, tmp_path / "routed")
    assert done.forks == (() if fork is None else (fork,))
    assert done.cost == pytest.approx({None: 1.0, 1: 1 + 2 / 3, 0: 2.0}[fork])


def test_a_cap_on_the_logits_stays_before_a_router(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("gemma2", "deep")
    for path in (trio.expanded_path, trio.path):
        config = json.loads((path / "config.json").read_text())
        assert config["final_logit_softcapping"] == 30.0, "as the base has it"
        facts = config["scale_surgery"]["base"]
        assert (facts["softcap"], facts["softcap_key"]) == (30.0, "final_logit_softcapping")
    base, unrouted, model = trio.load()
    for one in (base, unrouted, model):
        with torch.no_grad():
            one.get_output_embeddings().weight.mul_(40)
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
    unroute(trio.path, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (trio.expanded_path / "config.json").read_bytes()


def test_a_base_without_a_cap_gets_none(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(base_of("gemma2"), tmp_path / "base"))
    edit_config(base, lambda own: own | {"final_logit_softcapping": None})
    path = route_export(expand(base, REQUESTS["deep"], tmp_path / "expanded").path, tmp_path / "routed").path
    assert json.loads((path / "config.json").read_text())["scale_surgery"]["base"]["softcap"] is None
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load(path)(ids).logits, load(base)(ids).logits)


def test_a_cap_that_config_leaves_out_is_the_default(base_of: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(base_of("gemma2"), tmp_path / "base"))
    edit_config(base, lambda own: {name: value for name, value in own.items() if name != "final_logit_softcapping"})
    path = route_export(expand(base, REQUESTS["deep"], tmp_path / "expanded").path, tmp_path / "routed").path
    assert json.loads((path / "config.json").read_text())["scale_surgery"]["base"]["softcap"] == 30.0
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(load(path)(ids).logits, load(base)(ids).logits)


# ---- and back


@pytest.mark.parametrize("how", ("auto", "copy", "link"))
def test_un_routing_gives_back_every_byte(expanded: Path, tmp_path: Path, how: Any) -> None:
    before = digests(expanded)
    routed_path = route_export(expanded, tmp_path / "routed", COSINE, base_weights=how).path
    set_routing(routed_path, CosineRouter(threshold=0.75))
    there = digests(routed_path)
    done = unroute(routed_path, tmp_path / "back", base_weights=how)
    assert digests(tmp_path / "back") == before
    assert digests(routed_path) == there
    assert (done.routing, done.cost) == (None, 1.0)
    if how == "link":
        assert done.bytes_written == 0
        for name, file in weights(expanded).items():
            assert file.stat().st_ino == (done.path / name).stat().st_ino


def test_code_of_another_release_stays(expanded: Path, tmp_path: Path) -> None:
    """One set of files runs a model with a router and without."""
    file, besides = "expanded_modules.py", "expanded_once.py"
    (expanded / file).write_bytes((expanded / file).read_bytes() + b"# of another release\r\n")
    (expanded / besides).write_bytes(b"# a file that this release has not\n")
    hashes = {name: hashlib.sha256((expanded / name).read_bytes()).hexdigest() for name in (file, besides)}
    edit_manifest(expanded, lambda own: own | {"code": own["code"] | hashes})
    before = digests(expanded)
    path = route_export(expanded, tmp_path / "routed").path
    assert changed_files(before, digests(path)) == {"config.json", "surgery.json"}
    assert load(path).is_routing_enabled
    unroute(path, tmp_path / "back")
    assert digests(tmp_path / "back") == before


def test_what_was_learned_since_stays(expanded: Path, tmp_path: Path) -> None:
    """Weights and the record of training are the routed model's."""
    path = route_export(expanded, tmp_path / "routed", base_weights="copy").path
    shard = next(file for name, file in weights(path).items() if name.startswith("expansion"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    add_run(path, {"steps": 5, "begun": "2026-01-02"})
    (path / "note.txt").write_text("new")
    unroute(path, tmp_path / "back")
    assert changed_files(digests(expanded), digests(tmp_path / "back")) == {shard.name, "surgery.json", "note.txt"}
    manifest = read_manifest(tmp_path / "back")
    assert manifest.training == ({"steps": 3}, {"steps": 5, "begun": "2026-01-02"})
    assert manifest.routing is None
    assert inspect(tmp_path / "back").expanded.changed_since == "tensors (by training) changed since"  # type: ignore[union-attr]


def test_strip_of_a_routed_model_is_the_base(sharded_base: Path, expanded: Path, tmp_path: Path) -> None:
    before = digests(sharded_base)
    for index, routing in enumerate((PosteriorRouter(), COSINE)):
        path = route_export(expanded, tmp_path / f"routed{index}", routing).path
        strip(path, tmp_path / f"stripped{index}")
        assert digests(tmp_path / f"stripped{index}") == before


def test_a_base_with_a_cap_comes_back(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("gemma2", "adapt", "cosine")
    strip(trio.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(trio.base_path)


# ---- other numbers


def test_set_routing(expanded: Path, tmp_path: Path) -> None:
    path, ids = route_export(expanded, tmp_path / "routed", PosteriorRouter(prior=0.5)).path, random_ids(2, 9)
    before = digests(path)
    with torch.no_grad():
        one = train(load(path))(ids).logits
        set_routing(path, PosteriorRouter(prior=0.2, switch_rate=0.0))
        other = train(load(path))(ids).logits
    assert changed_files(before, digests(path)) == {"config.json", "surgery.json"}
    assert not torch.equal(one, other)
    config = json.loads((path / "config.json").read_text())["scale_surgery"]["router"]
    assert (config["prior"], config["switch_rate"]) == ([0.2, 0.8], 0.0)
    assert read_manifest(path).routing == PosteriorRouter((0.2, 0.8), switch_rate=0.0)
    assert read_manifest(path).verification == read_manifest(expanded).verification
    set_routing(path, PosteriorRouter(prior=0.5))
    assert digests(path) == before


@pytest.mark.parametrize(
    ("was", "asked", "text"),
    (
        (PosteriorRouter(), COSINE, "its router is posterior, .*cannot become cosine"),
        (COSINE, CosineRouter(threshold=0.25, strict=True), "its router is cosine.*cannot become cosine.*strict"),
        (None, PosteriorRouter(), "its router is none"),
    ),
    ids=("another router", "another strictness", "no router"),
)
def test_set_routing_changes_numbers_only(
    expanded: Path, tmp_path: Path, was: Router | None, asked: Router, text: str
) -> None:
    path = expanded if was is None else route_export(expanded, tmp_path / "routed", was).path
    before = digests(path)
    with pytest.raises(CheckpointError, match=text):
        set_routing(path, asked)
    with pytest.raises(PlanError, match="threshold: is 2, expected a cosine"):
        set_routing(path, CosineRouter(threshold=2))
    assert digests(path) == before


# ---- refused


def router_with(numbers: dict[str, Any]) -> Router:
    return CosineRouter(**numbers) if "threshold" in numbers else PosteriorRouter(**numbers)


def assert_nothing_written(folder: Path, *known: str) -> None:
    assert sorted(file.name for file in folder.iterdir()) == sorted(known)


def test_every_bad_number_is_named_at_once(expanded: Path, tmp_path: Path) -> None:
    bad = PosteriorRouter(prior=0.0, switch_rate=1.0)
    with pytest.raises(PlanError) as error:
        route_export(expanded, tmp_path / "routed", bad)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "prior",
        "switch_rate",
    ]
    assert all("expected" in line for line in str(error.value).splitlines())
    assert_nothing_written(tmp_path, "expanded", "sharded")


@pytest.mark.parametrize(
    ("numbers", "name"),
    (
        ({"threshold": -1.001}, "threshold:"),
        ({"threshold": float("nan")}, "threshold:"),
        ({"threshold": 0.5, "strict": "yes"}, "strict is"),
        ({"prior": 1.0}, "prior:"),
        ({"prior": float("nan")}, "prior:"),
        ({"switch_rate": -0.001}, "switch_rate:"),
        ({"switch_rate": float("inf")}, "switch_rate:"),
    ),
)
def test_a_number_out_of_range_is_refused(expanded: Path, tmp_path: Path, numbers: dict[str, Any], name: str) -> None:
    with pytest.raises(PlanError, match=rf"^{name} .*, expected [^\n]*$"):
        route_export(expanded, tmp_path / "routed", router_with(numbers))
    assert_nothing_written(tmp_path, "expanded", "sharded")


@pytest.mark.parametrize(
    ("router", "said"),
    (
        (PosteriorRouter(0.5, False), "switch_rate is False, expected a number"),
        (PosteriorRouter("x"), "prior is 'x', expected a list"),  # type: ignore[arg-type]
        (PosteriorRouter(10**400), "prior is 1000"),
        (PosteriorRouter(switch_rate=np.float32(0.25)), "switch_rate is np.float32(0.25), expected a number"),
        (CosineRouter(True), "threshold is True, expected a number"),
        (Router(), "expected one such as scale_surgery.PosteriorRouter()"),
        ({"prior": 0.5}, "router: is {'prior': 0.5}, expected one such as scale_surgery.PosteriorRouter()"),
    ),
    ids=("bool", "text", "huge", "numpy", "true", "no kind", "a mapping"),
)
def test_what_python_gives_otherwise_is_refused_and_nothing_is_written(
    trio_of: Callable[..., Trio], tmp_path: Path, router: Any, said: str
) -> None:
    folder = trio_of("llama").path
    before = digests(folder)
    for operation in (lambda: route_export(folder, tmp_path / "out", router), lambda: set_routing(folder, router)):
        with pytest.raises(PlanError, match=re.escape(said)):
            operation()
    assert digests(folder) == before and not list(tmp_path.iterdir())


def test_what_a_router_is_before_it_knows_how_many_paths_there_are() -> None:
    assert PosteriorRouter().bound is None and describe_router(PosteriorRouter()) == "posterior, switch rate 0.01"
    assert (
        PosteriorRouter(0.2).for_expansions(1).bound == -math.log(0.2)
        and PosteriorRouter().for_expansions(4).prior == (0.2,) * 5
    )
    assert PosteriorRouter().for_expansions(4) == PosteriorRouter(0.2).for_expansions(4).without_prior().for_expansions(
        4
    )
    uneven = PosteriorRouter((0.5, 0.2, 0.3))
    assert (
        describe_router(uneven, ("law", "medicine"))
        == "posterior, prior base 0.5, law 0.2, medicine 0.3, switch rate 0.01"
    )
    with pytest.raises(PlanError, match="--strict does not go with --router posterior"):
        RouterOptions(strict=True).make()


@pytest.mark.parametrize("numbers", ({"threshold": -1.0}, {"threshold": 1.0}, {"switch_rate": 0.0}))
def test_the_ends_of_the_ranges_are_allowed(expanded: Path, tmp_path: Path, numbers: dict[str, float]) -> None:
    route = router_with(numbers)
    assert load(route_export(expanded, tmp_path / "routed", route, base_weights="link").path).is_routing_enabled


def test_a_router_takes_the_place_of_another(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("llama")
    again = route_export(trio.path, tmp_path / "again", PosteriorRouter(switch_rate=0), base_weights="link").path
    straight = route_export(
        trio.expanded_path, tmp_path / "straight", PosteriorRouter(switch_rate=0), base_weights="link"
    ).path
    assert digests(again) == digests(straight)


def test_what_has_no_router_or_no_expansion_is_refused(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    trio = trio_of("llama")
    with pytest.raises(CheckpointError, match="has no router, expected a model made by scale-surgery route-export"):
        unroute(trio.expanded_path, tmp_path / "again")
    for operation in (route_export, unroute):
        with pytest.raises(CheckpointError, match=r"is a base model, expected one made by"):
            operation(trio.base_path, tmp_path / "again")
        with pytest.raises(CheckpointError, match="nowhere"):
            operation(tmp_path / "nowhere", tmp_path / "again")
    assert_nothing_written(tmp_path)


def test_cosine_cannot_part_the_paths_of_a_preserve_model(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    folder = trio_of("llama", "preserve").expanded_path
    for routing in (COSINE, CosineRouter(strict=True)):
        with pytest.raises(PlanError, match=r"^router: cosine compares .*Take --router posterior"):
            route_export(folder, tmp_path / "routed", routing)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("operation", (route_export, unroute))
def test_the_target_is_checked_first(trio_of: Callable[..., Trio], tmp_path: Path, operation: Any) -> None:
    trio = trio_of("llama")
    source = Path(shutil.copytree(trio.expanded_path if operation is route_export else trio.path, tmp_path / "source"))
    before = digests(source)
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(CheckpointError, match="lies inside, around or at the input"):
            operation(source, target)
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(CheckpointError, match=r"exists already\. Choose another output folder, or give --overwrite"):
        operation(source, taken)
    (taken / "diary.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is no model folder, --overwrite will not replace it"):
        operation(source, taken, overwrite=True)
    (taken / "diary.txt").unlink()
    operation(source, taken, overwrite=True)
    assert digests(source) == before
    assert (read_manifest(taken).routing is not None) == (operation is route_export)
    assert_nothing_written(tmp_path, "source", "taken")


@pytest.mark.parametrize("name", ("../outside.txt", "/tmp/outside.txt", "config.json/../../outside.txt"))
def test_a_manifest_cannot_write_or_read_outside_the_folder(
    trio_of: Callable[..., Trio], tmp_path: Path, name: str
) -> None:
    """surgery.json may come from anybody: its names are paths inside the folder, or nothing is written."""
    (tmp_path / "source").mkdir()
    folder = Path(shutil.copytree(trio_of("llama").path, tmp_path / "source" / "routed"))
    name = name.replace("/tmp", str(tmp_path))

    edit_manifest(folder, lambda own: own | {"code": own["code"] | {name: "boo"}})
    for operation in (unroute, strip):
        with pytest.raises(CheckpointError, match=r"outside\.txt' is said to be .*expected a name inside the folder"):
            operation(folder, tmp_path / "out" / "back")
    assert not list(tmp_path.rglob("outside.txt")) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "routing",
    (
        {},
        [],
        "posterior",
        {"router": "posterior"},
        PosteriorRouter().for_expansions(1).settings | {"colour": "blue"},
        PosteriorRouter().for_expansions(1).settings | {"router": "oracle"},
        PosteriorRouter().for_expansions(1).settings | {"prior": [0.5, 0.4]},
        PosteriorRouter().for_expansions(1).settings | {"prior": 1},
    ),
    ids=str,
)
def test_a_spoiled_record_is_refused(trio_of: Callable[..., Trio], tmp_path: Path, routing: Any) -> None:
    folder = Path(shutil.copytree(trio_of("llama").path, tmp_path / "routed"))
    edit_manifest(folder, lambda own: own | {"routing": routing})
    with pytest.raises(CheckpointError, match=r"surgery\.json: is incomplete .*Restore it"):
        unroute(folder, tmp_path / "back")
    assert_nothing_written(tmp_path, "routed")


def test_a_missing_code_file_is_named(expanded: Path, tmp_path: Path) -> None:
    (expanded / "expanded_modules.py").unlink()
    with pytest.raises(CheckpointError, match=r"^expanded_modules\.py: code file is missing\."):
        route_export(expanded, tmp_path / "routed")
    assert_nothing_written(tmp_path, "expanded", "sharded")


# ---- the command


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["route-export", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_and_back(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    folder, there, back = trio_of("llama", "deep").expanded_path, tmp_path / "there", tmp_path / "back"
    text = run(folder, "-o", there, "--prior", "0.25", "--switch-rate", "0", "--base-weights", "link").output
    assert "posterior, prior 0.25, switch rate 0" in text
    assert "from layer 1 of 3 on" in text and "1.67 x" in text
    assert read_manifest(there).routing == PosteriorRouter((0.25, 0.75), switch_rate=0.0)
    found = json.loads(run(there, "-o", back, "--router", "none", "--json").output)
    assert found["routing"] is None
    assert digests(back) == digests(folder)
    text = run(folder, "-o", there, "--router", "cosine", "--threshold", "0", "--strict", "--overwrite").output
    assert "cosine, threshold 0, strict" in text
    assert read_manifest(there).routing == CosineRouter(threshold=0.0, strict=True)


def test_by_default_it_is_the_posterior_router(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    run(trio_of("llama", "deep").expanded_path, "-o", tmp_path / "there", "--quiet")
    assert read_manifest(tmp_path / "there").routing == PosteriorRouter((0.5, 0.5), switch_rate=0.01)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        (("--threshold", "0.5"), "--threshold does not go with --router posterior"),
        (
            ("--router", "cosine", "--prior", "0.5", "--switch-rate", "0"),
            "--prior, --switch-rate does not go with --router cosine",
        ),
        (("--router", "none", "--prior", "0.5"), "--prior"),
        (("--router", "none", "--strict"), "--strict"),
        (("--router", "oracle"), "oracle"),
        (("--prior", "many"), "many"),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_another_router_are_refused(
    trio_of: Callable[..., Trio], tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    folder = trio_of("llama", "deep")
    source = folder.path if "none" in options else folder.expanded_path
    assert text in run(source, "-o", tmp_path / "there", *options, code=2).output
    assert_nothing_written(tmp_path)


def test_what_is_wrong_is_one_line_without_a_traceback(trio_of: Callable[..., Trio], tmp_path: Path) -> None:
    text = run(trio_of("llama", "deep").expanded_path, "-o", tmp_path / "there", "--prior", "1", code=1).output
    assert "--prior is 1.0, expected a probability" in " ".join(text.split())
    assert "Traceback" not in text
    assert_nothing_written(tmp_path)


def test_help_says_what_a_router_is() -> None:
    text = run("--help").output
    assert "Example: scale-surgery route-export" in text
    assert "preserved" not in text, "the bare word promises nothing"
