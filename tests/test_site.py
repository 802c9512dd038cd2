"""The pages beside those of commands: their scripts run, their examples print what is shown, the site stands alone.

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
from typing import Any

import pytest
import torch
import transformers

import scale_surgery
from scale_surgery import adopt
from scale_surgery.folder.record import read_manifest
from tests.conftest import digests
from tests.each import mostly
from tests.test_docs import (
    BLOCK,
    ROOT,
    invoke,
    rewrite_examples,
    run,
    run_python,
    sections,
    settled,
    without_chance,
    workplace,
)

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


def play(text: str) -> list[dict[str, Any]]:
    """Run the Python blocks of a text and the commands of its shell blocks, in order; gives what each script made."""
    scripts = []
    for language, body in BLOCK.findall(text):
        if language == "python":
            scripts.append(run_python(body))
        if language == "sh":
            for line in body.splitlines():
                if line.startswith("scale-surgery"):
                    done = invoke(line)
                    assert done.exit_code == 0, done.output
    return scripts


def check_recipe(script: dict[str, Any], adopted: Path) -> None:
    """What every trainer promises: only what may train is in its optimizer, and shards make no difference."""
    model = script["model"]
    optimizer = script["trainer"].optimizer if "trainer" in script else script["optimizer"]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    }
    assert 0 < len(held) < len(list(model.parameters()))
    assert read_manifest(adopted).training[-1]["trained_parameters"] > 0
    model.save_pretrained("sharded", max_shard_size="500KB")
    assert len(list(Path("sharded").glob("*.safetensors"))) > 1
    adopt("sharded", "wide", "of-shards")
    expansions = [
        {file.name: file.read_bytes() for file in of.glob("expansion*")} for of in (adopted, Path("of-shards"))
    ]
    assert expansions[0] and expansions[0] == expansions[1]
    shutil.rmtree("sharded")
    shutil.rmtree("of-shards")


def fetched_elsewhere(site: Path) -> list[str]:
    """Whatever a browser would fetch from another host, by file."""
    resources = []
    for file in site.rglob("*"):
        text = file.read_text(encoding="utf-8") if file.suffix in (".html", ".css") else ""
        resources += [f"{file.name}: {tag}" for tag in RESOURCE.findall(text) if ELSEWHERE.search(tag)]
        resources += [f"{file.name}: {rule}" for rule in STYLE_ELSEWHERE.findall(text)]
    return resources


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The folder in which a page is run: the shipped model, texts, and a folder of somebody else."""
    with workplace(tmp_path):
        for file in ("domain.jsonl", "general.jsonl", "held_out.jsonl"):
            Path(file).write_text('{"question": "Who?", "answer": "Nobody."}\n')
        yield tmp_path


@pytest.mark.slow
def test_the_quick_start_prints_what_is_shown(place: Path) -> None:
    page = rewrite_examples(QUICK_START)
    shown = QUICK_START.read_text(encoding="utf-8")
    assert settled(page, shown) == without_chance(shown), __doc__
    assert digests(place / "again") == digests(place / "biographies")


# pin_memory, a default of the data loader, warns where there is no accelerator
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_the_training_recipes_run(place: Path) -> None:
    page, trl = recipes()
    scripts = [script for script in play(page.replace(trl, "")) if "tokenizer" in script]
    for script, name in zip(scripts, ("by-trainer", "by-accelerate", "by-loop"), strict=True):
        check_recipe(script, Path(f"{name}-adopted"))


def recipes() -> tuple[str, str]:
    """The page of training recipes, and its section on TRL."""
    page = DOCS / "training-recipes.md"
    return page.read_text(encoding="utf-8"), sections(page)["TRL"]


@pytest.mark.parametrize("page", mostly(["api.md", "serving.md", "trust.md"], "api.md".__eq__))
def test_the_scripts_of_a_page_run(page: str, place: Path) -> None:
    if page != "api.md":
        run("scale-surgery expand biographies --layers last:2 -o wide -q")
        shutil.copytree("wide", "STRANGER")
    play((DOCS / page).read_text(encoding="utf-8"))


@needs_trl
@pytest.mark.filterwarnings("ignore")
def test_the_trl_recipe_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("scale-surgery expand biographies --layers last:2 -o wide -q")
    _, recipe = recipes()
    (script,) = play(recipe)
    check_recipe(script, Path("by-trl-adopted"))
    monkeypatch.setattr("trl.SFTTrainer.compute_loss", transformers.Trainer.compute_loss)
    (code,) = (body for language, body in BLOCK.findall(recipe) if language == "python")
    by_head = run_python(code)
    assert losses(script["trainer"]) == pytest.approx(losses(by_head["trainer"]), rel=1e-5), "the head, called"


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# what a row has beside its prompt; nothing for those that generate
OTHER_TRAINERS: dict[str, dict[str, str]] = {
    "DPO": {"chosen": " Utrecht.", "rejected": " Bern."},
    "KTO": {"completion": " Bern."},
    "GRPO": {},
    "RLOO": {},
}


def count_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@needs_trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHER_TRAINERS)
def test_other_trainers_of_trl_run(place: Path, name: str) -> None:
    import trl
    from datasets import Dataset

    run("scale-surgery expand biographies --layers last:2 -o wide -q")
    model = transformers.AutoModelForCausalLM.from_pretrained("wide", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained("wide", trust_remote_code=True)
    head = model.lm_head.weight.clone()
    rows = [{"prompt": f"Person {number} was born in", **OTHER_TRAINERS[name]} for number in range(8)]
    if name == "KTO":
        rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(rows)]
    samples = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        args=getattr(trl, f"{name}Config")(
            "by-trl",
            max_steps=3,
            learning_rate=1e-2,
            bf16=False,
            trust_remote_code=True,
            save_strategy="no",
            report_to="none",
            **({} if OTHER_TRAINERS[name] else samples),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **({} if OTHER_TRAINERS[name] else {"reward_funcs": count_letters}),
    )
    trainer.train()
    assert model.lm_head.expansions.default.up_weight.any(), "the head's up part began as zero"
    assert torch.equal(model.lm_head.weight, head)


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
