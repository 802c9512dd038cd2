"""tokenizer.json with new tokens, as JSON: ids without holes, in the form of the base."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from scale_surgery.planning.new_tokens import (
    NewTokens,
    extended_tokenizer,
    extended_tokenizer_config,
    token_ids,
    unused_ids,
)

ROWS = 64
LEARNED = NewTokens(("ld!", "world!"), ("ld !", "wor ld!"))
ADDED = NewTokens(("foo", "straße"))


def base(form: str = "pairs") -> str:
    """Five merges, and two added tokens whose ids come behind the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=14, show_progress=False)
    tokenizer.train_from_iterator(["hello world !"] * 3, trainer)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<tool>"])
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [["l", "d"], ["w", "o"], ["wo", "r"]]
    for token in ("ld", "wo", "wor"):
        content["model"]["vocab"].setdefault(token, len(content["model"]["vocab"]))
    for token in content["added_tokens"]:
        token["id"] = len(content["model"]["vocab"]) + content["added_tokens"].index(token)
    if form == "texts":
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    return json.dumps(content)


@pytest.mark.parametrize("form", ["pairs", "texts"])
@pytest.mark.parametrize("new", [LEARNED, ADDED], ids=["learned", "added"])
def test_every_id_is_a_token_and_the_old_ones_stay(new: NewTokens, form: str) -> None:
    text = base(form)
    before, after = Tokenizer.from_str(text), Tokenizer.from_str(extended_tokenizer(text, ROWS, new))

    assert token_ids(json.loads(text)) == before.get_vocab()
    assert before.get_vocab().items() <= after.get_vocab().items()
    assert sorted(after.get_vocab().values()) == list(range(ROWS + 2))
    assert [after.token_to_id(token) for token in new.tokens] == [ROWS, ROWS + 1]
    after.add_tokens(["<later>"])
    assert after.token_to_id("<later>") == ROWS + 2
    # without placeholders the tokens would get ids of padded rows
    before.add_tokens(list(new.tokens))
    assert before.token_to_id(new.tokens[0]) == len(token_ids(json.loads(text))) < ROWS


def test_merges_come_last_in_the_form_of_the_base() -> None:
    pairs, texts = (json.loads(extended_tokenizer(base(form), ROWS, LEARNED)) for form in ("pairs", "texts"))

    assert pairs["model"]["merges"] == [["l", "d"], ["w", "o"], ["wo", "r"], ["ld", "!"], ["wor", "ld!"]]
    assert texts["model"]["merges"] == ["l d", "w o", "wo r", "ld !", "wor ld!"]
    assert pairs["added_tokens"] == json.loads(base())["added_tokens"]
    for content in (pairs, texts):
        assert Tokenizer.from_str(json.dumps(content)).encode("world!").ids == [ROWS + 1]


def test_added_tokens_are_those_of_add_tokens() -> None:
    text = base()
    wanted = Tokenizer.from_str(text)
    wanted.add_tokens(list(ADDED.tokens))

    content = json.loads(extended_tokenizer(text, len(token_ids(json.loads(text))), ADDED))

    assert content["added_tokens"] == json.loads(wanted.to_str())["added_tokens"]
    assert content["model"]["merges"] == json.loads(text)["model"]["merges"]


def test_a_hole_among_the_ids_of_the_base_is_filled() -> None:
    content = json.loads(base())
    content["model"]["vocab"]["far"] = 40
    for place, token in enumerate(content["added_tokens"]):
        token["id"] = 41 + place
        content["model"]["vocab"][token["content"]] = 41 + place
    text = json.dumps(content)

    after = Tokenizer.from_str(extended_tokenizer(text, ROWS, ADDED))

    assert Tokenizer.from_str(text).get_vocab().items() <= after.get_vocab().items()
    assert [after.token_to_id(token) for token in ADDED.tokens] == [ROWS, ROWS + 1]
    assert len(unused_ids(content, ROWS)) == ROWS - len(token_ids(content))


def test_a_vocabulary_without_ids_of_its_own_takes_placeholders_as_added_tokens() -> None:
    model = models.Unigram([("<unk>", 0.0), ("a", -1.5), ("b", -2.25)], unk_id=0)
    text = Tokenizer(model).to_str()

    content = json.loads(extended_tokenizer(text, 5, ADDED))
    after = Tokenizer.from_str(json.dumps(content))

    assert content["model"] == json.loads(text)["model"]
    assert [token["content"] for token in content["added_tokens"]] == ["<|unused_3|>", "<|unused_4|>", "foo", "straße"]
    assert [after.token_to_id(token) for token in ADDED.tokens] == [5, 6]


def test_a_config_that_lists_added_tokens_lists_the_new_ones() -> None:
    listed = json.dumps({"added_tokens_decoder": {"3": {"content": "<s>", "special": True}}, "eos_token": "<s>"})
    bare = '{"eos_token": "<s>"}\r\n'

    decoder = json.loads(extended_tokenizer_config(listed, ROWS, ADDED))["added_tokens_decoder"]

    assert list(decoder) == ["3", "64", "65"]
    assert decoder["65"]["content"] == "straße"
    assert not decoder["65"]["special"]
    # transformers reads learned tokens from tokenizer.json alone, and added ones too where no config lists them
    assert extended_tokenizer_config(listed, ROWS, LEARNED) == listed
    assert extended_tokenizer_config(bare, ROWS, ADDED) == bare


def test_the_same_text_comes_out_each_time() -> None:
    once, repeated = (extended_tokenizer(base(), ROWS, LEARNED) for _ in range(2))

    assert once == repeated
    assert "ß" in extended_tokenizer(base(), ROWS, ADDED)
    assert extended_tokenizer(base(), ROWS, ADDED) != once
