"""The command chat: parse, call one function, hand its result to the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.generate import asking_options, look_options
from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import model_options, output_options, take_fields

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="chat", cls=Headed, first=("system", "max_new_tokens", "temperature", "expansion", "compare"))
@model_options
@asking_options
@look_options
@output_options
def chat_command(model: str, compare: bool, out: Output, **options: Any) -> None:
    """Talk to MODEL in the terminal. MODEL is a stock, expanded, routed, composed or fused model.

    Ctrl-C stops an answer. Ctrl-D or /exit ends the chat. /help lists the other commands. In a routed or composed
    model, the background colour of each token shows its path.

    \b
    Example: scale-surgery chat ROUTED
    """
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.chat import chat
    from scale_surgery.talking.records import Look
    from scale_surgery.talking.settings import GenerationSettings

    settings, look, run = (
        take_fields(GenerationSettings, options),
        take_fields(Look, options),
        take_fields(RunOptions, options),
    )
    result = chat(model, out, settings, compare=compare, look=look, run=run, **options)
    if out.as_json:
        out.show(result, "")
