"""Files that name code to run: kernels, classes of other repositories, adapters, templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS

from scale_surgery import Probes, Request, RunOptions, expand, inspect, plan, strip, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.code_names import BUILT_IN
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.modeling.expanded_modules import SPLIT_ATTENTION
from scale_surgery.running.loading import loaded
from scale_surgery.running.tokenizer import load_tokenizer, need_tokenizer
from tests.command import run
from tests.composed import Made
from tests.conftest import Pair, edited, problems, refused
from tests.dense_reference import JOINT_ATTENTION

TRUSTED = RunOptions(device="cpu", trust_remote_code=True)


def edit_json(file: Path, **changes: object) -> None:
    with edited(file) as content:
        content |= changes


# each has to look into a config
COMMANDS = (
    *("inspect BASE", "plan BASE --layers 1", "expand BASE --layers 1 -o OUT", "generate BASE --prompt x"),
    *("evaluate BASE --old TEXT", "rank-layers BASE --data TEXT", "learn BASE --data TEXT -o OUT"),
    *("inspect WIDE", "verify WIDE", "merge WIDE -o OUT", "extract WIDE -o OUT", "route-export WIDE -o OUT"),
    *("report WIDE", "train WIDE --data TEXT -o OUT", "push WIDE someone/model", "adopt WIDE --expanded WIDE -o OUT"),
    *("inspect MANY", "verify MANY", "route-calibrate MANY --old TEXT --new TEXT"),
    *("apply EXTRACT --base GOOD -o OUT", "apply PART --base BASE -o OUT", "compose BASE PART -o OUT"),
)


# kernels

# each with the place, and the value found there
KERNELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": ({"_attn_implementation": "org/kernel"}, "_attn_implementation", "org/kernel"),
    "public": ({"attn_implementation": "org/kernel"}, "attn_implementation", "org/kernel"),
    # CVE-2026-4372
    "internal": ({"_attn_implementation_internal": "org/kernel"}, "_attn_implementation_internal", "org/kernel"),
    "experts": ({"experts_implementation": "org/kernel"}, "experts_implementation", "org/kernel"),
    "experts inside": ({"_experts_implementation_internal": "o/k"}, "_experts_implementation_internal", "o/k"),
    "revision": ({"attn_implementation": "org/kernel@v1:run"}, "attn_implementation", "org/kernel@v1:run"),
    "paged": ({"attn_implementation": "paged|org/kernel"}, "attn_implementation", "paged|org/kernel"),
    "known": (
        {"attn_implementation": "kernels-community/flash-attn2"},
        "attn_implementation",
        "kernels-community/flash-attn2",
    ),
    "no repository": ({"attn_implementation": "someone"}, "attn_implementation", "someone"),
    "a part": ({"text_config": {"_attn_implementation": "o/k"}}, "text_config._attn_implementation", "o/k"),
    "by part": ({"attn_implementation": {"": "sdpa", "vision_config": "o/k"}}, "attn_implementation", "o/k"),
    "a list": (
        {"parts": [{}, {"inner": {"attn_implementation": "o/k"}}]},
        "parts[1].inner.attn_implementation",
        "o/k",
    ),
    "a layer": (
        {"per_layer_config": {"0": {"_attn_implementation": "o/k"}}},
        "per_layer_config.0._attn_implementation",
        "o/k",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_a_config_names(llama_base: Path, name: str) -> None:
    change, place, value = KERNELS[name]
    edit_json(llama_base / "config.json", **change)
    wanted = Problem("config-kernel", f"{llama_base / 'config.json'}: {place}", value=value)
    assert problems(inspect, llama_base, error=CheckpointError) == [wanted]


# the second gives another key the meaning of attribute_map itself
@pytest.mark.parametrize("aliases", ({"kind": "_attn_implementation"}, {"other": "attribute_map"}))
def test_keys_that_get_another_meaning(llama_base: Path, aliases: dict[str, str]) -> None:
    edit_json(llama_base / "config.json", attribute_map=aliases, other={"kind": "_attn_implementation"}, kind="o/k")
    with refused("config-alias", f"{llama_base / 'config.json'}: attribute_map", CheckpointError):
        inspect(llama_base)


def test_implementations_of_transformers_are_kept(llama_base: Path) -> None:
    """Also those that are not installed here, and where no name stands."""
    known = {*ALL_ATTENTION_FUNCTIONS.valid_keys(), *ALL_EXPERTS_FUNCTIONS, *ALL_FP8_EXPERTS_FUNCTIONS, "eager"}
    # the two are registered by expanded models and by a test
    for name in sorted((known | BUILT_IN) - {SPLIT_ATTENTION, JOINT_ATTENTION}):
        asked = {"": name, "text_config": None}
        edit_json(llama_base / "config.json", attn_implementation=asked, _attn_implementation_autoset=True)
        assert open_checkpoint(llama_base).config["attn_implementation"] == asked
    edit_json(llama_base / "config.json", attn_implementation="flash_attention_3")
    assert plan(llama_base, Request("0")).layers == (0,)


def test_every_way_into_a_folder_is_guarded(speaking: tuple[Made, Path], tmp_path: Path) -> None:
    """A base, an expanded and a composed folder, an extract; nothing is written."""
    made, composed = speaking
    given = {"BASE": made.base, "WIDE": made.folders["law"], "EXTRACT": made.extracts["law"], "MANY": composed}
    places = {name: str(shutil.copytree(folder, tmp_path / name)) for name, folder in given.items()}
    for place in places.values():
        edit_json(Path(place) / "config.json", text_config={"attn_implementation": "o/k"})
    places |= {"GOOD": str(made.base), "PART": str(made.extracts["music"]), "TEXT": __file__}
    places |= {"OUT": str(tmp_path / "out")}
    before = sorted(tmp_path.rglob("*"))
    for line in COMMANDS:
        output = " ".join(run(*(places.get(word, word) for word in line.split()), code=1).output.split())
        assert "text_config.attn_implementation is 'o/k', expected an" in output, (line, output)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_config_of_a_base_that_a_record_holds(llama: Pair, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "wide"))
    with edited(folder / "surgery.json") as record:
        config = json.loads(record["replaced"]["config.json"]) | {"attn_implementation": "org/kernel"}
        record["replaced"]["config.json"] = json.dumps(config)
    place = f"{folder / 'surgery.json'}: replaced.config.json: attn_implementation"
    with refused("config-kernel", place, CheckpointError):
        strip(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# classes of the folder, and of other repositories


def plant(folder: Path, marker: Path) -> None:
    """Code in every place where transformers looks for some, which leaves a file behind when it runs."""
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Code: pass\n"
    for name in ("planted.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    # the trust of CVE-2026-5241, and what it would let run
    inside = {"trust_remote_code": True, "auto_map": {"AutoConfig": "planted.Code", "AutoModel": "planted.Code"}}
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    config = {
        "auto_map": dict.fromkeys(classes, "planted.Code"),
        "trust_remote_code": True,
        "vision_config": inside,
    }
    edit_json(folder / "config.json", **config)
    edit_json(
        folder / "tokenizer_config.json", trust_remote_code=True, auto_map={"AutoTokenizer": ["planted.Code"] * 2}
    )
    edit_json(folder / "generation_config.json", trust_remote_code=True, custom_generate=str(folder))
    for name in ("processor_config.json", "preprocessor_config.json"):
        edit_json(folder / name, trust_remote_code=True, auto_map={"AutoProcessor": "planted.Code"})


def test_no_code_of_a_folder_runs_unasked(tmp_path: Path) -> None:
    base, marker = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base")), tmp_path / "it-ran"
    plant(base, marker)
    run = RunOptions(device="cpu")
    inspect(base)
    wide = expand(base, Request("last:1"), tmp_path / "wide", run=run).path
    assert verify(wide, probes=Probes(max_new_tokens=2), run=run).passed
    load_tokenizer(wide, run)
    assert not marker.exists()


@pytest.mark.parametrize("file", ("config.json", "tokenizer_config.json", "processor_config.json"))
def test_trust_in_a_folder_is_no_trust_in_another(llama_base: Path, file: str) -> None:
    edit_json(llama_base / file, auto_map={"AutoModel": "code.Code", "AutoTokenizer": [None, "org/other--code.Code"]})
    place = f"{llama_base / file}: auto_map"
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", llama_base)
    with refused("code-elsewhere", place, CheckpointError), loaded(llama_base, TRUSTED):
        pass
    with refused("code-elsewhere", place, CheckpointError):
        need_tokenizer(llama_base, "base", TRUSTED)
    with refused("code-elsewhere", place, CheckpointError):
        expand(llama_base, Request("0"), llama_base.parent / "wide", run=TRUSTED)
    # without trust nothing is taken from anywhere
    with loaded(llama_base, RunOptions(device="cpu")) as (_, found):
        assert not found


def test_a_chat_template_reaches_nothing(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(SHIPPED_MODEL / file, tmp_path)
    marker = tmp_path / "it-ran"
    template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.mknod('"
        + str(marker)
        + "') }}"
    )
    edit_json(tmp_path / "tokenizer_config.json", chat_template=template, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = need_tokenizer(tmp_path, "model")
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert not marker.exists()


def test_an_adapter_beside_weights(llama_base: Path) -> None:
    edit_json(llama_base / "adapter_config.json", base_model_name_or_path="org/other", peft_type="LORA")
    with refused("folder-with-adapter", llama_base, CheckpointError):
        inspect(llama_base)
