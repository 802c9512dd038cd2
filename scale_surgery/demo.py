"""The whole job on the shipped model: in one command, then step by step, with the commands to type.

learn; inspect -> plan -> expand -> verify -> reload in a fresh process -> train -> evaluate -> verify -> strip
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, Person, biography, people, questions
from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.listing import list_files
from scale_surgery.command_lines import changed_options, command
from scale_surgery.deriving.planned import plan
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.evaluate import Evaluation, evaluate
from scale_surgery.evidence.inspect import inspect
from scale_surgery.evidence.verify import verify
from scale_surgery.learning.learn import learn, resolve_recipe
from scale_surgery.planning.request import Request
from scale_surgery.running.options import RunOptions
from scale_surgery.show.layout import Facts, render_step, sentence
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from scale_surgery.training.settings import TrainingSettings
from scale_surgery.training.train import train

if TYPE_CHECKING:
    from scale_surgery.checkpoint.headers import TensorInfo
    from scale_surgery.learning.learned import Learned
    from scale_surgery.running.loss import Measurement
    from scale_surgery.show.console import Output

MARKER = ".scale-surgery-demo"
LAYERS = "all"
NEW_PEOPLE, OLD_PEOPLE = 20, 100
STYLES, UNSEEN = 4, 100_000
STEPS, SEQUENCE_LENGTH = 120, 128
LEARNING_RATES = {"preserve": 1e-2, "learn": 3e-3, "full": 1e-3}
# folders that must keep every tensor of the shipped model, and the fully fine-tuned one
KEEPING, OVERWRITTEN = (SHIPPED_MODEL.name, "trained", "job/routed"), "fine-tuned"

# a fresh process with transformers only, as for a user who does not have scale-surgery
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
    "model_class": type(expanded).__name__,
    "logits_bit_equal": equal,
    "answer": tokenizer.decode(tokens, skip_special_tokens=True).strip().splitlines()[0],
    "trainable": sum(p.numel() for p in expanded.parameters() if p.requires_grad),
    "frozen": sum(p.numel() for p in expanded.parameters() if not p.requires_grad),
    "imported_scale_surgery": "scale_surgery" in sys.modules,
}))
"""


@dataclass(frozen=True)
class Reloaded:
    """A result of the fresh process that loads the expanded model with remote code and without this package."""

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
    """A result of the demo. `passed` is True if every step kept its promise.

    `base_tensors_kept` counts, by folder, the tensors that are byte for byte those of the shipped model. `base_tensors`
    is the number of tensors of the shipped model.
    """

    folder: Path
    verified: bool
    reloaded: Reloaded
    lesson: Evaluation
    verified_after_training: bool
    files_compared: int
    files_identical: int
    base_tensors: int
    base_tensors_kept: dict[str, int]
    passed: bool


def demo(folder: Path, out: Output, *, steps: int = STEPS) -> Demo:
    """Run the whole job on the shipped model and leave the folders for inspection."""
    import torch

    from scale_surgery.show import tables
    from scale_surgery.show.tables_plan import render_plan
    from scale_surgery.show.tables_verify import render_verification

    # small matrices gain nothing from threads, and on a busy machine the threads wait for each other
    torch.set_num_threads(1)
    # a folder of an earlier demo is replaced
    _prepare(folder)
    tell = Teller(out)
    base, expanded, trained, stripped = (folder / name for name in ("biographies", "expanded", "trained", "stripped"))
    request = Request(layers=LAYERS)
    learned = _learn(folder, steps, out, tell)
    tell("The same step by step, and what else can be done: look at the model", command("inspect", base))
    out.say(tables.render_inspection(inspect(base)))
    tell("Plan: nothing is written", command("plan", base, "--layers", LAYERS))
    out.say(render_plan(plan(base, request), tensors=False))
    tell("Widen all its layers", command("expand", base, "--layers", LAYERS, "-o", expanded))
    out.say(tables.render_expansion(expand(base, request, expanded, track=out.track)))
    tell("Prove that nothing changed", command("verify", expanded, "--base", base))
    verification = verify(expanded, base, track=out.track)
    out.say(render_verification(verification))
    line = f'AutoModelForCausalLM.from_pretrained("{expanded}", trust_remote_code=True)'
    tell("Load it in a fresh process, without scale-surgery", line)
    reloaded = _reload(base, expanded)
    out.say(render_reloaded(reloaded))
    lesson = _teach(folder, steps, out, tell)
    tell("Prove that the base has stayed what it was", command("verify", trained, "--base", base))
    after = verify(trained, base, track=out.track)
    out.say(render_verification(after))
    tell("Take it back", command("strip", trained, "-o", stripped))
    out.say(tables.render_stripped(strip(trained, stripped, track=out.track)))
    files = sorted(set(list_files(base)) | set(list_files(stripped)))
    identical = [file for file in files if _is_identical(base / file, stripped / file)]
    tensors, kept = len(open_checkpoint(SHIPPED_MODEL).tensors), count_kept_tensors(folder)
    passed = verification.passed and after.passed and reloaded.logits_bit_equal and identical == files
    passed = passed and learned.verified and has_every_base(tensors, kept)
    result = Demo(
        folder, verification.passed, reloaded, lesson, after.passed, len(files), len(identical), tensors, kept, passed
    )
    tell("Compare every byte", shlex.join(["diff", "-r", str(base), str(stripped)]))
    out.say(render_demo(result))
    out.say(render_step(tell.number + 1, "What it learned, and what it forgot", None))
    out.show(result, render_lesson(result, NEW_PEOPLE))
    return result


def count_kept_tensors(folder: Path) -> dict[str, int]:
    """Count the tensors in each compared model that are byte for byte those of the shipped model."""
    return {name: _count_equal(SHIPPED_MODEL, folder / name) for name in (*KEEPING, OVERWRITTEN)}


def has_every_base(tensors: int, kept: Mapping[str, int]) -> bool:
    """Return True if every model that must keep its base has all of the base's tensors."""
    return all(kept[name] == tensors for name in KEEPING)


def _count_equal(base: Path, model: Path) -> int:
    wanted, checkpoint = open_checkpoint(base), open_checkpoint(model)
    shared = [name for name, info in wanted.tensors.items() if _is_alike(info, checkpoint.tensors.get(name))]
    expected, actual = hash_tensors(wanted, shared), hash_tensors(checkpoint, shared)
    return sum(expected[name] == actual[name] for name in shared)


def _is_alike(first: TensorInfo, second: TensorInfo | None) -> bool:
    return second is not None and (first.dtype, first.shape) == (second.dtype, second.shape)


class Teller:
    """A printer of step headings, each with the command to type."""

    def __init__(self, out: Output) -> None:
        self.out, self.number = out, 0

    def __call__(self, title: str, line: str) -> None:
        """Print the heading of the next step, and its command."""
        self.number += 1
        self.out.say(render_step(self.number, title, line))


def _teach(folder: Path, steps: int, out: Output, tell: Teller) -> Evaluation:
    """Train on new people by two methods, and ask for old and new people. `learn` was the third method."""
    from scale_surgery.show import tables

    base, data = folder / "biographies", folder / "new_people.jsonl"
    settings = TrainingSettings(steps=steps, sequence_length=SEQUENCE_LENGTH, learning_rate=LEARNING_RATES["preserve"])
    expanded, trained = folder / "expanded", folder / "trained"
    options = changed_options(settings, TrainingSettings())
    line = command("train", expanded, "--data", data, "-o", trained, *options)
    tell(f"Teach it {NEW_PEOPLE} new people: preserve", line)
    out.say(tables.render_training(train(expanded, [data], trained, settings, track=out.track)))
    tell("The same people: full fine-tuning, which overwrites the model", "(the Trainer of transformers)")
    _fine_tune(base, data, folder / OVERWRITTEN, replace(settings, learning_rate=LEARNING_RATES["full"]), out)
    models = [folder / name for name in ("trained", "job/routed", OVERWRITTEN)]
    old, new = folder / "old_questions.jsonl", folder / "new_questions.jsonl"
    run = RunOptions(batch_size=64)
    line = command("evaluate", *models, "--old", old, "--new", new, *changed_options(run, RunOptions()))
    tell("Ask for old and new people", line)
    evaluation = evaluate(models, [old], [new], run=run, track=out.track)
    out.say(tables.render_evaluation(evaluation))
    return evaluation


def _learn(folder: Path, steps: int, out: Output, tell: Teller) -> Learned:
    """Run the whole job with the command `learn`."""
    from scale_surgery.learning.tables import render_learned

    _write_people(folder)
    base, rate = folder / "biographies", LEARNING_RATES["learn"]
    data, old = folder / "new_people.jsonl", folder / "other_questions.jsonl"
    # the preset has smaller batches, so it gets more steps to read as many tokens as the other methods
    rows = TrainingSettings.batch_size
    options = ("--layers", LAYERS, "--steps", steps, "--batch-size", rows, "--sequence-length", SEQUENCE_LENGTH)
    texts = ("--data", data, "--old", old)
    line = command("learn", base, *texts, *options, "--learning-rate", rate, "-o", folder / "job", "--quiet")
    tell(f"The whole job in one command: teach it {NEW_PEOPLE} new people", line)
    settings = {
        "model": str(base),
        "data": str(data),
        "old": str(old),
        "expansion.layers": LAYERS,
        "training.steps": steps,
        "training.batch_size": rows,
        "training.sequence_length": SEQUENCE_LENGTH,
        "training.learning_rate": rate,
    }
    learned = learn(resolve_recipe(settings), folder / "job", track=out.track)
    out.say(render_learned(learned))
    return learned


def render_reloaded(reloaded: Reloaded) -> RenderableType:
    """Render the result of the fresh process."""
    rows = [
        ("class", reloaded.model_class),
        ("logits", "bit-equal to the base's" if reloaded.logits_bit_equal else "DIFFERENT from the base's"),
        ("trains", f"{reloaded.trainable:,} new parameters; {reloaded.frozen:,} are frozen"),
        ("asked", " ".join(reloaded.question.split())),
        ("answered", f"{reloaded.answer}  (right: {reloaded.expected})"),
    ]
    return Facts("loaded with trust_remote_code", rows)


def render_demo(result: Demo) -> RenderableType:
    """Render the result of the demo."""
    same = f"{result.files_identical} of {result.files_compared} files are identical, byte for byte"
    word = Text("All promises kept.", style="bold green") if result.passed else Text("FAILED.", style="bold red")
    left = sentence(f"Kept in {result.folder}/: every model of the demo, and its data", "dim")
    return Group(Text(same), word, left)


def render_lesson(result: Demo, new_people: int) -> RenderableType:
    """Render the end of the demo: accuracy on old and new people, and kept tensors, by training method."""
    # title of the row, whose learning rate it has, name of the model in the evaluation, folder of the model
    rows = (
        ("base", "", "biographies (base)", "biographies"),
        ("preserve", "preserve", "trained", "trained"),
        ("learn, without its router", "learn", "routed, routing disabled", "job/routed"),
        ("learn", "learn", "routed", "job/routed"),
        ("full fine-tuning", "full", "fine-tuned", "fine-tuned"),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for title in ("rate", "old people known", f"{new_people} new known", "base bytes"):
        table.add_column(title, justify="right")
    scores = {score.name: score for score in result.lesson.scores}
    for title, trained, name, folder in rows:
        known = [_accuracy(measured) for measured in (scores[name].old, scores[name].new)]
        rate = f"{LEARNING_RATES[trained]:g}" if trained else ""
        table.add_row(title, rate, *known, _kept(result.base_tensors_kept[folder], result.base_tensors))
    return table


def _accuracy(measured: Measurement | None) -> str:
    return "not asked" if measured is None or measured.accuracy is None else f"{measured.accuracy:.1%}"


def _kept(kept: int, tensors: int) -> str:
    """Describe how many of the base's tensors a model still has byte for byte."""
    if kept == tensors:
        return "all there"
    return f"{kept} of {tensors} tensors" if kept else "overwritten"


def _write_people(folder: Path) -> None:
    new = people(NEW_PEOPLE, start=SHIPPED_PEOPLE)
    texts = [{"text": biography(person, style)} for person in new for style in range(STYLES)]
    files = {
        "new_people.jsonl": _ask(new) + texts,
        "new_questions.jsonl": _ask(new),
        "old_questions.jsonl": _ask(people(OLD_PEOPLE)),
        # for the calibration of a router
        "other_questions.jsonl": _ask(people(OLD_PEOPLE, start=OLD_PEOPLE)),
        # in styles outside the training data, for running text
        "new_texts.jsonl": [{"text": biography(person, UNSEEN + index)} for index, person in enumerate(new)],
        "old_texts.jsonl": [
            {"text": biography(person, UNSEEN + index)} for index, person in enumerate(people(OLD_PEOPLE))
        ],
    }
    for name, rows in files.items():
        write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))


def _ask(asked: tuple[Person, ...]) -> list[dict[str, str]]:
    return [
        {"question": question.prompt, "answer": question.answer} for person in asked for question in questions(person)
    ]


def _fine_tune(base: Path, data: Path, output: Path, settings: TrainingSettings, out: Output) -> None:
    """Train every parameter of the base on the same sequences, for comparison."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer

    from scale_surgery.running.loading import quiet_transformers
    from scale_surgery.text.documents import read_documents
    from scale_surgery.text.tokenizing import collate, pack, start_tokens, tokenize
    from scale_surgery.training.arguments import make_arguments
    from scale_surgery.training.trainer import Advance

    with quiet_transformers():
        model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
        sequences = pack(tokenize(read_documents([data]), tokenizer), SEQUENCE_LENGTH, start_tokens(tokenizer))
        arguments = make_arguments(
            settings, output, settings.steps or STEPS, RunOptions(), bf16=False, is_measured=False
        )
        arguments.save_strategy = "no"
        trainer = Trainer(model=model, args=arguments, train_dataset=sequences, data_collator=collate)
        # it prints its log as Python dicts
        trainer.remove_callback(PrinterCallback)
        with out.track("fine-tuning", arguments.max_steps) as advance:
            trainer.add_callback(Advance(advance))
            trainer.train()
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)


def _prepare(folder: Path) -> None:
    if folder.exists() and not (folder / MARKER).exists():
        raise CheckpointError(Problem("folder-of-no-demo", folder))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    shutil.copytree(SHIPPED_MODEL, folder / SHIPPED_MODEL.name)


def _is_identical(first: Path, second: Path) -> bool:
    return first.is_file() and second.is_file() and first.read_bytes() == second.read_bytes()


def _reload(base: Path, expanded: Path) -> Reloaded:
    question = questions(people(1)[0])[1]
    arguments = [str(base.resolve()), str(expanded.resolve()), question.prompt]
    # -P keeps the current folder off the path; otherwise a checkout of this package could be imported
    run = subprocess.run(
        [sys.executable, "-P", "-c", RELOAD, *arguments], capture_output=True, text=True, cwd=base.resolve()
    )
    if run.returncode:
        raise CheckpointError(Problem("demo-not-loaded", expanded, error=run.stderr.strip()))
    reply = json.loads(run.stdout.splitlines()[-1])
    return Reloaded(question=question.prompt, expected=question.answer, **reply)
