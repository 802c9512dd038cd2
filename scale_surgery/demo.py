"""The whole job on the shipped model, step by step, with the commands to type it by hand.

inspect -> plan -> expand -> verify -> reload in a fresh process -> strip -> compare bytes
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.checkpoint import list_files
from scale_surgery.errors import CheckpointError
from scale_surgery.expand import expand
from scale_surgery.inspect import inspect
from scale_surgery.plan import plan
from scale_surgery.request import Request
from scale_surgery.strip import strip
from scale_surgery.verify import verify

if TYPE_CHECKING:
    from scale_surgery.console import Output

MARKER = ".scale-surgery-demo"
LAYERS = "last:2"

# what a stranger does who has never heard of scale-surgery: a fresh process, transformers only
RELOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
logging.set_verbosity_error(); logging.disable_progress_bar()
base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
expanded = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2], trust_remote_code=True)
inputs = tokenizer(sys.argv[3], return_tensors="pt", return_token_type_ids=False)
with torch.no_grad():
    equal = torch.equal(base(**inputs).logits, expanded(**inputs).logits)
    tokens = expanded.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1]:]
print(json.dumps({
    "class": type(expanded).__name__,
    "logits_bit_equal": equal,
    "answer": tokenizer.decode(tokens, skip_special_tokens=True).strip().splitlines()[0],
    "trainable": sum(p.numel() for p in expanded.parameters() if p.requires_grad),
    "frozen": sum(p.numel() for p in expanded.parameters() if not p.requires_grad),
    "imported_scale_surgery": "scale_surgery" in sys.modules,
}))
"""


@dataclass(frozen=True)
class Reloaded:
    """What a fresh process found that loaded the expanded model with remote code and without this package."""

    model_class: str
    logits_bit_equal: bool
    question: str
    answer: str
    expected: str
    trainable: int
    frozen: int
    imported_scale_surgery: bool


@dataclass(frozen=True)
class Demo:
    """What the demo showed; `passed` means that every step did what it promises."""

    folder: Path
    verified: bool
    reloaded: Reloaded
    files_compared: int
    files_identical: int
    passed: bool


def demo(folder: Path, out: Output) -> Demo:
    """Run the whole job on the shipped model and leave the folders for a look.

    Args:
        folder: Where base, expanded and stripped model go; replaced if an earlier demo made it.
        out: Where it is told.

    Returns:
        What was shown.

    Raises:
        CheckpointError: If the folder exists and no demo made it, or a step fails.
    """
    from scale_surgery import tables

    _prepare(folder)
    base, expanded, stripped = folder / "biographies", folder / "expanded", folder / "stripped"
    request = Request(layers=LAYERS)
    out.say(tables.render_step(1, "Look at the model", f"scale-surgery inspect {base}"))
    out.say(tables.render_inspection(inspect(base)))
    out.say(tables.render_step(2, "Plan: nothing is written", f"scale-surgery plan {base} --layers {LAYERS}"))
    out.say(tables.render_plan(plan(base, request), tensors=False))
    command = f"scale-surgery expand {base} --layers {LAYERS} -o {expanded}"
    out.say(tables.render_step(3, "Widen its last two layers", command))
    out.say(tables.render_expansion(expand(base, request, expanded, track=out.track)))
    out.say(tables.render_step(4, "Prove that nothing changed", f"scale-surgery verify {expanded} --base {base}"))
    verification = verify(expanded, base, track=out.track)
    out.say(tables.render_verification(verification))
    command = 'AutoModelForCausalLM.from_pretrained("' + str(expanded) + '", trust_remote_code=True)'
    out.say(tables.render_step(5, "Load it in a fresh process, without scale-surgery", command))
    reloaded = _reload(base, expanded)
    out.say(tables.render_reloaded(reloaded))
    out.say(tables.render_step(6, "Take it back", f"scale-surgery strip {expanded} -o {stripped}"))
    out.say(tables.render_stripped(strip(expanded, stripped, track=out.track)))
    files = sorted(set(list_files(base)) | set(list_files(stripped)))
    identical = [file for file in files if _is_identical(base / file, stripped / file)]
    passed = verification.passed and reloaded.logits_bit_equal and identical == files
    result = Demo(folder, verification.passed, reloaded, len(files), len(identical), passed)
    out.say(tables.render_step(7, "Compare every byte", f"diff -r {base} {stripped}"))
    out.show(result, tables.render_demo(result))
    return result


def _prepare(folder: Path) -> None:
    if folder.exists() and not (folder / MARKER).exists():
        raise CheckpointError(f"{folder}: exists and was not made by a demo. Choose another folder with -o.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    shutil.copytree(SHIPPED_MODEL, folder / SHIPPED_MODEL.name)


def _is_identical(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _reload(base: Path, expanded: Path) -> Reloaded:
    question = questions(people(1)[0])[1]
    arguments = [str(base.resolve()), str(expanded.resolve()), question.prompt]
    # -P keeps the current folder off the path, so a checkout of this package is not picked up by accident
    run = subprocess.run(
        [sys.executable, "-P", "-c", RELOAD, *arguments], capture_output=True, text=True, cwd=base.resolve()
    )
    if run.returncode:
        raise CheckpointError(f"{expanded}: does not load in a fresh process:\n{run.stderr.strip()}")
    found = json.loads(run.stdout.splitlines()[-1])
    return Reloaded(
        model_class=found["class"],
        logits_bit_equal=found["logits_bit_equal"],
        question=question.prompt,
        answer=found["answer"],
        expected=question.answer,
        trainable=found["trainable"],
        frozen=found["frozen"],
        imported_scale_surgery=found["imported_scale_surgery"],
    )
