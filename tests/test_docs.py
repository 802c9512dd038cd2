"""The documentation says what is: rooms, options, defaults, links, and every example with its output.

`python -m tests.test_docs` writes the outputs and the tables of options in docs/commands*.md anew, where a command
prints something else now, or has other options; `python -m tests.test_docs options` the tables alone, in seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
from click.testing import CliRunner, Result

import scale_surgery
from benchmarks import make_checkpoint, pipeline, svd
from scale_surgery.cli.program import main
from scale_surgery.errors import SurgeryError
from scale_surgery.evidence import verify
from scale_surgery.evidence.promises import PROMISES
from scale_surgery.fields import fields_of
from scale_surgery.folder.routers import RouterOptions
from scale_surgery.modeling.expanded_routers import ROUTERS
from tests.families import FAMILIES
from tests.instruct import make_instruct
from tests.test_rooms import ROOMS
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "scale_surgery"
SHIPPED = PACKAGE / "models" / "biographies"
README = ROOT / "README.md"
# in the order in which their examples run
COMMANDS = tuple(
    ROOT / "docs" / f"commands{part}.md"
    for part in ("", "-learn", "-expand", "-train", "-measure", "-share", "-scripts")
)
RECORDS = sorted((ROOT / "benchmarks").rglob("*.md"))
PAGES = (
    README,
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY", "AGENTS")),
    *sorted((ROOT / "docs").glob("*.md")),
    *RECORDS,
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*|(?<=`)-[a-z](?=`)")
BENCHMARKS = (make_checkpoint.main, pipeline.main, svd.main)
OTHER_PROGRAMS = {
    "--strict",
    "--multi_gpu",
    "--num_processes",
    "--config_file",
    "--cpu",
    "--nproc-per-node",
}  # mkdocs, accelerate, torchrun
OTHER_PROGRAMS |= {"--safe_serialization", "--exclude_frozen_parameters"}  # DeepSpeed's zero_to_fp32.py
OTHER_PROGRAMS |= {"--model", "--model_args", "--tasks"}  # lm_eval
OTHER_PROGRAMS |= {"--continuous-batching"}  # transformers serve
OTHER_PROGRAMS |= {"--outtype", "--outfile", "--local-dir"}  # llama.cpp's converter, hf download
OTHER_PROGRAMS |= {"--served-model-name", "--enable-lora", "--max-loras", "--lora-modules", "--enforce-eager"}  # vLLM
OTHER_PROGRAMS |= {"--hf-overrides"}  # vLLM
OTHER_PROGRAMS |= {"--logdir"}  # tensorboard
OTHER_PROGRAMS |= {option for script in BENCHMARKS for parameter in script.params for option in parameter.opts}
GROUP = {"--help", "-h", "--version"}
# of every command, with a table of their own
EVERYWHERE = ("as_json", "quiet", "debug", "help")

SCRIPTS = ROOT / "docs" / "commands-scripts.md"
WRITING = (
    "adopt",
    "apply",
    "compose",
    "expand",
    "extract",
    "hold-out",
    "merge",
    "push",
    "route-export",
    "strip",
    "train",
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
each_command = pytest.mark.parametrize("name", sorted(main.commands))


def blocks(page: Path, language: str) -> list[str]:
    return [
        body for block_language, body in BLOCK.findall(page.read_text(encoding="utf-8")) if block_language == language
    ]


def sections(page: Path) -> dict[str, str]:
    """Texts of a page's second-level sections, by heading."""
    parts = re.split(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sections_of_commands() -> dict[str, str]:
    """The same of all pages of commands."""
    return {heading: text for page in COMMANDS for heading, text in sections(page).items()}


def options_of(name: str) -> set[str]:
    parameters = main.commands[name].params
    options = (option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts))
    return {option for option in options if option.startswith("-")}


def option_table(name: str) -> str:
    """The options of a command as Markdown, from its help, but for those that every command has."""
    command = main.commands[name]
    context = click.Context(command)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in EVERYWHERE and not option.hidden:
            _, record = option.get_help_record(context)
            text, _, bracket = " ".join(record.split()).removesuffix("]").partition(" [")
            facts = bracket.split("; ") if bracket else []
            default = next((fact.removeprefix("default: ") for fact in facts if fact.startswith("default: ")), "")
            default = "required" if "required" in facts else f"`{default}`" if default else ""
            limits = [fact for fact in facts if not fact.startswith(("default: ", "required"))]
            meaning = "; ".join([text.removesuffix("."), *limits]).replace("x>=", "at least ") + "."
            forms = ", ".join(f"`{form}`" for form in sorted((*option.opts, *option.secondary_opts), key=len))
            rows.append(f"| {forms} | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def rewrite_tables(text: str) -> str:
    """The page of the commands with the options of now."""
    for name in main.commands:
        table = rf"(^## {name}$(?:(?!^## ).)*?)^\| option \| default \| meaning \|\n(?:^\|[^\n]*\n)+"
        text = re.sub(table, lambda match, name=name: match[1] + option_table(name), text, flags=re.M | re.S)
    return text


def invoke(command: str) -> Result:
    """Run `scale-surgery ...` in a terminal of 80 columns."""
    arguments = shlex.split(command, comments=True)
    assert arguments[0] == "scale-surgery", command
    environment = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner(env=environment).invoke(main, arguments[1:])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run(command: str) -> str:
    """What `scale-surgery ...` prints, errors too; examples hold no lines of a log."""
    result = invoke(command)
    printed = result.output if result.exit_code else result.stdout
    return "\n".join(line.rstrip() for line in printed.rstrip().splitlines())


def run_python(code: str) -> dict[str, Any]:
    """Run a script; gives its names."""
    names = {"__name__": "documentation"}
    exec(compile(code, "<documentation>", "exec"), names)
    return names


def rewrite_examples(page: Path) -> str:
    """Run a page's Python and console blocks in order; gives the page with the outputs of now."""

    def renewed(match: re.Match[str]) -> str:
        language, body = match.groups()
        if language == "python":
            run_python(body)
        if language != "console":
            return match[0]
        command = body.splitlines()[0]
        return f"```console\n{command}\n{run(command.removeprefix('$ '))}\n```"

    return BLOCK.sub(renewed, page.read_text(encoding="utf-8"))


@contextlib.contextmanager
def workplace(folder: Path):
    """The folder in which the examples of docs/commands*.md run: it holds a copy of the shipped model."""
    shutil.copytree(SHIPPED, folder / SHIPPED.name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def without_chance(text: str) -> list[str]:
    """Words of a page, without what differs from day to day and from machine to machine: dates, drift of training."""
    text = re.sub(r"(?m)^(wide-trained|routed|routed, routing disabled) +[\d.].*$", r"\1 NUMBERS", text)
    text = re.sub(r"(?m)^(base|learned|routed) +\d[\d.]+(?: .*)?$", r"\1 NUMBERS", text)
    text = re.sub(r"(?m)^took +(\d+ (s|min)|under a second)$", "took SECONDS", text)
    text = re.sub(r"(?m)^(mixed\.jsonl) +22 +[\d.].*$", r"\1 NUMBERS", text)
    text = re.sub(r"(?m)^( +\d+ +\d+) +[\d.]+% .*?(chosen.*?|tie|over budget)?$", r"\1 NUMBERS \2", text)
    text = re.sub(r"(?m)^( +\d)( +[\d.e-]+){3}$", r"\1 NUMBERS", text)
    text = re.sub(
        r"(?m)^(took +[\w ]*\d+ steps|ahead .* times; about|loss .* in the first steps),? .*$", r"\1 NUMBER", text
    )
    # what a mixture loses, and on which text
    text = re.sub(r"(?s)(lose\s+at\s+most) [\d.e-]+", r"\1 NUMBER", text)
    text = re.sub(r"(?m)^(worst loss) .*\n(?: +\S.*\n)?", r"\1 NUMBERS\n", text)
    # a report: blocks, layers, what was measured
    text = re.sub(r"(?m)^((?:w\d\d|up_weight) +\w+) +[\d.].*$", r"\1 NUMBERS", text)
    text = re.sub(r"(?m)^(\d+) .*[\d.]+%? .* bit-equal$", r"\1 NUMBERS bit-equal", text)
    text = re.sub(r"(?<=text), to [\d.]+", ", to NUMBER", text)
    text = re.sub(r"[\d.]+ (before|after)\b", r"NUMBER \1", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE", " ".join(text.split()))
    text = re.sub(r"(?<=steps )(.*?) in [\w ]+? trained", r"\1 in SECONDS trained", text)
    text = re.sub(r"(forgetting|learning|accuracy|loss|text) [+-]?[\d.]+%?", r"\1 NUMBER", text)
    text = re.sub(r", NUMBER before logits are rounded", "", text)
    measured = "differ by|drift|KL divergence|agreement|lowest cosine|of the largest"
    return re.sub(rf"({measured}) [\d.e%-]+", r"\1 NUMBER", text).split()


def is_near(printed: str, shown: str) -> bool:
    """Whether two measurements of nats differ by one in the last digit at most, as those of two processors do."""
    are_nats = all(re.fullmatch(r"[+-]\d+\.\d{4}", word) for word in (printed, shown))
    return are_nats and abs(float(printed) - float(shown)) < 1.5e-4


def settled(text: str, shown: str) -> list[str]:
    """Words of what examples print, with those of the page for what is near."""
    printed, wanted = without_chance(text), without_chance(shown)
    paired = [expected if is_near(word, expected) else word for word, expected in zip(printed, wanted, strict=False)]
    return paired + printed[len(paired) :]


@pytest.mark.slow
def test_examples_in_commands_print_what_is_shown(tmp_path):
    with workplace(tmp_path):
        texts = {page: rewrite_examples(page) for page in COMMANDS}
    for page, text in texts.items():
        shown = page.read_text(encoding="utf-8")
        assert settled(text, shown) == without_chance(shown), f"{page.name}: python -m tests.test_docs"


def test_what_differs_more_than_by_rounding_is_seen():
    assert settled("gain +2.7725 -0.0000", "gain +2.7724 +0.0000") == ["gain", "+2.7724", "+0.0000"]
    for line in ("gain +2.7726", "gain 2.7725", "gain +2.7724 more", "gain", "loss +2.7724", "gain +2.77"):
        assert settled(line, "gain +2.7724") != without_chance("gain +2.7724")


@pytest.mark.slow
def test_readme_quick_start(tmp_path, monkeypatch):
    """The commands of the quick start, on a tiny model of the same family in place of the Hub's."""
    start = sections(README)["Quick start"]
    (shell,) = [body for language, body in BLOCK.findall(start) if language == "sh"]
    (python,) = [body for language, body in BLOCK.findall(start) if language == "python"]
    (model,) = set(re.findall(r"\b\w+/[\w.-]+(?= --layers)", shell))
    base = save_tiny(tmp_path / "base", "qwen3", num_hidden_layers=5, vocab_size=1152)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / file, base / file)
    rows = (f'{{"text": "A new text, number {number}."}}\n' for number in range(400))
    (tmp_path / "domain.jsonl").write_text("".join(rows))
    (tmp_path / "held_out.jsonl").write_text('{"text": "A new text that nothing was trained on."}\n')
    (tmp_path / "general.txt").write_text("\n\n".join(f"An old text, number {number}." for number in range(40)))
    monkeypatch.chdir(tmp_path)
    for line in shell.splitlines():
        assert "error:" not in run(line.replace(model, "base")), line
    run_python(python)
    stripped = next(word for word in shlex.split(shell.splitlines()[-1], comments=True)[::-1])
    names = {file.name for file in base.iterdir()}
    assert {file.name for file in (tmp_path / stripped).iterdir()} == names
    assert all((tmp_path / stripped / name).read_bytes() == (base / name).read_bytes() for name in names)


@pytest.mark.slow
def test_commands_for_instruct_models(tmp_path, monkeypatch):
    """The commands of the page, on a small instruct model, with the page's own instructions."""
    page = ROOT / "docs" / "instruct.md"
    make_instruct(tmp_path / "INSTRUCT")
    (tmp_path / "asked.jsonl").write_text(blocks(page, "json")[0])
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "Where can I park?"}\n')
    (tmp_path / "domain.txt").write_text(" ".join(f"A new text, number {number}." for number in range(40)))
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks(page, "sh")).splitlines():
        assert invoke(line).exit_code == 0, line
    scores = json.loads((tmp_path / "answers.json").read_text())["scores"]
    assert [score["answers"] and score["answers"]["asked"] for score in scores] == [3, 3, None]
    samples = (tmp_path / "wide-asked" / "training" / "rehearsal.jsonl").read_text()
    assert "help desk" in samples and "<|im_start|>assistant" in samples


def test_contributing_says_what_every_room_is_for():
    rooms = sections(ROOT / "docs" / "contributing.md")["Rooms"]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", rooms, re.MULTILINE)
    assert [name for name, _ in rows] == [room for room in ROOMS if (PACKAGE / room).is_dir()]
    for room, examples in rows:
        for file in re.findall(r"`(\w+\.py)`", examples):
            assert (PACKAGE / room / file).is_file(), f"{room}/{file}"


@each_page
def test_files_of_the_repository_that_a_page_names_exist(page):
    named = re.findall(r"(?<![\w/])(?:scale_surgery|tests|benchmarks)/[\w./-]*\w", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_lists_every_room_in_the_order_of_imports():
    (tree,) = [body for body in blocks(README, "text") if body.startswith("scale_surgery/")]
    rows = [line.split(maxsplit=1) for line in tree.splitlines() if line.startswith("  ")]
    assert [row for row in rows if len(row) < 2] == [], "a room without a description"
    named = [name.removesuffix("/") for name, _ in rows]
    folders = {file.parent.name for file in PACKAGE.glob("*/*") if file.parent.name != "__pycache__"}
    assert sorted(named) == sorted(folders)
    assert named[:-1] == [room for room in ROOMS if room in folders] and named[-1] == "models"


@each_page
def test_options_exist(page):
    known = set().union(*(options_of(name) for name in main.commands)) | GROUP | OTHER_PROGRAMS
    if page in RECORDS or page.stem == "results":
        known |= set(OPTION.findall("".join(file.read_text() for file in (ROOT / "benchmarks").rglob("*.py"))))
    # a line of a command that is gone names the commit that has it
    lines = (line for line in page.read_text(encoding="utf-8").splitlines() if not re.search(r"# at [0-9a-f]{8}", line))
    assert set(OPTION.findall("\n".join(lines))) <= known


@each_page
def test_commands_have_the_options_they_are_given(page):
    lines = re.findall(r"^(?:\$ )?scale-surgery +([\w-]+)(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for name, rest in lines:
        given = {word.split("=")[0] for word in shlex.split(rest, comments=True) if word.startswith("-")}
        assert given <= options_of(name), f"{name}{rest}"


@each_command
def test_the_options_of_a_command_are_those_of_its_help(name):
    assert option_table(name) in sections_of_commands()[name], "python -m tests.test_docs options"


@each_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@each_page
def test_words(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?i)\bpreserved\b(?! depth)", text), "name the promise"
    assert not re.findall(r"/(?:work|tmp|home|root)/", text), "a path of one machine"


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_is_explained(name):
    assert f"### The {name} router\n" in (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"), (
        "a section of docs/concepts.md"
    )
    assert re.search(rf"\b{name}\b", fields_of(RouterOptions)["router"].help), "its line in RouterOptions"


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_listed(name):
    for page in (README, ROOT / "docs" / "concepts.md", ROOT / "docs" / "commands-expand.md"):
        assert f"| `{name}` |" in page.read_text(encoding="utf-8"), page
    assert name in (verify.__doc__ or "") and name in (main.commands["verify"].help or "")


@pytest.mark.parametrize("command", WRITING)
def test_every_key_of_json_is_explained(command):
    """What `--json` prints is a result's fields."""
    (row,) = [line for line in SCRIPTS.read_text().splitlines() if re.match(rf"\| `{command}`( |,.*)\|", line)]
    result = get_type_hints(getattr(scale_surgery, command.replace("-", "_")))["return"]
    assert {field.name for field in dataclasses.fields(result)} <= set(re.findall(r"`(\w+)`", row))


def test_every_family_and_error_is_documented():
    families = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in families] == []
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    classes = [SurgeryError, *SurgeryError.__subclasses__()]
    classes += [below for known in SurgeryError.__subclasses__() for below in known.__subclasses__()]
    # one of a room's own is a CheckpointError to whoever catches it
    named = {known.__name__ for known in classes if known.__module__ == SurgeryError.__module__}
    assert set(re.findall(r"\b[A-Z]\w+Error\b", errors)) == named


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (no network, no cache of the user's)

    for page in COMMANDS:
        page.write_text(rewrite_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    # the tables take seconds, the examples minutes
    if sys.argv[1:] != ["options"]:
        with tempfile.TemporaryDirectory() as place, workplace(Path(place)):
            texts = {page: rewrite_examples(page) for page in COMMANDS}
        for page, text in texts.items():
            shown = page.read_text(encoding="utf-8")
            if settled(text, shown) != without_chance(shown):
                page.write_text(text, encoding="utf-8")
