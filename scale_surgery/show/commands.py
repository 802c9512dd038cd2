"""The commands to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.expansions import ROUTER_KEY, specs_of_expansions
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, OWN_CODE_FILES, as_unicode
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.command_lines import changed_options, command, of_revision
from scale_surgery.planning.methods import complete
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.request import DEFAULT_METHOD, Request

if TYPE_CHECKING:
    from scale_surgery.evidence.evaluate import Evaluation
    from scale_surgery.evidence.report_records import Report
    from scale_surgery.evidence.verification import Verification
    from scale_surgery.planning.architecture import Architecture
    from scale_surgery.planning.plan import Plan


def trusting(architecture: Architecture) -> list[str]:
    """Return the option that lets a command run code from the model's folder."""
    return ["--trust-remote-code"] if architecture.own_code else []


def running_command(name: str, path: Path, *options: object) -> str:
    """Return a command that runs a model.

    If the base has its own classes, the command includes --trust-remote-code.
    """
    has_own_code = any((path / file).is_file() for file in OWN_CODE_FILES)
    return command(name, path, *options, *["--trust-remote-code"] * has_own_code)


def verify_command(path: Path) -> str:
    """Return the command that verifies an expanded folder."""
    return running_command("verify", path)


def expand_command(
    model: str, made: Plan, tokens: TokenSource, revision: str | None = None, plan: Path | None = None
) -> str:
    """Return the expand command of a plan, with the same source of new tokens."""
    trust = trusting(made.architecture)
    if plan is None:
        options = (*expand_options(made.request, revision), *changed_options(tokens, TokenSource()))
        return command("expand", model, *options, *trust)
    return command("expand", model, *of_revision(revision), "--plan", plan, *trust)


def expand_options(request: Request, revision: str | None) -> Iterator[str]:
    """Yield the options of `expand` for a request."""
    yield from of_revision(revision)
    yield from ("--layers", request.layers)
    yield from [] if request.method == DEFAULT_METHOD else ["--method", request.method]
    yield from changed_options(complete(request), complete(Request(request.layers, method=request.method)))


def after_verification(result: Verification) -> str:
    """Return the next command after `verify`."""
    if not result.passed:
        return running_command("verify", result.path, "-o", "certificate.json")
    if result.state == "trained" or result.routing is not None:
        return running_command("evaluate", result.path, "--old", "FILE", "--new", "FILE")
    return running_command("train", result.path, "--data", "FILE")


def after_evaluation(result: Evaluation, models: Sequence[str]) -> str:
    """Return the next command after `evaluate`.

    For the last expanded model it is `train`, `report` or `route-report`. Without an expanded model it is `inspect`.
    """
    last = max((place for place, score in enumerate(result.scores) if score.kind == "expanded"), default=None)
    if last is None:
        return command("inspect", models[-1])
    score, *parts = result.scores[last:]
    # if folders of two models share a name, a row has the path as it was typed
    path = Path(score.name if score.name in models else _of_name(score.name, models))
    if any(part.kind in ("adapt", "path") for part in parts):
        texts = (word for file in (*result.old, *result.new) for word in ("--text", file))
        return running_command("route-report", path, *texts)
    if (path / CONFIG_FILE).is_file() and not (path / MANIFEST_FILE).is_file():
        return adopt_line(path)
    is_trained = score.forgetting or score.learning or score.probes or score.answers
    name, *options = ("report", "-o", "report.html") if is_trained else ("train", "--data", "FILE")
    return running_command(name, path, *options)


def _of_name(name: str, models: Sequence[str]) -> str:
    return next(model for model in models if as_unicode(Path(model).resolve().name) == name)


def after_report(report: Report, path: Path, name: str | None) -> str:
    """Return the next command after `report`. `name` is the expansion that the user named."""
    # the report covers one expansion only; the other expansions and the router are in the config
    specs = read_json(path / CONFIG_FILE).get(CONFIG_KEY, {})
    if not any(tensor.is_trained for tensor in report.tensors):
        named = [] if name is None or len(specs_of_expansions(specs)) == 1 else ["--name", name]
        return running_command("train", path, *named, "--data", "FILE")
    if ROUTER_KEY in specs:
        return running_command("route-report", path, "--text", "FILE")
    if report.variant == "adapt":
        return command("route-export", path, "-o", f"{path}-routed")
    return running_command("evaluate", path, "--old", "FILE", "--new", "FILE")
