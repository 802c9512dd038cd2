"""A base model with the facts about its architecture, derived from its config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import STOCK_KEY
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.same_values import are_same_bytes
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.modeling import stock_type
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.base import Base, BaseFacts, check_layers, quantisation_config
from scale_surgery.running.loading import quiet_transformers, translated
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.deriving.derive import Derived
    from scale_surgery.running.stored_names import Reading, TensorPlace

# keys that count modules
COUNTED = re.compile("^(num|n)_.*(layer|expert|head|block)|layers?$|experts?$|depth$")
# no size and no context length is larger in any model
LARGEST = 20_000_000
# these are no sizes: the base of rope angles, seeds
UNBOUNDED = re.compile("theta|base|freq|seed")
# a config may name a layer beyond its last, such as where sliding windows begin, and experts may be one tensor
MOST_HARMLESS = 5000


def read_base(checkpoint: Checkpoint, run: RunOptions = RunOptions()) -> Base:
    """Read config and headers of a base model, and derive the facts for planning."""
    derived = derive_config(
        checkpoint.config, str(checkpoint.path), len(checkpoint.tensors), code_folder(checkpoint, run)
    )
    architecture, places = _with_names(derived, checkpoint.tensors)
    check_layers(architecture, derived.sizes.layers, checkpoint.tensors)
    in_memory = {name: place.name for name, place in places.items() if place.name != name}
    is_quantised = quantisation_config(checkpoint.config)[1] is not None
    not_loaded = paths_not_loaded(derived.reading, places, architecture.unread, is_quantised=is_quantised)
    both = stored_twice(derived, places)
    # of a repository on the Hub, the weights may not be here yet
    is_here = all((checkpoint.path / shard).is_file() for shard in checkpoint.shards)
    has_own_head = both is not None and is_here and not are_same_bytes(checkpoint, *both)
    sizes = replace(derived.sizes, is_tied=False) if has_own_head else derived.sizes
    facts = BaseFacts(architecture, sizes, derived.proof, in_memory, not_loaded, has_own_head)
    return Base(checkpoint, facts, () if is_quantised else _not_found(checkpoint, places, run))


def _not_found(checkpoint: Checkpoint, places: Mapping[str, TensorPlace], run: RunOptions) -> tuple[Problem, ...]:
    """Find what files do not hold of their model: transformers would initialise it anew.

    Its class is asked, which knows tied tensors and those that it makes itself; it loads tensors without memory.
    """
    import torch

    from scale_surgery.deriving.build import stock_classes, without_quantisation
    from scale_surgery.deriving.configs import config_of

    config = without_quantisation(config_of(checkpoint.config, code_folder(checkpoint, run)))
    *_, widest = stock_classes(config).values()
    tensors = {name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()}
    options: dict[str, Any] = {"state_dict": tensors, "device_map": {"": "meta"}, "ignore_mismatched_sizes": True}
    where = f"{checkpoint.path}: {', '.join(_parts_of_few(places)) or 'its tensors'}"
    with quiet_transformers(), translated("tensors-not-joined", where):
        made: Any = widest
        _, info = made.from_pretrained(None, config=config, output_loading_info=True, **options)
    return (
        *(Problem("tensor-made-anew", name) for name in sorted(info["missing_keys"])),
        *(
            Problem("tensor-unlike-config", name, shape=tuple(found), wanted=tuple(wanted))
            for name, found, wanted in sorted(info["mismatched_keys"])
        ),
    )


def _parts_of_few(places: Mapping[str, TensorPlace]) -> list[str]:
    """Name the tensors in memory that are joined from fewer tensors of the files than those of other layers."""
    counts = Counter((place.part, place.name) for place in places.values() if place.part is not None)
    most = {part: count for (part, _), count in sorted(counts.items(), key=lambda item: item[1])}
    return [
        f"{name} ({count} of {most[part]} tensors {part})"
        for (part, name), count in counts.items()
        if count < most[part]
    ]


def derive_stored(config: Mapping[str, Any], place: str, names: Collection[str], code: Path | None = None) -> Derived:
    """Derive facts from a parsed config.json and the names of its model's tensors, names on disk included."""
    derived = derive_config(config, place, len(names), code)
    return replace(derived, architecture=_with_names(derived, names)[0])


def _with_names(derived: Derived, names: Collection[str]) -> tuple[Architecture, dict[str, TensorPlace]]:
    """Facts with names on disk, and where transformers puts the tensors of these names."""
    from scale_surgery.deriving.disk import with_stored_names

    places = derived.reading.places(names)
    return with_stored_names(derived.architecture, derived.reading, places), places


def paths_not_loaded(
    reading: Reading, places: Mapping[str, TensorPlace], unread: Iterable[str], *, is_quantised: bool
) -> tuple[str, ...]:
    """Find the shortest paths of the tensors that no tensor of a model takes, on disk and in memory.

    Those that its class passes over without a warning are left out; their patterns are `unread`.
    """
    patterns = [re.compile(pattern) for pattern in unread]
    loaded = {*reading.tensors, *(name for name, place in places.items() if place.name in reading.tensors)}
    left = {
        name: place.name
        for name, place in places.items()
        if name not in loaded
        and not (is_quantised and _is_part(name, loaded))
        and not any(pattern.search(place.name) for pattern in patterns)
    }
    above = {name[:end] for name in loaded for end in (*_ends(name), len(name))}
    paths = {
        next((name[:end] for end in _ends(name) if name[:end] not in above), name) for name in (*left, *left.values())
    }
    return tuple(sorted(paths))


def stored_twice(derived: Derived, places: Mapping[str, TensorPlace]) -> tuple[str, str] | None:
    """Names on disk of the embedding, and of a head that config.json says is tied to it; None where one is not there.

    transformers ties them where they are equal, and otherwise loads both.
    """
    facts = derived.architecture
    embedding = f"{facts.base_model}.{facts.embedding}" if facts.base_model else facts.embedding
    named = {place.name: name for name, place in places.items()}
    both = named.get(f"{embedding}.weight"), named.get(f"{facts.head}.weight")
    return both if derived.sizes.is_tied and None not in both else None  # type: ignore[return-value]


def _is_part(name: str, loaded: Collection[str]) -> bool:
    """Return True if a quantiser may have stored a tensor for one of these names: experts_blocks, weight_scale_inv."""
    module, _, parts = name.rpartition(".")
    words = parts.split("_")
    starts = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return any((f"{module}.{start}" if module else start) in loaded for start in starts)


def _ends(name: str) -> list[int]:
    """Lengths of the paths of the modules that hold a tensor, the outermost first."""
    return [place for place, letter in enumerate(name) if letter == "."]


def code_folder(checkpoint: Checkpoint, run: RunOptions) -> Path | None:
    """The folder whose own code may run, or None."""
    return checkpoint.path if run.trust_remote_code else None


def _check_counts(config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config.json that counts more layers or experts than there are tensors, before a model is made of it."""
    nested = (value for value in config.values() if isinstance(value, Mapping))
    for section in (config, *nested):
        for key, value in section.items():
            if COUNTED.search(str(key)) and isinstance(value, int) and value > max(tensors, MOST_HARMLESS):
                raise CheckpointError(Problem("config-count", f"config.json: {key}", count=value, tensors=tensors))
            if isinstance(value, int) and value > LARGEST and not UNBOUNDED.search(str(key)):
                raise CheckpointError(Problem("config-size", f"config.json: {key}", size=value, most=LARGEST))


def derive_config(config: Mapping[str, Any], place: str, tensors: int, code: Path | None = None) -> Derived:
    """Derive facts from a parsed config.json alone; modules have the names that they have in memory."""
    _check_counts(config, tensors)
    key, said = quantisation_config(config)
    if said is not None and not isinstance(said, Mapping):
        raise CheckpointError(Problem("config-quantisation", f"config.json: {key}", value=said))
    from scale_surgery.deriving.configs import config_of
    from scale_surgery.deriving.derive import derive

    with translated("config-not-read", f"{place}: config.json"):
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
    sizes, nested = config[CONFIG_KEY].get(STOCK_KEY, {}), plain.get("text_config")
    if isinstance(nested, Mapping):
        inside = {key: value for key, value in sizes.items() if key in nested and key not in plain}
        plain["text_config"] = {**nested, **inside}
        sizes = {key: value for key, value in sizes.items() if key not in inside}
    plain = {key: value for key, value in (plain | sizes).items() if value is not None or key not in sizes}
    return plain | {"model_type": stock_type(config.get("model_type"))}


def _recorded_code(checkpoint: Checkpoint) -> Any:
    expansions: Any = (checkpoint.recorded or {}).get("expansions")
    record = next(iter(expansions.values()), None) if isinstance(expansions, Mapping) else None
    for key in ("facts", "architecture", "own_code"):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record
