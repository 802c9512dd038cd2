"""Shared options of commands, and the conversion of errors to one line."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.errors import Problem, SurgeryError, TextWarning, render
from scale_surgery.fields import Field, fields_of
from scale_surgery.running.device import is_out_of_memory
from scale_surgery.running.options import WINDOWS, Probes, RunOptions
from scale_surgery.text.sources import NO_OLD_TEXT

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

Command = Callable[..., Any]
Made = TypeVar("Made")
# help of --trust-remote-code in commands that read facts about a base model
BASE_CODE = "Allow MODEL to run its own code, if transformers lacks its class or its tokenizer is custom."
# the same in commands that run no model
TOKENIZER_CODE = "Allow a custom tokenizer to run code from its folder or repository."
FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)
TEXTS = click.Path(path_type=Path)
# help of --old
OLD_HELP = f"Old text, to measure forgetting. Can be repeated. {NO_OLD_TEXT}"


def add_options(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Add options to a command. Its help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def options_from(
    owner: type,
    *names: str,
    declared: Mapping[str, str] | None = None,
    helps: Mapping[str, str] | None = None,
    usual: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Make options from a dataclass: its types, choices, defaults and help."""
    fields = fields_of(owner)
    # by field: the declaration of a flag with two names, such as `--private/--public`; and help and default, if the
    # command differs from the dataclass
    given = (declared or {}, helps or {}, usual or {})
    chosen = names or [name for name, field in fields.items() if field.has_option]

    def add(command: Command) -> Command:
        # omitted options are None, so that a command knows which ones were given
        return add_options(command, [_option(fields[name], *given) for name in chosen])

    return add


def set_option(owner: type, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Add --set KEY=VALUE, which fills the fields of a dataclass without their own option."""
    known = fields_of(owner).items()
    fields = {name: field for name, field in known if not field.has_option and field.is_plain and name not in without}

    def fill(context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> None:
        values, problems = read_settings(given), []
        for name, value in values.items():
            if name not in fields:
                problems.append(f"--set {name}: there is no such setting, expected one of: {', '.join(fields)}.")
                continue
            context.params[name] = read = fields[name].read(value)
            if (expected := fields[name].expects(read)) is not None:
                problems.append(f"--set {name} is {read!r}, expected {expected}.")
        if problems:
            raise click.UsageError("\n".join(problems), context)

    usual = (f"{field.name}{_equals(field.default)}" for field in fields.values())
    text = f"Rarely used settings: {', '.join(usual)}. Can be repeated. learn --write-recipe explains each."
    return click.option("--set", multiple=True, metavar="KEY=VALUE", expose_value=False, callback=fill, help=text)


def _equals(default: Any) -> str:
    return "" if default is None else f"={str(default).lower() if isinstance(default, bool) else default}"


def read_settings(given: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE of --set. Values are YAML."""
    import yaml

    from scale_surgery.checkpoint.plain_yaml import PlainLoader

    settings: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise click.UsageError(f"--set {text} is not KEY=VALUE, for example warmup=0.1.")
        try:
            settings[name.strip().replace("-", "_")] = yaml.load(value, Loader=PlainLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise click.UsageError(f"--set {text}: the value is no YAML.") from error
    return settings


def _option(
    field: Field, declared: Mapping[str, str], helps: Mapping[str, str], usual: Mapping[str, str]
) -> Callable[[Command], Command]:
    both = f"--{field.option}/--no-{field.option}" if field.is_optional else f"--{field.option}"
    written = declared.get(field.name, both if field.kind is bool else f"--{field.option}")
    more: dict[str, Any] = {"type": field.kind}
    if field.kind is bool:
        more = {"is_flag": True}
    elif field.kind is tuple and not field.choices:
        more = {"multiple": True, "callback": lambda context, parameter, given: given or None}
    elif field.kind is tuple:
        more = {"callback": as_list, "shell_complete": functools.partial(_complete_list, field.choices)}
    elif field.kind is Path:
        more = {"type": FILE}
    elif field.choices:
        more = {"type": click.Choice(field.choices)}
    line = _help(field, helps.get(field.name, field.help), usual.get(field.name, _default(field)))
    return click.option(written, field.name, default=None, help=line, **more)


def as_list(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
    """Parse a comma-separated list. An empty string is returned as it is, so that a command rejects it."""
    return text and tuple(map(str.strip, text.split(",")))


def _complete_list(
    choices: Sequence[str], _context: click.Context, _parameter: click.Parameter, written: str
) -> list[str]:
    """Complete the last name of a comma-separated list, by names that are not in it yet."""
    before, comma, begun = written.rpartition(",")
    left = (name for name in choices if name.startswith(begun) and name not in before.split(","))
    return [f"{before}{comma}{name}" for name in left]


def _default(field: Field) -> str:
    if field.kind is bool or field.default in (None, MISSING, ()):
        return ""
    return (
        "all" if field.kind is tuple else f"{field.default:g}" if type(field.default) is float else f"{field.default}"
    )


def _help(field: Field, line: str, default: str) -> str:
    """Return a line of help with choices, default and range, in click's format."""
    choices = f"some of {', '.join(field.choices)}" if field.kind is tuple and field.choices else ""
    parts = [choices, f"default: {default}" if default else "", "" if field.range is None else field.range.bounds]
    extra = "; ".join(filter(None, parts))
    return f"{line}  [{extra}]" if extra else line


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def named(names: Iterable[str]) -> str:
    """Return the names of options as typed, separated by commas."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def model_options(command: Command) -> Command:
    """Add the model argument and its revision."""
    command = click.option("--revision", help="Branch, tag or commit of a Hub repository.")(command)
    return click.argument("model")(command)


def stop(out: Output, error: BaseException, *problems: Problem, debug: bool) -> None:
    """Print an error and exit with 1."""
    out.fail(*render(problems), trace=traceback.format_exc() if debug else "")
    out.show_error(type(error).__name__, problems)
    sys.exit(1)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Silence warnings of libraries, by Python's warnings or by loggers. Errors are still shown."""
    # torch's C++ code reads this on import
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def own_warnings(warn: Callable[[str], None]) -> Iterator[None]:
    """Print warnings of this package as the command's own. Warnings of libraries are unchanged."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, TextWarning):
                warn(f"{message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("default", TextWarning)
        yield


def output_options(command: Command) -> Command:
    """Add --json, --quiet and --debug.

    The command receives an `Output`, and known errors are printed as one line.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    @click.option("-q", "--quiet", is_flag=True, help="Show no progress and no warnings.")
    @click.option("--debug", is_flag=True, help="Show a traceback with an error.")
    @functools.wraps(command)
    def run(*args: Any, as_json: bool, quiet: bool, debug: bool, **options: Any) -> None:
        from scale_surgery.show.console import Output

        out = Output(as_json=as_json, quiet=quiet)
        if quiet or not sys.stderr.isatty():
            # huggingface_hub, transformers and datasets have their own bars, and read these variables on import
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        try:
            with no_warnings() if out.quiet else own_warnings(out.warn):
                command(*args, out=out, **options)
        except click.ClickException:
            raise
        except SurgeryError as error:
            stop(out, error, *error.problems, debug=debug)
        except KeyboardInterrupt as error:
            stop(out, error, Problem("interrupted"), debug=debug)
        except Exception as error:
            # errors of other libraries: a missing device, out of memory, a file that cannot be written
            kind = type(error).__name__
            problem = Problem("out-of-memory" if is_out_of_memory(error) else "unforeseen", kind=kind, error=error)
            stop(out, error, problem, debug=debug)

    return run


def overwrite_options(command: Command) -> Command:
    """Add options for copying base files and for overwriting the target."""
    weights = click.option(
        "--base-weights",
        type=click.Choice(get_args(BaseWeights)),
        default="auto",
        show_default=True,
        help="How base shards get into the output folder. auto: a reflink if the file system supports it, else a copy. "
        "copy: a copy. link: a hard link, without extra space. Editing a linked file in place then also changes the "
        "base model.",
    )
    return overwrite_option(weights(command))


def overwrite_option(command: Command) -> Command:
    """Add the option to overwrite the target."""
    overwrite = click.option(
        "--overwrite", is_flag=True, help="Replace an existing output folder, after the new one is complete."
    )
    return overwrite(command)


def parse_size(text: str) -> int:
    """Parse a size such as 4GiB, 500MB or 2000000 as a number of bytes."""
    units = {"GIB": 1024**3, "MIB": 1024**2, "KIB": 1024, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    wrong = click.UsageError(f"--memory {text} is not a size, expected for example 4GiB or 500MB.")
    try:
        size = int(float(upper.removesuffix(unit)) * units.get(unit, 1))
    except (ValueError, OverflowError) as error:
        raise wrong from error
    if size < 0:
        raise wrong
    return size


def take_fields(kind: Callable[..., Made], options: dict[str, Any], *names: str) -> Made:
    """Fill a dataclass from the options with its field names, or from `names`, and remove them from `options`."""
    chosen = names or [field.name for field in fields(kind)]  # type: ignore[arg-type]
    taken = {name: options.pop(name) for name in chosen if name in options}
    # None is an option that was not given; the dataclass's default applies
    return kind(**{name: value for name, value in taken.items() if value is not None})


def run_options(*names: str, code: str, helps: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Add options for running models. `code` is the help of --trust-remote-code."""
    help_texts = {**(helps or {}), "trust_remote_code": code}
    # the default of each operation
    usual = {"batch_size": str(WINDOWS)}
    return options_from(RunOptions, *names, "trust_remote_code", helps=help_texts, usual=usual)


def code_of(models: str) -> str:
    """Return the help of --trust-remote-code in commands that run models."""
    return f"Run the model code in {models} instead of this program's."


def running_options(command: Command) -> Command:
    """Add options for running models on probe prompts."""
    memory = click.option(
        "--memory",
        "memory_bytes",
        callback=lambda _, __, text: parse_size(text),
        default=f"{RunOptions().memory_bytes // 1024**3}GiB",
        show_default=True,
        help="Memory for weights on the CPU, such as 500MB. A larger model is streamed from its files.",
    )
    command = memory(run_options("device", code=code_of("EXPANDED"))(command))
    return options_from(Probes, "prompts_file", "max_new_tokens")(command)


def reading_options(models: str) -> Callable[[Command], Command]:
    """Add options for reading texts by models, which the help calls `models`."""
    context = f"the shortest context length of {models}" if models == "MODELS" else f"the context length of {models}"
    windows = [
        click.option(
            "--sequence-length",
            type=click.IntRange(min=2),
            help=f"Tokens in one window. Default: {context}, at most 1024.",
        ),
    ]

    def add(command: Command) -> Command:
        helps = {"batch_size": "Windows in one forward pass."}
        running = run_options("batch_size", "dtype", "device", code=code_of(models), helps=helps)
        return add_options(running(command), windows)

    return add
