"""The command push: parse, call one function, hand its result to the console."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, given, options_from, output_options
from scale_surgery.errors import HubError, Problem
from scale_surgery.hub.settings import Push

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="push", cls=Headed)
@click.argument("folder", type=FOLDER)
@click.argument("repo")
@options_from(Push, "private", "create_pr", "revision", "commit_message", declared={"private": "--private/--public"})
@click.option("--dry-run", is_flag=True, help="Check everything and list the files. Nothing changes on the Hub.")
@options_from(Push, "card", "write_card", "license")
@click.option("--show-card", is_flag=True, help="Print the model card too.")
@options_from(Push, "replace")
@click.option("--no-verify", is_flag=True, help="Skip the check of bytes and structure of FOLDER.")
@click.option("--token", help="Access token of the Hub. Default: the variable HF_TOKEN, or the token of hf auth login.")
@output_options
def push_command(
    folder: Path,
    repo: str,
    dry_run: bool,
    show_card: bool,
    no_verify: bool,
    token: str | None,
    out: Output,
    **options: Any,
) -> None:
    """Push FOLDER to the repository REPO on the Hub, with a model card.

    FOLDER is the output of expand, train, route-export, compose, merge or extract. It is not changed. Its bytes are
    checked first. To resume an interrupted push, run the same command again: it sends no file twice.

    \b
    Example: scale-surgery push EXPANDED me/qwen3-wide --dry-run
    """
    from scale_surgery.command_lines import changed_options, command
    from scale_surgery.hub.push import push
    from scale_surgery.show.tables_push import render_files, render_pushed

    if options["create_pr"] and options["revision"] is not None:
        raise click.UsageError("--create-pr goes to the main branch: leave out --revision.")
    if options["card"] is not None and options["write_card"]:
        raise click.UsageError("Give --card or --write-card, one of the two.")
    if options["card"] is not None and options["license"] is not None:
        raise click.UsageError("--license is for a card that is written from facts: name it in the file of --card.")
    how = Push(**given(options), check=not no_verify)
    try:
        done = push(folder, repo, how, dry_run=dry_run, token=token, track=out.track)
    except KeyboardInterrupt as error:
        raise HubError(Problem("push-interrupted", repo)) from error
    out.say(render_files(done))
    if show_card and done.card is not None:
        out.say(done.card, as_it_is=True)
    out.show(done, render_pushed(done))
    if done.commit is not None:
        out.suggest(shlex.join(["hf", "download", repo, "--local-dir", repo.rpartition("/")[2]]))
    elif done.obstacle is None:
        # flags with two names: the negative is not --no-NAME
        flags = [] if how.private is None else ["--private" if how.private else "--public"]
        flags += [] if how.check else ["--no-verify"]
        out.suggest(command("push", folder, repo, *changed_options(how, Push(), {"private", "check"}), *flags))
    sys.exit(0 if done.obstacle is None else 1)
