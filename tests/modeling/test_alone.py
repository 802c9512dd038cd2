"""Folders as somebody loads them who has transformers and not this package: by their own code, in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from scale_surgery.checkpoint.names import CODE_FILES
from tests import routed
from tests.conftest import Pair, load
from tests.each import FEW, mostly
from tests.modeling import test_generic_classes
from tests.routed import Trio, train

made, trio_of = test_generic_classes.made, routed.trio_of
IDS = torch.arange(3, 16).repeat(2, 1)
# of FEW, those of the default run; gemma3_text is there too, routed. The llama has a name that no module could have
KEPT, NAMED = ("llama", "gpt_neox"), "tiny-llama.v1.0-scale"
# classes that are made when they are named, and the auto classes that name them
CAUSAL = "AutoModelForCausalLM"
GENERIC = {"internlm3": CAUSAL, "smollm3": CAUSAL, "gemma3": "AutoModelForImageTextToText"}

# one process for all folders, run far from the repository
ALONE = """
import json, pickle, shutil, sys, torch, transformers
from pathlib import Path
from transformers.utils import logging
logging.disable_progress_bar()
out, ids, report = Path(sys.argv[1]), torch.tensor(json.loads(sys.argv[2])), {}
for folder, auto in json.loads(sys.argv[3]):
    name, Auto, own = Path(folder).name, getattr(transformers, auto), {"trust_remote_code": True}
    config = transformers.AutoConfig.from_pretrained(folder, **own)
    model, info = Auto.from_pretrained(folder, **own, output_loading_info=True)
    alone = transformers.AutoModel.from_pretrained(folder, **own).eval()
    once, twice = out / name / "once", out / name / "twice"
    with torch.no_grad():
        found = {"logits": model.eval()(ids).logits, "hidden": alone(ids)[0]}
        model.save_pretrained(once)
        again = Auto.from_pretrained(once, **own).eval()
        again.save_pretrained(twice)
        shutil.rmtree(once)
        last = Auto.from_pretrained(twice, **own).eval()
        torch.save(found | {"last": last(ids).logits}, out / f"{name}.pt")
    report[name] = {
        "config": [config.model_type, type(config).__name__],
        "class": type(model).__name__,
        "modules": [type(model).__module__, type(last).__module__],
        "pickled": pickle.loads(pickle.dumps(type(last))) is type(last),
        "info": {key: sorted(map(str, value)) for key, value in info.items()},
        "trainable": sorted(name for name, p in model.named_parameters() if p.requires_grad),
        "trainable_saved": sorted(name for name, p in last.named_parameters() if p.requires_grad),
    }
    try:
        Auto.from_pretrained(folder)
        report[name]["refused"] = None
    except Exception as error:
        report[name]["refused"] = [type(error).__name__, str(error)]
assert "scale_surgery" not in sys.modules
(out / "report.json").write_text(json.dumps(report))
"""


def run_fresh(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, from a folder outside the repository."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"HF_MODULES_CACHE": str(cwd / "modules"), "PYTHONPATH": ""}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Alone:
    """What the fresh process found.

    Attributes:
        place: Where it wrote tensors, and the models that it saved.
        report: What it said of each folder, by name.
        routed: Routed models that were trained here, by the names of the folders to which they were saved.
    """

    place: Path
    report: dict[str, dict[str, Any]]
    routed: dict[str, tuple[Trio, Any]]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = torch.load(self.place / f"{name}.pt")
        return tensors


@pytest.fixture(scope="module")
def alone(pair_of: Any, trio_of: Any, made: Any, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    place = tmp_path_factory.mktemp("alone")
    trained = saved_routed(trio_of, place)
    folders = [pair_with(pair_of)(family).path for family in KEPT if family != "llama"]
    folders += [Path(shutil.copytree(pair_with(pair_of)("llama").path, place / NAMED))]
    folders += [place / name for name in trained]
    asked = [(str(folder), CAUSAL) for folder in folders]
    asked += [(str(made(name)[1]), auto) for name, auto in GENERIC.items()]
    return Alone(place, loaded_alone(place, asked), trained)


@pytest.fixture(scope="module")
def others(pair_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The families that are left to the slow tests, in a process of theirs."""
    place = tmp_path_factory.mktemp("others")
    asked = [(str(pair_with(pair_of)(family).path), CAUSAL) for family in FEW if family not in KEPT]
    return Alone(place, loaded_alone(place, asked), {})


def loaded_alone(place: Path, asked: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    done = run_fresh(ALONE, place, json.dumps(IDS.tolist()), json.dumps(asked), cwd=place)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads((place / "report.json").read_text())
    return report


def saved_routed(trio_of: Callable[..., Trio], place: Path) -> dict[str, tuple[Trio, Any]]:
    saved = {}
    for family, routing in (("llama", "posterior"), ("gemma3_text", "cosine")):
        trio = trio_of(family, "deep", routing)
        model = train(load(trio.path))
        folder = Path(shutil.copytree(trio.path, place / f"{family}_{routing}"))
        model.save_pretrained(folder)
        saved[folder.name] = trio, model
    return saved


def pair_with(pair_of: Callable[..., Pair]) -> Callable[[str], Pair]:
    return lambda family: pair_of(family, "preserve" if family != "llama" else "adapt")


@pytest.mark.parametrize("family", mostly(FEW, KEPT.__contains__))
def test_it_computes_what_the_base_does_and_is_saved_and_loaded_again(
    request: pytest.FixtureRequest, pair_of: Callable[..., Pair], family: str
) -> None:
    pair = pair_with(pair_of)(family)
    found: Alone = request.getfixturevalue("alone" if family in KEPT else "others")
    name = NAMED if family == "llama" else pair.path.name
    report, tensors = found.report[name], found.tensors(name)
    assert report["config"][0] == f"scale_{family}"
    assert report["class"] == type(pair.expanded).__name__
    assert report["class"].startswith("Scale")
    assert not any(report["info"].values()), "no key missing, unexpected or mismatched"
    trainable = sorted(name for name, p in pair.expanded.named_parameters() if p.requires_grad)
    assert report["trainable"] == report["trainable_saved"] == trainable
    with torch.no_grad():
        wanted = pair.base(IDS, output_hidden_states=True)
    assert torch.equal(tensors["logits"], wanted.logits) and torch.equal(tensors["last"], wanted.logits)
    width = pair.base.config.hidden_size
    assert tensors["hidden"].shape[-1] == width + pair.expansion.plan.widths.up_width
    assert torch.equal(tensors["hidden"][..., :width], wanted.hidden_states[-1])


def test_every_folder_name_loads_and_none_without_remote_code(alone: Alone) -> None:
    assert alone.report[NAMED]["class"] == "ScaleLlamaForCausalLM"
    for name, report in alone.report.items():
        error, message = report["refused"]
        assert error == "ValueError" and "trust_remote_code=True" in message, name


def test_routed_models(alone: Alone) -> None:
    """Trained and saved here and there: the same logits; without a head there is nothing to route: the adapt path."""
    assert len(alone.routed) == 2
    for name, (trio, model) in alone.routed.items():
        report, tensors = alone.report[name], alone.tensors(name)
        with torch.no_grad():
            wanted = model(IDS).logits
            assert (load(trio.path)(IDS).logits - wanted).abs().max() > 0.1, "the control"
            assert torch.equal(tensors["logits"], wanted) and torch.equal(tensors["last"], wanted)
            with model.routing_disabled():
                assert torch.equal(tensors["hidden"], model.get_decoder()(IDS)[0])
        assert not any(report["info"].values()), "no key missing, unexpected or mismatched"
        assert report["trainable"] == sorted(key for key, p in model.named_parameters() if p.requires_grad)


def test_classes_that_are_made_when_they_are_named(alone: Alone, made: Callable[[str], tuple[Path, Path]]) -> None:
    classes = {
        "internlm3": ("ScaleInternLM3Config", "ScaleLlamaForCausalLM_of_InternLM3Config"),
        "smollm3": ("ScaleSmolLM3Config", "ScaleSmolLM3ForCausalLM"),
        "gemma3": ("ScaleGemma3Config", "ScaleGemma3ForConditionalGeneration"),
    }
    auto = {"gemma3": AutoModelForImageTextToText}
    for name in GENERIC:
        report, tensors = alone.report[name], alone.tensors(name)
        assert (report["config"][1], report["class"]) == classes[name]
        assert report["modules"][1].split(".")[0] == "transformers_modules" and report["pickled"]
        base = auto.get(name, AutoModelForCausalLM).from_pretrained(made(name)[0]).eval()
        with torch.no_grad():
            assert torch.equal(tensors["logits"], tensors["last"]) and torch.equal(tensors["last"], base(IDS).logits)
        saved = alone.place / name / "twice"
        assert {file.name for file in saved.glob("*.py")} == set(CODE_FILES)
        names = set().union(*(load_file(file) for file in saved.glob("*.safetensors")))
        stored = set().union(*(load_file(file) for file in made(name)[1].glob("*.safetensors")))
        assert names == stored
