"""Answer prompts, for scripts: by a model of any form, and by the base of an expanded model."""

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
    """Answer prompts one after the other, each independently.

    Args:
        model: A model folder or Hub id: stock, expanded, routed, composed or fused.
        prompts: A prompt, or several.
        settings: Settings of the prompt and of sampling.
        compare: Let the base of an expanded model answer too, by the same weights with the expansion disabled.
        run: Options of the run: device, dtype, trust_remote_code.
        revision: Branch, tag or commit of a Hub repository.
        on_token: Function called with each token when it is generated.

    Returns:
        The answers, with each token's share of the adapt path, or of each path of a composed model.

    Raises:
        DataError: If there is no prompt, a prompt is too long or has no token, or no tokenizer of the model loads; the
            error names every such prompt.
        PlanError: If a setting is out of range, or the model lacks a requested chat template or base.
        CheckpointError: If the model cannot be found or loaded, or does not run.
    """
    asked = [str(prompt) for prompt in listed(prompts)]
    if not asked:
        raise DataError(Problem("prompts-missing"))
    subject = open_subject(model, settings, compare=compare, run=run, revision=revision)
    voices = (True, False) if compare else (False,)
    encoded = {is_base: encode_all(subject, asked, settings, is_base=is_base) for is_base in voices}
    with loaded_speaker(subject, run) as speaker, speaker.isolated_random_state(settings.seed):
        answers: dict[bool, list[Answer]] = {False: [], True: []}
        for place, prompt in enumerate(asked):
            for is_base in voices:

                def stream(token: Token, place: int = place, is_base: bool = is_base) -> None:
                    on_token(StreamedToken(place, is_base, token, speaker.paths))

                with speaker.as_base() if is_base else speaker.as_chosen(settings):
                    answers[is_base].append(speaker.speak(prompt, encoded[is_base][place].ids, settings, stream))
        return summarise(speaker, settings, answers[False], answers[True])


def encode_all(
    subject: Subject, prompts: Sequence[str], settings: GenerationSettings, *, is_base: bool = False
) -> list[EncodedPrompt]:
    """Encode independent prompts for a model or its base; one error names all prompts that it cannot read."""
    encoded, problems = [], list[Problem]()
    for number, prompt in enumerate(prompts, start=1):
        try:
            conversation = Conversation(subject, has_template=has_template(subject, settings), is_base=is_base)
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
    """Combine the answers with the facts about their model."""
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
    """Write one line of JSON per prompt, all or nothing; replace an existing file."""
    rows: list[dict[str, Any]] = [answer.to_json() for answer in result.answers]
    for row, base in zip(rows, result.base_answers, strict=False):
        row["base_answer"] = base.to_json()
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
