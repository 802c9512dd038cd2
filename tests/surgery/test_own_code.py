"""Bases whose classes lie in their own folder: expanded where their user trusts that code, and never run otherwise."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scale_surgery import (
    Request,
    RunOptions,
    TrainingSettings,
    adopt,
    apply,
    compose,
    evaluate,
    expand,
    extract,
    load_expansion,
    plan,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.names import CODE_FILES, OWN_CODE_FILE
from scale_surgery.errors import CheckpointError, PlanError, SurgeryError, UnsupportedFamilyError
from scale_surgery.evidence.inspect import inspect
from scale_surgery.show.commands import after_verification, verify_command
from scale_surgery.surgery.merge import merge
from tests.conftest import digests, edited, refused, shake
from tests.each import mostly
from tests.interrupted_steps import run_apart
from tests.own_code import save_pine

IDS = torch.arange(1, 12)[None]
TRUSTED = RunOptions(device="cpu", trust_remote_code=True)
ADAPT = Request("last:2", variant="adapt")


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()


@torch.no_grad()
def answers(model: Any) -> list[torch.Tensor]:
    return [model(IDS).logits, model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    @functools.cache
    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp("pine")
        base = save_pine(place / "base", dtype=dtype, **changes)
        return base, expand(base, ADAPT, place / "wide", run=TRUSTED).path

    return make


def save_speaking(path: Path, **options: Any) -> Path:
    """Such a base with a tokenizer."""
    base = save_pine(path, vocab_size=1152, **options)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / file, base)
    return base


def use_untrusted(wide: Path, out: Path) -> None:
    """All that can be done with an expanded folder by somebody who does not trust the code of its base."""
    run = RunOptions(device="cpu")
    verification = verify(wide, run=run, record=False)
    assert verification.passed and verification.not_run == "the base has code of its own; --trust-remote-code runs it"
    extract(wide, out / "extract"), strip(wide, out / "strip"), route_export(wide, out / "routed")
    apply(out / "extract", out / "applied", wide.parent / "base")
    with refused("config-not-read", "wide: config.json", CheckpointError):
        evaluate([wide], [out / "text.txt"], run=run)


def test_no_code_runs_without_the_flag(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    base = save_speaking(tmp_path / "base", marker=marker)
    untrusted = RunOptions(device="cpu")
    for call in (
        lambda: inspect(base),
        lambda: plan(base, ADAPT),
        lambda: expand(base, ADAPT, tmp_path / "wide", run=untrusted),
    ):
        with refused("code-not-trusted", "config.json", UnsupportedFamilyError):
            call()
    assert not marker.exists() and not (tmp_path / "wide").exists()
    wide = expand(base, ADAPT, tmp_path / "wide", run=TRUSTED).path
    assert marker.exists()
    marker.unlink()
    # the code was imported once in this process: another shows that nothing imports it there
    (tmp_path / "text.txt").write_text("one line\n")
    done = run_apart(use_untrusted, wide, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize(
    ("dtype", "has_own_attention"),
    mostly(
        [(dtype, has_own) for dtype in (torch.float32, torch.bfloat16) for has_own in (False, True)],
        [(torch.bfloat16, True)].__contains__,
    ),
)
def test_the_output_is_the_base_s(made: Any, dtype: torch.dtype, has_own_attention: bool) -> None:
    base, wide = made(dtype, has_own_attention=has_own_attention)
    treatment = {block.treatment for block in plan(base, ADAPT, run=TRUSTED).architecture.kinds[0].blocks}
    assert treatment == ({"edges", "split"} if has_own_attention else {"split"})
    stock, expanded = load(base), load(wide)
    assert all(map(torch.equal, answers(stock), answers(expanded)))
    new = {name for name in open_checkpoint(wide).tensors if name not in open_checkpoint(base).tensors}
    assert {name for name, parameter in expanded.named_parameters() if parameter.requires_grad} == new
    verification = verify(wide, base, run=TRUSTED, record=False)
    assert after_verification(verification) == f"scale-surgery train {wide} --data FILE --trust-remote-code"
    assert verification.passed and verification.numbers is not None
    with torch.no_grad():
        for name, parameter in expanded.named_parameters():
            parameter.normal_() if name.endswith(".w12") else None
    assert not torch.equal(answers(stock)[0], answers(expanded)[0])
    with expanded.expansion_disabled():
        assert all(map(torch.equal, answers(stock), answers(expanded)))


@pytest.mark.slow
def test_what_a_trainer_saved_of_it_is_adopted(made: Any, tmp_path: Path) -> None:
    """From the expanded folder none of its code has to run; names in memory are only known by running it."""
    _, wide = made()
    model = load(wide)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1) if parameter.requires_grad else None
    model.save_pretrained(tmp_path / "saved")
    done = adopt(tmp_path / "saved", wide, tmp_path / "out")
    assert not done.other_settings and done.trained_tensors == done.expansion_tensors
    assert verify_command(done.path) == f"scale-surgery verify {done.path} --trust-remote-code"
    assert all(map(torch.equal, answers(load(done.path)), answers(model)))
    with edited(tmp_path / "saved" / "config.json") as config:
        config |= {"intermediate_size": 7, "unheard": 3.0}
    lines = adopt(tmp_path / "saved", wide, tmp_path / "third").other_computation
    assert [line.partition(":")[0] for line in lines] == ["intermediate_size is 7 in what was saved, 48 stays"]
    with edited(tmp_path / "saved" / "model.safetensors") as tensors:
        tensors["other"] = torch.ones(1)
    with refused("saved-other-names", tmp_path / "saved", CheckpointError):
        adopt(tmp_path / "saved", wide, tmp_path / "other")


@pytest.mark.slow
def test_somebody_with_transformers_alone_loads_and_saves_it(made: Any, tmp_path: Path) -> None:
    base, wide = made()
    program = (
        "import sys, torch; from pathlib import Path; from transformers import AutoConfig, AutoModelForCausalLM\n"
        "ids, out = torch.arange(1, 12)[None], Path(sys.argv[2])\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "model.save_pretrained(out / 'once')\n"
        "again = AutoModelForCausalLM.from_pretrained(out / 'once', trust_remote_code=True).eval()\n"
        "print(type(again).__name__, type(again.config).__name__)\n"
        "with torch.no_grad(): torch.save([own(ids).logits for own in (model, again)], out / 'logits.pt')\n"
        "assert 'scale_surgery' not in sys.modules\n"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", program, str(wide), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ScalePineForCausalLM", "ScalePineConfig"]
    wanted = answers(load(base))[0]
    assert all(torch.equal(logits, wanted) for logits in torch.load(tmp_path / "logits.pt"))
    code = {*CODE_FILES, OWN_CODE_FILE, "configuration_pine.py", "modeling_pine.py", "needles.py"}
    assert {file.name for file in (tmp_path / "once").glob("*.py")} == code


def test_the_base_comes_back_and_the_expansion_travels(made: Any, tmp_path: Path) -> None:
    base, wide = made()
    assert digests(strip(wide, tmp_path / "stripped").path) == digests(base)
    taken = extract(wide, tmp_path / "extract").path
    assert digests(apply(taken, tmp_path / "applied", base).path) == digests(wide)
    with refused("own-code-in-memory", taken, PlanError):
        load_expansion(base, taken)
    with refused("own-code-composed", "one", PlanError):
        compose(base, {"one": taken}, tmp_path / "composed")


@pytest.mark.slow
def test_routed_fused_and_duplicated(made: Any, tmp_path: Path) -> None:
    base, wide = made()
    routed = route_export(wide, tmp_path / "routed").path
    assert verify(routed, run=TRUSTED, record=False).passed
    fused = merge(wide, tmp_path / "fused", run=TRUSTED).path
    assert verify(fused, base, run=TRUSTED, record=False).passed
    deep = expand(base, Request("last:1", method="depth"), tmp_path / "deep", run=TRUSTED).path
    assert verify(deep, run=TRUSTED, record=False).passed
    assert all(map(torch.equal, answers(load(base)), answers(load(deep))))
    assert inspect(wide, run=TRUSTED).family == "pine"


def test_it_trains_and_the_base_stream_stays(tmp_path: Path) -> None:
    base = save_speaking(tmp_path / "base")
    (tmp_path / "text.txt").write_text("Ada was born in London. " * 40)
    wide = expand(base, Request("last:2"), tmp_path / "wide", run=TRUSTED).path
    settings = TrainingSettings(steps=3, sequence_length=16, batch_size=2)
    with pytest.raises(SurgeryError, match="--trust-remote-code"):
        train(wide, [tmp_path / "text.txt"], tmp_path / "no", settings, run=RunOptions(device="cpu"))
    trained = train(wide, [tmp_path / "text.txt"], tmp_path / "trained", settings, run=TRUSTED).path
    verification = verify(trained, base, run=TRUSTED, record=False)
    assert verification.passed and verification.state == "trained"
    held = {promise.name: promise.holds for promise in verification.promises if promise.claimed}
    assert held["base_stream_always"] and held["recoverable"]


def test_its_code_file_is_checked(made: Any, tmp_path: Path) -> None:
    wide = Path(shutil.copytree(made()[1], tmp_path / "wide"))
    assert not any(OWN_CODE_FILE in line for line in verify(wide, probes=None, record=False).warnings)
    with (wide / OWN_CODE_FILE).open("a") as file:
        file.write("print('anything')\n")
    verification = verify(wide, probes=None, record=False)
    assert any(OWN_CODE_FILE in line for line in verification.warnings) and not verification.passed
    assert any(
        line.startswith(f"{OWN_CODE_FILE}: is not the code that the expansion wrote") for line in verification.problems
    )


NAMED = "config.json: auto_map.AutoModelForCausalLM"


@pytest.mark.parametrize(
    ("name", "code", "where"),
    (
        ("modeling_pine.Pine\nimport os", "class-name-unfit", NAMED),
        ("..modeling_pine.PineForCausalLM", "class-name-unfit", NAMED),
        ("modeling_pine.class", "class-name-unfit", NAMED),
        ("someone/repo--modeling_pine.PineForCausalLM", "code-elsewhere", NAMED),
        ("modeling_oak.OakForCausalLM", "class-file-missing", NAMED),
        ("modeling_pine.Layer", "class-no-model", "modeling_pine.Layer"),
        ("modeling_pine.PineModel", "class-without-generation", "modeling_pine.PineModel"),
        ("modeling_pine.Nothing", "code-not-imported", "{base}: auto_map of config.json"),
    ),
)
def test_names_that_are_none_of_a_model(tmp_path: Path, name: str, code: str, where: str) -> None:
    base = save_pine(tmp_path / "base")
    with edited(base / "config.json") as config:
        config["auto_map"]["AutoModelForCausalLM"] = name
    with refused(code, where.format(base=base)):
        expand(base, ADAPT, tmp_path / "wide", run=TRUSTED)
    assert not (tmp_path / "wide").exists()


def test_a_model_type_that_transformers_has_is_taken_from_there(tmp_path: Path, llama_base: Path) -> None:
    (llama_base / "modeling_pine.py").write_text("raise RuntimeError('ran')\n")
    with edited(llama_base / "config.json") as config:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_pine.PineForCausalLM"}
    made = expand(llama_base, ADAPT, tmp_path / "wide", run=TRUSTED)
    assert made.plan.architecture.own_code == {} and OWN_CODE_FILE not in made.plan.code_files


@pytest.mark.parametrize("ties", [False, True])
def test_a_head_is_tied_if_the_class_ties_it(tmp_path: Path, ties: bool) -> None:
    """Of a class that keeps two parameters, config.json may say otherwise, and the files hold equal values."""
    # transformers takes folders of one name for one module
    base = save_pine(tmp_path / f"base_{ties}")
    code = base / "modeling_pine.py"
    with edited(base / "config.json") as config, edited(base / "model.safetensors") as tensors:
        config["tie_word_embeddings"] = True
        tensors["head.weight"] = tensors["trunk.wte.weight"].clone()
    if not ties:
        code.write_text(code.read_text().replace('{"head.weight": "trunk.wte.weight"}', "{}"))
    stock = load(base)
    assert (stock.head.weight is stock.trunk.wte.weight) == ties, "the reference: what transformers makes"
    inspected = inspect(base, run=TRUSTED)
    assert (inspected.sizes.is_tied, inspected.has_own_head) == (ties, False)
    wide = shake(expand(base, ADAPT, tmp_path / "wide", run=TRUSTED).path)
    assert verify(wide, base, run=TRUSTED).passed
    fused = merge(wide, tmp_path / "fused", run=TRUSTED)
    assert fused.drift is not None and fused.drift.holds
    assert ("head.weight" in open_checkpoint(fused.path).tensors) != ties
    assert digests(strip(wide, tmp_path / "again").path) == digests(base)
    # a head of its own cannot be missing
    with edited(base / "model.safetensors") as tensors:
        del tensors["head.weight"]
    assert bool(inspect(base, run=TRUSTED).not_found) != ties
