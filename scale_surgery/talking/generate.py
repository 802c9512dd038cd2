"""Answer prompts, for scripts: by a model of any form, and by the base of an expanded one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.sources import listed
from scale_surgery.errors import DataError, Problem
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.running.options import RunOptions
from scale_surgery.talking.conversation import Conversation, EncodedPrompt
from scale_surgery.talking.records import Answer, Generation, StreamedToken, Token
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.talking.speaker import Speaker, has_template, loaded_speaker, open_subject


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    settings: GenerationSettings = GenerationSettings(),
    *,
    compare: bool = False,
    run: RunOptions = RunOptions(),
    revision: str | None = None,
    on_token: Callable[[StreamedToken], None] = lambda token: None,
) -> Generation:
    """Answer prompts, one after the other, each by itself.

    Args:
        model: A model folder or Hub id: stock, expanded, routed, composed or fused.
        prompts: A prompt, or several.
        settings: How the model is asked, and how answers are drawn.
        compare: Let the base of an expanded model answer too, by the same weights with the expansion disabled.
        run: How the model runs: device, dtype, trust_remote_code.
        revision: Branch, tag or commit of a Hub repository.
        on_token: Called with each token as it comes.

    Returns:
        The answers, with each token's share of the adapt path, or of each path of a composed model.

    Raises:
        DataError: If there is no prompt, one is too long for the model or has no token, or the model has no tokenizer
            that loads; every such prompt is named.
        PlanError: If a setting is out of range, or the model has no chat template or base that is asked for.
        CheckpointError: If the model cannot be found or loaded, or does not run.
    """
    asked = [str(prompt) for prompt in listed(prompts)]
    if not asked:
        raise DataError(Problem("prompts-missing"))
    subject = open_subject(model, settings, compare=compare, run=run, revision=revision)
    encoded = encode_all(subject, asked, settings)
    with loaded_speaker(subject, run) as speaker, speaker.isolated_random_state(settings.seed):
        answers: dict[bool, list[Answer]] = {False: [], True: []}
        for place, (prompt, read) in enumerate(zip(asked, encoded, strict=True)):
            for is_base in (True, False) if compare else (False,):

                def stream(token: Token, place: int = place, is_base: bool = is_base) -> None:
                    on_token(StreamedToken(place, is_base, token, speaker.paths))

                with speaker.as_base() if is_base else speaker.as_chosen(settings):
                    answers[is_base].append(speaker.speak(prompt, read.ids, settings, stream))
        return summarise(speaker, settings, answers[False], answers[True])


def encode_all(subject: Subject, prompts: Sequence[str], settings: GenerationSettings) -> list[EncodedPrompt]:
    """What a model reads for prompts that have nothing to do with each other; those that it cannot are all named."""
    encoded, problems = [], list[Problem]()
    for number, prompt in enumerate(prompts, start=1):
        try:
            conversation = Conversation(subject, has_template=has_template(subject, settings))
            encoded.append(conversation.encode(prompt, settings))
        except DataError as error:
            place = f"prompt {number}"
            problems += [each.within(place) for each in error.problems] if len(prompts) > 1 else error.problems
    if problems:
        raise DataError(*problems)
    return encoded


def summarise(
    speaker: Speaker, settings: GenerationSettings, answers: Sequence[Answer], base_answers: Sequence[Answer]
) -> Generation:
    """Put answers together with what is known of the model that gave them."""
    return Generation(
        model=speaker.subject.name,
        base=speaker.base_name,
        routing=speaker.routing,
        paths=speaker.paths,
        has_template=has_template(speaker.subject, settings),
        settings=settings,
        answers=tuple(answers),
        base_answers=tuple(base_answers),
    )


def write_answers(result: Generation, file: Path) -> None:
    """Write a line of JSON for each prompt, whole or not at all; an existing file is replaced."""
    rows: list[dict[str, Any]] = [answer.to_json() for answer in result.answers]
    for row, base in zip(rows, result.base_answers, strict=False):
        row["base_answer"] = base.to_json()
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
