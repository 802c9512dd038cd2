"""Compare a base with the recorded base of an extract: config, shapes and bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.reading import differing_keys
from scale_surgery.deriving.base import derive_config
from scale_surgery.deriving.configs import config_of
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.extract_folder import Extract
from scale_surgery.folder.record import BaseTensor, Manifest
from scale_surgery.planning.base import QUANTISATION_KEY
from scale_surgery.planning.plan import base_title
from scale_surgery.progress import Track
from scale_surgery.surgery.saved import LEAVES_NUMBERS, settings_of, short

Shapes = Mapping[str, tuple[int, ...]]
# keys of a config that change no number that a model gives
INDECISIVE = ("_name_or_path", "architectures", "transformers_version", "use_cache")


def check_fit(extract: Extract, base: Checkpoint, name: str) -> None:
    """Check that an expansion fits a base by names and shapes, whatever its values."""
    if CONFIG_KEY in base.config:
        refuse_form(name, "expanded", "base")
    shapes = {name: tensor.shape for name, tensor in extract.manifest.base_tensors.items()}
    given = {tensor: tuple(info.shape) for tensor, info in base.tensors.items()}
    check_sizes(extract, base.config, shapes, given, name)


def check_sizes(extract: Extract, config: Mapping[str, Any], shapes: Shapes, given: Shapes, name: str) -> None:
    """Check config and shapes of a base, on disk or in memory; `shapes` are expected, `given` are the base's."""
    # sizes are derived, which takes seconds, and are others too where shapes are
    manifest, model_type = extract.manifest, config.get("model_type")
    if model_type != manifest.plan.family:
        problems = [_other_value("model_type", model_type, manifest.plan.family)]
    else:
        problems = [*_shape_problems(shapes, given)] or [*_config_problems(manifest, config, name)]
    if problems:
        base = base_title(manifest.base_name, manifest.base_revision)
        raise CheckpointError(Problem("base-unfit", name, *problems, base=base))


def other_computation(extract: Extract, config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Describe values of a base's config with which it computes otherwise than the base of an expansion.

    With its own code, every value is compared by `check_sizes`. Defaults count as values.
    """
    if extract.manifest.plan.architecture.own_code:
        return ()
    made_on, given = (dict(settings_of(config_of(some).to_dict())) for some in (extract.manifest.base_config, config))
    return tuple(
        f"{extract.name} was made on a base whose {key} is {short(made_on.get(key))}, and in {name} it is "
        f"{short(given.get(key))}: what was learned may be worth less here."
        for key in differing_keys(made_on, given)
        if not (LEAVES_NUMBERS.search(key) or key.startswith(QUANTISATION_KEY))
    )


def hash_base(base: Checkpoint, track: Track) -> dict[str, str]:
    """Hash each tensor of a base."""
    with track("base tensors", sum(info.bytes for info in base.tensors.values())) as advance:
        return hash_tensors(base, list(base.tensors), advance)


def find_differing(extract: Extract, base: Checkpoint, hashes: Mapping[str, str]) -> dict[str, Problem]:
    """Find the tensors of a base that differ from those on which the expansion was made."""
    differing = {}
    for name, info in base.tensors.items():
        given, expected = BaseTensor(hashes[name], info.dtype, info.shape), extract.manifest.base_tensors[name]
        if given.form != expected.form:
            differing[name] = Problem("base-tensor-form", name, form=given.form, recorded=expected.form)
        elif given != expected:
            differing[name] = Problem("base-tensor-bytes", name)
    return differing


def refuse_differing(extract: Extract, name: str, differing: Mapping[str, Problem], count: int, code: str) -> None:
    """Refuse a base if any of its `count` tensors differ; the code of the problem says what to do."""
    if differing:
        base = base_title(extract.manifest.base_name, extract.manifest.base_revision)
        raise CheckpointError(Problem(code, name, *differing.values(), count=len(differing), total=count, base=base))


def _config_problems(manifest: Manifest, config: Mapping[str, Any], name: str) -> Iterator[Problem]:
    if manifest.plan.architecture.own_code:
        # its sizes are known to its own code alone, which is not run to compare
        differing = (key for key in differing_keys(manifest.base_config, config) if key not in INDECISIVE)
        yield from (Problem("base-key-differs", f"{CONFIG_FILE}: {key}") for key in differing)
        return
    given = asdict(derive_config(config, name, len(manifest.base_tensors)).sizes)
    for key, expected in asdict(manifest.plan.facts.sizes_by_config).items():
        if given[key] != expected:
            yield _other_value(key, given[key], expected)


def _other_value(key: str, value: object, recorded: object) -> Problem:
    return Problem("base-value-differs", f"{CONFIG_FILE}: {key}", value=value, recorded=recorded)


def _shape_problems(shapes: Shapes, given: Shapes) -> Iterator[Problem]:
    for name in shapes:
        if name in given and shapes[name] != given[name]:
            yield Problem("tensor-shape", name, shape=given[name], planned=shapes[name])
    yield from (Problem("base-tensor-missing", name) for name in shapes if name not in given)
    yield from (Problem("base-tensor-unknown", name) for name in given if name not in shapes)
