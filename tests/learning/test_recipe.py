"""Recipes: what is written reads back, what is wrong is said with its line, and what is said last counts."""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from scale_surgery import CheckpointError, PlanError, read_recipe, resolve_recipe, write_recipe
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.learn import SHORT, TOP, settings_from
from scale_surgery.cli.options import read_settings
from scale_surgery.cli.program import main
from scale_surgery.errors import Problem
from scale_surgery.learning.learn import _texts_of_two_uses, prepare
from scale_surgery.learning.presets import JobFacts, with_preset
from scale_surgery.learning.recipe import SECTIONS, differences, make_recipe, settings, unknown_setting, values_of
from scale_surgery.learning.recipe_file import recipe_text
from scale_surgery.learning.stages import Work
from scale_surgery.training.settings import TrainingSettings, check_settings
from tests.command import run
from tests.conftest import edited, problems, refused

SAID = {"model": "base", "data": ["a.txt", "b.txt"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "new.jsonl"
    file.write_text("".join(json.dumps({"text": f"A text about {number}."}) + "\n" for number in range(40)))
    return file


def problems_in(text: str | bytes | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    monkeypatch.chdir(folder)
    if text is not None:
        Path("recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return problems(lambda: make_recipe(read_recipe("recipe.yaml")), error=PlanError)


def unfit(where: str, value: str, kind: str) -> Problem:
    return Problem("value-unfit", where, value=value, kind=kind)


@limits(deadline=None, max_examples=30)
@given(
    st.text(min_size=1).filter(str.strip),
    st.floats(min_value=1e-30, max_value=1e30),
    st.lists(st.text(min_size=1).filter(lambda text: text.strip() and "," not in text), min_size=1),
)
def test_any_text_and_number_reads_back(model, rate, files):
    files = [file.strip() for file in files]
    values = {
        "model": model,
        "data": files,
        "training.learning_rate": rate,
        "training.groups": "w12, w21",
        "route": False,
    }
    recipe = make_recipe(values | {"expansion.layers": 4})
    assert (recipe.data, recipe.expansion.layers) == (tuple(files), "4")
    assert make_recipe(values | {"training.warmup": 0.1}) != recipe, "the control: another value is another recipe"
    with tempfile.TemporaryDirectory() as folder:
        write_recipe(recipe, Path(folder) / "recipe.yaml")
        assert make_recipe(read_recipe(Path(folder) / "recipe.yaml")) == recipe


def test_what_is_said_beside_a_recipe_takes_the_place_of_what_it_has_instead(tmp_path):
    """A budget is for chosen layers, and passes are counted where no steps are given."""
    (tmp_path / "r.yaml").write_text("model: m\ndata: d\nexpansion: {layers: last:4}\ntraining: {steps: 1000}\n")

    def merged(given=(), **said):
        options = dict.fromkeys(("model", "preset", "data", "old", *TOP, "revision", *chain(*SHORT.values())))
        options |= {"data": (), "old": (), "recipe": tmp_path / "r.yaml", "given": given, **said}
        return settings_from(options)

    usual = merged()
    assert (usual["expansion.layers"], usual["training.steps"]) == ("last:4", 1000)
    assert "expansion.layers" not in merged(budget="20%") and merged(budget="20%")["training.steps"] == 1000
    assert "training.steps" not in merged(epochs=3.0) and merged(epochs=3.0)["expansion.layers"] == "last:4"
    assert merged(budget="20%", layers="0")["expansion.layers"] == "0"
    assert merged(("ranking.steps=3",))["expansion.layers"] == "last:4"
    assert merged(("training.epochs=3", "training.steps=5"))["training.steps"] == "5"


def test_settings_of_how_a_job_runs_may_change():
    begun = values_of(make_recipe(SAID))
    after = {"running.device": "cpu", "running.batch_size": 2, "training.gradient_checkpointing": True}
    assert not list(differences(make_recipe(SAID | after), begun))
    assert list(differences(make_recipe(SAID | after | {"training.batch_size": 2}), begun)), "the control"


def test_every_setting_is_written_with_a_comment():
    lines = recipe_text(make_recipe(SAID)).splitlines()
    written = [number for number, line in enumerate(lines) if ":" in line and not line.strip().startswith("#")]
    assert len(written) == len(settings()) + len(SECTIONS)
    assert all(lines[number - 1].strip().startswith("#") for number in written)


def test_everything_that_is_wrong_is_said_with_its_line(tmp_path, monkeypatch):
    text = (
        "model: base\ndat: [a.txt]\ntraining:\n  stepz: 3\n  steps: many\n  learning-rate: 1e-3\n  steps: 3\n"
        "routing: {router: best}\nranking:\nhold_out: 3\nexpansion: {ratio: 7}\n"
    )
    assert problems_in(text, tmp_path, monkeypatch) == [
        Problem("setting-misnamed", "recipe.yaml, line 2: dat", near=["data"]),
        Problem("setting-misnamed", "recipe.yaml, line 4: training.stepz", near=["training.steps"]),
        unfit("recipe.yaml, line 5: training.steps", "'many'", "a whole number"),
        Problem("setting-twice", "recipe.yaml, line 7: training.steps"),
        unfit("recipe.yaml, line 8: routing.router", "'best'", "one of: posterior, cosine"),
        Problem("section-without-settings", "recipe.yaml, line 10: hold_out"),
        unfit("recipe.yaml, line 11: expansion.ratio", "7", "more than 0 and at most 4"),
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("training.layers", ["expansion.layers"]),
        ("training.stepz", ["training.steps"]),
        ("traning.seed", ["training.seed"]),
        ("expansion.steps", ["ranking.steps", "training.steps"]),
        ("learning-rate", ["ranking.learning_rate", "training.learning_rate"]),
        ("epoch", ["training.epochs"]),
        ("rout", ["route"]),
        # a known section alone makes no setting similar
        ("training.lr", None),
        ("hold_out.size", None),
        ("output", None),
    ],
)
def test_an_unknown_setting_is_compared_by_its_own_name(name, near):
    problem = Problem("setting-unknown", name) if near is None else Problem("setting-misnamed", name, near=near)
    assert name not in settings() and unknown_setting(name) == problem


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("- a\n", "recipe-without-settings", "recipe.yaml"),
        ("data: [", "recipe-no-yaml", "recipe.yaml"),
        ("model: &x [*x]\n", "value-unfit", "recipe.yaml, line 1: model"),
        ("model: !!python/object/apply:os.system [ls]\n", "setting-no-value", "recipe.yaml, line 1: model"),
        ("training: {steps: 0100}\n", "value-unfit", "recipe.yaml, line 1: training.steps"),
        ("training: {batch_size: 1:30}\n", "value-unfit", "recipe.yaml, line 1: training.batch_size"),
        ("preset: [a]\n", "preset-unknown", "recipe.yaml, line 1: preset"),
        ("model: m\ndata: d\nwarmup: 0.1\n", "setting-misnamed", "recipe.yaml, line 3: warmup"),
        (b"model: \xff\n", "recipe-no-yaml", "recipe.yaml"),
        (None, "recipe-unreadable", "recipe.yaml"),
        ("model: m\ndata: {a: b}\n", "value-unfit", "recipe.yaml, line 2: data"),
        ("? [a, b]\n: 3\n", "setting-unknown", "recipe.yaml, line 2: a list"),
        ("", "model-not-given", "model"),
    ],
)
def test_hostile_files_are_refused(text, code, where, tmp_path, monkeypatch):
    found = problems_in(text, tmp_path, monkeypatch)
    assert (code, where) in [(problem.code, problem.where) for problem in found]


def test_text_is_what_was_typed_whatever_number_or_date_it_looks_like(tmp_path):
    texts = {"model": "2020-01-01", "revision": "0123456", "ranking.budget": "0200", "expansion.layers": "010"}
    texts |= {"expansion.name": "1.10", "data": ("1.10", "7")}
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: 2020-01-01\nrevision: 0123456\ndata: [1.10, 7]\n"
        "ranking: {budget: 0200}\nexpansion: {layers: 010, name: 1.10}\n"
    )
    assert read_recipe(file) == texts
    typed = [f"{name}={value}" for name, value in texts.items() if name != "data"]
    settings = read_settings([*typed, "data=[1.10, 7]", "training.epochs=3", "training.warmup=1e-1", "route=false"])
    recipe = values_of(make_recipe(settings))
    assert {name: recipe[name] for name in texts} == texts
    assert (recipe["training.epochs"], recipe["training.warmup"], recipe["route"]) == (3, 0.1, False)
    write_recipe(make_recipe(settings), file)
    assert values_of(make_recipe(read_recipe(file))) == recipe


def test_options_go_before_a_recipe_and_a_recipe_before_the_preset(data):
    values = {"model": str(SHIPPED_MODEL), "data": str(data)}
    usual = resolve_recipe(values)
    assert (usual.expansion.variant, usual.expansion.collaborate) == ("adapt", "both")
    assert usual.training.learning_rate is None, "the width of the model decides"
    assert resolve_recipe(values | {"training.learning_rate": 0.5}).training.learning_rate == 0.5
    # another method brings its own variant
    grown = resolve_recipe(values | {"expansion.method": "grow", "training.steps": 3})
    assert (grown.expansion.variant, grown.expansion.collaborate) == (None, None)
    for preset in ("best", ["paper"]):
        with refused("preset-unknown", "preset", PlanError):
            resolve_recipe(values | {"preset": preset})


@pytest.mark.parametrize("preset", ["default", "one-path", "paper"])
def test_what_a_preset_has_may_be_said_too(preset):
    """Its own method or variant, or an empty one, drops nothing of it; the control is another."""
    facts = JobFacts(16, 4096, 9_000)
    usual = with_preset(preset, SAID, facts)
    variant = usual["expansion.variant"]
    for said in ({"expansion.method": "scale"}, {"expansion.variant": variant}, {"expansion.variant": None}):
        assert with_preset(preset, SAID | said, facts) == usual | said | {"expansion.variant": variant}
    for said in ({"expansion.method": "grow"}, {"expansion.variant": "preserve"}, {"expansion.method": "depth"}):
        made = make_recipe(with_preset(preset, SAID | said, facts))
        assert (made.expansion.collaborate, made.expansion.collaborative_layers) == (None, None)
        assert made.routing.router == "posterior"
    grown = {"expansion.method": "grow", "expansion.variant": None}
    assert make_recipe(with_preset(preset, SAID | grown, facts)).expansion.variant is None


def test_each_layer_that_is_said_has_w12(data):
    """The paper leaves out the lowest of all layers; of some, or of those that a pilot chooses, it leaves out none."""
    said = {"model": str(SHIPPED_MODEL), "data": str(data), "preset": "paper"}
    for layers, collaborative in (("last:2", None), ("auto", None), (0, None), ("all", "last:3")):
        recipe = resolve_recipe(said | {"expansion.layers": layers})
        assert (recipe.expansion.variant, recipe.expansion.collaborative_layers) == ("adapt", collaborative)
        prepare(recipe, data.parent / "job")
    chosen = {"expansion.layers": "last:2", "expansion.collaborative_layers": "-1"}
    assert resolve_recipe(said | chosen).expansion.collaborative_layers == "-1", "what is said counts"


def test_the_last_quarter_is_expanded_and_a_pilot_is_for_who_asks(data):
    def layers(preset="default", count=30, **said):
        values = SAID | {name.replace("__", "."): value for name, value in said.items()}
        return make_recipe(with_preset(preset, values, JobFacts(count, 4096, 9_000))).expansion.layers

    assert [layers(count=count) for count in (1, 4, 18, 26, 80)] == ["last:1", "last:1", "last:5", "last:7", "last:20"]
    assert layers(expansion__method="depth") == "last:8"
    # a budget alone says that a pilot chooses; beside layers it is not read
    assert layers(ranking__budget="10%") == layers(expansion__layers="auto") == "auto"
    assert layers(ranking__budget="10%", expansion__layers="0") == "0"
    assert layers("paper") == layers("one-path") == "all"
    assert resolve_recipe({"model": str(SHIPPED_MODEL), "data": str(data)}).expansion.layers == "last:1"


def test_a_number_of_layers_that_config_json_leaves_to_its_class_is_compared_with_the_tensors(data, tmp_path):
    folder = shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    with edited(folder / "config.json") as config:
        del config["num_hidden_layers"]
    (found,) = problems(resolve_recipe, {"model": str(folder), "data": str(data)}, error=CheckpointError)
    assert "num_hidden_layers is 32" in found.phrase


def test_a_preset_goes_by_the_length_that_is_said():
    """Of short sequences a step learns few tokens: so many more of them make a hundred steps."""
    facts = JobFacts(32, 4096, 100_000)
    for length, expected in ((None, (9.0, 8)), (128, (2.0, 8)), (4096, (12.0, 2))):
        training = make_recipe(with_preset("default", SAID | {"training.sequence_length": length}, facts)).training
        assert (training.epochs, training.batch_size) == expected


def test_steps_go_in_place_of_passes_and_other_lengths_replace_themselves_alone():
    facts, said = JobFacts(32, 4096, 9_000), SAID | {"training.learning_rate": 1e-3}

    def length(preset="default", **given):
        values = said | {f"training.{name}": value for name, value in given.items()}
        training = make_recipe(with_preset(preset, values, facts)).training
        return training.steps, training.epochs, training.batch_size, training.gradient_accumulation

    assert length() == length(steps=None) == (None, 12.0, 1, 1)
    assert length(batch_size=2) == (None, 12.0, 2, 1)
    assert length(epochs=3.0) == (None, 3.0, 1, 1)
    assert length(steps=7) == (7, 1.0, 1, 1)
    # 512 sequences a step, whatever batch fits
    assert length("paper") == (None, 1.0, 8, 64)
    assert length("paper", batch_size=2) == (None, 1.0, 2, 256)
    assert length("paper", batch_size=1024) == (None, 1.0, 1024, 1)
    assert length("paper", steps=7) == (7, 1.0, 8, 64)
    assert length("paper", batch_size=2, gradient_accumulation=3) == (None, 1.0, 2, 3), "what is said counts"


def test_the_paper_is_as_published_and_the_default_fits_any_text(data):
    recipe = resolve_recipe({"model": str(SHIPPED_MODEL), "data": str(data), "preset": "paper"})
    training = recipe.training
    assert training.batch_size * training.gradient_accumulation == 512
    assert (training.learning_rate, training.schedule, training.warmup, training.epochs) == (1e-3, "linear", 0.06, 1)
    assert (recipe.expansion.layers, recipe.expansion.variant, recipe.routing.router) == ("all", "adapt", "cosine")
    # L_fp is 3 of 16 layers, and sequences are as long as the model reads
    other = shutil.copytree(SHIPPED_MODEL, data.parent / "other")
    with edited(other / "config.json") as config:
        config["num_layers"] = config.pop("num_hidden_layers")  # as gpt_neo calls them
    asked = resolve_recipe({"model": str(other), "data": str(data), "preset": "paper"}).expansion
    assert asked.collaborative_layers == recipe.expansion.collaborative_layers == "last:3"
    preserved = {"model": str(SHIPPED_MODEL), "data": str(data), "preset": "paper", "expansion.variant": "preserve"}
    assert resolve_recipe(preserved).routing.router == "posterior", "without W12 cosine has nothing to compare"
    values = with_preset("paper", {}, JobFacts(layers=16, context=131072, tokens=10**9))
    assert (values["expansion.collaborative_layers"], values["training.sequence_length"]) == ("last:13", 8192)
    for tokens in (1, 9_000, 10**6, 10**12):
        training = make_recipe(with_preset("default", SAID, JobFacts(32, 4096, tokens))).training
        assert 1 <= training.epochs <= 12 and 1 <= training.batch_size <= 8


def test_one_path_has_gates_and_rehearsal_in_place_of_a_router(data):
    recipe = resolve_recipe({"model": str(SHIPPED_MODEL), "data": str(data), "preset": "one-path"})
    expansion, training = recipe.expansion, recipe.training
    assert (recipe.route, expansion.layers, expansion.variant, expansion.collaborate) == (False, "all", "gated", "both")
    assert (training.rehearse, training.rehearsal_weight, training.rehearsal_samples) == (("self",), 3.0, None)
    values = {"model": str(SHIPPED_MODEL), "data": str(data), "preset": "one-path", "training.rehearse": [str(data)]}
    training = resolve_recipe(values).training
    assert (training.rehearsal_weight, training.rehearsal_samples) == (3.0, TrainingSettings().rehearsal_samples)
    check_settings(training)


def test_the_command_writes_a_recipe_and_takes_it(data, tmp_path):
    file = tmp_path / "recipe.yaml"
    words = ["learn", SHIPPED_MODEL, "--data", data, "--set", "training.warmup=1e-1", "--steps", "7", "--device", "cpu"]
    written = run(*words, "--write-recipe", file).stdout
    assert str(file) in "".join(written.split()) and f"next     scale-surgery learn --recipe {file}" in written
    made = json.loads(run(*words, "--write-recipe", file, "--json").stdout)
    assert (made["model"], made["training"]["steps"], made["running"]["device"]) == (str(SHIPPED_MODEL), 7, "cpu")
    values = values_of(make_recipe(read_recipe(file)))
    assert (values["training.warmup"], values["training.steps"], values["running.device"]) == (0.1, 7, "cpu")
    run("learn", "--recipe", file, "--write-recipe", tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == file.read_text()
    before = file.read_text()
    told = run("learn", "--recipe", file, "--write-recipe", file, "--steps", "8", "--json", code=1).stdout
    assert [problem["code"] for problem in json.loads(told)["problems"]] == ["output-file-is-input"]
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "training.step=3"], "training.step is no setting of a recipe. Did you mean training.steps?"),
        (["--set", "steps=3"], "steps is no setting of a recipe. Did you mean ranking.steps or training.steps?"),
        (["--set", "training.steps"], "--set training.steps is not KEY=VALUE"),
        (["--set", "training.steps=["], "the value is no YAML"),
        (["--set", "training.warmup=2024-99-99"], "training.warmup is '2024-99-99', expected a number."),
        (["--set", "training.steps=0100"], "training.steps is '0100', expected a whole number."),
        (["--set", "preset=[a]"], "preset is ['a'], expected one of: default"),
        (["--set", f"training.warmup={'[' * 2000}"], "the value is no YAML."),
        (["--steps", "0"], "training.steps is 0, expected at least 1."),
        (["--epochs", "0"], "training.epochs is 0.0, expected more than 0."),
        (["--batch-size", "0"], "training.batch_size is 0, expected at least 1."),
        (["--learning-rate", "0"], "training.learning_rate is 0.0, expected more than 0."),
        (["--sequence-length", "0"], "training.sequence_length is 0, expected at least 2."),
        (["--count", "0"], "tokens.token_count is 0, expected at least 1."),
        (["--set", "training.warmup=2"], "training.warmup is 2, expected a share of the steps"),
        (["--data", "none.txt"], "none.txt: "),
    ],
)
def test_wrong_options_are_refused(words, message, data, tmp_path):
    result = CliRunner().invoke(
        main, ["learn", str(SHIPPED_MODEL), "--data", str(data), "-o", str(tmp_path / "job"), *words]
    )
    assert result.exit_code in (1, 2) and message in " ".join(result.output.split())
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("missing", ("model", "data"))
def test_what_neither_the_line_nor_a_recipe_gives_is_wrong_usage(missing, data, tmp_path):
    """As a missing argument is in every other command."""
    words = {"model": [SHIPPED_MODEL], "data": ["--data", data]}
    rest = [word for name, some in words.items() if name != missing for word in some]
    assert f"or {missing} in a recipe." in run("learn", *rest, "-o", tmp_path / "job", code=2).output
    (tmp_path / "r.yaml").write_text(json.dumps({missing: str(words[missing][-1])}))
    run("learn", *rest, "--recipe", tmp_path / "r.yaml", "--write-recipe", tmp_path / "again.yaml")


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"training.rehearse": "q.jsonl"}, "--rehearse"),
        ({"training.rehearse": "self", "training.rehearsal_prompts": "q.jsonl"}, "rehearsal_prompts"),
        ({"tokens.token_texts": "q.jsonl", "tokens.token_count": 3}, "--new-tokens-from"),
        ({"training.rehearse": "self", "training.rehearsal_prompts": "shipped"}, None),
    ],
)
def test_what_forgetting_is_measured_on_has_no_other_use(
    settings: dict[str, Any], option: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("new.txt", "q.jsonl"):
        (tmp_path / name).write_text("x")
    recipe = make_recipe({"model": "m", "data": "new.txt", "old": "q.jsonl", **settings})
    found = [(problem.code, problem.where, problem.values["trained"]) for problem in _texts_of_two_uses(recipe)]
    assert found == ([] if option is None else [("text-of-two-uses", "q.jsonl", option)])


def test_new_tokens_are_chosen_without_the_held_out_part_whatever_the_text_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.txt").write_text("x")
    (tmp_path / "other.txt").write_text("y")
    (tmp_path / "rows.jsonl").write_text('{"said": "z"}')

    def work(texts: Any, data: Any = "new.txt", **given: Any) -> Work:
        values = {"model": "m", "data": data, "tokens.token_texts": texts, "tokens.token_count": 3}
        return Work(make_recipe({**values, **given}), Path("out"), True)

    learned = "out/texts-new/learn.jsonl"
    for name in ("new.txt", "./new.txt", str(tmp_path / "new.txt")):
        assert work(name).tokens.token_texts == (learned,)
    assert work("other.txt").tokens.token_texts == ("other.txt",), "the control"
    # a folder with other files too
    assert work(".").tokens.token_texts == (learned, "other.txt", "rows.jsonl")
    # several to learn, of which tokens are wanted of some
    both = ["new.txt", "other.txt"]
    assert work(both, both).tokens.token_texts == (learned,) and work(both, both).tokens_of_data.has_all
    assert work("new.txt", both).tokens_of_data.has_any and not work("new.txt", both).tokens_of_data.has_all
    # another part of the same rows, and a file whose text has another name
    assert work("rows.jsonl,column=said").tokens.token_texts == ("rows.jsonl,column=said",)
    # nothing is held out
    assert work("new.txt", both, measure_new="rows.jsonl", route=False).tokens.token_texts == ("new.txt",)
