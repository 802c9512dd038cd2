"""What it saves to leave paths out: choices are measured, and what a text loses is what the mixture says."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from click.testing import CliRunner

from benchmarks import leaving_out
from tests.composed import LLAMA
from tests.routed import random_ids


@torch.no_grad()
def test_what_a_text_loses_is_what_the_mixture_says(made_of, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made_of("llama", LLAMA).composed(), random_ids(1, 12)
    with model.use_expansion(list(LLAMA), switch_rate=0.05):
        scores = model.score_tokens(ids)
    lost, above, inside = leaving_out.read(model, ids, switch_rate=0.05)
    assert lost == pytest.approx(-float(scores.mixed.sum()), abs=1e-3)
    assert above == pytest.approx(lost + float(scores.paths[..., 0].sum()), abs=1e-3)
    assert inside == [set(LLAMA)] * 11
    lost, _, inside = leaving_out.read(model, ids, switch_rate=0.05, prune=0.1, lag=4)
    assert abs(lost + float(scores.mixed.sum())) > 1e-3 and set(LLAMA) != inside[-1], "the control"
    monkeypatch.setattr(leaving_out, "name_of", LLAMA.__getitem__)
    monkeypatch.setattr(leaving_out, "PRUNE", 0.1)
    whole = leaving_out.lose(model, [(ids, [0, 6, 12], [0, 1])], 0.05, None)
    assert whole.inside == len(LLAMA) and whole.back == (0, 0)
    name, place = next((name, place) for place, own in enumerate(inside) for name in LLAMA if name not in own)
    later = [number for number in range(place, len(inside)) if name in inside[number]]
    pruned = leaving_out.lose(model, [(ids, [place, 12], [LLAMA.index(name)])], 0.05, 4)
    assert pruned.inside == pytest.approx(mean(map(len, inside)))
    assert pruned.back == ((later[0] if later else 12) - place,) * 2 and pruned.back[1] > 0


@pytest.mark.slow
def test_all_is_measured_and_written(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    options = ["time", "--shape", "tiny", "--prompt", "4", "--new-tokens", "20", "--paths", "2", "--rounds", "1"]
    run = CliRunner().invoke(leaving_out.main, [*options, "-o", str(output)], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    measured = json.loads(output.read_text())["measured"]
    assert [own["choice"] for own in measured[:3]] == ["base", "all", "one in, lag 16"] and len(measured) == 6
    assert measured[0]["by_base"] == measured[1]["by_all"] == 1
