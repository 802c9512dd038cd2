"""Models on a Hub that are read: what the real client fetches, and what is said of what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from scale_surgery import Request, expand, plan, strip
from scale_surgery.biographies import SHIPPED_MODEL
from tests.command import run
from tests.conftest import digests
from tests.hub_server import Hub, Repository, asked, commit_of, running
from tests.own_code import save_pine
from tests.tiny import save_tiny

REPO = "org/tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("repository") / "tiny", "llama", shard_size="40KB")


@contextmanager
def served(model: Path) -> Iterator[Hub]:
    """A Hub with one repository."""
    files: dict[str, bytes | str] = {file.name: file.read_bytes() for file in model.iterdir()}
    with running() as hub:
        hub.repositories[REPO] = Repository(private=False, branches={"main": files})
        yield hub


@pytest.fixture
def hub(base: Path) -> Iterator[Hub]:
    with served(base) as server:
        yield server


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub that this process asks, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    with asked(hub):
        yield hub


def commit(hub: Hub) -> str:
    return commit_of(hub.repositories[REPO].branches["main"])


def test_a_plan_downloads_headers_only(here: Hub, base: Path, tmp_path: Path) -> None:
    result = run("plan", REPO, "--layers", "last:1", "--json")
    plan = json.loads(result.stdout)
    assert (plan["base_name"], plan["base_revision"], plan["layers"]) == (REPO, commit(here), [2])
    downloaded = list(tmp_path.rglob("*.safetensors"))
    assert downloaded == [] and result.stderr == ""
    inspected, local = (run("inspect", model, "--json").stdout for model in (REPO, str(base)))
    assert json.loads(inspected) | {"name": "tiny"} == json.loads(local)
    shards = {file.name: file.stat().st_size for file in base.glob("*.safetensors")}
    assert len(shards) > 1 and all(here.sent[name] > 0 for name in shards), "headers come by range"


def test_headers_of_the_hub_are_checked_like_those_of_a_folder(here: Hub, base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    files = here.repositories[REPO].branches["main"]
    for wrong, code in (({"scale_surgery": []}, "config-specs"), ({"num_hidden_layers": 10**6}, "config-count")):
        files["config.json"] = json.dumps(config | wrong).encode()
        refused = json.loads(run("plan", REPO, "--layers", "last:1", "--json", code=1).stdout)
        assert [problem["code"] for problem in refused["problems"]] == [code]


def test_the_whole_job_is_planned_before_any_weight_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the tokenizer, which lies beside the weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("Some text to learn.\n" * 30)
    words = ("learn", REPO, "--data", tmp_path / "text.txt", "-o", tmp_path / "job", "--dry-run", "--json")
    with served(SHIPPED_MODEL) as server, asked(server):
        estimate = json.loads(run(*words).stdout)
    assert estimate["tokens"] > 30 and not (tmp_path / "job").exists()
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_plan_of_a_model_with_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "own"))
    with served(save_pine(tmp_path / "pine")) as server, asked(server):
        result = run("plan", REPO, "--layers", "last:1", "--json", "--trust-remote-code")
    classes = json.loads(result.stdout)["facts"]["architecture"]["own_code"]
    assert classes["AutoModelForCausalLM"] == "modeling_pine.PineForCausalLM"
    assert list(tmp_path.rglob("own/**/*.safetensors")) == []


@pytest.mark.slow
def test_an_expansion_downloads_once_and_records_the_commit(hub: Hub, base: Path, tmp_path: Path) -> None:
    """In a process of its own, which finds the Hub and its cache by the variables of the environment."""
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
    words = ["expand", REPO, "--layers", "last:1", "-o", str(tmp_path / "e"), "--json"]
    command = [sys.executable, "-m", "scale_surgery", *words]
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "e" / "surgery.json").read_text())
    assert (manifest["base_name"], manifest["base_revision"]) == (REPO, commit(hub))
    assert digests(strip(tmp_path / "e", tmp_path / "back").path) == digests(base)


def test_what_was_downloaded_is_not_asked_for_again(here: Hub, tmp_path: Path) -> None:
    expanded = expand(REPO, Request("last:1"), tmp_path / "e")
    manifest = json.loads((tmp_path / "e" / "surgery.json").read_text())
    assert (manifest["base_name"], manifest["base_revision"]) == (REPO, commit(here))
    sent = dict(here.sent)
    assert plan(REPO, Request("last:1")).tensors == expanded.plan.tensors
    assert here.sent == sent != {}


def test_a_second_copy_of_the_weights_is_not_downloaded(here: Hub, tmp_path: Path) -> None:
    second = ("consolidated.safetensors", "original/model-00001-of-00002.safetensors")
    here.repositories[REPO].branches["main"] |= dict.fromkeys(second, b"a second copy of the weights")
    expand(REPO, Request("last:1"), tmp_path / "e")
    assert [here.sent[name] for name in second] == [0, 0]
    assert here.sent["model-00001-of-00007.safetensors"] > 0


def test_a_repository_that_is_not_there(here: Hub) -> None:
    for verb in ("plan", "expand"):
        message = " ".join(run(verb, "org/none", "--layers", "0", code=1).stderr.split())
        assert "Traceback" not in message
        assert message.startswith("error: org/none: no such folder, and the Hub does not give it (")
        assert "Check the name, your access (hf auth login), the network, and HF_HUB_OFFLINE." in message
