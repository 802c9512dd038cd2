"""Each command as the first of its process: nothing that another one registered or imported is there.

One process imports the libraries, and each command runs in a fork of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scale_surgery.biographies import SHIPPED_MODEL, biography, people

COMMANDS = """
import json, os, sys
import torch, transformers.models.llama.modeling_llama
from scale_surgery.cli.program import main

for line in sys.stdin:
    words = json.loads(line)
    if (child := os.fork()) == 0:
        main(words)
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"{' '.join(words)}: ended with {os.waitstatus_to_exitcode(status)}")
"""
JOB = """
expand BASE --layers 2-3 -o one
verify one
plan one --name law --layers 2-3
train one --data text.txt --steps 1 --set warmup=0 -o trained
expand trained --name law --layers 2-3 --new-tokens tokens.txt -o both
train both --name law --data text.txt --steps 1 --set warmup=0 -o further
report both --name law --text text.txt
evaluate both --old text.txt --new text.txt --sequence-length 64
merge both --name law -o fused
route-export trained -o routed
route-report routed --text text.txt --sequence-length 64
route-calibrate routed --old text.txt --new text.txt --sequence-length 64
generate both --expansion law --prompt Once --max-new-tokens 2
inspect both
extract both --name law -o law
apply law --base BASE -o alone
compose BASE law -o composed
strip both -o stripped
"""


@pytest.mark.slow
def test_every_command_runs_as_the_first_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(biography(person, 0) for person in people(12)), encoding="utf-8")
    (tmp_path / "tokens.txt").write_text("surgery\n", encoding="utf-8")
    lines = [[str(SHIPPED_MODEL) if word == "BASE" else word for word in line.split()] for line in JOB.split("\n")]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(json.dumps([*words, "-q"]) for words in lines if words),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
