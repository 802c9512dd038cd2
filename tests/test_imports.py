"""What imports what: torch is imported when facts are derived, and exported code needs torch and transformers only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from transformers.dynamic_module_utils import get_relative_imports

from scale_surgery import extract, modeling
from scale_surgery.checkpoint.names import CODE_FILES, FUSED_CODE_FILES
from tests.tiny import save_tiny

LIGHT = [
    f"{room}.{file.stem}"
    for room in ("checkpoint", "planning")
    for file in (modeling.FOLDER.parent / room).glob("[!_]*.py")
] + ["deriving.base", "deriving.planned", "evidence.inspect"]


# what a process has imported of the slow libraries, step by step
STEPS = f"""
import importlib, json, sys
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
expanded, base, mistaken, output, stubs = sys.argv[1:]
found = {{}}
def note(step):
    slow = ("torch", "transformers", "transformers.models.llama.modeling_llama")
    found[step] = [name for name in slow if name in sys.modules]

from scale_surgery import CheckpointError, Request, plan, register
from scale_surgery.cli.program import main
for name in {LIGHT}:
    importlib.import_module("scale_surgery." + name)
note("planning")
try:
    plan(expanded, Request("last:2"))
except CheckpointError:
    note("a plan that is refused")
refusals = []
for line in json.loads(Path(mistaken).read_text()):
    with redirect_stderr(StringIO()) as stderr, suppress(SystemExit):
        main(line)
    refusals.append(stderr.getvalue())
note("what is no request")
from scale_surgery.tensors import blocks
note("blocks")
from scale_surgery.surgery.expand import expand
from scale_surgery.folder.record import read_manifest
expand(base, read_manifest(Path(expanded)).plan, output)
note("an expansion that was planned before")
plan(base, Request("last:2"))
note("a plan")
register()
from transformers import AutoModelForCausalLM
loaded = type(AutoModelForCausalLM.from_pretrained(expanded)).__module__
from scale_surgery import DataError, train
sys.path.insert(0, stubs)
try:
    train(expanded, ["no-file"], output + "-trained")
except DataError:
    found["a training"] = [name for name in ("peft", "bitsandbytes") if name in sys.modules]
print(json.dumps([found, loaded, refusals]))
"""
# a peft that warns as bitsandbytes does, which peft imports; the real ones are slow, and not every CPU makes them warn
PEFT = """
import logging
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load a kernel")
class PeftModel: ...
class PeftMixedModel: ...
"""


@pytest.fixture(scope="module")
def mistaken(base_of, pair_of, tmp_path_factory) -> dict[str, str]:
    """Command lines with folders in places of others, and what is said of each."""
    place = tmp_path_factory.mktemp("mistaken")
    base, expanded = base_of("llama"), pair_of("llama", "adapt").path
    text, out, saved = place / "text.txt", place / "out", place / "saved"
    text.write_text("some text")
    shutil.copytree(expanded, saved, ignore=shutil.ignore_patterns("surgery.json"))
    extracted = extract(expanded, place / "extracted").path
    wider = save_tiny(place / "wider", "llama", intermediate_size=60)
    is_base = f"{base}: is a base model, expected"
    no_text = (
        f"{base}: is a model (config.json says model_type 'llama'), expected text. Give a file of UTF-8 text, JSONL or "
        "a saved dataset."
    )
    return {
        f"train {base} --data {text} -o {out}": f"{is_base} one made by scale-surgery expand. Expand it first: "
        f"scale-surgery expand {base} --layers LAYERS -o EXPANDED.",
        f"train {expanded} --data {text} --eval-data old={base} -o {out}": no_text,
        f"train {expanded} --data {text} --rehearse {base} -o {out}": no_text,
        f"learn {base} --data {text} --old {base} -o {out}": no_text,
        f"evaluate {expanded} --old {base}": no_text,
        f"adopt {expanded} --expanded {saved} -o {out}": f"{saved}: a trainer saved it, and {expanded} is the model "
        f"for --expanded. Exchange the two: scale-surgery adopt {saved} --expanded {expanded} -o OUT",
        f"adopt {saved} --expanded {base} -o {out}": f"{is_base} the expanded model that was trained. Give that as "
        "--expanded.",
        f"adopt {base} --expanded {expanded} -o {out}": f"{is_base} what a trainer saved of an expanded model. Give "
        "the folder that it wrote.",
        f"compose {wider} {extracted} -o {out}": f"wider: does not fit, this expansion was made on {base.name}.",
    }


@pytest.fixture(scope="module")
def messages(base_of, pair_of, mistaken, tmp_path_factory) -> tuple[dict[str, list[str]], str, list[str], str]:
    """What a process has imported after each step, whose class it loads, what it refused, and its stderr."""
    place = tmp_path_factory.mktemp("steps")
    base, expanded = base_of("llama"), pair_of("llama", "adapt").path
    (place / "mistaken.json").write_text(json.dumps([line.split() for line in mistaken]))
    files = [expanded, base, place / "mistaken.json", place / "out", place]
    (place / "peft.py").write_text(PEFT)
    done = subprocess.run([sys.executable, "-c", STEPS, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout), done.stderr


def test_what_is_slow_is_imported_when_it_is_needed_and_not_before(messages):
    """Facts come from the stock model itself; planning, and what is refused before they are asked for, needs none."""
    modules = messages[0]
    assert modules["planning"] == modules["a plan that is refused"] == modules["what is no request"] == []
    assert modules["a plan"] == ["torch", "transformers", "transformers.models.llama.modeling_llama"]
    assert modules["blocks"] == ["torch"]
    # peak memory is that of tensors, not of a model: once it is planned, no stock modeling module is imported
    assert modules["an expansion that was planned before"][:1] == ["torch"]
    assert "transformers.models.llama.modeling_llama" not in modules["an expansion that was planned before"]


def test_a_folder_in_the_place_of_another_is_refused(messages, mistaken):
    """The first line says so; tensors that differ are named below it."""
    assert [message.splitlines()[0] for message in messages[2]] == [f"error: {text}" for text in mistaken.values()]


def test_training_does_not_say_what_others_miss(messages):
    assert messages[0]["a training"] == ["peft"]
    assert "Failed to load" not in messages[3]


def test_registration_replaces_remote_code(messages):
    assert messages[1] == "scale_surgery.modeling.modeling_scale"


def test_every_code_file_travels():
    assert {file.name for file in modeling.FOLDER.glob("*.py")} == {"__init__.py", *CODE_FILES, *FUSED_CODE_FILES}


def test_the_modeling_file_imports_every_file_itself():
    """transformers 4 copies what the file that it loads imports itself, and nothing that those import."""
    for files, modeling_file in ((CODE_FILES, "modeling_scale.py"), (FUSED_CODE_FILES, "modeling_fused.py")):
        imports = get_relative_imports(modeling.FOLDER / modeling_file)
        assert {f"{name}.py" for name in imports} == set(files) - {modeling_file}
