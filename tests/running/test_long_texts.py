"""Long texts: pieces give the tokens of the whole, whatever kind of tokenizer, also where no two pieces agree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.running import long_texts
from scale_surgery.running.long_texts import tokenize_long

GPT_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PEOPLE = [biography(person, style) for person in people(30, start=400) for style in range(3)]
# what tokenizers stumble over: runs, spaces, digits, letters of several bytes and of several characters
ODD = [
    *("a" * 1500, "ab" * 700, " " * 900, "\n\n\n \n" * 90, "1234567890" * 90, "\t \u00a0 \u3000" * 60),
    *("🧑‍🚀👩‍👩‍👧 " * 90, "e\u0301o\u0308" * 200, "東京都" * 200, "don't we'll they've " * 60, "<|end|>" * 70),
]


def mixed(seed: int) -> str:
    parts = [*PEOPLE, *ODD]
    random.Random(seed).shuffle(parts)
    return " ".join(parts)


def learned(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, trained on the people and on some of the rest."""
    unigram = kind == "unigram"
    made = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":
        split = pre_tokenizers.Split(Regex(GPT_SPLIT), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        made.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
        )
    elif kind == "unsplit":  # as that of Llama 2: spaces are letters, and nothing is split before the merges
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<|end|>"], max_token_length=12)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<|end|>"], unk_token="<unk>")
    made.train_from_iterator([text[:300] for text in [*PEOPLE[:30], *ODD]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=None if kind == "bytes" else "<unk>")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 700)
    monkeypatch.setattr(long_texts, "OVERLAP", 250)
    monkeypatch.setattr(long_texts, "PIECES_AT_ONCE", 3)


def in_pieces(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def whole(text: str, tokenizer: Any) -> list[int]:
    return tokenizer([text], add_special_tokens=False)["input_ids"][0]


@pytest.mark.parametrize("kind", ["bytes", "unsplit", "unigram"])
def test_pieces_give_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer = learned(kind)
    for seed in range(3):
        text = mixed(seed)
        found = list(tokenize_long(in_pieces(text, 333), tokenizer))
        assert list(chain.from_iterable(found)) == whole(text, tokenizer)
        assert len(found) > 20, "the control: it was read in pieces"


def test_pieces_that_do_not_agree_are_read_as_one() -> None:
    tokenizer = learned("unsplit")
    for text in ("a" * 5000, "ab" * 2500, " " * 5000, "a" * 4999 + "b"):
        assert list(chain.from_iterable(tokenize_long(in_pieces(text, 1000), tokenizer))) == whole(text, tokenizer)


def test_cut_without_an_overlap_it_would_be_other_tokens() -> None:
    tokenizer, text = learned("unsplit"), mixed(0)
    cut = [whole(piece, tokenizer) for piece in in_pieces(text, 700)]
    assert list(chain.from_iterable(cut)) != whole(text, tokenizer)


def test_the_shipped_tokenizer_and_short_texts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    for text in (mixed(5), "a", PEOPLE[0], ""):
        assert list(chain.from_iterable(tokenize_long([text], tokenizer))) == whole(text, tokenizer)


def test_a_tokenizer_without_places_is_given_the_whole() -> None:
    class Slow:
        is_fast = False

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    (found,) = tokenize_long(in_pieces("abc" * 900, 700), Slow())
    assert found.tolist() == [ord(letter) for letter in "abc" * 900]
