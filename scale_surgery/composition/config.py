"""What config.json and the index of a composed folder say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.reading import differing_keys
from scale_surgery.composition.record import Mixing
from scale_surgery.surgery.config import expansion_specs, model_config
from scale_surgery.surgery.record import Manifest


def composed_config(
    base: Mapping[str, Any], dtype: str, manifests: Mapping[str, Manifest], mixing: Mixing
) -> dict[str, Any]:
    """Edit a base model's config.json: own model type and class, all expansions, everything else as it was.

    Args:
        base: Parsed config.json of the base.
        dtype: Dtype of the base, for a config that names none.
        manifests: surgery.json of each expansion, by its name; at least one.
        mixing: How the paths are mixed.

    Returns:
        The new config.
    """
    expansions = [expansion_specs(manifest.plan, name) for name, manifest in manifests.items()]
    first = next(iter(manifests.values())).plan
    return model_config(base, first, expansions, dtype, mixing.router(len(expansions)))


def config_problems(written: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Keys of a composed folder's config.json that are not what was written, a line each."""
    return [f"config.json: {key} is not what compose wrote." for key in differing_keys(written, config)]


def index_of(tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """The index of a folder.

    Args:
        tensors: Every tensor, by the name and in the shard that it has there.
    """
    known = list(tensors)
    weight_map = {info.name: info.file for info in known}
    return {
        "metadata": {"total_size": sum(info.bytes for info in known)},
        "weight_map": dict(sorted(weight_map.items())),
    }
