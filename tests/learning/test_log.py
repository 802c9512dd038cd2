"""What a job writes where stderr is a file: its stages, the steps of its training, and why it ended."""

from __future__ import annotations

import json
import re

import pytest

from tests.command import run_logged, terminated_at
from tests.learning.test_learn import SHORT, settings, texts  # noqa: F401  (fixtures)


def stages_in(text: str) -> list[tuple[str, int, int]]:
    found = re.findall(r"(?m)^\d\d:\d\d:\d\d  ([\w-]+)  stage (\d+) of (\d+)$", text)
    return [(name, int(number), int(count)) for name, number, count in found]


@pytest.mark.slow
def test_a_job_that_a_scheduler_ends_says_its_stages_and_goes_on(settings, tmp_path):  # noqa: F811
    log, job = tmp_path / "log", tmp_path / "job"
    values = {name: value for name, value in SHORT.items() if not name.startswith("ranking")} | {"training.steps": 20}
    set_ = [f"--set={name}={value}" for name, value in values.items()]
    words = ["learn", settings["model"], "--data", settings["data"][0], "-o", str(job), "--layers", "last:1", *set_]
    words += ["--set=route=false", "--device", "cpu", "--json"]
    with terminated_at(log, "step 4 of 20"):
        run_logged(log, *words, code=1)
    first = log.read_text(encoding="utf-8")
    assert first.splitlines()[-1].startswith(f"error: {job}: interrupted in the stage train.")
    result = json.loads(run_logged(log, *words))
    assert result["verified"]
    second = log.read_text(encoding="utf-8")[len(first) :]
    begun, gone_on = stages_in(first), stages_in(second)
    names = [stage["name"] for stage in result["stages"]]
    assert begun == [(name, number, len(names)) for number, name in enumerate(names, start=1)][: len(begun)]
    assert begun[-1][0] == "train" and [*begun, *gone_on[1:]] == [
        (name, number, len(names)) for number, name in enumerate(names, start=1)
    ]
    # nothing else: what ends within seconds writes no line
    others = [line for line in (first + second).splitlines() if not re.search("  stage |  training  |^error: ", line)]
    assert others == []
    resumed = re.search(r"training  step (\d+) of 20  resumed", second)
    assert resumed is not None and 2 <= int(resumed[1]) < 20
    assert re.search(r"training  step 20 of 20  loss new \d\.\d{4} \(-\d\.\d{4}\)  [\d,]+ tokens/s\n", second)
