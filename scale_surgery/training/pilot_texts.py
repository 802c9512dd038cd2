"""Texts of a ranking as tokens: what pilots learn, and what tells what the base knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.sources import Source
from scale_surgery.deriving.base import read_base
from scale_surgery.errors import DataError
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.options import RunOptions
from scale_surgery.running.sources import NO_OLD_TEXT
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.training.pilot_settings import PilotSettings

if TYPE_CHECKING:
    from scale_surgery.running.sequences import Sequences

# a text that is read more often than this is learned by heart, whatever it is
MOST_PASSES = 50
# a divergence that is measured on fewer says more about them than about what the base knows
LEAST_OLD_TOKENS = 256


def read_texts(
    source: Source,
    checkpoint: Checkpoint,
    files: Mapping[str, Sequence[Path]],
    settings: PilotSettings,
    run: RunOptions,
) -> dict[str, Sequences]:
    """Read what a ranking reads.

    Args:
        source: The model, with its tokenizer.
        checkpoint: Its files.
        files: Files by side, "new" and "old".
        settings: How pilots train.
        run: How its tokenizer is loaded: trust_remote_code.

    Returns:
        Token sequences of the new text, and of the old where there is any; all of one length but the last.

    Raises:
        DataError: If there is no new text, a text is too short, or a token has no embedding.
    """
    from scale_surgery.running.documents import read_documents
    from scale_surgery.running.texts import pack, tokenize, without_unscored

    length = choose_length(settings.sequence_length, {source.name: context_of(checkpoint.config)})
    tokenizer = need_tokenizer(source.path, source.name, run)
    texts = {
        side: without_unscored(pack(tokenize(read_documents(given), tokenizer), length))
        for side, given in files.items()
        if given
    }
    if "new" not in texts:
        raise DataError("There is no text for the pilot. Give files with --data.")
    _check_ids(texts, source.name, read_base(checkpoint, run).sizes.vocabulary)
    _check_amount({side: len(text.ids) for side, text in texts.items()}, settings, length)
    return texts


def _check_ids(texts: Mapping[str, Sequences], name: str, vocabulary: int) -> None:
    highest = max(int(text.ids.max()) for text in texts.values())
    if highest >= vocabulary:
        raise DataError(
            f"{name}: its tokenizer gives the id {highest}, expected ids below {vocabulary}, the size of its "
            "embedding. Use the tokenizer that the model was trained with."
        )


def _check_amount(tokens: Mapping[str, int], settings: PilotSettings, length: int) -> None:
    step = settings.pilots * settings.batch_size * length
    problems = []
    if settings.steps and tokens["new"] < (needed := math.ceil(settings.steps * step / MOST_PASSES)):
        fitting = tokens["new"] * MOST_PASSES // step
        problems.append(
            f"--data: {tokens['new']:,} tokens found, at least {needed:,} needed: {settings.pilots} pilots take "
            f"{settings.steps} steps of {settings.batch_size} x {length} tokens each, and what is read more than "
            f"{MOST_PASSES} times is learned by heart. Give more text, or lower --steps"
            + (f" (to {fitting})" if fitting else "")
            + ", --pilots, --batch-size or --sequence-length."
        )
    if tokens.get("old", LEAST_OLD_TOKENS) < LEAST_OLD_TOKENS:
        problems.append(
            f"--old: {tokens['old']:,} tokens found, at least {LEAST_OLD_TOKENS:,} needed: what a step costs is "
            f"measured on them. Give more text, or leave --old out. {NO_OLD_TEXT}"
        )
    if problems:
        raise DataError.from_problems(problems)
