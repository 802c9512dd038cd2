"""What `train` says of a run: what it will do, whether that can teach, and what the loss was before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from scale_surgery import DataError, EvalData, Request, RunOptions, TrainingSettings, TrainingStart, expand, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.cli.program import main
from scale_surgery.errors import TrainingError
from scale_surgery.progress import Progress
from scale_surgery.running.documents import read_documents
from scale_surgery.running.loss import measure
from scale_surgery.running.sequences import Sequences
from scale_surgery.running.texts import pack, tokenize
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.training.outlook import MOST_SAMPLED, LossChange, Outlook, disappointments, look_ahead, sample_of
from tests.conftest import digests, load

CPU = RunOptions(device="cpu")
SETTINGS = TrainingSettings(steps=4, sequence_length=64, batch_size=4, save_every=2, learning_rate=3e-3, log_every=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outlook")
    rows = [json.dumps({"text": biography(person, 3)}) for person in people(6, start=400)]
    (folder / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "word.txt").write_text("Hello.", encoding="utf-8")
    expand(SHIPPED_MODEL, Request("2-3", variant="adapt", collaborate="both"), folder / "wide")
    return folder


def sequences(count: int, tokens: int) -> Sequences:
    flat = torch.ones(count * tokens, dtype=torch.int32)
    return Sequences(flat, flat, tuple(range(0, count * tokens + 1, tokens)))


def warnings_of(count: int = 1000, tokens: int = 64, processes: int = 1, **settings: Any) -> str:
    return "\n".join(look_ahead(TrainingSettings(**settings), sequences(count, tokens), processes).warnings)


def test_a_run_that_can_teach_is_not_warned_of() -> None:
    assert warnings_of() == warnings_of(steps=50) == warnings_of(50, 64, batch_size=1) == ""


@pytest.mark.parametrize(
    ("settings", "advice"),
    (
        ({"count": 48}, "Give --epochs 9, or --steps 50; a smaller --batch-size makes more steps of the same text."),
        ({"count": 50, "batch_size": 1, "epochs": 0.5}, "Give --epochs 1, or --steps 50."),
        ({"gradient_accumulation": 8}, "; a smaller --batch-size and --gradient-accumulation makes more steps"),
        ({"processes": 4, "count": 800}, "25 optimizer steps can teach little, at least 50 are usual."),
        ({"steps": 49}, "49 optimizer steps can teach little, at least 50 are usual. Give --steps 50."),
        (
            {"steps": 60, "learning_rate": 1e-5},
            "60 steps at a learning rate of 1e-05 move a weight by about 0.0003, and weights are usually about 0.02, "
            "so they can teach little. Give --learning-rate 0.00084, or --steps 5000.",
        ),
        ({"count": 1000, "learning_rate": 1e-4}, "Give --learning-rate 0.0004, or --steps 500."),
        ({"steps": 5, "learning_rate": 1e-4}, "50 steps at a learning rate of 0.0001 move"),
        # larger steps are not more of them
        ({"steps": 20, "learning_rate": 1e-2}, "20 optimizer steps can teach little, at least 50 are usual."),
        ({"steps": 100, "warmup": 0.6}, "rises in 60 of 100 steps. Give a smaller --warmup."),
        ({"count": 1, "tokens": 5, "steps": 60}, "have 4 tokens to learn, which a model learns by heart and not from;"),
    ),
)
def test_what_teaches_little_is_said_with_what_to_do(settings: dict[str, Any], advice: str) -> None:
    assert advice in warnings_of(**settings)


def test_the_advice_is_enough() -> None:
    for advised in ({"learning_rate": 0.00084}, {"learning_rate": 1e-5, "steps": 5000}):
        assert warnings_of(**{"steps": 60, **advised}) == ""
    for not_enough in ({"learning_rate": 0.00083}, {"learning_rate": 1e-5, "steps": 4999}):
        assert "--learning-rate" in warnings_of(**{"steps": 60, **not_enough})
    few = look_ahead(TrainingSettings(), sequences(48, 64), 1)
    assert few.steps == 6 and "--epochs 9" in few.warnings[0]
    assert look_ahead(TrainingSettings(epochs=9), sequences(48, 64), 1).warnings == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    ((3.0, 2.9, ""), (3.0, 2.99, "hardly fell, from 3.0000 to 2.9900. Train for more steps"), (3.0, 3.2, "rose, from")),
)
def test_a_loss_that_did_not_fall_is_said(before: float, after: float, said: str) -> None:
    found = disappointments(LossChange("text", 8, before, after))
    assert (said in found[0]) if said else found == ()
    assert disappointments(None) == disappointments(LossChange("text", 8, None, after)) == ()


def nats_of(folder: Path, texts: Path, length: int) -> float:
    """Loss of a model on all windows of a text, without the Trainer."""
    tokens = tokenize(read_documents([texts]), need_tokenizer(folder, "wide", CPU))
    return measure(load(folder), pack(tokens, length), 3).nats_per_token


@pytest.mark.slow
def test_the_loss_before_and_after_is_that_of_the_folders(place: Path, tmp_path: Path) -> None:
    told: list[tuple[str, Any]] = []

    @contextmanager
    def track(label: str, total: int) -> Iterator[Progress]:
        told.append(("track", label))
        yield lambda advance, note="": None

    start = TrainingStart(announce=lambda outlook: told.append(("outlook", outlook)))
    settings = replace(SETTINGS, steps=40, save_every=20)
    texts = place / "texts.jsonl"
    done = train(place / "wide", [texts], tmp_path / "made", settings, start=start, run=CPU, track=track)
    assert [name for name, _ in told] == ["track", "outlook", "track"] and told[-1] == ("track", "training")
    assert told[1][1] == done.outlook and isinstance(done.outlook, Outlook)
    assert done.change is not None and done.change.text == "text" and done.change.before is not None
    assert done.change.sequences == done.outlook.sequences, "a small text is measured whole"
    assert done.change.before == pytest.approx(nats_of(place / "wide", texts, 64), abs=1e-5)
    assert done.change.after == pytest.approx(nats_of(done.path, texts, 64), abs=1e-5)
    assert done.change.after < done.change.before - 0.1
    assert done.warnings == done.outlook.warnings and "40 optimizer steps" in done.warnings[0]


def test_new_text_is_what_is_compared_where_there_is_some(place: Path, tmp_path: Path) -> None:
    new = EvalData(new=[place / "word.txt"])
    done = train(place / "wide", [place / "texts.jsonl"], tmp_path / "made", SETTINGS, eval_data=new, run=CPU)
    entries = [json.loads(line) for line in done.log.read_text().splitlines()]
    found = [entry["new_nats_per_token"] for entry in entries if "new_nats_per_token" in entry]
    assert done.change == LossChange("new", 1, found[0], found[-1]) and len(found) == 5


def sampled(count: int, processes: int = 1, **settings: Any) -> int:
    """How many of so many sequences are measured."""
    learned, chosen = sequences(count, 8), TrainingSettings(**settings)
    return len(sample_of(learned, look_ahead(chosen, learned, processes)))


@pytest.mark.parametrize("length", ({"steps": 4}, {"epochs": 1.0}, {"epochs": 0.25}))
def test_the_sample_is_the_same_however_a_step_is_shared(length: dict[str, Any]) -> None:
    alone = sampled(32, batch_size=4, **length)
    assert alone == 4, "no fewer than one step reads"
    assert sampled(32, processes=2, batch_size=2, **length) == alone
    assert sampled(32, batch_size=1, gradient_accumulation=4, **length) == alone
    assert sampled(32, processes=2, batch_size=4, **length) == 8, "the control: a larger step"


def test_the_sample_has_its_bounds() -> None:
    assert sampled(200, batch_size=2, steps=50) == 10, "a tenth of what is read"
    assert sampled(3, batch_size=8, epochs=0.1) == 1 and sampled(3, batch_size=8, steps=50) == 3
    assert sampled(5000, batch_size=8) == MOST_SAMPLED


@pytest.mark.slow
def test_a_measurement_changes_nothing_of_what_is_learned(place: Path, tmp_path: Path) -> None:
    """Neither numbers nor chance: with dropout, each step draws its own."""
    base = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    expand(base, Request("2-3", variant="adapt", collaborate="both"), tmp_path / "drops")
    often = EvalData(old=[place / "word.txt"], new=[place / "texts.jsonl"])
    runs = {
        "ends": train(tmp_path / "drops", [place / "texts.jsonl"], tmp_path / "ends", SETTINGS, run=CPU),
        "often": train(
            tmp_path / "drops", [place / "texts.jsonl"], tmp_path / "often", replace(SETTINGS, eval_every=1),
            eval_data=often, run=CPU,
        ),
        "plain": train(place / "wide", [place / "texts.jsonl"], tmp_path / "plain", SETTINGS, run=CPU),
    }  # fmt: skip
    (ends, measured), (often_losses, often_measured), (plain, _) = (losses_of(done.log) for done in runs.values())
    assert (measured, often_measured) == (2, 5)
    assert ends == often_losses and ends != plain, "and the control: dropout is on"
    one, other = (digests(tmp_path / name) for name in ("ends", "often"))
    shards = [name for name in one if name.startswith("expansion-")]
    assert shards and [one[name] for name in shards] == [other[name] for name in shards]


def losses_of(log: Path) -> tuple[list[float], int]:
    """The loss of each step, and how often something was measured."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    measured = [entry for entry in entries if any(key.endswith("_nats_per_token") for key in entry)]
    return [entry["loss"] for entry in entries if "loss" in entry], len(measured)


@contextmanager
def interrupted(label: str, total: int) -> Iterator[Progress]:
    """Somebody presses Ctrl-C after the third step."""
    steps = 0

    def advance(amount: int, note: str = "") -> None:
        nonlocal steps
        steps += amount
        if label == "training" and steps == 3:
            raise KeyboardInterrupt

    yield advance


@pytest.mark.slow
def test_a_resumed_run_knows_the_loss_before_and_draws_once(place: Path, tmp_path: Path) -> None:
    whole = train(place / "wide", [place / "texts.jsonl"], tmp_path / "whole", SETTINGS, run=CPU)
    target = tmp_path / "made"
    with pytest.raises(TrainingError, match="it holds step 2"):
        train(place / "wide", [place / "texts.jsonl"], target, SETTINGS, run=CPU, track=interrupted)
    assert not (target / "training" / "curves.png").exists(), "drawn at the end, not at every checkpoint"
    resumed = TrainingStart(resume=True)
    done = train(place / "wide", [place / "texts.jsonl"], target, SETTINGS, start=resumed, run=CPU)
    assert done.change == whole.change is not None and done.curves.exists()


def test_the_console_says_it_in_80_columns_and_ends_with_next(place: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = ["train", place / "wide", "--data", place / "word.txt", "-o", made, "--learning-rate", "1e-9"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, list(map(str, command)))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert text.startswith("to train texts 1 sequence, 5 tokens to learn, read once steps 1,")
    before, after = text.split(" trained written ")
    warned = "warning: 1 optimizer step can teach little, at least 50 are usual. Give --epochs 50, or --steps 50."
    assert warned in before and "tokens to learn, which a model learns by heart" in before
    assert "can teach little" not in after, "nothing is said twice"
    assert (
        "(nats per token, 1 sequence to learn)" in after and "warning: the loss on the texts to learn hardly" in after
    )
    assert (
        f"next scale-surgery verify {made}".replace(" ", "") in result.stdout.replace("\n", "").replace(" ", "")[-300:]
    )
    assert "{'" not in result.output, "dictionaries of the Trainer"
    quiet = CliRunner().invoke(main, [*map(str, command), "--overwrite", "-q"])
    assert quiet.stdout.startswith("trained") and "warning" not in quiet.output


def test_one_step_alone_learns(place: Path, tmp_path: Path) -> None:
    """Where the learning rate rises, the first step has a rate of 0: one alone would change nothing."""
    done = train(place / "wide", [place / "word.txt"], tmp_path / "made", TrainingSettings(), run=CPU)
    assert (done.steps, done.outlook.warmup_steps) == (1, 0)
    assert done.change is not None and done.change.before is not None and done.change.after < done.change.before


def test_a_file_that_is_not_there(place: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nofile: there is no such file\. Give UTF-8 text"):
        train(place / "wide", [place / "nofile"], tmp_path / "made", SETTINGS, run=CPU)
