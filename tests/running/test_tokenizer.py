"""Token ids: the expanded folder gives those of the base, also where transformers would choose another class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from scale_surgery.planning.request import Request
from scale_surgery.running.tokenizer import load_tokenizer
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.conftest import digests
from tests.modeling.test_alone import run_fresh
from tests.tiny import save_tiny

TEXTS = ("Hello, world! It's 2024.", "  two  spaces\n\nand lines\t", "caf\u00e9 \u4f60\u597d \U0001f600", "")

# family, tokenizer_config.json (None: no such file)
CASES = {
    "qwen2_without_a_class": ("qwen2", {}),
    "qwen2_without_a_config": ("qwen2", None),
    "qwen3_named": ("qwen3", {"tokenizer_class": "Qwen2Tokenizer"}),
    "phi3_named_llama": ("phi3", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "llama_portable": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "llama_without_a_class": ("llama", {"model_max_length": 64}),
    "gpt2_without_a_class": ("gpt2", {}),
}


def write_tokenizer(folder: Path, config: dict | None) -> None:
    """A small byte-level BPE with a way of its own to split, which a class chosen by name would not know."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world 2024 it is and lines and spaces and two worlds"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}, indent=1) + "\r\n")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Path, Path, str | None]]:
    """Base, expanded and pinned class of each case."""
    made = {}
    for name, (family, config) in CASES.items():
        root = tmp_path_factory.mktemp(name)
        base = save_tiny(root / "base", family)
        write_tokenizer(base, config)
        expansion = expand(base, Request("0"), root / "expanded")
        made[name] = (base, expansion.path, expansion.pinned_tokenizer)
    return made


@pytest.fixture(scope="module")
def ids_in_a_fresh_process(folders, tmp_path_factory) -> dict[str, list]:
    """Class and ids that somebody finds who has transformers only: of each base, and of each expanded folder."""
    script = """
import json, sys
from transformers import AutoTokenizer
found = {}
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found[folder] = [type(tokenizer).__name__, [tokenizer(text)["input_ids"] for text in json.loads(sys.argv[1])]]
assert "scale_surgery" not in sys.modules
print(json.dumps(found))
"""
    paths = [path for base, expanded, _ in folders.values() for path in (base, expanded)]
    done = run_fresh(script, json.dumps(TEXTS), *paths, cwd=tmp_path_factory.mktemp("fresh"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_the_base_and_strip_gives_its_files_back(folders, ids_in_a_fresh_process, tmp_path, name):
    base, expanded, _ = folders[name]
    assert ids_in_a_fresh_process[str(base)] == ids_in_a_fresh_process[str(expanded)]
    ids = ids_in_a_fresh_process[str(base)][1]
    assert len(ids[0]) > 3
    here = AutoTokenizer.from_pretrained(expanded)
    assert [here(text)["input_ids"] for text in TEXTS] == ids
    strip(expanded, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(base)


def test_tokenizer_config_is_changed_only_where_it_must_be(folders):
    pinned = {name for name, (_, _, pinned_class) in folders.items() if pinned_class is not None}
    for base, expanded, pinned_class in folders.values():
        before, after = (folder / "tokenizer_config.json" for folder in (base, expanded))
        if pinned_class is None:
            assert before.exists() == after.exists()
            assert not before.exists() or before.read_bytes() == after.read_bytes()
        else:
            old = json.loads(before.read_text()) if before.exists() else {}
            new = json.loads(after.read_text())
            assert new == old | {"tokenizer_class": new["tokenizer_class"]}
            assert new["tokenizer_class"] in (pinned_class, "PreTrainedTokenizerFast")
    # the negative control: without it, some would have changed
    assert pinned
    assert pinned != set(CASES)


def test_without_the_pinned_class_the_ids_differ(folders):
    """The negative control: what the original file would have given in the expanded folder."""
    name = next(
        name
        for name, (_, _, pinned_class) in folders.items()
        if pinned_class is not None and CASES[name][1] is not None
    )
    base, expanded, _ = folders[name]
    file = expanded / "tokenizer_config.json"
    kept = file.read_bytes()
    try:
        file.write_bytes((base / "tokenizer_config.json").read_bytes())
        assert type(load_tokenizer(expanded)) is not type(load_tokenizer(base))
    finally:
        file.write_bytes(kept)


def test_a_folder_without_a_tokenizer(base_of, tmp_path):
    assert load_tokenizer(base_of("llama")) is None
    expansion = expand(base_of("llama"), Request("0"), tmp_path / "expanded")
    assert expansion.pinned_tokenizer is None
    assert not (expansion.path / "tokenizer_config.json").exists()
