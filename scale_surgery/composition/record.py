"""composed.json: the base of a composed folder, the expansions that lie in it, and how their paths are mixed.

model-*.safetensors, tokenizer, ...   the base's files, as they are
expansions/NAME/                      an extract, byte for byte; its shards name tensors by NAME
config.json, *.py, index              say which expansions, and load all of it as one model
composed.json                         sha256 of the base's files and tensors, and headers that shards of extracts had
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from scale_surgery.checkpoint.code_names import kernel_problems
from scale_surgery.checkpoint.expansions import EXPANSIONS_KEY, ROUTER_KEY, specs_of_expansions
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_json
from scale_surgery.checkpoint.names import COMPOSED_FILE, CONFIG_FILE, EXPANSIONS_FOLDER, is_inside
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.schema import build, in_one_line, misfits
from scale_surgery.errors import CheckpointError
from scale_surgery.fields import Range, fields_of
from scale_surgery.surgery.record import OnBase
from scale_surgery.surgery.record_schema import header_problems

RECORD_FORMAT = 1


@dataclass(frozen=True)
class Mixing:
    """How the paths of a composition are mixed: the posterior router over K + 1 paths.

        v_k(t) ~ w_k(t) p_k(y_t),   w_k(t+1) = (1 - r) v_k(t) + (r / K) sum of the others' v(t)

    Attributes:
        prior: Weights of the base and of each expansion at the start of a text. Default: all equal.
        switch_rate: Share r of its weight that each path gives to the others at every token.
    """

    prior: tuple[float, ...] | None = None
    switch_rate: Annotated[float, Range(least=0, below=1, noun="a share")] = 0.01

    def router(self, expansions: int) -> dict[str, Any]:
        """What config.json says of the router that mixes the base and so many expansions."""
        prior = [1 / (1 + expansions)] * (1 + expansions) if self.prior is None else list(self.prior)
        return {"router": "posterior", "prior": prior, "switch_rate": self.switch_rate}

    @property
    def description(self) -> str:
        """The router and its numbers in one line."""
        prior = "all paths alike" if self.prior is None else ", ".join(f"{own:g}" for own in self.prior)
        return f"posterior, {prior} at the start, switch rate {self.switch_rate:g}"


@dataclass(frozen=True)
class Member:
    """An expansion in a composed folder.

    Attributes:
        headers: Text of the header that each of its shards has in its extract, where that was made under another name.
    """

    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Composition(OnBase):
    """The content of composed.json.

    Attributes:
        expansions: What is in the folder, in the order of the paths.
        mixing: How the paths are mixed.
        tool: Versions of what wrote it.
        verification: What `verify` found last.
    """

    expansions: Mapping[str, Member]
    mixing: Mixing
    tool: Mapping[str, str] = field(default_factory=dict)
    verification: Mapping[str, Any] | None = None
    format: int = RECORD_FORMAT

    @property
    def record_file(self) -> str:
        """Name of the file that holds this."""
        return COMPOSED_FILE

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the expansions, in the order of the paths."""
        return tuple(self.expansions)


def is_composition(path: str | Path) -> bool:
    """Whether a folder is a composed one."""
    return (Path(path) / COMPOSED_FILE).is_file()


def folder_of(name: str) -> str:
    """Where an expansion lies in a composed folder."""
    return f"{EXPANSIONS_FOLDER}/{name}"


def read_composition(path: Path) -> tuple[Checkpoint, Composition]:
    """Read a composed folder: its headers and its record.

    Args:
        path: The folder.

    Returns:
        The checkpoint, and what composed.json says; no tensor has been read.

    Raises:
        CheckpointError: If this is no composed folder, or its record is not one that `compose` wrote.
    """
    record = read_composed_record(path)
    return open_checkpoint(path), record


def read_rest(path: Path, removed: Sequence[str]) -> tuple[Checkpoint, Composition]:
    """Read a composed folder as if some expansions were not in it, whatever has become of these.

    Args:
        path: The folder.
        removed: Names of the expansions.

    Returns:
        The checkpoint, and what composed.json says of the rest; no tensor has been read.

    Raises:
        CheckpointError: If this is no composed folder, or its record is not one that `compose` wrote.
    """
    record = read_composed_record(path)
    checkpoint = open_checkpoint(path, without=tuple(f"{folder_of(name)}/" for name in removed))
    if not removed:
        return checkpoint, record
    left = {name: member for name, member in record.expansions.items() if name not in removed}
    specs = dict(checkpoint.config.get(CONFIG_KEY, {}))
    specs[EXPANSIONS_KEY] = [own for own in specs_of_expansions(specs) if own.get("name") not in removed]
    if specs.get(ROUTER_KEY) == record.mixing.router(len(record.expansions)):
        specs[ROUTER_KEY] = record.mixing.router(len(left))
    config = {**checkpoint.config, CONFIG_KEY: specs}
    return replace(checkpoint, config=config), replace(record, expansions=left)


def read_composed_record(path: Path) -> Composition:
    """Read composed.json alone, whatever has become of the files around it.

    Raises:
        CheckpointError: If there is none, or it is not one that `compose` wrote.
    """
    file = path / COMPOSED_FILE
    if not file.is_file():
        raise CheckpointError(f"{path}: has no {COMPOSED_FILE}, expected a folder made by scale-surgery compose.")
    content = read_json(file)
    if content.get("format") != RECORD_FORMAT:
        raise CheckpointError(
            f"{file}: format {content.get('format')!r}, expected {RECORD_FORMAT}. Use the release that made it."
        )
    try:
        problems = list(misfits(content, Composition)) or _content_problems(content)
    except (LookupError, ValueError, RecursionError) as error:
        problems = [str(error)]
    if problems:
        raise CheckpointError(f"{file}: is incomplete ({in_one_line(problems)}). Restore it from where you got it.")
    record: Composition = build(content, Composition)
    return record


def mixing_problems(mixing: object, names: Sequence[str]) -> list[str]:
    """Numbers of a router over a base and expansions that make no sense.

    Args:
        mixing: The numbers.
        names: Of the expansions.
    """
    if not isinstance(mixing, Mixing):
        return [f"mixing: is {mixing!r}, expected scale_surgery.Mixing."]
    problems = []
    if expected := fields_of(Mixing)["switch_rate"].expects(mixing.switch_rate):
        problems.append(f"switch rate: is {mixing.switch_rate}, expected {expected}.")
    prior = mixing.prior
    if prior is not None and not _are_weights(prior, len(names) + 1):
        found = ", ".join(map(str, prior)) if isinstance(prior, list | tuple) else prior
        wanted = f"{len(names) + 1} positive weights of sum 1: the base, {', '.join(names)}"
        problems.append(f"prior: is {found}, expected {wanted}.")
    return problems


def _are_weights(prior: Any, count: int) -> bool:
    """Whether something is as many positive numbers of sum 1."""
    are_numbers = isinstance(prior, list | tuple) and all(isinstance(own, int | float) for own in prior)
    return are_numbers and len(prior) == count and all(own > 0 for own in prior) and abs(sum(prior) - 1) <= 1e-6


def _content_problems(content: Mapping[str, Any]) -> list[str]:
    """Names of files that lead out of the folder, texts that are missing, and headers that are none."""
    files, replaced = content["base_files"], content["replaced"]
    stored = [entry["stored_as"] for entry in files.values() if entry["stored_as"] is not None]
    headers = {name: member["headers"] for name, member in content["expansions"].items()}
    names = [*files, *stored, *content["code"], *(shard for own in headers.values() for shard in own)]
    problems = [f"{name!r} is no name inside the folder" for name in names if not is_inside(name)]
    problems += [f"{name!r} is no name of an expansion" for name in headers if not name.isidentifier()]
    problems += [
        f"the text of {name} is missing"
        for name, entry in files.items()
        if entry["stored_as"] is None and name not in replaced
    ]
    problems += [problem for name, own in headers.items() for problem in header_problems(own, f"expansions.{name}")]
    problems += [] if CONFIG_FILE in files else [f"the base's {CONFIG_FILE} is missing"]
    config = parse_json(replaced.get(CONFIG_FILE, "{}"))
    problems += [] if isinstance(config, dict) else [f"replaced.{CONFIG_FILE} is no object"]
    problems += [f"replaced.{CONFIG_FILE}.{problem}" for problem in kernel_problems(config)]
    problems += [f"replaced.{name} is no file of the base" for name in replaced if name not in files]
    problems += [] if headers else ["expansions is empty"]
    return problems + mixing_problems(build(content["mixing"], Mixing), list(headers))
