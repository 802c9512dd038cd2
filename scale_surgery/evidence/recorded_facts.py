"""Compare the facts in surgery.json with the facts derived from the base's config.json.

An edited record, such as another name of a norm, could hide tensors from the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.reading import differing_keys, parse_json
from scale_surgery.deriving.base import code_folder, derive_stored
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.folder.folder import Folder
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.plan import Plan
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.deriving.derive import Derived

# facts that locate tensors
LASTING = ("model_type", "base_model", "layers", "embedding", "final_norm", "transposed", "softcap", "stored_as")


def fact_problems(folder: Folder, run: RunOptions = RunOptions()) -> tuple[str, ...]:
    """Compare the recorded facts with those that are derived again."""
    manifest = folder.manifest
    try:
        config = parse_json(manifest.replaced.get(CONFIG_FILE, "{}"))
        code = code_folder(folder, run)
        derived = derive_stored(config, str(folder.path), manifest.base_tensors, code)
    except (CheckpointError, PlanError) as error:
        return tuple(f"{MANIFEST_FILE}: its facts of the base model cannot be checked: {line}" for line in error.lines)
    return tuple(
        f"{MANIFEST_FILE}: expansions.{name}.facts.{key} is not what the base's {CONFIG_FILE} gives. Restore it from "
        "where you got it."
        for name, plan in manifest.plans.items()
        for key in _differing(plan, derived)
    )


def _differing(plan: Plan, facts: Derived) -> Iterator[str]:
    """Generate the facts of a plan that differ from those derived again."""
    sizes = differing_keys(plain_json(asdict(plan.facts.sizes_by_config)), plain_json(asdict(facts.sizes)))
    recorded, derived = _facts(plan.architecture, facts.architecture), _facts(facts.architecture, plan.architecture)
    yield from (f"sizes.{key}" for key in sizes)
    yield from (f"architecture.{key}" for key in differing_keys(recorded, derived))


def _facts(architecture: Architecture, second: Architecture) -> Mapping[str, Any]:
    """Return the facts that do not depend on the release, unlike treatments of blocks."""
    facts = plain_json(asdict(architecture))
    layers = range(min(len(architecture.kind_of_layer), len(second.kind_of_layer)))
    pairs = [(architecture.kind(layer), second.kind(layer)) for layer in layers]
    names = [{name: kind.on_disk(name) for name in kind.modules if name in its.modules} for kind, its in pairs]
    return {name: facts[name] for name in LASTING} | {"kinds": names}
