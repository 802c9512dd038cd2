"""tokenizer.json with new tokens, as JSON: ids without holes, in the form of the base."""

from __future__ import annotations

import json

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
    assert token_ids(json.loads(text)) == wanted.get_vocab()
    wanted.add_tokens(list(ADDED.tokens))
    # without placeholders the tokens would get ids of padded rows
    assert wanted.token_to_id(ADDED.tokens[0]) == len(token_ids(json.loads(text))) < ROWS

    content = json.loads(extended_tokenizer(text, len(token_ids(json.loads(text))), ADDED))

    assert content["added_tokens"] == json.loads(wanted.to_str())["added_tokens"]
    assert content["model"]["merges"] == json.loads(text)["model"]["merges"]

    padded = extended_tokenizer(text, ROWS, ADDED)
    after = Tokenizer.from_str(padded)
    after.add_tokens(["<later>"])
    assert after.token_to_id("<later>") == ROWS + 2
    assert "ß" in padded


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
