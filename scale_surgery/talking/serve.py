"""Serve a model by transformers' own server, whose endpoints are OpenAI's.

The server finds a model's config class by its type, which `register` adds. It finds the model class among the names of
`transformers`, and this module adds it there. It computes one request after the other, each as `generate` would.
Batches of several requests (its continuous batching) stay off, because they need an attention that expanded models do
not have.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from scale_surgery.checkpoint.expansions import path_names
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.errors import CheckpointError, PlanError, Problem, ServingError
from scale_surgery.evidence.eval_targets import open_subjects
from scale_surgery.fields import Range, problems_of
from scale_surgery.running.expansion_names import expansion_problems
from scale_surgery.running.loading import model_class, translated
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import need_tokenizer

# packages that transformers' server needs
NEEDED = ("fastapi", "openai", "pydantic", "uvicorn")


@dataclass(frozen=True)
class Address:
    """The address of a server.

    Attributes:
        host: Address to listen on. The default accepts connections from this machine only. Clients need no key.
        port: Port to listen on.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=1, most=65535, noun="a port")] = 8000

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/v1"


@dataclass(frozen=True)
class Served:
    """A loaded model that is about to be served.

    Attributes:
        model: Name of the model in requests.
        url: Base URL for clients.
        has_chat_template: True if the tokenizer has a chat template, as /v1/chat/completions needs.
        paths: Names of single paths that requests may choose: base and expansions of a composed folder.
    """

    model: str
    url: str
    has_chat_template: bool
    paths: tuple[str, ...] = ()


def serve(
    model: str | Path,
    address: Address = Address(),
    *,
    revision: str | None = None,
    expansion: str | None = None,
    run: RunOptions = RunOptions(),
    ready: Callable[[Served], None] = lambda served: None,
) -> None:
    """Serve a model with OpenAI's endpoints by transformers' own server, until it is interrupted.

    Args:
        model: A folder or a Hub id: a stock, expanded, routed, composed or fused model. Requests use the same name, or
            the name of a path of a composed model: an expansion, or base.
        address: Address to listen on.
        revision: Branch, tag or commit of a Hub repository.
        expansion: Expansion of a composed folder, or base, that answers requests for the model itself. Default: all,
            weighed by the router.
        run: Options of the run: device, dtype, trust_remote_code.
        ready: Function called once the model is loaded.

    Raises:
        ServingError: If the server's packages are missing, or the address is unavailable.
        CheckpointError: If the model cannot be loaded.
        PlanError: If it has no such expansion, or has the same name as one of them.
        DataError: If no tokenizer of the model loads.
    """
    name = _name_for_server(model, revision)
    _need_free(address)
    _need_packages()
    source = find_source(model, revision)
    checkpoint = open_checkpoint(source.path)
    paths = path_names(checkpoint.config.get(CONFIG_KEY, {}))
    _check_names(name, paths, expansion, source.name)
    tokenizer = need_tokenizer(source.path, source.name, run)
    # comes last, because importing a tokenizer may replace the module transformers
    _make_known(checkpoint, run)
    try:
        from scale_surgery.talking.server import Server
    except ImportError as error:
        raise ServingError(
            Problem("server-of-other-release", transformers=version("transformers"), error=error)
        ) from error

    served = Served(name, address.url, bool(getattr(tokenizer, "chat_template", None)), paths)
    options = {"device": run.placed().device, "dtype": run.dtype or "auto", "trust_remote_code": run.trust_remote_code}
    answering = {name: expansion, **{path: path for path in paths}}
    # a path without the new tokens of another reads in the base's tokens
    subjects = open_subjects([model], run, revision=revision) if paths else []
    readers = {key: subject.tokenizer_of(path) for subject in subjects for key, path in answering.items()}
    with translated("model-not-served", source.name):
        Server(name, answering, readers, lambda: ready(served), host=address.host, port=address.port, **options)


def _need_packages() -> None:
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        raise ServingError(Problem("server-without-packages", packages=missing))


def _name_for_server(model: str | Path, revision: str | None) -> str:
    """Return the name of the model for the server and for requests."""
    if "@" in str(model):
        raise CheckpointError(Problem("name-with-at-sign", model))
    return str(model) if revision is None else f"{model}@{revision}"


def _need_free(address: Address) -> None:
    """Check that the address is free before a model is loaded."""
    if problems := problems_of(address):
        raise ServingError(*problems)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        place = f"{address.host}, port {address.port}"
        raise ServingError(Problem("address-unavailable", place, error=error.strerror or error)) from error


def _check_names(model: str, paths: tuple[str, ...], expansion: str | None, folder: str) -> None:
    """Refuse an unknown expansion, and a model with the name of one of its paths."""
    problems = [*expansion_problems(expansion, paths, folder)]
    if model in paths:
        problems.append(Problem("name-of-two", model))
    if problems:
        raise PlanError(*problems)


def _make_known(checkpoint: Checkpoint, run: RunOptions) -> None:
    """Add an expanded model's class to the module in which transformers' server looks for it."""
    import transformers

    for name in checkpoint.config.get("architectures") or ():
        if getattr(transformers, name, None) is None:
            setattr(transformers, name, model_class(checkpoint, run))
