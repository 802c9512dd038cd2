"""--method depth: copies of layers that add nothing at first, in a stock checkpoint; the base comes back as it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scale_surgery import CheckpointError, PlanError, Probes, Request, RunOptions, expand, inspect, plan, strip, verify
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.deriving.base import derive_config, read_base
from scale_surgery.errors import Problem
from scale_surgery.evidence.eval_targets import open_subjects
from scale_surgery.folder.record import read_manifest
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import read_contents
from scale_surgery.planning.depth import Depth, build_depth_specs, deepened_config
from scale_surgery.planning.method import Resolved
from scale_surgery.running.freeze import base_states, expansion_disabled, freeze_base, new_layers
from scale_surgery.show.tables import render_inspection
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.extract import extract
from tests.conftest import DEEPENED, Pair, digests, edited, load, problems, refused, shake, shown
from tests.each import FORM_OF, WAYS, each_shape_in_a_form, mostly
from tests.families import FAMILIES as FACTS
from tests.modeling.test_promises import prompts, unequal
from tests.sweep.take import twin_config, write_base
from tests.tiny import FAMILIES, save_tiny, tiny_config


@pytest.fixture
def deep(deep_of: Callable[..., Pair], tmp_path: Path) -> Path:
    """A copy of the deepened tiny llama, sharded, to be damaged by a test."""
    return Path(shutil.copytree(deep_of("llama", "float32", True).path, tmp_path / "own"))


def edit(path: Path, name: str, **changes: Any) -> None:
    with edited(path / name) as content:
        content |= changes


@each_shape_in_a_form
def test_output_at_init(deep_of, family, dtype, tied):
    """Whole and in generation, by a stock class, in whose layers the base's hidden states can be found again."""
    pair = deep_of(family, dtype, tied)
    assert type(pair.expanded) is type(pair.base), "a stock class"
    assert pair.expanded.dtype == pair.base.dtype == getattr(torch, dtype)
    assert unequal(pair.base, pair.expanded) == []
    for prompt in (prompts()[3], prompts()[-2]):
        for options in ({"use_cache": True}, {"use_cache": False} if dtype == "float32" else {"num_beams": 3}):
            settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, **options}
            wanted, output = (m.generate(**prompt, output_logits=True, **settings) for m in (pair.base, pair.expanded))
            assert torch.equal(wanted.sequences, output.sequences)
            assert all(map(torch.equal, wanted.logits, output.logits))
    with torch.no_grad():
        both = [model(**prompts()[0], output_hidden_states=True).hidden_states for model in (pair.base, pair.expanded)]
    assert [len(states) for states in both] == [4, 6]
    assert base_states(pair.base, both[0]) == both[0]
    assert all(map(torch.equal, both[0], base_states(pair.expanded, both[1])))


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    mostly([(family, *FORM_OF[family]) for family in WAYS], lambda case: case[0] == "gpt2"),
)
def test_one_entry_of_what_is_mute_changes_the_output(deep_of, family, dtype, tied):
    """The negative control of output_at_init; and no other tensor of a copy counts as long as those are as they are."""
    pair = deep_of(family, dtype, tied)
    facts, checkpoint = FACTS[family], open_checkpoint(pair.path)
    mute = {tensor.name for tensor in pair.expansion.plan.tensors if tensor.init in ("zero", "mute")}
    modules = {name.split(".after.")[1].rpartition(".")[0] for name in mute}
    outputs = {linear.name for linear in facts.linears if {"o", "down"}.intersection(linear.roles)}
    assert modules == (set(facts.post_norms) or outputs)
    stored = [str(checkpoint.tensors[name].stored_as) for name in mute]
    others = {str(checkpoint.tensors[tensor.name].stored_as) for tensor in pair.expansion.plan.tensors} - set(stored)
    moved = pair.load()
    with torch.no_grad():
        for name in others:
            moved.get_parameter(name).add_(0.1)
    assert unequal(pair.base, moved) == [], "what is not mute writes nothing"
    for name in stored:
        model = pair.load()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] += 1.0
        assert unequal(pair.base, model), name


@each_shape_in_a_form
def test_recoverable(deep_of, tmp_path, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    base, stored = open_checkpoint(pair.base_path), open_checkpoint(pair.path)
    assert hash_tensors(base, list(base.tensors)) == hash_tensors(stored, list(base.tensors))
    # also where the copies have learned
    trained = shake(Path(shutil.copytree(pair.path, tmp_path / "trained")))
    assert strip(trained, tmp_path / "stripped").files == digests(tmp_path / "stripped") == digests(pair.base_path)
    taken = extract(trained, tmp_path / "extract")
    assert not any(name.startswith("model-") for name in taken.files)
    assert taken.tensors == len(pair.expansion.plan.tensors)
    applied = apply(taken.path, tmp_path / "again", pair.base_path)
    assert digests(applied.path) == digests(trained) and applied.other_files == ()


@each_shape_in_a_form
def test_the_folder_is_a_stock_checkpoint(deep_of, family, dtype, tied):
    """The base's config but for its layers, no code, and copies of all that a layer has, but for what they write."""
    pair, facts = deep_of(family, dtype, tied), FACTS[family]
    before, after = (json.loads((path / "config.json").read_text()) for path in (pair.base_path, pair.path))
    key = facts.key("layers")
    assert (before.pop(key), after.pop(key)) == (3, 5)
    origin = after["scale_surgery"].pop("origin")
    assert (origin["base_name"], origin["request"]["layers"]) == (pair.base_path.name, "0,2")
    assert after.pop("scale_surgery") == {
        "format": 2,
        "method": "depth",
        "variant": "depth",
        "base_model": facts.base_model,
        "layers": facts.layers,
        "expanded_layers": [0, 2],
        "new_layers": [1, 4],
        "groups": {facts.attention: "attn", facts.activation.rpartition(".")[0]: "ffn"},
    }
    types, wanted = after.pop("layer_types", None), before.pop("layer_types", None)
    assert types == (wanted and [wanted[layer] for layer in (0, 0, 1, 2, 2)])
    assert after == before
    assert not list(pair.path.glob("*.py")) and read_manifest(pair.path).code == {}
    checkpoint, planned = open_checkpoint(pair.path), pair.expansion.plan.tensors
    for tensor in planned:
        values, wanted = read_tensor(checkpoint, tensor.name), read_tensor(checkpoint, tensor.source)
        start = {"zero": torch.zeros_like(wanted), "mute": torch.full_like(wanted, facts.mute_gain)}
        assert values.dtype == wanted.dtype and torch.equal(values, start.get(tensor.init, wanted))
    base = set(checkpoint.tensors) - {tensor.name for tensor in planned}
    copied = {name for name in base if any(f"{facts.layers}.{layer}." in name for layer in (0, 2))}
    assert {tensor.source for tensor in planned} == copied


UNLISTED: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": None}),
    ("qwen2", {"max_window_layers": 1}),
    *((family, {}) for family in FAMILIES),
]


@pytest.mark.parametrize(("family", "changes"), mostly(UNLISTED, UNLISTED[0].__eq__))
def test_types_of_layers_are_those_of_transformers(family, changes):
    """Where config.json lists none, as on the Hub: the facts against the stock config class, base and deepened."""
    config = tiny_config(family, num_hidden_layers=7).to_diff_dict() | {"model_type": family} | changes
    config = {key: value for key, value in config.items() if key != "layer_types"}
    stock, facts = transformers.CONFIG_MAPPING[family], derive_config(config, family, 100).architecture
    wanted = getattr(stock.from_dict(dict(config)), "layer_types", None)
    assert (list(facts.layer_types) or ["full_attention"] * 7) == (wanted or ["full_attention"] * 7)
    edited = deepened_config(config, build_depth_specs(facts, (0, 5)), facts)
    types = getattr(stock.from_dict(dict(edited)), "layer_types", None)
    assert types == (wanted and [wanted[i] for i in (0, 0, 1, 2, 3, 4, 5, 5, 6)])
    assert ("layer_types" in edited) == bool(facts.layer_types), "nothing is written that is not needed"
    if family == "gemma3_text":
        by_number = stock.from_dict({key: value for key, value in edited.items() if key != "layer_types"})
        assert by_number.layer_types != types, "the negative control: left to their numbers they are others"


@pytest.mark.slow
@pytest.mark.parametrize("family", ("gemma2", "olmo2"))
def test_a_first_step_moves_it_little(deep_of, family):
    """Why norms after an output projection are mute in its place: the control makes the projection zero."""
    pair, ids, moved = deep_of(family), prompts()[0]["input_ids"], []
    for model in (pair.load(), control := pair.load()):
        if model is control:
            with torch.no_grad():
                for path, layer in new_layers(model, Numbering("model", "layers", (0, 2))).items():
                    source = pair.base.model.layers[{1: 0, 4: 2}[int(path.rpartition(".")[2])]]
                    for name in FACTS[family].post_norms:
                        layer.get_submodule(name).weight.copy_(source.get_submodule(name).weight)
                    for name in ("self_attn.o_proj", "mlp.down_proj"):
                        layer.get_submodule(name).weight.zero_()
            assert unequal(pair.base, model) == [], "this too would be the base's output"
        trained = [parameter for parameter in freeze_base(model).parameters() if parameter.requires_grad]
        model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.AdamW(trained, lr=1e-4, weight_decay=0).step()
        with torch.no_grad():
            before, after = (each(input_ids=ids).logits.log_softmax(-1) for each in (pair.base, model))
        moved.append(float((before.exp() * (before - after)).sum(-1).mean()))
    assert moved[0] < 1e-3 and moved[1] > 1e-2, "KL divergence from the base, nats a token"


def test_shards_without_a_renumbered_tensor_are_taken_over_as_files(deep_of, base_of, tmp_path):
    base, path = base_of("llama", tied=True), tmp_path / "linked"
    done = expand(base, Request("1", method="depth"), path, base_weights="link")
    manifest, written = read_manifest(path), 0
    for name, file in manifest.base_files.items():
        if not name.endswith(".safetensors"):
            continue
        with safe_open(base / name, "pt") as shard:
            is_renumbered = any(".layers.2." in tensor for tensor in list(shard.keys()))
        assert (str(file.stored_as) in manifest.renumbered) == is_renumbered
        assert ((base / name).stat().st_ino == (path / str(file.stored_as)).stat().st_ino) != is_renumbered
        written += is_renumbered * (base / name).stat().st_size
    assert done.base_bytes_written == written > 0
    assert verify(path, probes=None).passed
    # behind another header the same data lie in the same order, aligned as they were
    for stored, header in manifest.renumbered.items():
        first, second = (base / stored).read_bytes(), (path / stored).read_bytes()
        assert first[8 + len(header) :] == second[8 + int.from_bytes(second[:8], "little") :]
        assert first[8:].startswith(header.encode())
        assert (len(first) - len(second)) % 64 == 0


@pytest.mark.parametrize("padding", mostly(range(0, 64, 8), (8, 32, 56).__contains__))
def test_however_the_base_is_aligned_so_are_its_tensors(tmp_path, padding):
    """The last bit of a product of one row depends on it, and files of the Hub begin their data anywhere."""
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=False)
    content = (base / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * padding
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert unequal(load(base), load(expand(base, DEEPENED, tmp_path / "deep").path)) == []


def without_its_head(base: Path) -> Path:
    model = transformers.AutoModel.from_pretrained(save_tiny(base / "whole", "llama", tie_word_embeddings=True))
    model.save_pretrained(base / "model")
    return base / "model"


def with_masks(base: Path) -> Path:
    """GPT-2 and GPT-NeoX of the Hub store attention masks with their layers; stock classes pass over them."""
    save_tiny(base, "gpt2", tie_word_embeddings=True)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) * i for i in range(3)}
    save_file(load_file(base / "model.safetensors") | masks, base / "model.safetensors", metadata={"format": "pt"})
    return base


def with_an_old_head(base: Path) -> Path:
    save_tiny(base, "gpt_neox", tie_word_embeddings=False)
    with edited(base / "model.safetensors") as tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight", tensors.get("embed_out.weight"))
    return base


@pytest.mark.parametrize(
    ("make", "layers"),
    mostly(
        [
            (with_masks, "0,2"),
            (lambda path: save_tiny(path, "qwen3"), "all"),
            (lambda path: save_tiny(path, "qwen3", num_hidden_layers=1), "0"),
            (without_its_head, "0,2"),
            (with_an_old_head, "0,2"),
        ],
        lambda case: case[0] is with_masks or case[1] == "all",
    ),
)
def test_bases_of_other_forms(tmp_path, make, layers):
    base = make(tmp_path / "base")
    path = expand(base, Request(layers, method="depth"), tmp_path / "deep").path
    assert unequal(load(base), load(path)) == []
    result = verify(path, base, probes=Probes(max_new_tokens=0))
    assert result.passed and result.numbers is not None
    assert [layer.layer for layer in result.numbers.layers] == list(range(-1, load(base).config.num_hidden_layers))
    if make is with_masks:
        stored = open_checkpoint(path).tensors
        assert stored["transformer.h.1.attn.bias"].stored_as == "transformer.h.2.attn.bias"
        assert not any("after.attn.bias" in name for name in stored), "renumbered, and not copied"
    assert digests(strip(path, tmp_path / "stripped").path) == digests(base)


@pytest.mark.parametrize("family", mostly(("gpt_neo", "bloom", "falcon", "llama"), ("gpt_neo", "llama").__contains__))
def test_without_its_copies_it_is_the_base(tmp_path: Path, family: str) -> None:
    """Layers of some types return a tuple, of others the hidden state alone."""
    base = tmp_path / "base"
    write_base(twin_config(family), torch.float32, base)
    deep = load(shake(expand(base, Request("last:1", method="depth"), tmp_path / "deep").path))
    ids, wanted = torch.randint(5, 60, (2, 6)), load(base)
    with expansion_disabled(deep):
        assert torch.equal(deep(ids, use_cache=False).logits, wanted(ids, use_cache=False).logits)
    assert not torch.equal(deep(ids, use_cache=False).logits, wanted(ids, use_cache=False).logits), "the control"


@pytest.mark.parametrize("memory", mostly(({}, {"memory_bytes": 60_000}), lambda options: not options), ids=str)
def test_what_verify_finds(deep_of, memory):
    """Whole, and streamed where the model is larger than the memory that it is given."""
    pair = deep_of("qwen2", "bfloat16", True)
    result = verify(pair.path, run=RunOptions(**memory), record=False)
    assert result.passed and result.state == "initial" and result.problems == result.warnings == ()
    assert {promise.name: (promise.claimed, promise.holds) for promise in result.promises} == {
        "recoverable": (True, True),
        "output_at_init": (True, True),
        "base_stream_always": (False, False),
        "bounded_forgetting": (False, False),
    }
    assert result.numbers is not None and all(layer.is_bit_equal for layer in result.numbers.layers)
    assert result.promises[1].evidence.startswith("new layers write zero; logits bit-equal on")
    assert result.promises[2].evidence.startswith("new layers write into the base stream once they are trained")


def change(path: Path, name: str) -> str:
    """Set one entry of a tensor on disk; gives the name in the file."""
    info = open_checkpoint(path).tensors[name]
    with edited(path / info.file) as tensors:
        tensors[str(info.stored_as)].view(-1)[0] = 1.5
    return str(info.stored_as)


def test_verify_names_what_is_other_than_it_was(deep):
    """As after training, output_at_init is no longer claimed, and asked for by name it is broken; the base may not."""
    name = "model.layers.0.after.mlp.down_proj.weight"
    assert change(deep, name) == "model.layers.1.mlp.down_proj.weight"
    result = verify(deep, probes=None, record=False)
    assert (result.passed, result.state, result.trained_tensors) == (True, "trained", 1)
    result = verify(deep, required=("output_at_init",), probes=Probes(max_new_tokens=0), record=False)
    assert not result.passed
    assert f"{name}: 1 of 2080 entries are not zero." in result.promises[1].problems
    assert any(problem.startswith("logits: drift") for problem in result.promises[1].problems)
    change(deep, "model.layers.1.mlp.down_proj.weight")
    result = verify(deep, probes=None, record=False)
    assert not result.passed
    problems = result.promises[0].problems
    assert any(line.startswith("model.layers.1.mlp.down_proj.weight: sha256") for line in problems)
    assert any("bytes differ from the base's model-" in line for line in problems)
    with pytest.raises(CheckpointError, match=r"^model-\d+-of-\d+\.safetensors: sha256 .*, expected .* from surgery"):
        strip(deep, deep.parent / "stripped")
    assert not (deep.parent / "stripped").exists()


def test_two_layers_that_changed_places_are_noticed(deep):
    """Every byte of every tensor is there, under the name of another layer."""
    places = {}
    for file in sorted(deep.glob("*.safetensors")):
        tensors = {
            re.sub(r"^model\.layers\.([23])\.", lambda match: f"model.layers.{5 - int(match[1])}.", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    edit(deep, "model.safetensors.index.json", weight_map=places)
    result = verify(deep, probes=None, record=False)
    assert not result.passed
    problems = result.promises[0].problems
    assert any(line.startswith("model.layers.1.self_attn.q_proj.weight: sha256") for line in problems)


# ---- configs and records that do not fit


def test_a_config_that_does_not_say_which_layers_are_new_is_refused(deep):
    specs = json.loads((deep / "config.json").read_text())["scale_surgery"]
    for wrong in (None, [], [0, 0], [2, 0], [-1], ["0"], [True], 3):
        edit(deep, "config.json", scale_surgery=specs | {"expanded_layers": wrong})
        with refused("config-copies-unnamed", "config.json: scale_surgery", CheckpointError):
            open_checkpoint(deep)
    edit(deep, "config.json", scale_surgery={key: value for key, value in specs.items() if key != "variant"})
    missing = Problem("key-missing", "scale_surgery.variant")
    assert problems(inspect, deep, error=CheckpointError) == [
        Problem("record-incomplete", deep / "config.json", missing)
    ]


@pytest.mark.parametrize("copied", [[0, 1], None])
def test_a_config_that_names_other_layers_is_named_first(deep: Path, copied: list[int] | None) -> None:
    with edited(deep / "config.json") as config:
        if copied is None:
            del config["scale_surgery"]
        else:
            config["scale_surgery"]["expanded_layers"] = copied
    place = f"{deep / 'config.json'}: scale_surgery"
    # without the key, evaluate sees a plain model
    evaluating = [] if copied is None else [lambda path: open_subjects([path])]
    for read in (verify, lambda path: extract(path, path.with_name("extract")), *evaluating):
        assert problems(read, deep, error=CheckpointError) == [
            Problem("config-copies-differ", place, copied=copied or [], recorded=[0, 2])
        ]


def test_new_layers_beyond_the_last_are_named(deep_of: Callable[..., Pair]) -> None:
    model = deep_of("llama").load()
    model.config.scale_surgery = {**model.config.scale_surgery, "expanded_layers": [1, 99]}
    with pytest.raises(CheckpointError, match=r"names layer 101 as new, expected one of the model's \d+"):
        freeze_base(model)


def test_a_spoiled_record_is_named(deep: Path) -> None:
    headers = json.loads((deep / "surgery.json").read_text())["renumbered"]
    name = next(iter(headers))
    for wrong in (3, [name], {name: 3}, {name: "[]"}, {name: "{"}, {"other.safetensors": headers[name]}):
        edit(deep, "surgery.json", renumbered=wrong)
        with refused("record-incomplete", deep / "surgery.json", CheckpointError):
            read_manifest(deep)
    edit(deep, "surgery.json", renumbered=headers | {"config.json": "{}"})
    (problem,) = problems(strip, deep, deep.with_name("stripped"), error=CheckpointError)
    assert [(part.code, part.where) for part in problem.details] == [("value-unfit", "renumbered")]
    edit(deep, "surgery.json", renumbered={})
    assert not verify(deep, probes=None, record=False).passed
    found = problems(strip, deep, deep.with_name("stripped"), error=CheckpointError)
    assert {(problem.code, problem.where) for problem in found} == {("base-not-given-back", name) for name in headers}


# ---- what cannot be deepened


def test_a_block_that_nothing_makes_mute_is_refused(llama_base):
    base = read_base(open_checkpoint(llama_base))
    (kind,) = base.architecture.kinds
    attention, mlp = kind.blocks
    kinds = (replace(kind, blocks=(attention, replace(mlp, mute=()))),)
    spoiled = replace(base, facts=replace(base.facts, architecture=replace(base.architecture, kinds=kinds)))
    request, resolved = Request("0,2", method="depth"), Resolved((0, 2))
    assert problems(Depth().specs, spoiled, request, resolved, error=PlanError) == [
        Problem("copies-not-mute", "--layers 0,2", block="mlp")
    ]
    assert Depth().specs(base, request, resolved)["new_layers"] == [1, 4]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    (
        ("llama", {"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(3\) must be equal to .* \(1\)"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "ZeroDivisionError"),
    ),
)
def test_lists_that_do_not_fit_the_layers(base_of, tmp_path, family, changes, message):
    base = Path(shutil.copytree(base_of(family), tmp_path / "base"))
    edit(base, "config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: transformers does not read it .*{message}"):
        plan(base, DEEPENED)


def test_requests_that_make_no_sense_are_refused(deep_of, llama_base, tmp_path):
    request = Request("0", method="depth", up_width=20, collaborate="attn", init_w21="zero", dtype="float32", copies=3)
    found = problems(plan, llama_base, request, error=PlanError)
    assert [problem.where for problem in found] == ["--collaborate", "--up-width", "init_w21", "--dtype", "--copies"]
    assert {problem.code for problem in found} == {"option-of-other-method"}
    with refused("variant-of-other-method", "--variant", PlanError):
        plan(llama_base, Request("0", method="depth", variant="adapt"))
    for request in (DEEPENED, Request("0")):
        with refused("base-deepened", deep_of().path, CheckpointError):
            expand(deep_of().path, request, tmp_path / "again")


# ---- what is said


def test_what_plan_inspect_and_card_say(deep_of):
    pair = deep_of()
    lines = shown(render_plan(pair.expansion.plan), 120).splitlines()
    fields = {name.strip(): text.strip() for name, _, text in (line.partition("  ") for line in lines)}
    assert fields["duplicated layers"] == "0,2  (2 of 3)"
    assert fields["new layers"] == "1,4  (of 5 then)"
    assert fields["training reaches"] == "layers 1-4"
    assert fields["stock form"].startswith("the folder itself: llama with more layers")
    costs = pair.expansion.plan.costs
    assert costs.parameters_added == sum(p.numel() for p in pair.expanded.parameters()) - sum(
        p.numel() for p in pair.base.parameters()
    )
    stored = open_checkpoint(pair.path).tensors
    assert costs.bytes_added == sum(info.bytes for name, info in stored.items() if ".after." in name)
    described = inspect(pair.path)
    assert described.sizes.layers == 3 and described.expanded is not None
    (added,) = described.expanded.expansions.values()
    assert (added.method, added.new_layers, added.parameters) == ("depth", (1, 4), costs.parameters_added)
    assert "duplicated layers  0,2" in shown(render_inspection(described))
    card = make_card(read_contents(pair.path), "me/deep", None, None, None).text
    assert "| new layers | 1,4 of 0-4 |" in card and "LLaMA Pro" in card
