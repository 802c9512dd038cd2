"""The base of benchmarks/language: a small Llama that reads one language and has met a second one.

Its tokenizer is a byte-level BPE of both languages, so that the second one costs no more tokens than it must; where
new tokens are compared, of the first and a little of the second. The base is trained on the first language once, with
one or two percent of the second: as the models that people continue are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from benchmarks.language.packages import ENGLISH
from benchmarks.language.precision import is_bfloat16_fast
from benchmarks.language.text import read_text

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# characters of each language that the tokenizer is made of
TOKENIZER_CHARACTERS = 5_000_000
SECOND_SHARE = 0.015
# draws which documents the base reads
BASE_SEED = 0
WARM_UP, WEIGHT_DECAY = 0.03, 0.1
SAVE_STEPS = 200


@dataclass(frozen=True)
class Size:
    """How large a base is, and how much it reads.

    Attributes:
        hidden_size: Features of the residual stream.
        intermediate_size: Inner features of the MLP.
        layers: How many.
        heads: Query heads; half as many key-value heads.
        vocabulary: Entries of the tokenizer.
        context: Tokens of a row.
        rows: Rows of a batch.
        tokens: Tokens that the base reads.
        rate: Peak of its learning rate.
        second_share: Of the second language in the tokenizer's text, beside the first's.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    rows: int
    tokens: int
    rate: float
    second_share: float = 1.0


SIZES = {
    "1m": Size(96, 256, 4, 4, 4096, 256, 16, 2_000_000, 3e-3),
    "1m-old": Size(96, 256, 4, 4, 4096, 256, 16, 2_000_000, 3e-3, second_share=SECOND_SHARE),
    "3m": Size(192, 512, 6, 6, 4096, 256, 16, 6_000_000, 2e-3),
    "6m": Size(256, 704, 6, 8, 8192, 256, 16, 10_000_000, 2e-3),
    "100m": Size(768, 2048, 12, 12, 16384, 512, 32, 9_500_000, 6e-4),
}


def make_base(work: Path, name: str, second: str, seed: int = 0) -> Path:
    """Train the tokenizer and the base, or go on where that stopped."""
    base = work / f"base-{name}-{second}"
    if (base / "config.json").exists():
        return base
    size, run = SIZES[name], work / f".base-{name}-{second}"
    tokenizer = make_tokenizer(work, second, size)
    rows = base_rows(work, tokenizer, second, size, seed)
    torch.manual_seed(seed)
    trainer = Trainer(_build(tokenizer, size), _arguments(run, size, seed), train_dataset=_Rows(rows))
    trainer.train(resume_from_checkpoint=any(run.glob("checkpoint-*")) or None)
    trainer.model.save_pretrained(run / "base")
    tokenizer.save_pretrained(run / "base")
    (run / "base").rename(base)
    return base


def make_tokenizer(work: Path, second: str, size: Size) -> PreTrainedTokenizerFast:
    """Train the tokenizer on both languages; the same text gives the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        first(shuffled(read_text(work, language, "train"), 0), round(share * TOKENIZER_CHARACTERS))
        for language, share in ((ENGLISH, 1.0), (second, size.second_share))
    )
    bpe.train_from_iterator(chain.from_iterable(texts), trainer)
    begin, end = (bpe.token_to_id(SPECIAL_TOKENS[name]) for name in ("bos_token", "eos_token"))
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=size.context, **SPECIAL_TOKENS)


def base_rows(work: Path, tokenizer: PreTrainedTokenizerFast, second: str, size: Size, seed: int) -> Tensor:
    """Pack what the base reads: the first language once, and the share of the second, in one order."""
    parts = []
    for language, share in ((ENGLISH, 1 - SECOND_SHARE), (second, SECOND_SHARE)):
        texts = shuffled(read_text(work, language, "train"), BASE_SEED)
        parts.append(pack_all(tokenizer, texts, size.context, round(size.tokens * share), language))
    rows = torch.cat(parts)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def new_rows(work: Path, tokenizer: PreTrainedTokenizerFast, second: str, size: Size, tokens: int, seed: int) -> Tensor:
    """Pack text of the second language that the base has not read, in an order that the seed draws."""
    texts = shuffled(unread(work, tokenizer, second, size), seed)
    return pack_all(tokenizer, texts, size.context, tokens, second)


def unread(work: Path, tokenizer: PreTrainedTokenizerFast, second: str, size: Size) -> list[str]:
    """Documents of the second language that the base has not read."""
    texts = iter(shuffled(read_text(work, second, "train"), BASE_SEED))
    read = 0
    while read < round(size.tokens * SECOND_SHARE):
        read += len(tokenizer(next(texts))["input_ids"])
    return list(texts)


def pack_all(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], context: int, tokens: int, language: str
) -> Tensor:
    """Pack so many tokens, and no fewer."""
    rows = pack(tokenizer, texts, context, tokens)
    if len(rows) < tokens // context:
        raise click.ClickException(f"{language}: {rows.numel():,} tokens of text, expected {tokens:,}. Ask for fewer.")
    return rows


def pack(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], context: int, tokens: int) -> Tensor:
    """Join documents end to end into full rows, of no more tokens than asked for; (rows, context)."""
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text)["input_ids"]
        if len(stream) >= tokens:
            break
    rows = min(len(stream), tokens) // context
    return torch.tensor(stream[: rows * context], dtype=torch.long).view(rows, context)


def shuffled(texts: list[str], seed: int) -> list[str]:
    """The texts in an order that the seed draws."""
    return random.Random(seed).sample(texts, len(texts))


def first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, until they have so many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def _build(tokenizer: PreTrainedTokenizerFast, size: Size) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def _arguments(run: Path, size: Size, seed: int) -> TrainingArguments:
    return TrainingArguments(
        str(run),
        per_device_train_batch_size=size.rows,
        num_train_epochs=1,
        learning_rate=size.rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARM_UP,
        weight_decay=WEIGHT_DECAY,
        bf16=is_bfloat16_fast("cuda" if torch.cuda.is_available() else "cpu"),
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
    )


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[place], "labels": self.rows[place]}
