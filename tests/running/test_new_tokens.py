"""New tokens: old ids and texts stay, new texts come back, and what they save is what the tokenizer then gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.new_tokens import (
    NewTokens,
    TokenSource,
    extended_tokenizer,
    extended_tokenizer_config,
    token_ids,
)
from scale_surgery.running import learned_tokens
from scale_surgery.running.learned_tokens import ChosenTokens, choose_new_tokens
from scale_surgery.running.new_tokens import find_new_tokens, read_new_tokens
from tests.command import run
from tests.conftest import problems, refused

ENGLISH = ["hello world the year is and lines and spaces and two worlds of the dogs"] * 5
GERMAN = (
    "Die Größe der Straße für den Hund. Straßen und Größen für Hunde, Hündinnen und die größte Straße der Größe.\n"
    "Für den Hund ist die Straße groß: 12 Größen, 12 Straßen und 12 Hunde.\n日本 und 日本 für Hunde 😀 und Hunde 😀.\n"
) * 3
OLD_TEXTS = (
    "Hello world, the year 2024!",
    "  two  spaces\n\nand lines\t",
    "<|im_start|>user\nhi<|im_end|>",
    "Łódź ☃",
    "",
)
LETTERS = "Größe der Straße für den Hund. hello world日本😀12\n<|>_"
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """As Qwen's: byte-level, special tokens behind the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.normalizer = decoders.ByteLevel(), normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(ENGLISH, trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2's: words begin with a mark, unknown characters are written in bytes."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    learned.train_from_iterator(
        ENGLISH, trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    )
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def prepended() -> Tokenizer:
    """As Llama 2's files: the mark comes from a normalizer, which new tokens go through too."""
    content = json.loads(metaspace().to_str())
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    normalizer = {"type": "Sequence", "normalizers": steps}
    return Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": None, "normalizer": normalizer}))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*ENGLISH, GERMAN], trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*ENGLISH, GERMAN], trainer)
    return tokenizer


@dataclass(frozen=True)
class Base:
    """A base's folder, rows of its embedding, and tokens that can be added to it."""

    path: Path
    rows: int
    added: tuple[str, ...]

    @property
    def content(self) -> dict[str, Any]:
        return json.loads((self.path / "tokenizer.json").read_text("utf-8"))


def save(path: Path, tokenizer: Tokenizer, config: Mapping[str, Any], model_type: str = "llama") -> Path:
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, **config}))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def listed(tokenizer: Tokenizer) -> dict[str, Any]:
    """`added_tokens_decoder`, as transformers 4 writes it."""
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return {str(token.pop("id")): token for token in added}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Base]:
    """Tokenizers of each kind, most of them with an embedding that is padded beyond them."""
    root = tmp_path_factory.mktemp("bases")
    tokenizer, metaspaced = byte_level(), metaspace()
    qwen = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "added_tokens_decoder": listed(tokenizer),
    }
    llama = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
    }
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    spaced, whole = (" Straße", " für", "日本"), ("Straße", "für", "日本")
    return {
        "shipped": Base(SHIPPED_MODEL, 1152, spaced),
        "qwen": Base(save(root / "qwen", tokenizer, qwen, "qwen2"), 320, spaced),
        "bytes": Base(save(root / "bytes", tokenizer, {**qwen, **fast}), 320, spaced),
        "llama": Base(save(root / "llama", metaspaced, llama), 400, whole),
        "prepended": Base(save(root / "prepended", prepended(), fast), 400, whole),
        "unigram": Base(save(root / "unigram", unigram(), {**fast, "unk_token": "<unk>"}), 70, ("xylo", "quux")),
        "wordpiece": Base(save(root / "wordpiece", word_piece(), {**fast, "unk_token": "[UNK]"}), 80, ("xylo", "quux")),
    }


@pytest.fixture(scope="module")
def german(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("german") / "german.txt"
    file.write_text(GERMAN, "utf-8")
    return file


@pytest.fixture(scope="module")
def chosen(bases, german) -> dict[str, ChosenTokens]:
    return {name: choose_new_tokens(bases[name].path, [german], 40, bases[name].rows) for name in BPE}


@pytest.fixture(scope="module")
def pairs(bases, chosen, tmp_path_factory) -> dict[str, tuple[Any, Any, NewTokens]]:
    """Each base's tokenizer, the same with new tokens, both as a user loads them, and the new tokens."""
    made = {}
    root = tmp_path_factory.mktemp("extended")
    for name, base in bases.items():
        file = root / f"{name}.txt"
        file.write_text("\n".join(base.added) + "\n", "utf-8")
        kinds = {"added": read_new_tokens(base.path, file, base.rows)}
        kinds |= {"learned": chosen[name].new_tokens} if name in BPE else {}
        for kind, new in kinds.items():
            folder = extend(base, new, root / name / kind)
            made[f"{name}-{kind}"] = (load(base.path), load(folder), new)
    return made


BPE = ("shipped", "qwen", "bytes", "llama", "prepended")
KINDS = [f"{name}-learned" for name in BPE] + [f"{name}-added" for name in (*BPE, "unigram", "wordpiece")]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_bpe = pytest.mark.parametrize("name", BPE)


def load(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def extend(base: Base, new: NewTokens, folder: Path) -> Path:
    """A folder with the base's tokenizer and new tokens, as `expand` writes it."""
    shutil.copytree(base.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, extended in (
        ("tokenizer.json", extended_tokenizer),
        ("tokenizer_config.json", extended_tokenizer_config),
    ):
        text = (base.path / name).read_text("utf-8")
        (folder / name).write_text(extended(text, base.rows, new), "utf-8")
    return folder


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read_back(tokenizer: Any, text: str) -> str:
    return tokenizer.decode(ids(tokenizer, text))


def in_pieces(tokenizer: Any, new: NewTokens, token_ids: list[int], first: int) -> list[int]:
    """Ids with every new token taken apart by the new merges, down to tokens of the base."""
    # of several merges with one result the first pieces do: the base's tokens in them are the same
    merged = {"".join(parts): parts for parts in (merge.split(" ") for merge in reversed(new.merges))}
    vocabulary = tokenizer.get_vocab()

    def pieces(token: str) -> list[int]:
        if token in merged:
            return [id_ for part in merged[token] for id_ in pieces(part)]
        if vocabulary[token] >= first:
            # a character that the base writes in bytes
            return [vocabulary[f"<0x{byte:02X}>"] for byte in token.encode()]
        return [vocabulary[token]]

    names = tokenizer.convert_ids_to_tokens(token_ids)
    return [id_ for name in names for id_ in pieces(name)]


@each_kind
def test_old_tokens_keep_their_ids(pairs, bases, kind: str) -> None:
    before, after, new = pairs[kind]
    rows = bases[kind.split("-")[0]].rows

    assert before.get_vocab().items() <= after.get_vocab().items()
    assert [after.convert_tokens_to_ids(token) for token in new.tokens] == list(range(rows, rows + len(new.tokens)))
    assert sorted(after.get_vocab().values()) == list(range(rows + len(new.tokens)))
    assert before.special_tokens_map == after.special_tokens_map
    assert before.all_special_ids == after.all_special_ids
    assert before.chat_template == after.chat_template
    assert type(before) is type(after)
    for text in OLD_TEXTS:
        assert ids(before, text) == ids(after, text)
        assert before(text)["input_ids"] == after(text)["input_ids"]
    # and a text with new tokens has others
    text = GERMAN if new.merges else f"a{' ' * (new.tokens[0][0] != ' ')}{new.tokens[0]} a"
    assert ids(before, text) != ids(after, text)
    if before.chat_template:
        prompts = [tokenizer.apply_chat_template(MESSAGES, tokenize=False) for tokenizer in (before, after)]
        assert prompts[0] == prompts[1]
        assert ids(before, prompts[0]) == ids(after, prompts[1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("wordpiece")])
def test_new_texts_come_back(pairs, kind: str) -> None:
    before, after, new = pairs[kind]
    # without its first token's mark, and nothing that a Unigram does not know
    text = "Die Größe der Straße für den Hund, Hunde" if not kind.startswith("unigram") else "hello xylo and quux dogs"

    assert read_back(before, text) == text or kind.startswith("unigram")
    assert read_back(after, text) == text
    assert set(ids(after, text)) & {after.convert_tokens_to_ids(token) for token in new.tokens}


@each_bpe
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("Größe der Straße für den Hund. hello world日本😀12\n<|>_"), max_size=60) | st.text()
)
@example(text=GERMAN)
@example(text="<|unused_310|> <|im_end|>ß")
def test_every_text_is_the_base_s_with_pairs_joined(pairs, bases, name: str, text: str) -> None:
    before, after, new = pairs[f"{name}-learned"]
    token_ids = ids(after, text)

    assert in_pieces(after, new, token_ids, bases[name].rows) == ids(before, text)
    if max(token_ids, default=0) < bases[name].rows:
        assert token_ids == ids(before, text)
    assert read_back(after, text) == read_back(before, text)


@pytest.mark.parametrize("name", [*BPE, "unigram", "wordpiece"])
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.sampled_from(LETTERS), max_size=60) | st.text())
@example(text="<|unused_310|> <|im_end|>ß")
@example(text="日本")
def test_a_text_without_added_tokens_is_the_base_s(pairs, name: str, text: str) -> None:
    before, after, new = pairs[f"{name}-added"]

    is_new = not set(after.convert_tokens_to_ids(list(new.tokens))).isdisjoint(ids(after, text))
    if not any(token.strip() in text for token in new.tokens):
        assert not is_new
    if not is_new:
        assert ids(before, text) == ids(after, text)
    among = f"{text} {new.tokens[0].strip()} a"
    assert after.convert_tokens_to_ids(new.tokens[0]) in ids(after, among)
    assert ids(before, among) != ids(after, among)


def test_no_merge_makes_a_token_of_the_base(tmp_path) -> None:
    """The base has "abc", but reads "ab" and "c"; to join them would change a text that has no new token."""
    vocabulary = {token: id_ for id_, token in enumerate(["a", "b", "c", "d", "ab", "bc", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("a", "bc")]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    base = Base(save(tmp_path / "base", tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}), 7, ())
    text = tmp_path / "text.txt"
    text.write_text("abc abc abc cd cd")

    new = choose_new_tokens(base.path, [text], 5, base.rows).new_tokens

    assert new == NewTokens(("cd",), ("c d",))
    before, after = load(base.path), load(extend(base, new, tmp_path / "extended"))
    assert ids(before, "abc") == ids(after, "abc") == [4, 2]
    damaged = NewTokens(("cd",), ("ab c", "c d"))
    assert ids(load(extend(base, damaged, tmp_path / "damaged")), "abc") == [6]


@each_kind
def test_the_loaded_base_cuts_new_tokens_as_its_file_says(pairs, bases, kind: str) -> None:
    """New rows begin as means of these pieces, from whichever of the two is at hand."""
    before, _, new = pairs[kind]
    file = Tokenizer.from_file(str(bases[kind.split("-")[0]].path / "tokenizer.json"))
    for read in (
        lambda tokenizer, token: tokenizer.encode(token, add_special_tokens=False).ids,
        lambda tokenizer, token: [piece.id for piece in tokenizer.model.tokenize(token)],
    ):
        assert [read(before.backend_tokenizer, token) for token in new.tokens] == [
            read(file, token) for token in new.tokens
        ]


@each_bpe
def test_what_they_save_is_what_the_tokenizer_gives(pairs, chosen, name: str) -> None:
    before, after, new = pairs[f"{name}-learned"]
    choice = chosen[name]

    assert choice.characters == len(GERMAN)
    assert choice.bytes == len(GERMAN.encode())
    assert choice.tokens_before == len(ids(before, GERMAN))
    assert choice.tokens_after[len(new.tokens)] == len(ids(after, GERMAN)) < choice.tokens_before
    standing = {token: ids(after, GERMAN).count(after.convert_tokens_to_ids(token)) for token in new.tokens}
    for entry in choice.most_saving:
        assert entry.count == standing[entry.token] > 0
        assert entry.text == after.decode(ids(after, "a" + entry.text))[1:]
    assert [entry.saved for entry in choice.most_saving] == sorted(
        (entry.saved for entry in choice.most_saving), reverse=True
    )


@each_bpe
def test_fewer_tokens_are_the_first_of_more(bases, chosen, german, name: str) -> None:
    more = chosen[name]
    number = next(iter(more.tokens_after))

    fewer = choose_new_tokens(bases[name].path, [german], number, bases[name].rows)

    assert fewer.new_tokens.tokens == more.new_tokens.tokens[:number]
    assert fewer.tokens_after[number] == more.tokens_after[number] > more.tokens_after[len(more.new_tokens.tokens)]
    assert fewer.wanted == len(fewer.new_tokens.tokens) == number


def test_a_character_that_is_written_in_bytes_is_one_token(chosen) -> None:
    new = chosen["llama"].new_tokens

    assert {"ß", "ü", "ö"} <= set(new.tokens)
    assert not any("<0x" in token for token in new.tokens)
    # no merge makes one
    assert {"ß", "ü", "ö"}.isdisjoint("".join(merge.split(" ")) for merge in new.merges)


def test_what_no_two_tokens_share_is_learned_no_further(bases, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("zq zq xw", "utf-8")

    choice = choose_new_tokens(bases["shipped"].path, [text], 50, 1152)

    assert 0 < len(choice.new_tokens.tokens) < 50
    assert choice.wanted == 50
    assert not any("xw" in token for token in choice.new_tokens.tokens)


def test_memory_is_bounded_by_forgetting_the_rarest_words(bases, german, chosen, monkeypatch) -> None:
    monkeypatch.setattr(learned_tokens, "MOST_WORDS", 3)

    choice = choose_new_tokens(bases["qwen"].path, [german], 40, 320)

    assert choice.tokens_before == chosen["qwen"].tokens_before
    assert 0 < len(choice.new_tokens.tokens) < len(chosen["qwen"].new_tokens.tokens)


def test_the_same_tokens_are_chosen_again(bases, german, chosen) -> None:
    for name in BPE:
        assert choose_new_tokens(bases[name].path, [german], 40, bases[name].rows) == chosen[name]


def test_questions_and_conversations_are_read(bases, tmp_path) -> None:
    rows = [
        {"question": "Wie heißt die Straße?", "answer": "Straße"},
        {"messages": [{"role": "user", "content": "Straße?"}, {"role": "assistant", "content": "Die Straße."}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")

    choice = choose_new_tokens(bases["qwen"].path, [file], 20, 320)

    assert any(entry.text.strip() == "Straße" and entry.count >= 3 for entry in choice.most_saving)


def test_added_tokens_are_lost_where_the_config_does_not_list_them(bases, pairs, tmp_path) -> None:
    """Why tokenizer_config.json is extended too: transformers 5 reads added tokens there."""
    base, (_, after, new) = bases["qwen"], pairs["qwen-added"]
    folder = extend(base, new, tmp_path / "damaged")
    shutil.copyfile(base.path / "tokenizer_config.json", folder / "tokenizer_config.json")

    assert ids(after, "ein für")[-1] == 321
    assert ids(load(folder), "ein für")[-1] < 321


@each_kind
def test_a_folder_with_the_tokens_gives_them_back(pairs, bases, tmp_path, kind: str) -> None:
    base, new = bases[kind.split("-")[0]], pairs[kind][2]

    assert read_new_tokens(base.path, extend(base, new, tmp_path / "extended"), base.rows) == new


@pytest.mark.parametrize("name", [*BPE, "unigram", "wordpiece"])
def test_a_folder_that_add_tokens_made_gives_its_tokens(bases, tmp_path, name: str) -> None:
    base = bases[name]
    tokenizer = load(base.path)
    tokenizer.add_tokens(["xylo", "quux"])
    tokenizer.save_pretrained(tmp_path)
    # in padded rows, or behind the last one
    first = tokenizer.convert_tokens_to_ids("xylo")
    assert first == len(token_ids(base.content)) <= base.rows

    assert read_new_tokens(base.path, tmp_path, base.rows) == NewTokens(("xylo", "quux"))


def test_a_folder_whose_merges_are_texts_is_read_like_one_with_pairs(bases, pairs, tmp_path) -> None:
    base, new = bases["qwen"], pairs["qwen-learned"][2]
    folder = extend(base, new, tmp_path / "extended")
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["model"]["merges"] = list(map(" ".join, content["model"]["merges"]))
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")

    assert read_new_tokens(base.path, folder, base.rows) == new


def change_special(content: dict[str, Any]) -> None:
    content["added_tokens"][-1]["special"] = True


def change_flags(content: dict[str, Any]) -> None:
    content["added_tokens"][-1]["lstrip"] = True


def change_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]


def change_normalizer(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "NFKC"}


def change_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"][0], content["model"]["merges"][1] = content["model"]["merges"][1::-1]


def add_nothing(content: dict[str, Any]) -> None:
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 320]


def with_flag(flag: str) -> tuple[str, list[Problem], dict[str, Any]]:
    return "tokens-with-flags", [Problem("token-with-flags", "'日本'", flags=[flag])], {"odd": 1, "of": 3}


FOLDERS: dict[Callable[[dict[str, Any]], None], tuple[str, list[Problem], dict[str, Any]]] = {
    change_special: with_flag("special"),
    change_flags: with_flag("lstrip"),
    change_ids: ("tokens-moved", [], {"moved": 2, "of": 294, "tokens": ["'!'", "'\"'"]}),
    change_normalizer: ("tokenizer-differs", [], {"parts": ["normalizer"]}),
    change_merges: ("tokenizer-differs", [], {"parts": ["merges"]}),
    add_nothing: ("tokens-none-new", [], {}),
}


@pytest.mark.parametrize("change", FOLDERS)
def test_a_folder_of_another_tokenizer_is_refused(bases, pairs, tmp_path, change) -> None:
    # of a class that reads all of the file
    base = bases["bytes"]
    folder = extend(base, pairs["qwen-added"][2], tmp_path / "extended")
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")

    code, details, values = FOLDERS[change]
    assert problems(read_new_tokens, base.path, folder, base.rows) == [Problem(code, folder, *details, **values)]


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_refused(bases, tmp_path) -> None:
    base = bases["qwen"]

    with refused("tokenizer-json-missing", tmp_path):
        read_new_tokens(base.path, tmp_path, base.rows)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with refused("tokenizer-json-unreadable", tmp_path / "tokenizer.json"):
        read_new_tokens(base.path, tmp_path, base.rows)


def test_all_that_is_wrong_with_a_file_is_said_at_once(bases, tmp_path) -> None:
    base, file = bases["qwen"], tmp_path / "tokens.txt"
    file.write_text(" neu\n\n \t\nfoo\nfoo\n<|im_end|>\né\n world\n", "utf-8")

    assert problems(read_new_tokens, base.path, file, base.rows) == [
        Problem("token-blank", f"{file}, line 2"),
        Problem("token-blank", f"{file}, line 3"),
        Problem("token-repeated", f"{file}, line 5", token="foo", line=4),
        Problem("token-known", f"{file}, line 6", token="<|im_end|>", id=292),
        Problem("token-known", f"{file}, line 7", token="é", id=165),
        # 'Ġworld' in tokenizer.json
        Problem("token-known", f"{file}, line 8", token=" world", id=267),
    ]
    (tmp_path / "empty.txt").write_text("")
    with refused("token-blank", f"{tmp_path / 'empty.txt'}, line 1"):
        read_new_tokens(base.path, tmp_path / "empty.txt", base.rows)
    with refused("tokens-missing", tmp_path / "absent"):
        read_new_tokens(base.path, tmp_path / "absent", base.rows)


def test_the_file_of_another_system_is_read(bases, tmp_path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_bytes("\ufefffoo\r\n für\r\nbar".encode())

    assert read_new_tokens(bases["qwen"].path, file, 320) == NewTokens(("foo", " für", "bar"))


def test_a_token_that_would_not_come_back_is_refused_with_one_that_does(bases, tmp_path) -> None:
    """A byte-level decoder takes ß for a byte, unless something stands in the token that can be none."""
    file = tmp_path / "tokens.txt"
    file.write_text("Straße\nquux\nfür\n", "utf-8")
    read = {"Straße": "Stra\ufffde", "für": "f\ufffdr"}

    assert problems(read_new_tokens, bases["qwen"].path, file, 320) == [
        Problem("token-read-otherwise", repr(token), text=f"a {token} a", read=f"a {back} a", other=f" {token}")
        for token, back in read.items()
    ]
    file.write_text(" Straße\nquux\n für\n", "utf-8")
    read_new_tokens(bases["qwen"].path, file, 320)
    # where words begin with a mark, the space is no part of what is searched
    assert problems(read_new_tokens, bases["prepended"].path, file, 400) == [
        Problem("token-not-found", repr(f" {token}"), text=f"a {token} a", other=token) for token in read
    ]


def test_a_base_that_cannot_take_tokens_is_refused(bases, german, tmp_path) -> None:
    rows, file = 320, tmp_path / "tokens.txt"
    file.write_text("foo\n")

    def wrong_with(folder: Path, rows: int = rows) -> list[Problem]:
        wrong = problems(read_new_tokens, folder, file, rows)
        assert problems(choose_new_tokens, folder, [german], 3, rows) == wrong
        return wrong

    bare = shutil.copytree(bases["qwen"].path, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert wrong_with(bare) == [Problem("tokenizer-json-missing", bare)]
    python = shutil.copytree(bases["qwen"].path, tmp_path / "python")
    (python / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (python / "config.json").write_text('{"model_type": "t5"}')
    assert wrong_with(python) == [Problem("tokenizer-in-python", python, kind="ByT5Tokenizer")]
    elsewhere = shutil.copytree(bases["qwen"].path, tmp_path / "elsewhere")
    config = json.loads((elsewhere / "tokenizer_config.json").read_text())
    (elsewhere / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<pad>"}))
    assert wrong_with(elsewhere) == [
        Problem("tokenizer-json-differs", elsewhere / "tokenizer.json", count=1, tokens=["'<pad>'"])
    ]
    small = bases["qwen"].path
    assert wrong_with(small, 290) == [Problem("token-id-too-high", small, id=293, text="'<tool>'", rows=290)]


def test_only_merges_can_be_gone_on_with(bases, german, tmp_path) -> None:
    for name, kind in (("unigram", "Unigram"), ("wordpiece", "WordPiece")):
        path = bases[name].path
        assert problems(choose_new_tokens, path, [german], 3, bases[name].rows) == [
            Problem("tokenizer-not-bpe", path, kind=kind)
        ]
    once = tmp_path / "once.txt"
    once.write_text("x")
    with refused("texts-without-pairs", once):
        choose_new_tokens(bases["qwen"].path, [once], 3, 320)
    with refused("count-too-low", "--count"):
        choose_new_tokens(bases["qwen"].path, [once], 0, 320)


def test_a_count_of_tokens_that_are_not_learned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("Xylophone\n")
    expected = Problem("count-without-texts", "--count", count=5)
    for source in (TokenSource(token_count=5), TokenSource(str(tmp_path / "tokens.txt"), token_count=5)):
        assert problems(find_new_tokens, SHIPPED_MODEL, source, error=PlanError) == [expected]
    for command in ("plan", "expand"):
        shown = run(command, SHIPPED_MODEL, "--layers", "last:1", "--count", "5", "--json", code=1).stdout
        assert json.loads(shown)["problems"] == [expected.to_json()]
