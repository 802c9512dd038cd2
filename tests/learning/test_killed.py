"""A job that is killed or runs out of disk anywhere: the same line again makes what an undisturbed one makes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from scale_surgery.biographies import SHIPPED_MODEL
from tests.conftest import digests
from tests.interrupted_steps import Disturbance, run_apart, run_disturbed
from tests.learning.test_learn import SHORT, learn_words, outputs, settings, texts  # noqa: F401  (fixtures)

# these name their folder
NAMED = {"evaluation.json", "verification.json", "report.json"}
SHARES = (0.02, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.99)


def words(values: dict, folder: Path) -> list[str]:
    given = [f"--set={name}={value}" for name, value in values.items() if name in SHORT]
    return learn_words(values, "-o", str(folder), "-q", *given)


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> tuple[dict[str, str], dict[str, int]]:  # noqa: F811
    """What a job makes that nothing disturbs, and how many calls that takes."""
    place = tmp_path_factory.mktemp("whole")
    record = place / "record.json"
    done = run_apart(run_disturbed, words(settings, place / "job"), str(place), Disturbance(), str(record))
    assert done.returncode == 0, done.stderr
    return outputs(place / "job"), json.loads(record.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["kill", "error"])
def test_the_same_line_again_makes_the_same(kind, share, settings, whole, tmp_path):  # noqa: F811
    made, counts = whole
    before = digests(SHIPPED_MODEL)
    at = int(share * counts["calls" if kind == "kill" else "writes"])
    disturbed = run_apart(
        run_disturbed, words(settings, tmp_path / "job"), str(tmp_path), Disturbance(kind, at, errno.ENOSPC), ""
    )
    # some files a job can do without: a state file that is to be removed, say
    assert disturbed.returncode != 0 or (kind == "error" and not disturbed.stderr)
    if kind == "error" and disturbed.returncode:
        assert "Traceback" not in disturbed.stderr and "No space left on device" in " ".join(disturbed.stderr.split())
    rerun = run_apart(
        run_disturbed, words(settings, tmp_path / "job"), str(tmp_path), Disturbance(), str(tmp_path / "r")
    )
    assert rerun.returncode == 0, rerun.stderr
    job_digests = outputs(tmp_path / "job")
    assert job_digests.keys() == made.keys()
    assert {name for name, digest in job_digests.items() if made[name] != digest} <= NAMED
    assert digests(SHIPPED_MODEL) == before
