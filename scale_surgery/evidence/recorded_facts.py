"""Whether the facts on which surgery.json relies are those that the base's config.json gives.

A record that was edited, such as the name of a norm, would hide tensors from what is proved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.reading import differing_keys, parse_json
from scale_surgery.deriving.base import check_counts, derive_config
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.record import Manifest

if TYPE_CHECKING:
    from scale_surgery.deriving.derive import Derived


def fact_problems(checkpoint: Checkpoint, manifest: Manifest, run: RunOptions) -> tuple[str, ...]:
    """Compare the recorded facts with those that are derived again.

    Args:
        checkpoint: The expanded checkpoint.
        manifest: Its surgery.json.
        run: Whether code that lies with the base may run: trust_remote_code.

    Returns:
        A line for each fact that differs, or for what stands in the way of deriving them.
    """
    try:
        found = _derived(checkpoint, manifest, run)
    except (CheckpointError, PlanError) as error:
        return tuple(f"{MANIFEST_FILE}: its facts of the base model cannot be checked: {line}" for line in error.lines)
    plan = manifest.plan
    differing = {
        "sizes": differing_keys(plain_json(asdict(plan.sizes)), plain_json(asdict(found.sizes))),
        "architecture": differing_keys(_facts(plan.architecture), _facts(found.architecture)),
    }
    return tuple(
        f"{MANIFEST_FILE}: plan.{part}.{key} is not what the base's {CONFIG_FILE} gives. Restore it from where you got "
        "it."
        for part, keys in differing.items()
        for key in keys
    )


def _derived(checkpoint: Checkpoint, manifest: Manifest, run: RunOptions) -> Derived:
    config = parse_json(manifest.replaced.get(CONFIG_FILE, "{}"))
    check_counts(config, len(manifest.base_tensors))
    if not run.trust_remote_code:
        return derive_config(config, str(checkpoint.path), run)
    with tempfile.TemporaryDirectory() as folder:
        _link_code(checkpoint, manifest, Path(folder))
        return derive_config(config, folder, run)


def _link_code(checkpoint: Checkpoint, manifest: Manifest, folder: Path) -> None:
    """The base's config with its own code, without those of the expansion, to be read as a base is."""
    (folder / CONFIG_FILE).write_text(manifest.replaced.get(CONFIG_FILE, "{}"), encoding="utf-8")
    for name, file in manifest.base_files.items():
        if name.endswith(".py") and file.stored_as is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to((checkpoint.path / file.stored_as).resolve())


def _facts(architecture: Architecture) -> Mapping[str, Any]:
    """Facts without the reasons for them, whose words are those of a release."""
    facts: dict[str, Any] = plain_json(asdict(architecture))
    for kind in facts["kinds"]:
        for block in kind["blocks"]:
            del block["reason"]
    return facts | {"fixed_heads": bool(architecture.fixed_heads)}
