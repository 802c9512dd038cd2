"""Finding the model that the user named: a folder, or a Hub repository in the local cache, without a network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scale_surgery.checkpoint.sources import find_beside_weights, find_source, open_model
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.conftest import digests, problems

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def cached(base_of) -> Path:
    """A repository in the Hub's cache as huggingface_hub lays it out; gives its snapshot."""
    repo = Path(os.environ["HF_HOME"]) / "hub" / "models--surgeons--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name, digest in digests(base_of("llama", tied=True)).items():
        shutil.copy(base_of("llama", tied=True) / name, repo / "blobs" / digest)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    yield snapshot
    shutil.rmtree(repo)


@pytest.mark.parametrize("revision", (None, "main", COMMIT))
def test_a_repository_in_the_cache(cached, revision):
    source = find_source("surgeons/tiny", revision)
    assert (source.path, source.name, source.revision) == (cached, "surgeons/tiny", COMMIT)
    opened, checkpoint = open_model("surgeons/tiny", revision)
    assert opened == source
    assert checkpoint.path == cached


@pytest.mark.parametrize("how", ("auto", "copy", "link"))
def test_an_expansion_records_id_and_commit_and_leaves_the_cache_alone(cached, base_of, tmp_path, how):
    blobs = cached.parents[1] / "blobs"
    before = digests(blobs)
    expansion = expand("surgeons/tiny", Request("0"), tmp_path / "expanded", base_weights=how)
    manifest = read_manifest(expansion.path)
    assert (manifest.base_name, manifest.base_revision) == ("surgeons/tiny", COMMIT)
    assert digests(blobs) == before
    assert not any(file.is_symlink() for file in expansion.path.iterdir()), "files, not links into the cache"
    for file in expansion.path.iterdir():
        assert str(cached.parents[2]).encode() not in file.read_bytes()
    strip(expansion.path, tmp_path / "stripped", base_weights=how)
    assert digests(tmp_path / "stripped") == digests(base_of("llama", tied=True))


def test_the_default_output_is_named_after_the_repository(cached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expand("surgeons/tiny", Request("0")).path == Path("tiny-scale")
    assert plan("surgeons/tiny", Request("0")).base_revision == COMMIT


def test_a_folder_comes_before_a_repository_of_the_same_name(cached, base_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base_of("qwen3"), tmp_path / "surgeons" / "tiny")
    source = find_source("surgeons/tiny")
    assert (source.path, source.name, source.revision) == (Path("surgeons/tiny"), "tiny", None)


def test_a_folder_has_no_revision(cached, base_of, tmp_path, monkeypatch):
    """It may stand in the place of a repository of the same name, whose revision was asked for."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base_of("qwen3"), tmp_path / "surgeons" / "tiny")
    for find in (find_source, open_model, find_beside_weights):
        assert problems(find, "surgeons/tiny", "v2", error=PlanError) == [
            Problem("revision-of-folder", "--revision", revision="v2", model="surgeons/tiny")
        ]
    # a commit of a record is that of a repository, if it is one
    assert find_source("surgeons/tiny", recorded=COMMIT).revision is None


def test_a_commit_of_a_record_is_used_unless_the_user_names_one(cached):
    assert find_source("surgeons/tiny", recorded=COMMIT).revision == COMMIT
    with pytest.raises(CheckpointError):
        find_source("surgeons/tiny", recorded="0" * 40)
    assert find_source("surgeons/tiny", "main", recorded="0" * 40).revision == COMMIT


def test_a_folder_is_known_by_its_name_only(base_of, monkeypatch):
    folder = base_of("llama")
    for given in (folder, str(folder), f"{folder}/", folder / ".." / folder.name):
        assert find_source(given).name == folder.name
    monkeypatch.chdir(folder)
    assert find_source(".").name == folder.name


@pytest.mark.parametrize(("repo", "revision"), (("nobody/nothing", None), ("surgeons/tiny", "no-such-branch")))
def test_what_cannot_be_had_offline(cached, repo, revision):
    (problem,) = problems(open_model, repo, revision, error=CheckpointError)
    assert (problem.code, problem.where) == ("repository-unreachable", repo)
    assert "\n" not in problem.values["error"]


def test_a_repository_that_is_there_in_part_says_what_is_missing(cached, tmp_path):
    """Without a network; a plan of it reads headers from the Hub."""
    weights = next(cached.glob("*.safetensors"))
    weights.rename(tmp_path / "away")
    try:
        (problem,) = problems(open_model, "surgeons/tiny", error=CheckpointError)
        assert problem.code == "shard-missing"
    finally:
        (tmp_path / "away").rename(weights)


@pytest.mark.parametrize("name", ("nowhere", "./no/where", "a/b/c", "/no/where", "~/model", "../x", "org/"))
def test_what_is_neither_a_folder_nor_a_repository(name):
    assert problems(find_source, name, error=CheckpointError) == [Problem("model-not-found", name)]


def test_a_name_that_no_system_or_hub_can_hold():
    (unknown,) = problems(open_model, "my models/foo", error=CheckpointError)
    assert (unknown.code, unknown.where) == ("repository-unreachable", "my models/foo")
    assert problems(open_model, name := "x" * 300, error=CheckpointError) == [
        Problem("path-unreachable", name, error="File name too long")
    ]
