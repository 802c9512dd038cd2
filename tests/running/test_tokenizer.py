"""Token ids: the expanded folder gives those of the base, also where transformers would choose another class."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_surgery.evidence.verify import verify
from scale_surgery.planning.new_tokens import NewTokens, TokenSource, extend_json
from scale_surgery.planning.request import Request
from scale_surgery.running import tokenizer as tokenizers_kept
from scale_surgery.running.base_tokenizer import facts_of, forget_base_tokenizers
from scale_surgery.running.new_tokens import check_new_tokens, find_new_tokens
from scale_surgery.running.options import Probes
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
def fresh_process(folders, tmp_path_factory) -> tuple[list, dict[str, list]]:
    """What somebody finds who has transformers only.

    First of one expanded folder with each flag: ids, whether he was asked, whether its code ran. Then class and ids of
    each base and of each expanded folder.
    """
    script = """
import io, json, sys
from contextlib import redirect_stdout
from transformers import AutoTokenizer
flagged, found = [], {}
for flags in ({"trust_remote_code": False}, {}, {"trust_remote_code": True}):
    sys.stdin = io.StringIO("n\\n")
    with redirect_stdout(io.StringIO()) as said:
        ids = AutoTokenizer.from_pretrained(sys.argv[2], **flags)("hello world")["input_ids"]
    runs_code = any(name.startswith("transformers_modules.") for name in sys.modules)
    flagged.append([ids, "run the custom code?" in said.getvalue(), runs_code])
for folder in sys.argv[3:]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found[folder] = [type(tokenizer).__name__, [tokenizer(text)["input_ids"] for text in json.loads(sys.argv[1])]]
assert "scale_surgery" not in sys.modules
print(json.dumps([flagged, found]))
"""
    paths = [path for base, expanded, _ in folders.values() for path in (base, expanded)]
    flagged = folders["qwen3_named"][1]
    done = run_fresh(script, json.dumps(TEXTS), flagged, *paths, cwd=tmp_path_factory.mktemp("fresh"))
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.fixture(scope="module")
def ids_in_a_fresh_process(fresh_process) -> dict[str, list]:
    return fresh_process[1]


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


def test_a_tokenizer_loads_without_a_question_and_without_code(folders, fresh_process):
    ids = load_tokenizer(folders["qwen3_named"][1])("hello world")["input_ids"]
    # the negative controls: without the flag it asks, and with the other its code runs; as soon as transformers asks no
    # more, docs/trust.md can do without a flag
    assert fresh_process[0] == [[ids, False, False], [ids, True, False], [ids, False, True]]


def test_a_class_is_found_without_a_vocabulary(folders):
    chosen = set()
    for base, expanded, _ in folders.values():
        for folder in (base, expanded):
            assert tokenizers_kept._find_class(folder) is type(load_tokenizer(folder))
            chosen.add(type(load_tokenizer(folder)))
    # the negative control: always the same class would be right for some
    assert len(chosen) > 1


def test_the_files_decide_where_mistral_common_would_be_chosen(folders, monkeypatch):
    """It reads tekken.json where it is installed, lacks some methods, and is nowhere else."""

    class MistralCommonBackend:
        """Stands in for the class of transformers, which needs a package that is not installed here."""

    folder, _, _ = folders["llama_portable"]
    tokenizers_kept._kept.clear()
    expected = load_tokenizer(folder)
    tokenizers_kept._kept.clear()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    found = load_tokenizer(folder)
    assert type(found) is type(expected) and found(TEXTS[0])["input_ids"] == expected(TEXTS[0])["input_ids"]
    tokenizers_kept._kept.clear()


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """Folders from which transformers loads a tokenizer with its vocabulary."""
    folders, load = list[Path](), PreTrainedTokenizerBase._from_pretrained.__func__

    def counted(cls, resolved, folder, *args, **options):
        if json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]:
            folders.append(Path(folder))
        return load(cls, resolved, folder, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "_from_pretrained", classmethod(counted))
    tokenizers_kept._kept.clear()
    return folders


def test_a_tokenizer_of_the_same_files_is_loaded_once(folders, tmp_path, loaded):
    base, expanded, _ = folders["qwen3_named"]
    first, second = load_tokenizer(base), load_tokenizer(expanded)
    assert loaded == [base]
    assert (first.name_or_path, second.name_or_path) == (str(base), str(expanded))
    # what is set on one copy is not set on another
    second.chat_template, second.eos_token = "{{ messages }}", "<s>"
    second.model_input_names.append("more")
    third = load_tokenizer(base)
    assert (third.chat_template, third.eos_token) == (first.chat_template, "</s>") == (None, "</s>")
    assert "more" not in third.model_input_names
    # the negative controls: another token, a template, another class
    other = Path(shutil.copytree(expanded, tmp_path / "other"))
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<unk>"', '"<unknown>"'))
    assert load_tokenizer(other).convert_tokens_to_ids("<unknown>") == 3
    shutil.copyfile(base / "tokenizer.json", tokenizer)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(other).chat_template == "{{ messages }}"
    (other / "chat_template.jinja").unlink()
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert type(load_tokenizer(other)) is not type(first)
    assert loaded == [base, other, other, other]


def test_a_command_loads_a_tokenizer_once(tmp_path, loaded):
    for config, pinned in (({"tokenizer_class": "Qwen2Tokenizer"}, False), ({}, True)):
        base = save_tiny(tmp_path / f"base-{pinned}", "qwen2", vocab_size=300)
        write_tokenizer(base, config)
        tokenizers_kept._kept.clear()
        loaded.clear()
        expansion = expand(base, Request("0"), tmp_path / f"expanded-{pinned}")
        assert (expansion.pinned_tokenizer is not None, loaded) == (pinned, [base])
        assert verify(expansion.path, probes=Probes(max_new_tokens=0)).passed
        # the negative control: with a class that had to be pinned, files differ, so both are loaded and compared
        assert len(loaded) == (2 if pinned else 1)


def test_new_tokens_load_the_tokenizer_without_them_and_with_them(tmp_path, loaded):
    base, words = save_tiny(tmp_path / "base", "llama", vocab_size=300), tmp_path / "words.txt"
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    words.write_text("zorbified\nunzorbified")
    tokens = find_new_tokens(base, TokenSource(token_file=str(words)))
    expansion = expand(base, Request("none", new_tokens=tokens), tmp_path / "expanded")
    assert [base, len(loaded)] == [loaded[0], 2]
    # the negative control: what is kept is not taken for the one with new tokens
    assert load_tokenizer(expansion.path).convert_tokens_to_ids("zorbified") == 300
    assert load_tokenizer(base).convert_tokens_to_ids("zorbified") != 300


def test_new_tokens_that_a_command_found_are_tried_once(tmp_path, loaded):
    base, words = save_tiny(tmp_path / "base", "llama", vocab_size=300), tmp_path / "words.txt"
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    words.write_text("zorbified")
    tokens = find_new_tokens(base, TokenSource(token_file=str(words)))
    assert isinstance(tokens, NewTokens)
    given = load_tokenizer(base)
    tokenizers_kept.forget_tokenizers()
    loaded.clear()
    check_new_tokens(base, given, tokens, 300)
    assert loaded == []
    # the negative controls: other tokens, other rows, another tokenizer
    check_new_tokens(base, given, NewTokens(("unzorbified",)), 300)
    check_new_tokens(base, given, tokens, 301)
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>"}')
    check_new_tokens(base, given, tokens, 300)
    assert len(loaded) == 3


def test_nothing_of_a_tokenizer_is_kept_while_models_run(tmp_path, loaded):
    base, words = save_tiny(tmp_path / "base", "llama", vocab_size=300), tmp_path / "words.txt"
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    words.write_text("zorbified")
    tokens = find_new_tokens(base, TokenSource(token_file=str(words)))
    expand(base, Request("none", new_tokens=tokens), tmp_path / "expanded")

    def kept():
        return len(tokenizers_kept._kept), facts_of.cache_info().currsize, extend_json.cache_info().currsize

    # the negative control: after a command with new tokens something is kept of each
    assert all(kept())
    forget_base_tokenizers()
    assert not any(kept())
