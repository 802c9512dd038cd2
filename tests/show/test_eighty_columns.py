"""Every command in a terminal of 80 columns: no longer line, no broken name, the next command in one piece."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions
from scale_surgery.cli.program import main
from scale_surgery.demo import demo
from scale_surgery.show.console import Output

# longer than the column that a name has in any table, with signs at which lines like to break
BASE, WIDE, TUNED = (
    "biographies-of-400-people-0.7M",
    "expanded-in-the-last-two-layers.1",
    "tuned-for-a-new-domain_v1.5",
)
ROUTED = "routed-between-the-base-and-the-new-domain-model.v2"
TEXTS = "--old known.jsonl --new asked.jsonl"
TRAIN = f"train {WIDE} --data told.jsonl -o {TUNED} --steps 3 --sequence-length 64"
RANK = f"rank-layers {BASE} --data told.jsonl --steps 2 --batch-size 2 --sequence-length 32"
COMMANDS = (
    f"inspect {BASE}",
    RANK,
    f"plan {BASE} --layers last:2 --variant adapt --collaborate both --details",
    f"plan {BASE} --layers last:2 --variant adapt -o plan-of-the-new-domain.json",
    f"expand {BASE} --layers last:2 --variant adapt --collaborate both -o {WIDE}",
    f"verify {WIDE}",
    TRAIN,
    f"inspect {TUNED}",
    f"verify {TUNED}",
    f"evaluate {BASE} {TUNED} {TEXTS}",
    f"report {TUNED} -o report-of-{TUNED}.html --details",
    f"route-export {TUNED} -o {ROUTED}",
    f"verify {ROUTED}",
    f"evaluate {ROUTED} {TEXTS}",
    f"route-calibrate {ROUTED} {TEXTS}",
    f"route-calibrate {ROUTED} {TEXTS} --most-forgetting 9 --bound 9 --write",
    f"inspect {ROUTED}",
    f"route-report {ROUTED} --text asked.jsonl",
    f"generate {ROUTED} --prompts asked.jsonl --compare --paths --max-new-tokens 8",
    f"chat {ROUTED} --compare --paths",
    f"merge {TUNED} -o fused-{TUNED}",
    f"merge fused-{TUNED} -o blocks-{TUNED} --to blocks",
    f"extract {TUNED} -o extract-of-{TUNED}",
    f"apply extract-of-{TUNED} --base {BASE} -o applied-{TUNED}",
    f"strip {ROUTED} -o base-of-{ROUTED}",
)
WITHOUT_NEXT = ("route-report", "generate", "chat")


def run(command: str, width: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(main, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, str]:
    """What each command prints, one after the other in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place := tmp_path_factory.mktemp("narrow"))
        shutil.copytree(SHIPPED_MODEL, BASE)
        write_texts(place)
        return {command: run(command) for command in COMMANDS}


def write_texts(place: Path) -> None:
    for name, group in (("known", people(3)), ("asked", people(2, start=400))):
        rows = [
            {"question": question.prompt, "answer": question.answer}
            for person in group
            for question in questions(person)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    biographies = [{"text": biography(person, 0)} for person in people(4, start=400)]
    (place / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in biographies))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_longer_no_name_is_broken_and_the_next_command_comes_last(command, shown):
    text = shown[command]
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("next ")] == []
    # wherever a name begins, it ends too, and the other way round
    for name in (BASE, WIDE, TUNED, ROUTED):
        assert text.count(name[:16]) == text.count(name) == text.count(name[-16:]), name
    if not command.startswith(WITHOUT_NEXT):
        name, _, line = text.splitlines()[-1].partition(" ")
        program, verb, *arguments = shlex.split(line)
        assert (name, program) == ("next", "scale-surgery") and verb in main.commands
        options = {option for parameter in main.commands[verb].params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("-")} <= options


def test_a_broken_name_would_be_found(shown):
    text = shown[f"verify {WIDE}"]
    broken = text.replace(WIDE, f"{WIDE[:20]}\n{WIDE[20:]}")
    assert WIDE in text and broken.count(WIDE[:16]) != broken.count(WIDE)


def test_next_is_never_broken():
    for width in (20, 80):
        for command in ("plan", "expand"):
            text = run(
                f"{command} {SHIPPED_MODEL} --layers 0-3 --variant adapt --collaborate both --set seed=7"
                f"{' --dry-run' if command == 'expand' else ''}",
                width,
            )
            (line,) = [line for line in text.splitlines() if line.startswith("next ")]
            assert line.endswith("--layers 0-3 --variant adapt --collaborate both --set seed=7")


def test_what_plan_proposes_makes_the_same_plan(shown, tmp_path_factory):
    text = run(f"plan {SHIPPED_MODEL} --layers 0-3 --method grow --copies 3 --set seed=7")
    words = shlex.split(text.splitlines()[-1])
    assert words[:2] == ["next", "scale-surgery"] and words[2] == "expand"
    assert run(shlex.join([*words[2:], "--dry-run"])) == text


def test_a_base_that_is_given_too_is_shown_once(shown):
    text = shown[f"evaluate {BASE} {TUNED} {TEXTS}"]
    rows = re.findall(rf"(?m)^{BASE}.*$", text)
    assert len(rows) == 2 and all(row.startswith(f"{BASE} (base)") for row in rows), "one for old, one for new text"
    assert not any("+0.0000" in row for row in rows) and text.count(f"{TUNED}, expansion disabled") == 2


def test_inspect_says_what_is_newer_than_the_verification(shown):
    trained, routed = (" ".join(shown[f"inspect {name}"].split()) for name in (TUNED, ROUTED))
    assert re.search(r"last verified passed \S+; tensors \(by training\) changed since next", trained)
    assert re.search(r"last verified passed \S+; the router's numbers changed since next", routed)


@pytest.mark.slow
def test_the_demo_prints_commands_and_results_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    demo(Path("demo"), Output(), steps=2)
    text = capfd.readouterr().out
    assert "train_runtime" not in text and "{'" not in text
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith(("$ ", "next "))] == []
    commands = [line for line in text.splitlines() if line.startswith("$ scale-surgery")]
    assert len(commands) >= 9 and all(len(shlex.split(line)) > 3 for line in commands)
    assert any(line.endswith("--learning-rate 0.01") for line in commands), "not broken"
