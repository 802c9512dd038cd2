"""What has to hold of small functions for any input: hypothesis looks for one of which it does not."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from scale_surgery import (
    DataError,
    Request,
    SurgeryError,
    TrainingSettings,
    load_plan,
    plan,
)
from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.headers import read_header
from scale_surgery.checkpoint.names import is_inside
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.shards import computed, make_header, write_pieces
from scale_surgery.cli.options import parse_size
from scale_surgery.fields import fields_of, problems_of
from scale_surgery.folder.routers import RouterOptions
from scale_surgery.planning.methods import complete
from scale_surgery.planning.saved import save_plan
from scale_surgery.text.documents import read_documents
from scale_surgery.visible import visible

# the same examples in every run; `pytest --hypothesis-seed` draws others
REPEATED = settings(derandomize=True, deadline=None, max_examples=80)
# files of one test are written one over the other
IN_ONE_FOLDER = settings(REPEATED, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANY_TEXT = st.text(st.characters(), max_size=20)  # halves of characters too
WORDS = st.sampled_from(["model", "layers", "1", "after", "..", ".", "a", "", "/", "\\", "\0", "\ud800", "x" * 300])
COPIED = st.sets(st.integers(0, 12)).map(lambda layers: tuple(sorted(layers)))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
ODD = SCALARS | st.lists(SCALARS) | st.complex_numbers() | st.binary(max_size=3) | st.just(object)


@given(COPIED, st.integers(1, 14), st.sampled_from(["model.layers.{}.mlp.x", "layers.{}.mlp.x"]))
@REPEATED
def test_positions_and_names_are_one_to_one(copied: tuple[int, ...], count: int, form: str) -> None:
    """Base layers and copies fill the positions without a gap, and every name finds back."""
    numbering = Numbering("model", "layers", tuple(layer for layer in copied if layer < count))
    names = [form.format(layer) for layer in range(count)]
    names += [form.format(f"{layer}.after") for layer in numbering.copied]
    stored = [numbering.stored(name) for name in names]
    assert sorted(stored) == sorted(form.format(position) for position in range(len(names)))
    assert [numbering.named(name) for name in stored] == names


@given(COPIED, ANY_TEXT)
@REPEATED
def test_names_of_no_layer_stay(copied: tuple[int, ...], name: str) -> None:
    numbering = Numbering("model", "layers", copied)
    assume("layers." not in name)
    assert numbering.stored(name) == numbering.named(name) == name


@given(st.lists(WORDS).map("/".join) | st.lists(WORDS).map("".join) | ANY_TEXT)
@REPEATED
def test_a_name_inside_a_folder_stays_inside(name: str) -> None:
    if is_inside(name):
        folder = Path("/a/b")
        joined = folder / name
        assert joined.is_relative_to(folder) and joined != folder and ".." not in joined.parts
        assert (folder / Path(name)).relative_to(folder).as_posix() == name
        assert b"\0" not in str(joined).encode()


@given(ANY_TEXT, ANY_TEXT)
@REPEATED
def test_what_is_visible_steers_no_terminal(text: str, piece: str) -> None:
    shown = visible(text, piece)
    assert shown if text else shown.startswith("⟨")
    if text:
        assert not [sign for sign in shown if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")]


@given(JSON)
@REPEATED
def test_plain_json_is_json(content: Any) -> None:
    json.dumps(plain_json({"content": content}), allow_nan=False)


@given(
    st.text() | st.builds("{}{}".format, st.floats() | st.integers(), st.sampled_from(["", "GiB", " MB", "kb", "B"]))
)
@REPEATED
def test_a_size_is_a_number_of_bytes_or_wrong_usage(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except click.UsageError as error:
        assert text in str(error)


SHARED = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(list(SHARED)), st.lists(st.integers(0, 4), max_size=3)))


@given(TENSORS)
@IN_ONE_FOLDER
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path: Path, tensors: dict[str, Any]) -> None:
    values = {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(SHARED[dtype])
        for name, (dtype, shape) in tensors.items()
    }
    entries = [
        computed(name, dtype, tuple(shape), lambda value=values[name]: value)
        for name, (dtype, shape) in tensors.items()
    ]
    write_pieces(tmp_path / "x.safetensors", *make_header(entries))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as read:
        assert set(read.keys()) == set(values)
        assert all(torch.equal(read.get_tensor(name), value) for name, value in values.items())
    headers = read_header(tmp_path, "x.safetensors")
    assert {name: (info.dtype, list(info.shape)) for name, info in headers.items()} == {
        name: (dtype, shape) for name, (dtype, shape) in tensors.items()
    }


@given(st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode), st.sampled_from(["x.json", "x.jsonl", "x.txt"]))
@IN_ONE_FOLDER
def test_any_file_gives_texts_or_an_error_of_ours(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        documents = list(read_documents([tmp_path / name]))
    except DataError as error:
        assert str(error).startswith(str(tmp_path / name))
    else:
        assert all(document.text.strip() for document in documents)


def filled(owner: type, usual: Any, most: int = 1) -> st.SearchStrategy[Any]:
    """A dataclass of options with any values in some of its fields."""
    names = st.dictionaries(st.sampled_from(list(fields_of(owner))), ODD, min_size=1, max_size=most)
    return names.map(lambda odd: dataclasses.replace(usual, **odd))


@given(
    st.one_of(
        filled(Request, Request("0")),
        filled(RouterOptions, RouterOptions()),
        filled(TrainingSettings, TrainingSettings()),
    )
)
def test_any_value_of_an_option_is_judged(options: Any) -> None:
    """What is found fine can be written as JSON, and is the same when it is read again."""
    if not problems_of(options):
        plain = json.dumps(dataclasses.asdict(options), allow_nan=False)
        assert json.dumps(dataclasses.asdict(type(options)(**json.loads(plain)))) == plain


@given(filled(Request, Request("0"), most=3))
@REPEATED
def test_what_is_completed_is_complete(request: Request) -> None:
    try:
        done = complete(request)
    except SurgeryError:
        return
    assert complete(done) == done and done.variant is not None


WIDTHS = st.none() | st.integers(0, 3).map(lambda count: count * 10)
SCALE = st.builds(
    Request,
    layers=st.sampled_from(["0", "1-2", "last:1", "every:2", "all", "-1"]),
    variant=st.sampled_from([None, "preserve", "adapt"]),
    collaborate=st.sampled_from([None, "attn", "ffn", "both"]),
    ratio=st.floats(0.01, 1),
    up_width=WIDTHS,
    up_kv_heads=st.none() | st.integers(0, 3),
    up_inner_width=WIDTHS,
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([None, "bfloat16"]),
)
COPIES = st.builds(
    Request,
    layers=st.sampled_from(["0", "1-2", "all"]),
    method=st.sampled_from(["grow", "depth"]),
    copies=st.none() | st.integers(2, 4),
)


@given(SCALE | COPIES)
@IN_ONE_FOLDER
def test_a_saved_plan_is_the_plan(base_of: Callable[..., Path], tmp_path: Path, request: Request) -> None:
    base = base_of("llama")
    try:
        made = plan(base, request)
    except SurgeryError:
        return
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(base, tmp_path / "plan.json") == made
    assert sum(tensor.elements for tensor in made.tensors) == made.costs.parameters_added


def test_most_requests_can_be_planned(base_of: Callable[..., Path]) -> None:
    """So that the test above is about plans, and not about refusals."""
    assert plan(base_of("llama"), Request("1-2", up_width=20)).tensors
    with pytest.raises(SurgeryError):
        plan(base_of("llama"), Request("9"))
