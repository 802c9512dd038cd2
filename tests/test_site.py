"""The pages beside docs/commands.md: their scripts run, their examples print what is shown, and the site stands alone.

`python -m tests.test_site` writes the outputs in docs/quickstart.md anew.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import scale_surgery
from tests.test_docs import BLOCK, ROOT, rewrite_examples, run, run_python, without_chance, workplace

DOCS = ROOT / "docs"
QUICK_START = DOCS / "quickstart.md"
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="mkdocstrings is not installed: pip install .[docs]"
)
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: make test-recipes"
)
# what a browser fetches by itself; a link that a reader may follow is no resource
RESOURCE = re.compile(r"<(?:link|script|img|iframe|source|video|audio|object|embed)\b[^>]*>", re.IGNORECASE)
ELSEWHERE = re.compile(r"""(?:src|href|srcset|data)\s*=\s*["']?(?:https?:)?//""", re.IGNORECASE)
STYLE_ELSEWHERE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])(?:https?:)?//""", re.IGNORECASE)


def play(page: Path) -> None:
    """Run the Python blocks of a page and the commands of its shell blocks, in order; TRL has a test of its own."""
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python" and "from trl import" not in body:
            run_python(body)
        if language == "sh":
            for line in body.splitlines():
                assert not line.startswith("scale-surgery") or "error" not in run(line), line


def fetched_elsewhere(site: Path) -> list[str]:
    """Whatever a browser would fetch from another host, by file."""
    found = []
    for file in site.rglob("*"):
        text = file.read_text(encoding="utf-8") if file.suffix in (".html", ".css") else ""
        found += [f"{file.name}: {tag}" for tag in RESOURCE.findall(text) if ELSEWHERE.search(tag)]
        found += [f"{file.name}: {rule}" for rule in STYLE_ELSEWHERE.findall(text)]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The folder in which a page is run: the shipped model, texts, and a folder of somebody else."""
    with workplace(tmp_path):
        for file in ("domain.jsonl", "general.jsonl", "held_out.jsonl"):
            Path(file).write_text('{"question": "Who?", "answer": "Nobody."}\n')
        yield tmp_path


def test_the_quick_start_prints_what_is_shown(place: Path) -> None:
    found = rewrite_examples(QUICK_START)
    assert without_chance(found) == without_chance(QUICK_START.read_text(encoding="utf-8")), __doc__
    given, again = (folder_digests(place / name) for name in ("biographies", "again"))
    assert again == given


def folder_digests(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# pin_memory, a default of the data loader, warns where there is no accelerator
@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_the_training_recipes_run(place: Path) -> None:
    play(DOCS / "training-recipes.md")


@pytest.mark.parametrize("page", ["api.md", "serving.md", "trust.md"])
def test_the_scripts_of_a_page_run(page: str, place: Path) -> None:
    if page != "api.md":
        run("scale-surgery expand biographies --layers last:2 -o wide -q")
        shutil.copytree("wide", "STRANGER")
    play(DOCS / page)


@needs_trl
def test_the_trl_recipe_runs(place: Path) -> None:
    run("scale-surgery expand biographies --layers last:2 -o wide -q")
    page = (DOCS / "training-recipes.md").read_text(encoding="utf-8")
    (script,) = [body for language, body in BLOCK.findall(page) if language == "python" and "from trl import" in body]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (place / "by-trl" / "model.safetensors").is_file()
    plain = script.replace("trainer = WholeHeadTrainer(", "trainer = SFTTrainer(")
    refused = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, check=False)
    assert "mat1 and mat2 shapes cannot be multiplied" in refused.stderr, "the recipe is not needed any more"


def test_every_public_name_is_in_the_reference() -> None:
    entries = re.findall(r"^::: (scale_surgery\.[\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [entry.rpartition(".")[2] for entry in entries]
    assert sorted(named) == sorted(set(scale_surgery.__all__) - {"__version__"})
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert getattr(scale_surgery, name).__module__ == module, entry


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in DOCS.glob("*.md"))


@needs_mkdocs
def test_the_site_is_built_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "scale_surgery.surgery.expand.expand" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.json").is_file()
    assert fetched_elsewhere(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="preconnect" href="//example.org">',
        '<img alt="a" src=https://example.org/a.png>',
        "<style>a{background:url(https://example.org/a.png)}</style>",
        '<style>@import "https://example.org/a.css"</style>',
    ],
)
def test_another_host_is_noticed(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(f'<a href="https://example.org">a link</a><script src="a.js"></script>{text}')
    assert len(fetched_elsewhere(tmp_path)) == 1


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (no network, no cache of the user's)

    with tempfile.TemporaryDirectory() as folder, workplace(Path(folder)):
        page = rewrite_examples(QUICK_START)
    QUICK_START.write_text(page, encoding="utf-8")
