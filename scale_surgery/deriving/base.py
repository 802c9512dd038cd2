"""A base model with the facts about its architecture, derived from its config."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import STOCK_KEY
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import CheckpointError
from scale_surgery.modeling import stock_type
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.base import Base, BaseFacts, check_layers
from scale_surgery.running.loading import translated
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.deriving.derive import Derived

# keys that count modules
COUNTED = re.compile("^(num|n)_.*(layer|expert|head|block)|layers?$|experts?$|depth$")
# no size and no context length is larger in any model
LARGEST = 20_000_000
# these are no sizes: the base of rope angles, seeds
UNBOUNDED = re.compile("theta|base|freq|seed")
# a config may name a layer beyond its last, such as where sliding windows begin, and experts may be one tensor
MOST_HARMLESS = 5000
ADVICE = "Check config.json, and whether transformers alone loads the model."


def read_base(checkpoint: Checkpoint, run: RunOptions = RunOptions()) -> Base:
    """Read config and headers of a base model, and derive the facts for planning."""
    derived = derive_config(
        checkpoint.config, str(checkpoint.path), len(checkpoint.tensors), code_folder(checkpoint, run)
    )
    architecture, in_memory = _with_names(derived, checkpoint.tensors)
    check_layers(architecture, derived.sizes.layers, checkpoint.tensors)
    return Base(checkpoint, BaseFacts(architecture, derived.sizes, derived.proof, in_memory))


def derive_stored(config: Mapping[str, Any], place: str, names: Collection[str], code: Path | None = None) -> Derived:
    """Derive facts from a parsed config.json and the names of its model's tensors, names on disk included."""
    derived = derive_config(config, place, len(names), code)
    return replace(derived, architecture=_with_names(derived, names)[0])


def _with_names(derived: Derived, names: Collection[str]) -> tuple[Architecture, dict[str, str]]:
    """Facts with names on disk, and names in memory where they are others."""
    from scale_surgery.deriving.disk import with_stored_names

    places = derived.reading.places(names)
    in_memory = {name: place.name for name, place in places.items() if place.name != name}
    return with_stored_names(derived.architecture, derived.reading, places), in_memory


def code_folder(checkpoint: Checkpoint, run: RunOptions) -> Path | None:
    """The folder whose own code may run, or None."""
    return checkpoint.path if run.trust_remote_code else None


def _check_counts(config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config.json that counts more layers or experts than there are tensors, before a model is made of it."""
    nested = (value for value in config.values() if isinstance(value, Mapping))
    for section in (config, *nested):
        for key, value in section.items():
            if COUNTED.search(str(key)) and isinstance(value, int) and value > max(tensors, MOST_HARMLESS):
                raise CheckpointError(
                    f"config.json: {key} is {value}, found {tensors} tensors in all. Is config.json from this "
                    "checkpoint, and is the checkpoint complete?"
                )
            if isinstance(value, int) and value > LARGEST and not UNBOUNDED.search(str(key)):
                raise CheckpointError(f"config.json: {key} is {value}, expected at most {LARGEST}. Is it this model's?")


def derive_config(config: Mapping[str, Any], place: str, tensors: int, code: Path | None = None) -> Derived:
    """Derive facts from a parsed config.json alone; modules have the names that they have in memory."""
    _check_counts(config, tensors)
    from scale_surgery.deriving.configs import config_of
    from scale_surgery.deriving.derive import derive

    with translated(f"{place}: config.json", "transformers does not read it", ADVICE):
        made = config_of(config, code)
    return derive(made)


def base_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of a folder's base model: without what the expansion wrote, duplicated layers still counted."""
    config = checkpoint.config
    if CONFIG_KEY not in config:
        return dict(config)
    plain = {key: value for key, value in config.items() if key not in (CONFIG_KEY, "auto_map", "architectures")}
    # classes of a base with own code are named in the record alone
    if auto_map := _recorded_code(checkpoint):
        plain["auto_map"] = auto_map
    # a fused model has sizes of base and expansion together, and records those of the base
    sizes = config[CONFIG_KEY].get(STOCK_KEY, {})
    plain = {key: value for key, value in (plain | sizes).items() if value is not None or key not in sizes}
    return plain | {"model_type": stock_type(config.get("model_type"))}


def _recorded_code(checkpoint: Checkpoint) -> Any:
    expansions: Any = (checkpoint.manifest or {}).get("expansions")
    record = next(iter(expansions.values()), None) if isinstance(expansions, Mapping) else None
    for key in ("facts", "architecture", "own_code"):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record
