"""A release's checks notice what is wrong; `make release` runs them on a release."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "release" / "check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def release_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def metadata(*minors: int, urls: tuple[str, ...] = ()) -> Message:
    made = Message()
    made["Requires-Python"] = ">=3.11"
    for minor in minors:
        made["Classifier"] = f"Programming Language :: Python :: 3.{minor}"
    for url in urls:
        made["Project-URL"] = url
    made.set_payload("[a page](docs/index.md) and [a paper](https://arxiv.org/abs/2511.03270)")
    return made


def test_a_second_build_with_another_byte_is_noticed(release, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.whl").write_bytes(b"same")
    assert release.differing(tmp_path / "first", tmp_path / "second") == []
    (tmp_path / "second" / "a.whl").write_bytes(b"sane")
    (tmp_path / "second" / "b.whl").write_bytes(b"more")
    assert release.differing(tmp_path / "first", tmp_path / "second") == ["a.whl", "b.whl"]


def test_a_file_too_many_and_one_too_few_are_noticed(release):
    assert release.changes(["a", "b"], ["a", "b"]) == []
    assert release.changes(["a", "b"], ["a", "c"]) == ["- b", "+ c"]


def test_a_python_without_a_classifier_is_noticed(release):
    assert release.wrong_classifiers(metadata(11, 12, 13, 14)) == []
    assert release.wrong_classifiers(metadata(11, 13, 14)) == ["Programming Language :: Python :: 3.12"]
    assert release.wrong_classifiers(metadata(11, 12, 13)) == ["Programming Language :: Python :: 3.14"]
    assert release.wrong_classifiers(metadata(10, 11, 12, 13, 14)) == ["Programming Language :: Python :: 3.10"]


def test_a_version_that_a_file_does_not_name_is_noticed(release):
    assert release.without_version(ROOT, version := release_version()) == []
    assert release.without_version(ROOT, f"{version}1") == ["CHANGELOG.md", "CITATION.cff"]


def test_what_an_index_still_needs_is_listed(release):
    assert len(release.missing_to_publish(metadata(11))) == 2
    assert len(release.missing_to_publish(metadata(11, urls=("Source, https://example.org",)))) == 1


def test_readme_has_a_quick_start_to_try(release):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (_, shell), (_, python) = release.quick_start(readme, "biographies")
    assert "scale-surgery expand biographies " in " ".join(shell.split()) and "qwen3-wide" in python
    assert release.NAMED_MODEL not in shell
    with pytest.raises(SystemExit):
        release.quick_start("# Nothing\n", "biographies")


def test_a_file_that_is_listed_for_the_sdist_is_there(release):
    """The list is that of a build; a file that was removed since is noticed at once, others by `make release`."""
    assert [name for name in (ROOT / release.LISTED).read_text().splitlines() if not (ROOT / name).is_file()] == [
        "PKG-INFO"
    ]


def test_the_citation_is_of_this_version_and_names_every_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    papers = set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert papers and {reference["url"].rpartition("/")[2] for reference in citation["references"]} == papers


@pytest.mark.parametrize("name", ["bug", "model"])
def test_issues_ask_for_what_inspect_says(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    (asked,) = [part for part in form["body"] if part.get("id") == "inspect"]
    assert asked["validations"]["required"] and re.search("inspect .* --json", asked["attributes"]["label"])


def test_the_image_is_given_what_it_copies():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    given = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied == {line.removeprefix("!") for line in given if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert lines.index("USER user") < lines.index('CMD ["scale-surgery", "demo"]')
