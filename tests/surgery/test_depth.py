"""--method depth: copies of layers that add nothing at first, in a stock checkpoint; the base comes back as it was."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scale_surgery import CheckpointError, PlanError, Probes, Request, RunOptions, expand, inspect, plan, strip, verify
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.deriving.base import derive_config
from scale_surgery.evidence.eval_targets import open_subjects
from scale_surgery.hub.card import make_card
from scale_surgery.hub.repository import read_contents
from scale_surgery.planning.depth import BINDINGS, build_depth_specs, deepened_config
from scale_surgery.running.freeze import base_states, freeze_base, new_layers
from scale_surgery.show.tables import render_inspection
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.record import read_manifest
from tests.conftest import DEEPENED, Pair, digests, load, shake
from tests.each import FORM_OF, WAYS, each_shape_in_a_form, mostly
from tests.families import get_family
from tests.modeling.test_promises import prompts, unequal
from tests.tiny import FAMILIES, save_tiny, tiny_config


@pytest.fixture
def own(deep_of: Callable[..., Pair], tmp_path: Path) -> Path:
    """A copy of the deepened tiny llama, sharded, to be damaged by a test."""
    return Path(shutil.copytree(deep_of("llama", "float32", True).path, tmp_path / "own"))


@pytest.mark.parametrize("copied", ((0,), (2,), (0, 1, 2), (1, 4), (0, 9)))
def test_every_name_has_one_place(copied: tuple[int, ...]) -> None:
    numbering = Numbering("model", "layers", copied)
    base = [f"{prefix}layers.{layer}.mlp.x" for prefix in ("model.", "") for layer in range(12)]
    new = [f"{prefix}layers.{layer}.after.mlp.x" for prefix in ("model.", "") for layer in copied]
    stored = [numbering.stored(name) for name in (*base, *new)]
    assert len(set(stored)) == len(stored)
    assert [numbering.named(name) for name in stored] == [*base, *new]
    wanted = [f"{prefix}layers.{layer}.mlp.x" for prefix in ("model.", "") for layer in range(12 + len(copied))]
    assert sorted(stored) == sorted(wanted), "no gap and no other name"
    for name in ("lm_head.weight", "model.norm.weight", "model.layers", "vision.layers.1.x", "model.layers.x.y"):
        assert numbering.stored(name) == numbering.named(name) == name


def test_names_of_the_readme_of_names() -> None:
    numbering = Numbering("model", "layers", (1,))
    assert numbering.new == (2,)
    assert numbering.stored("model.layers.1.after.mlp.x") == "model.layers.2.mlp.x"
    assert numbering.stored("model.layers.2.mlp.x") == "model.layers.3.mlp.x"


@each_shape_in_a_form
def test_output_at_init(deep_of, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    assert type(pair.expanded) is type(pair.base), "a stock class"
    assert pair.expanded.dtype == pair.base.dtype == getattr(torch, dtype)
    assert unequal(pair.base, pair.expanded) == []


@each_shape_in_a_form
def test_output_at_init_in_generation(deep_of, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    for prompt in (prompts()[3], prompts()[-2]):
        for options in ({"use_cache": True}, {"use_cache": False} if dtype == "float32" else {"num_beams": 3}):
            settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, **options}
            wanted, found = (m.generate(**prompt, output_logits=True, **settings) for m in (pair.base, pair.expanded))
            assert torch.equal(wanted.sequences, found.sequences)
            assert all(map(torch.equal, wanted.logits, found.logits))


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    mostly([(family, *FORM_OF[family]) for family in WAYS], lambda own: own[0] in ("llama", "gpt2")),
)
def test_one_entry_of_what_is_mute_changes_the_output(deep_of, family, dtype, tied):
    """The negative control of output_at_init; and no other tensor of a copy counts as long as those are as they are."""
    pair = deep_of(family, dtype, tied)
    facts, checkpoint = get_family(family), open_checkpoint(pair.path)
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


@pytest.mark.slow
def test_a_step_from_the_start_moves_every_family_as_little(deep_of):
    """Why norms that come after an output projection are mute in its place: the control makes the projection zero."""
    for family in ("llama", "gemma2", "olmo2"):
        pair = deep_of(family)
        assert first_step(pair, pair.load()) < 1e-3, family
        if (facts := get_family(family)).post_norms:
            model = pair.load()
            with torch.no_grad():
                for path, layer in new_layers(model, Numbering("model", "layers", (0, 2))).items():
                    source = pair.base.model.layers[{1: 0, 4: 2}[int(path.rpartition(".")[2])]]
                    for name in facts.post_norms:
                        layer.get_submodule(name).weight.copy_(source.get_submodule(name).weight)
                    for name in ("self_attn.o_proj", "mlp.down_proj"):
                        layer.get_submodule(name).weight.zero_()
            assert unequal(pair.base, model) == [], "this too would be the base's output"
            assert first_step(pair, model) > 1e-2, family


def first_step(pair: Pair, model: Any) -> float:
    """KL divergence from the base after one small step of AdamW, in nats per token."""
    parameters = [parameter for parameter in freeze_base(model).parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0)
    ids = prompts()[0]["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        before, after = (each(input_ids=ids).logits.log_softmax(-1) for each in (pair.base, model))
    return float((before.exp() * (before - after)).sum(-1).mean())


@each_shape_in_a_form
def test_recoverable(deep_of, tmp_path, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    base, stored = open_checkpoint(pair.base_path), open_checkpoint(pair.path)
    assert hash_tensors(base, list(base.tensors)) == hash_tensors(stored, list(base.tensors))
    assert len(stored.tensors) == len(base.tensors) + len(pair.expansion.plan.tensors)
    # also where the copies have learned
    trained = shake(Path(shutil.copytree(pair.path, tmp_path / "trained")))
    assert strip(trained, tmp_path / "stripped").files == digests(tmp_path / "stripped") == digests(pair.base_path)


@each_shape_in_a_form
def test_a_copy_is_its_layer_but_for_what_it_writes(deep_of, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    checkpoint = open_checkpoint(pair.path)
    own, sources = {tensor.name for tensor in pair.expansion.plan.tensors}, set()
    for tensor in pair.expansion.plan.tensors:
        found, wanted = read_tensor(checkpoint, tensor.name), read_tensor(checkpoint, tensor.source)
        assert found.dtype == wanted.dtype
        start = {"zero": torch.zeros_like(wanted), "mute": torch.full_like(wanted, get_family(family).mute_gain)}
        assert torch.equal(found, start.get(tensor.init, wanted))
        sources.add(tensor.source)
    layers = f"{get_family(family).layers}."
    assert sources == {
        name for name in checkpoint.tensors if name not in own and any(f"{layers}{i}." in name for i in (0, 2))
    }, "everything that a layer has"


@each_shape_in_a_form
def test_the_folder_is_a_stock_checkpoint(deep_of, family, dtype, tied):
    pair = deep_of(family, dtype, tied)
    before, after = (json.loads((path / "config.json").read_text()) for path in (pair.base_path, pair.path))
    key = get_family(family).key("layers")
    assert (before.pop(key), after.pop(key)) == (3, 5)
    origin = after["scale_surgery"].pop("origin")
    assert (origin["base_name"], origin["request"]["layers"]) == (pair.base_path.name, "0,2")
    assert after.pop("scale_surgery") == {
        "format": 2,
        "method": "depth",
        "variant": "depth",
        "base_model": get_family(family).base_model,
        "layers": get_family(family).layers,
        "expanded_layers": [0, 2],
        "new_layers": [1, 4],
        "groups": {get_family(family).attention: "attn", get_family(family).activation.rpartition(".")[0]: "ffn"},
    }
    types, wanted = after.pop("layer_types", None), before.pop("layer_types", None)
    assert types == (wanted and [wanted[layer] for layer in (0, 0, 1, 2, 2)])
    assert after == before
    assert not list(pair.path.glob("*.py"))
    manifest = read_manifest(pair.path)
    assert manifest.code == {}
    # and a stock model that is saved by somebody else still says which layers are new
    assert pair.expanded.config.scale_surgery["new_layers"] == [1, 4]


UNLISTED: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": None}),
    ("qwen2", {"max_window_layers": 1}),
]
OTHERS_UNLISTED = mostly([(family, {}) for family in FAMILIES], lambda one: one[0] == "gemma2")


@pytest.mark.parametrize(("family", "changes"), [*mostly(UNLISTED, UNLISTED[:1].__contains__), *OTHERS_UNLISTED])
def test_types_of_layers_are_those_of_transformers(family, changes):
    """Where config.json lists none, as on the Hub: the facts against the stock config class, base and deepened."""
    config = tiny_config(family, num_hidden_layers=7).to_diff_dict() | {"model_type": family} | changes
    config = {key: value for key, value in config.items() if key != "layer_types"}
    stock, facts = transformers.CONFIG_MAPPING[family], derive_config(config, family, 100).architecture
    wanted = getattr(stock.from_dict(dict(config)), "layer_types", None)
    by_hand = get_family(family).types_by_number
    assert facts.layer_types == tuple((by_hand and by_hand.of(config, 7)) or ())
    assert (list(facts.layer_types) or ["full_attention"] * 7) == (wanted or ["full_attention"] * 7)
    edited = deepened_config(config, build_depth_specs(facts, (0, 5)), facts)
    types = getattr(stock.from_dict(dict(edited)), "layer_types", None)
    assert types == (wanted and [wanted[i] for i in (0, 0, 1, 2, 3, 4, 5, 5, 6)])
    assert ("layer_types" in edited) == bool(facts.layer_types), "nothing is written that is not needed"


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly(("gemma2", "gemma3_text"), "gemma3_text".__eq__))
def test_layers_keep_their_types_where_the_config_lists_none(tmp_path, family):
    base = save_tiny(tmp_path / "base", family, num_hidden_layers=7)
    config = json.loads((base / "config.json").read_text())
    del config["layer_types"]
    (base / "config.json").write_text(json.dumps(config))
    done = expand(base, Request("0,3", method="depth"), tmp_path / "deep")
    assert unequal(load(base), load(done.path)) == []
    assert verify(done.path, probes=Probes(new_tokens=0)).passed
    # the negative control: left to their numbers, the layers above a copy are of other types
    edited = json.loads((done.path / "config.json").read_text())
    del edited["layer_types"]
    (done.path / "config.json").write_text(json.dumps(edited))
    assert unequal(load(base), load(done.path))
    result = verify(done.path, probes=None)
    assert not result.passed
    assert "config.json: layer_types is not what the expansion wrote." in result.problems


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
        one, other = (base / stored).read_bytes(), (path / stored).read_bytes()
        assert one[8 + len(header) :] == other[8 + int.from_bytes(other[:8], "little") :]
        assert one[8:].startswith(header.encode())
        assert (len(one) - len(other)) % 64 == 0


@pytest.mark.parametrize("padding", mostly(range(0, 64, 8), (8, 32, 56).__contains__))
def test_however_the_base_is_aligned_so_are_its_tensors(tmp_path, padding):
    """The last bit of a product of one row depends on it, and files of the Hub begin their data anywhere."""
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=False)
    content = (base / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * padding
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert unequal(load(base), load(expand(base, DEEPENED, tmp_path / "deep").path)) == []


@pytest.mark.slow
def test_a_base_saved_without_its_head(base_of, tmp_path):
    model = transformers.AutoModel.from_pretrained(base_of("llama", tied=True))
    model.save_pretrained(tmp_path / "base")
    assert not any(name.startswith("model.") for name in open_checkpoint(tmp_path / "base").tensors)
    path = expand(tmp_path / "base", DEEPENED, tmp_path / "deep").path
    assert unequal(load(tmp_path / "base"), load(path)) == []
    assert verify(path, probes=Probes(new_tokens=0)).passed
    strip(path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(tmp_path / "base")


def test_tensors_that_no_module_has_are_renumbered_and_not_copied(tmp_path):
    """GPT-2 and GPT-NeoX of the Hub store attention masks with their layers; stock classes pass over them."""
    base = save_tiny(tmp_path / "base", "gpt2", tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) * i for i in range(3)}
    save_file(tensors | masks, base / "model.safetensors", metadata={"format": "pt"})
    path = expand(base, DEEPENED, tmp_path / "deep").path
    assert unequal(load(base), load(path)) == []
    assert verify(path, base, probes=Probes(new_tokens=0)).passed
    stored = open_checkpoint(path).tensors
    assert stored["transformer.h.1.attn.bias"].stored_as == "transformer.h.2.attn.bias"
    assert not any("after.attn.bias" in name for name in stored)
    strip(path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(base)


def test_on_a_trained_model(stories, tmp_path):
    path = expand(stories, Request("every:2", method="depth"), tmp_path / "deep").path
    base, deepened = load(stories), load(path)
    options = {"max_new_tokens": 40, "do_sample": False}
    prompt = {"input_ids": torch.tensor([[1]])}
    assert torch.equal(base.generate(**prompt, **options), deepened.generate(**prompt, **options))


@pytest.mark.slow
def test_a_head_under_its_old_name(tmp_path):
    base = save_tiny(tmp_path / "base", "gpt_neox", tie_word_embeddings=False)
    tensors = load_file(base / "model.safetensors")
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight", tensors.get("embed_out.weight"))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    path = expand(base, DEEPENED, tmp_path / "deep").path
    assert unequal(load(base), load(path)) == []
    assert verify(path, probes=Probes(new_tokens=0)).passed


@pytest.mark.parametrize(("layers", "selection"), mostly(((1, "0"), (3, "all")), lambda own: own[0] == 3))
def test_one_layer_and_all_layers(tmp_path, layers, selection):
    base = save_tiny(tmp_path / "base", "qwen3", num_hidden_layers=layers)
    path = expand(base, Request(selection, method="depth"), tmp_path / "deep").path
    assert load(path).config.num_hidden_layers == 2 * layers
    assert unequal(load(base), load(path)) == []
    result = verify(path, base, probes=Probes(new_tokens=0))
    assert result.passed
    assert result.numbers is not None and [layer.layer for layer in result.numbers.layers] == list(range(-1, layers))


def held(result: Any) -> dict[str, tuple[bool, bool | None]]:
    return {promise.name: (promise.claimed, promise.holds) for promise in result.promises}


@pytest.mark.parametrize("with_base", (False, True))
def test_what_verify_finds(deep_of, with_base):
    pair = deep_of("qwen2", "bfloat16", True)
    result = verify(pair.path, pair.base_path if with_base else None, record=False)
    assert result.passed and result.state == "initial" and result.problems == result.warnings == ()
    assert held(result) == {
        "recoverable": (True, True),
        "output_at_init": (True, True),
        "base_stream_always": (False, False),
        "bounded_forgetting": (False, False),
    }
    assert result.numbers is not None and all(layer.is_bit_equal for layer in result.numbers.layers)
    assert result.promises[1].evidence.startswith("new layers write zero; logits bit-equal on")
    assert result.promises[2].evidence.startswith("new layers write into the base stream once they are trained")


@pytest.mark.slow
def test_verify_streams_a_model_larger_than_the_memory_that_it_is_given(deep_of):
    assert verify(
        deep_of("gemma3_text", "float32", True).path,
        run=RunOptions(memory_bytes=60_000),
        probes=Probes(new_tokens=2),
        record=False,
    ).passed


def change(path: Path, name: str) -> str:
    """Set one entry of a tensor on disk; gives the name in the file."""
    info = open_checkpoint(path).tensors[name]
    tensors = load_file(path / info.file)
    tensors[str(info.stored_as)].view(-1)[0] = 1.5
    save_file(tensors, path / info.file, metadata={"format": "pt"})
    return str(info.stored_as)


def test_verify_names_an_output_projection_that_is_not_zero(own):
    """As after training: output_at_init is no longer claimed, and asked for by name it is broken."""
    name = "model.layers.0.after.mlp.down_proj.weight"
    assert change(own, name) == "model.layers.1.mlp.down_proj.weight"
    result = verify(own, probes=None, record=False)
    assert (result.passed, result.state, result.trained_tensors) == (True, "trained", 1)
    result = verify(own, required=("output_at_init",), probes=Probes(new_tokens=0), record=False)
    assert not result.passed
    assert f"{name}: 1 of 2080 entries are not zero." in result.promises[1].problems
    assert any(problem.startswith("logits: drift") for problem in result.promises[1].problems)


def test_verify_names_a_base_tensor_that_moved(own):
    change(own, "model.layers.1.mlp.down_proj.weight")
    result = verify(own, probes=None, record=False)
    assert not result.passed
    problems = result.promises[0].problems
    assert any(line.startswith("model.layers.1.mlp.down_proj.weight: sha256") for line in problems)
    assert any("bytes differ from the base's model-" in line for line in problems)
    with pytest.raises(CheckpointError, match=r"^model-\d+-of-\d+\.safetensors: sha256 .*, expected .* from surgery"):
        strip(own, own.parent / "stripped")
    assert not (own.parent / "stripped").exists()


def test_two_layers_that_changed_places_are_noticed(own):
    """Every byte of every tensor is there, under the name of another layer."""
    swapped = {"model.layers.2.": "model.layers.3.", "model.layers.3.": "model.layers.2."}

    def renamed(name: str) -> str:
        found = next((prefix for prefix in swapped if name.startswith(prefix)), None)
        return name if found is None else swapped[found] + name.removeprefix(found)

    places = {}
    for file in sorted(own.glob("*.safetensors")):
        tensors = {renamed(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    index = json.loads((own / "model.safetensors.index.json").read_text())
    (own / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": places}))
    result = verify(own, probes=None, record=False)
    assert not result.passed
    problems = result.promises[0].problems
    assert any(line.startswith("model.layers.1.self_attn.q_proj.weight: sha256") for line in problems)


def test_code_and_a_config_that_were_not_written_are_noticed(own):
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (own / "config.json").write_text(json.dumps(config))
    (own / "modeling.py").write_text("raise SystemExit\n")
    result = verify(own, record=False)
    assert not result.passed
    assert result.not_run == "code or config.json is not what was written"
    assert "modeling.py: unknown code file. Read it before you trust it." in result.problems
    assert "config.json: auto_map is not what the expansion wrote." in result.problems


def edit(path: Path, name: str, **changes: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(content | changes))


def test_a_config_that_does_not_say_which_layers_are_new_is_refused(own):
    for wrong in (None, [], [0, 0], [2, 0], [-1], ["0"], [True], 3):
        specs = {"method": "depth", "base_model": "model", "layers": "layers", "expanded_layers": wrong}
        edit(own, "config.json", scale_surgery=specs)
        with pytest.raises(CheckpointError, match=r"^config\.json: scale_surgery says that layers were duplicated"):
            open_checkpoint(own)


def test_a_manifest_without_the_headers_of_the_base_is_refused(own):
    headers = json.loads((own / "surgery.json").read_text())["renumbered"]
    name = next(iter(headers))
    for wrong in (3, [name], {name: 3}, {name: "[]"}, {name: "{"}, {"other.safetensors": headers[name]}):
        edit(own, "surgery.json", renumbered=wrong)
        with pytest.raises(CheckpointError, match=r"surgery\.json: is incomplete \("):
            read_manifest(own)
    edit(own, "surgery.json", renumbered={})
    result = verify(own, probes=None, record=False)
    assert not result.passed
    with pytest.raises(CheckpointError, match="The file was changed after the expansion"):
        strip(own, own.parent / "stripped")


def test_hidden_states_of_the_base_are_chosen(deep_of):
    pair = deep_of()
    prompt = prompts()[0]
    with torch.no_grad():
        states = [model(**prompt, output_hidden_states=True).hidden_states for model in (pair.base, pair.expanded)]
    assert [len(found) for found in states] == [4, 6]
    assert base_states(pair.base, states[0]) == states[0]
    assert all(map(torch.equal, states[0], base_states(pair.expanded, states[1])))


BOUND = {
    "num_kv_shared_layers": 2,
    "num_kv_reuse_layers": 1,
    "cla_share_factor": 2,
    "use_cross_layer_attention": True,
    "num_hidden_groups": 1,
    "num_mem_blocks": 2,
    "hidden_size_per_layer_input": 256,
    "per_layer_config": {"0": {}},
    "scale_attn_by_inverse_layer_idx": True,
    "scale_depth": 1.4,
}


@pytest.mark.parametrize("model_type", ("llama", "gemma3n_text"))
def test_layers_that_cannot_be_copied_are_refused_by_the_key_that_says_so(llama_base, model_type):
    """Before the family is asked for: also where that is not supported."""
    assert set(BOUND) == {binding.key for binding in BINDINGS}
    for key, value in BOUND.items():
        edit(llama_base, "config.json", **dict.fromkeys(BOUND), model_type=model_type)
        edit(llama_base, "config.json", **{key: value})
        with pytest.raises(PlanError, match=rf"^config\.json: {key} is .*, so no layer can be duplicated\. Use"):
            plan(llama_base, DEEPENED)
    edit(llama_base, "config.json", text_config={"num_kv_shared_layers": 10}, num_kv_shared_layers=3)
    with pytest.raises(PlanError) as error:
        plan(llama_base, DEEPENED)
    assert [line.split(" is ")[0] for line in str(error.value).splitlines()] == [
        "config.json: num_kv_shared_layers",
        "config.json: scale_depth",
        "config.json: text_config: num_kv_shared_layers",
    ]


@pytest.mark.slow
def test_keys_that_bind_nothing_are_no_reason(llama_base):
    edit(llama_base, "config.json", **dict.fromkeys(BOUND))
    edit(llama_base, "config.json", cla_share_factor=1, num_kv_shared_layers=0)
    assert plan(llama_base, DEEPENED).layers == (0, 2)
    edit(llama_base, "config.json", cla_share_factor=2, use_cla=False)
    assert plan(llama_base, DEEPENED).layers == (0, 2)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    (
        ("llama", {"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(3\) must be equal to .* \(1\)"),
        ("llama", {"layer_types": "full_attention"}, "The `layer_types` entries must be in"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "ZeroDivisionError"),
        ("qwen2", {"max_window_layers": "all"}, "'max_window_layers' expected int, got str"),
    ),
)
def test_lists_that_do_not_fit_the_layers(base_of, tmp_path, family, changes, message):
    base = Path(shutil.copytree(base_of(family), tmp_path / "base"))
    edit(base, "config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: transformers does not read it .*{message}"):
        plan(base, DEEPENED)


def test_options_of_other_methods_are_refused_together(llama_base):
    request = Request("0", method="depth", up_width=20, collaborate="attn", init_w21="zero", dtype="float32", copies=3)
    with pytest.raises(PlanError) as error:
        plan(llama_base, request)
    lines = str(error.value).splitlines()
    assert len(lines) == 5 and all("it has no meaning for depth. Leave it out." in line for line in lines)
    with pytest.raises(PlanError, match=r"--variant is adapt, expected depth for --method depth"):
        plan(llama_base, Request("0", method="depth", variant="adapt"))


def test_a_deepened_model_is_not_expanded_again(deep_of, tmp_path):
    for request in (DEEPENED, Request("0")):
        with pytest.raises(CheckpointError, match=r"has duplicated layers, expected a base model.*Strip it first"):
            expand(deep_of().path, request, tmp_path / "again")


def shown(renderable: Any) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_plan_and_inspect_say(deep_of):
    pair = deep_of()
    lines = shown(render_plan(pair.expansion.plan)).splitlines()
    found = {name.strip(): text.strip() for name, _, text in (line.partition("  ") for line in lines)}
    assert found["duplicated layers"] == "0,2  (2 of 3)"
    assert found["new layers"] == "1,4  (of 5 then)"
    assert found["training reaches"] == "layers 1-4"
    assert found["stock form"].startswith("the folder itself: llama with more layers")
    costs = pair.expansion.plan.costs
    assert costs.parameters_added == sum(p.numel() for p in pair.expanded.parameters()) - sum(
        p.numel() for p in pair.base.parameters()
    )
    assert costs.bytes_added == sum(
        info.bytes for name, info in open_checkpoint(pair.path).tensors.items() if ".after." in name
    )
    described = inspect(pair.path)
    assert described.sizes.layers == 3
    assert described.expanded is not None
    (added,) = described.expanded.expansions.values()
    assert (added.method, added.new_layers, added.parameters) == ("depth", (1, 4), costs.parameters_added)
    assert "duplicated layers  0,2" in shown(render_inspection(described))


def test_the_card_says_what_it_is(own):
    text = make_card(read_contents(own), "me/deep", None, None, None).text
    assert "| new layers | 1,4 of 0-4 |" in text
    assert "no remote code is run" in text and "trust_remote_code" not in text
    assert "freeze_base(model)" in text and "LLaMA Pro" in text
    assert "W21" not in text and "W12" not in text


@pytest.mark.parametrize(("copied", "named"), [([0, 1], "layers 0, 1"), (None, "no layer")])
def test_a_config_that_names_other_layers_is_named_first(own: Path, copied: list[int] | None, named: str) -> None:
    wanted = ", ".join(map(str, read_manifest(own).plan.layers))
    config = json.loads((own / "config.json").read_text())
    if copied is None:
        del config["scale_surgery"]
    else:
        config["scale_surgery"]["expanded_layers"] = copied
    (own / "config.json").write_text(json.dumps(config))
    # without the key, evaluate sees a plain model
    evaluating = [] if copied is None else [lambda path: open_subjects([path])]
    for read in (verify, lambda path: extract(path, path.with_name("extract")), *evaluating):
        with pytest.raises(CheckpointError) as raised:
            read(own)
        assert str(raised.value) == (
            f"{own}/config.json: scale_surgery names {named} as duplicated, expected layers {wanted} from "
            "surgery.json. Restore config.json from where you got it."
        )


def test_new_layers_beyond_the_last_are_named(deep_of: Callable[..., Pair]) -> None:
    model = deep_of("llama").load()
    model.config.scale_surgery = {**model.config.scale_surgery, "expanded_layers": [1, 99]}
    with pytest.raises(CheckpointError, match=r"names layer 101 as new, expected one of the model's \d+"):
        freeze_base(model)


def test_an_incomplete_key_in_the_config(own: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    del config["scale_surgery"]["variant"]
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        inspect(own)
    assert str(raised.value) == (
        f"{own}/config.json: is incomplete (scale_surgery.variant is missing). Restore it from where you got it."
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda record: record["renumbered"].update({"config.json": "{}"}), "renumbered"),
        (
            lambda record: record["expansions"]["default"]["request"].update(method="foo"),
            "expansions.default: --method is 'foo', expected one of: scale, grow, depth",
        ),
        (
            lambda record: record["expansions"]["default"]["request"].update(method="scale"),
            "expansions.default: --variant is depth, expected preserve or adapt for --method scale",
        ),
        (
            lambda record: record["expansions"]["default"]["facts"]["sizes"].update(layers="x"),
            "expansions.default.facts.sizes.layers is 'x', expected a whole number",
        ),
    ],
)
def test_a_spoiled_record_is_named(own: Path, spoil: Callable[[Any], None], reason: str) -> None:
    record = json.loads((own / "surgery.json").read_text())
    spoil(record)
    (own / "surgery.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError) as raised:
        strip(own, own.with_name("base"))
    wanted = f"{own}/surgery.json: is incomplete ({reason}). Restore it from where you got it."
    assert str(raised.value) == wanted
