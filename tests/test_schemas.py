"""What commands print with --json, and surgery.json, fit the schemas of docs/schemas/."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from scale_surgery.cli.program import main
from tests.schemas import COMMANDS, FOLDER, as_text, closed, schemas
from tests.test_docs import invoke, workplace

# of these the output is checked by hand or not at all: they ask a server, or write what another trainer saved
NOT_RUN = {"adopt", "push", "serve"}


def wrong(name: str, content: Any) -> list[str]:
    """What does not fit a schema of docs/schemas/; a key that it lacks is wrong, too."""
    schema = closed(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(content)]


def printed(line: str, code: int = 0) -> Any:
    """The object that a command prints."""
    done = invoke(f"scale-surgery {line} --json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def fits(line: str) -> None:
    # the base knows none of the probes, so that the limit is not measured
    code = 1 if "--max-forgetting" in line else 0
    assert wrong(line.split()[0], printed(line, code)) == [], line


@pytest.fixture
def place(tmp_path: Path):
    with workplace(tmp_path):
        yield tmp_path


def test_the_schemas_are_those_of_the_classes() -> None:
    made = {name: as_text(schema) for name, schema in schemas().items()}
    assert {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()} == made, "python -m tests.schemas"
    for schema in schemas().values():
        Draft202012Validator.check_schema(schema)


def test_every_command_with_a_result_has_a_schema() -> None:
    assert {*COMMANDS, "serve"} == set(main.commands) - {"chat", "demo"}


def test_what_is_printed_fits_its_schema(place: Path) -> None:
    for line in (
        "inspect biographies",
        "plan biographies --layers last:1",
        "expand biographies --layers last:1 -o wide",
        "inspect wide",
        "route-export wide -o routed",
        "extract wide -o blocks",
        "apply blocks --base biographies -o again",
        "strip routed -o base",
    ):
        fits(line)
    assert wrong("surgery", json.loads(Path("wide/surgery.json").read_text())) == []
    assert wrong("surgery", json.loads(Path("routed/surgery.json").read_text())) == []
    assert wrong("error", printed("inspect nowhere", code=1)) == []


def test_what_does_not_fit_is_noticed(place: Path) -> None:
    content = printed("inspect biographies")
    damaged = {
        "$.tensors": {**content, "tensors": "many"},
        "$.sizes": {**content, "sizes": {**content["sizes"], "unknown": 1}},
        "$": {key: value for key, value in content.items() if key != "family"},
    }
    for path, other in damaged.items():
        (error,) = wrong("inspect", other)
        assert error.startswith(f"{path}: ")
    invoke("scale-surgery expand biographies --layers last:1 -o wide")
    record = json.loads(Path("wide/surgery.json").read_text())
    other = deepcopy(record)
    other["base_tensors"]["lm_head.weight"] = {"sha256": 1, "dtype": "F32", "shape": []}
    assert wrong("surgery", other)


@pytest.mark.slow
def test_what_every_command_prints_fits_its_schema(place: Path) -> None:
    rows = [json.dumps({"question": f"Who is number {number}?", "answer": f"Person {number}."}) for number in range(60)]
    Path("new.jsonl").write_text("\n".join(rows[:40]) + "\n")
    Path("old.jsonl").write_text("\n".join(rows[40:]) + "\n")
    Path("probes.jsonl").write_text(
        '{"prompt": "Who is number 3?", "kind": "exact", "answer": "Person", "group": "a"}\n'
    )
    short = "--steps 2 --batch-size 4 --sequence-length 32"
    lines = (
        "rank-layers biographies --data new.jsonl --steps 2",
        "plan biographies --layers last:2 --variant adapt",
        "expand biographies --layers last:2 --variant adapt -o wide",
        "verify wide",
        f"train wide --data new.jsonl --eval-data old=old.jsonl -o trained {short}",
        "verify trained",
        "inspect trained",
        "report trained",
        "evaluate biographies trained --old old.jsonl --new new.jsonl --probes probes.jsonl --max-forgetting 1",
        "route-export trained -o routed",
        "verify routed",
        "inspect routed",
        "report routed",
        "route-report routed --text old.jsonl",
        "route-calibrate routed --old old.jsonl --new new.jsonl",
        "generate routed --prompt Who --max-new-tokens 3",
        "generate trained --prompt Who --max-new-tokens 3 --compare",
        "merge trained -o fused",
        "verify fused",
        "extract trained -o blocks",
        "apply blocks --base biographies -o again",
        "compose biographies blocks --names law -o composed",
        "strip routed -o base",
        "hold-out new.jsonl -o held",
        "compare biographies --data new.jsonl --old old.jsonl --methods lora,routed --tokens 64 --rates 1 -o compared",
        "learn biographies --data new.jsonl --old old.jsonl --layers last:1 --steps 2 -o job",
    )
    assert {line.split()[0] for line in lines} == {*COMMANDS} - NOT_RUN
    failed = {}
    for line in lines:
        try:
            fits(line)
        except AssertionError as error:
            failed[line] = str(error)[:600]
    assert failed == {}
