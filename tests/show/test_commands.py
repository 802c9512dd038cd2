"""Commands that are printed: what is typed again fills the same dataclasses."""

from __future__ import annotations

from scale_surgery.cli.program import main
from scale_surgery.show.commands import changed_options
from scale_surgery.training.settings import TrainingSettings


def test_options_that_are_said_fill_the_same_settings():
    settings = TrainingSettings(
        packing=False,
        bf16=False,
        groups=("w12", "w21"),
        rehearse=("a,column=b", "c d.txt"),
        learning_rate=2e-3,
        gradient_checkpointing=True,
        steps=3,
        schedule="cosine",
        warmup=1e-5,
        save_every=7,
        rehearsal_prompts="a: b #c.txt",
    )
    words = list(changed_options(settings, TrainingSettings()))
    options = main.commands["train"].make_context("train", ["folder", "--data", "x", *words]).params
    given = {name: options[name] for name in vars(settings) if options.get(name) is not None}
    usual = vars(TrainingSettings())
    assert given == {name: value for name, value in vars(settings).items() if value != usual[name]}
    assert [word for word in words if word.startswith("save")] == ["save_every=7"], "after --set"
