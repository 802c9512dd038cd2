"""The model card: what it says stands in the records, what it does not know it leaves out, and its code runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForImageTextToText

from scale_surgery import PosteriorRouter
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.licence import read_licence
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.verify import verify
from scale_surgery.folder.record import read_manifest
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import is_written_card, read_contents
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.planning.request import Request
from scale_surgery.running.options import RunOptions
from scale_surgery.show.tables_forms import render_merged
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from tests.command import run
from tests.conftest import REQUESTS, digests, edited, problems, shown
from tests.evidence.test_evaluate import with_tokenizer
from tests.own_code import save_pine
from tests.surgery.test_images import base_of as save_seeing

REPO = "lab/wide-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FORMS = ("expanded", "routed", "fused", "stock", "deepened", "extract", "composed")
RUN = {
    "begun": "2026-01-02T03:04:05+00:00",
    "steps": 40,
    "trained_parameters": 1234,
    "settings": {"learning_rate": 0.01},
    "measured": {
        "old_nats_per_token": 0.0732,
        "forgetting": 0.0706,
        "new_nats_per_token": 0.2244,
        "new_accuracy": 0.917,
        "learning": -0.5,
    },
}


@pytest.fixture(scope="module")
def expanded(base_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand(base_of("llama"), REQUESTS["adapt"], tmp_path_factory.mktemp("made") / "secret-name").path


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder in each form, made of the shipped model, which has a tokenizer."""
    place = tmp_path_factory.mktemp("forms")
    request = Request("1", variant="adapt", up_width=0, up_kv_heads=0, collaborate="ffn")
    wide = expand(SHIPPED_MODEL, request, place / "wide").path
    taken = extract(wide, place / "extract").path
    return {
        "expanded": wide,
        "routed": route_export(wide, place / "routed", PosteriorRouter(switch_rate=0)).path,
        "fused": merge(wide, place / "fused").path,
        "stock": merge(wide, place / "stock", "stock").path,
        "deepened": expand(SHIPPED_MODEL, Request("1", method="depth"), place / "deepened").path,
        "extract": taken,
        "composed": compose(SHIPPED_MODEL, {"law": taken, "art": taken}, place / "composed").path,
    }


@pytest.fixture
def copied(expanded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(expanded, tmp_path / "own"))


def record(folder: Path, **changes: Any) -> None:
    """Record other things in surgery.json."""
    with edited(folder / "surgery.json") as content:
        content |= changes


def record_own(folder: Path, **changes: Any) -> None:
    """Record other things of its first expansion."""
    with edited(folder / "surgery.json") as content:
        next(iter(content["expansions"].values())).update(changes)


def card(folder: Path, certificate: Any = None) -> str:
    text = make_card(read_contents(folder), REPO, None, None, certificate).text
    assert text is not None and is_written_card(text)
    assert not re.search(r"preserved|None(?!: the base)|Undefined|/(tmp|home|root)/", text), (
        "a banned word, a hole, a path"
    )
    return text


def metadata(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    return fields


def test_metadata_and_text_name_a_base_on_the_hub_with_its_commit_and_licence(copied: Path) -> None:
    record(copied, base_name="org/Base_1.5B", base_revision=COMMIT)
    base_card = "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\ndatasets: [x/y]\n---\n# Base\n"
    text = make_card(read_contents(copied), REPO, base_card, "README.base.md", None).text
    assert text is not None and metadata(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "llama3",
        "license_link": "LICENSE",
        "base_model": "org/Base_1.5B",
        "base_model_relation": "finetune",
        "tags": ["scale-surgery", "continual-learning", "model-expansion", "adapt"],
    }
    assert f"[org/Base\\_1.5B](https://huggingface.co/org/Base_1.5B) at commit `{COMMIT}`" in text
    assert "; its own card is [README.base.md](README.base.md)." in text


@pytest.mark.parametrize(
    ("name", "revision"), (("secret-base", None), ("org/looks-like-one", None), ("/srv/secret/base", COMMIT))
)
def test_a_local_base_is_not_named(copied: Path, name: str, revision: str | None) -> None:
    record(copied, base_name=name, base_revision=revision)
    made = make_card(read_contents(copied), REPO, None, None, None)
    assert made.text is not None and "base_model" not in metadata(made.text)
    assert name not in made.text and "secret" not in made.text
    assert "Base: a checkpoint that is not on the Hub." in made.text
    assert made.notes == (
        "base_model is left out of the card: the base is a local folder, no Hub id is known.",
        "license is left out of the card: no README.md of the base here names one. Give --license.",
    )


def test_a_licence_that_is_given_is_named_in_place_of_the_base_s(copied: Path) -> None:
    base_card = "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n# Base\n"
    made = make_card(read_contents(copied), REPO, base_card, "README.base.md", None, "apache-2.0")
    fields = metadata(str(made.text))
    assert fields["license"] == "apache-2.0" and not {"license_name", "license_link"} & set(fields)
    assert "license is apache-2.0, as --license says; the base's card names other." in made.notes
    plain = make_card(read_contents(copied), REPO, None, None, None, "mit")
    assert metadata(str(plain.text))["license"] == "mit" and not [note for note in plain.notes if "license" in note]


def test_the_licence_is_that_of_the_base_s_card() -> None:
    for text, expected in (
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---\r\nlicense: apache-2.0\r\ntags: [a]\r\n---\r\n# x", {"license": "apache-2.0"}),
        ("---\nlicense:\n- mit\n- bsd\n---\n", {"license": ["mit", "bsd"]}),
        ("---\nlicense: other\nlicense_name: 2024-05-01\n---\n", {"license": "other", "license_name": "2024-05-01"}),
    ):
        assert read_licence(text) == expected
    for text in (
        "---\ntags: [a]\n---\n",
        "# license: mit\n",
        "---\nlicense: [mit\n---\n",
        "---\n- license\n---\n",
        "",
        None,
    ):
        assert read_licence(text) == {}


def test_what_was_widened_stands_in_the_plan(pair_of: Any, expanded: Path) -> None:
    text = card(expanded)
    plan = read_manifest(expanded).plan
    assert text.startswith("---\nlibrary_name: transformers\n") and "\n# wide-model\n" in text
    for row in (
        "| variant | `adapt` |",
        "| expanded layers | 0,2 of 0-2 |",
        "| layers with W12 | 0,2 (attn and ffn) |",
        f"| parameters | {plan.costs.parameters_before:,} of the base, {plan.costs.parameters_added:,} new",
        "| start | W12 zero, W21 svd, W22 random, seed 0 |",
        f"| fingerprint of the base | `{plan.base_fingerprint}` |",
    ):
        assert row in text
    assert "arXiv" in text and "2511.03270" in text and "2603.08647" in text
    assert "The new blocks have not been trained with `scale-surgery train`." in text and "## Evaluation" not in text
    assert "second stream beside" in text
    assert "second stream beside" not in card(pair_of("llama", "adapt_without_up_stream").path)


def test_training_and_what_was_measured(copied: Path) -> None:
    record_own(copied, training=[{**RUN, "measured": {}}, RUN])
    (copied / "training").mkdir()
    (copied / "training" / "curves.png").write_bytes(b"")
    text = card(copied)
    assert "| 2 | 40 | 1,234 | 0.01 | 2026-01-02 |" in text
    assert "| old text | 0.0732 | – | forgetting +0.0706 |" in text
    assert "| new text | 0.2244 | 91.7% | learning -0.5000 |" in text
    assert "![Curves of the last run](training/curves.png)" in text
    record_own(copied, training=[RUN, {**RUN, "measured": {}}])
    assert "## Evaluation" not in card(copied), "numbers of an earlier run are not those of this model"
    assert "asked to stay" not in card(copied)
    for rehearse, phrase in ((["self"], "text that the base wrote itself"), (["a.txt"], "other text")):
        record_own(copied, training=[RUN, {**RUN, "settings": {"learning_rate": 0.01, "rehearse": rehearse}}])
        stays = f"In run 2 the model was also asked to stay what its base is, on {phrase}; what that keeps is measured"
        assert stays in " ".join(card(copied).split())


def test_numbers_of_another_model_say_so(copied: Path, forms: dict[str, Path], tmp_path: Path) -> None:
    measured = "Measured at the end of the last training run"
    record_own(copied, training=[RUN])
    assert f"{measured}, on texts" in card(copied)
    record_own(copied, training=[{**RUN, "routed": True}])
    assert f"{measured}, with its router, which it has no longer, on texts" in card(copied)
    folder = Path(shutil.copytree(forms["routed"], tmp_path / "routed"))
    for was_routed, phrase in ((False, ", of the adapt path alone, not routed"), (True, "")):
        record_own(folder, training=[{**RUN, "routed": was_routed}])
        assert f"{measured}{phrase}, on texts" in card(folder)
    record_own(copied, training=[RUN], strength=0.5)
    assert f"{measured}, at strength 1 and not 0.5, on texts" in card(copied)
    several = Path(shutil.copytree(forms["composed"], tmp_path / "composed"))
    assert "| strength |" not in card(several), "the control"
    assert "\n\n| expansion | variant | layers | parameters |\n|---|---|---|--:|\n| `law` |" in card(several)
    record_own(several, training=[RUN], strength=0.5)
    assert "\n\n| expansion | variant | layers | parameters | strength |\n|---|---|---|--:|--:|\n" in card(several)
    assert "| 0.5 |" in card(several) and "law, at strength 1: old text" in card(several)


def test_promises_are_those_of_the_certificate(copied: Path) -> None:
    assert "No verification is recorded" in card(copied)
    verification = verify(copied, record=False)
    certificate = json.loads(json.dumps(verification.to_json()))
    text = card(copied, certificate)
    holds = next(promise for promise in verification.promises if promise.name == "output_at_init")
    assert f"| `output_at_init` | holds | {holds.evidence} |" in text
    assert f"`scale-surgery verify`, {verification.date}, " in text
    assert "| `base_stream_always` | not claimed |" in text
    for promise in certificate["promises"]:
        promise["holds"] = None if promise["name"] == "output_at_init" else False
    text = card(copied, certificate)
    assert "| `recoverable` | **BROKEN** |" in text and "| `output_at_init` | not checked |" in text


@pytest.mark.parametrize(
    ("form", "parts", "unsaid"),
    (
        ("expanded", ["needs `torch` and `transformers` alone", "expansion_disabled"], ["routing_disabled", "router"]),
        ("routed", ["| router | posterior, all paths alike, switch rate 0; one", "model.routing_disabled()"], []),
        ("fused", ["| form | fused for serving", "merged from |", "tokens (float32) |"], ["expansion_disabled"]),
        ("stock", ["no remote code is run", "| `1` |", "does not go back"], ["trust_remote_code", "Promises"]),
        ("deepened", ["no remote code is run", "freeze_base(model)"], ["trust_remote_code", "W12"]),
        ("extract", ["holds no whole model"], ["from_pretrained", "strip"]),
        ("composed", ["weighs 3 paths", "| paths | base, `law`, `art` |", "| `art` | adapt | 1 |"], ["| variant | `"]),
    ),
)
def test_each_form_is_told_as_what_it_is(
    forms: dict[str, Path], form: str, parts: list[str], unsaid: list[str]
) -> None:
    text = card(forms[form])
    assert all(part in text for part in parts)
    assert not [part for part in unsaid if part in text]
    assert ("routed" in metadata(text)["tags"]) == (form in ("routed", "composed"))


@pytest.mark.parametrize("form", FORMS)
def test_the_python_of_a_card_runs(forms: dict[str, Path], form: str) -> None:
    text = card(forms[form]).replace(f'"{REPO}"', f'"{forms[form]}"').replace('"BASE"', f'"{SHIPPED_MODEL}"')
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "<card>", "exec"), names)
    prefix = {"stock": "", "deepened": "", "fused": "Fused"}.get(form, "Scale")
    assert type(names["model"]).__name__ == f"{prefix}LlamaForCausalLM"
    assert form == "extract" or names["tokenizer"]("a").input_ids


@pytest.mark.parametrize("name", ("llava", "qwen3_vl"))
def test_a_model_that_sees_images_is_loaded_by_the_class_that_takes_it(name: str, tmp_path: Path) -> None:
    base = with_tokenizer(save_seeing(name, tmp_path / "base"))
    whole = type(AutoModelForImageTextToText.from_pretrained(base)).__name__
    request = Request("all", variant="adapt", collaborate="both", up_width=0, up_kv_heads=1)
    wide = expand(base, request, tmp_path / "wide").path
    stock = merge(wide, tmp_path / "stock", to="stock")
    for folder, prefix in ((wide, "Scale"), (stock.path, "")):
        text = card(folder)
        assert metadata(text)["pipeline_tag"] == "image-text-to-text"
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block.replace(REPO, str(folder)), "<card>", "exec"), names := dict[str, Any]())
            assert type(names["model"]).__name__ == f"{prefix}{whole}"
    assert "AutoModelForImageTextToText.from_pretrained" in shown(render_merged(stock))


@pytest.mark.parametrize("method", ("scale", "depth"))
def test_the_lines_for_a_base_with_its_own_code_trust_it(method: str, tmp_path: Path) -> None:
    trusted = RunOptions(device="cpu", trust_remote_code=True)
    base = save_pine(tmp_path / "base")
    request = Request("last:1", method="depth") if method == "depth" else Request("last:1")
    text = card(expand(base, request, tmp_path / "wide", run=trusted).path)
    assert 'from_pretrained("lab/wide-model", trust_remote_code=True)' in text
    assert 'from_pretrained("lab/wide-model")' not in text
    assert re.search(r"serve lab/wide-model --trust-remote-code\n", text)


def test_only_what_merge_takes_is_said_to_merge(forms: dict[str, Path]) -> None:
    assert "`scale-surgery merge` makes" in card(forms["expanded"])
    assert "`scale-surgery merge` makes" not in card(forms["routed"])


@pytest.mark.parametrize("form", [form for form in FORMS if form != "stock"])
def test_the_commands_of_a_card_give_back_what_they_say(
    forms: dict[str, Path], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", card(forms[form]), re.DOTALL)
    if form == "extract":
        commands = commands.replace(REPO, str(forms[form])).replace("BASE", str(SHIPPED_MODEL))
    else:
        shutil.copytree(forms[form], "expanded")
        download, commands = commands.split("\n", 1)
        assert download == f"hf download {REPO} --local-dir expanded"
    for command in commands.splitlines():
        program, *words = shlex.split(command)
        assert program == "scale-surgery"
        run(*words)
    made, expected = ("expanded", forms["expanded"]) if form == "extract" else ("base", SHIPPED_MODEL)
    assert digests(Path(made)) == digests(expected)
    assert form != "composed" or (Path("law").is_dir() and Path("art").is_dir())


def test_code_in_a_stock_export_is_told(forms: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(forms["stock"], tmp_path / "stock"))
    (folder / "evil.py").write_text("import os\n")
    made = make_card(read_contents(folder), REPO, None, None, None)
    assert "no remote code is run" not in str(made.text)
    assert "these lines do not run the code of `evil.py`." in str(made.text)
    note = "evil.py: is code, or names some, which trust_remote_code=True runs. Read it before you publish it."
    assert made.notes[-1] == note


def test_of_several_expansions_each_has_its_runs(forms: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(forms["composed"], tmp_path / "both"))
    held = json.loads((folder / "surgery.json").read_text())["expansions"]
    held["law"] |= {"training": [{**RUN, "measured": {}}, RUN]}
    held["art"] |= {"training": [{**RUN, "steps": 7, "measured": {}}]}
    record(folder, expansions=held)
    text = card(folder)
    assert "| run | expansion | steps | parameters trained | learning rate | begun |" in text
    assert "| 2 | `law` | 40 | 1,234 | 0.01 | 2026-01-02 |" in text and "| 3 | `art` | 7 |" in text
    assert "| law: old text | 0.0732 |" in text and "art: old text" not in text
    assert "of each expansion, alone beside the base, on" in text
    held["law"]["training"][-1] = {**RUN, "routed": True}
    record(folder, expansions=held)
    text = card(folder)
    assert (
        "| law, routed: old text | 0.0732 |" in text
        and "beside the base; routed: by a router between the two, on" in text
    )


def test_a_card_that_somebody_edited_is_known(expanded: Path) -> None:
    text = card(expanded)
    assert is_written_card(text)
    for other in (text.replace("wide-model", "wide-Model", 1), text + "More.\n", text[:-2], "", "# Mine\n"):
        assert not is_written_card(other)


def test_a_record_with_holes_is_one_line(copied: Path) -> None:
    record_own(copied, training=[{"steps": 3}])
    cause = Problem("other-program", error="'trained_parameters'")
    expected = Problem("record-incomplete", copied / "surgery.json", cause)
    assert problems(card, copied, error=CheckpointError) == [expected]


def test_new_tokens_stand_in_the_plan(tmp_path: Path) -> None:
    wide = expand(SHIPPED_MODEL, Request("none", new_tokens=NewTokens((" Xylophone",))), tmp_path / "wide").path
    text = card(wide)
    assert "| new tokens | 1, with rows of their own; those of the base stay as they are |" in text
    assert "| expanded layers | none of 0-3 |" in text and "| start | new rows pieces, seed 0 |" in text
    assert "New tokens have rows of their own in embedding and head. Nothing else was added;" in text
