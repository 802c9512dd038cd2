"""The folder of a training run: the last complete state as an expanded checkpoint, with a log.

    OUT/                                   loads, verifies and strips like any expanded checkpoint
      expansion-NAME-step-200-00001-of-... expansion tensors of the last complete checkpoint; at the end without step
      model-*, config.json, ...            files of the expanded checkpoint
      training/
        settings.json  log.jsonl  curves.png
        checkpoint-200/                    for --resume: expansion tensors, optimizer, schedule, random state

The index alone decides which shards are read. New shards get new names, then the index is replaced, then the old shards
are removed. So at any moment the folder is one complete checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import (
    BaseWeights,
    remove_unfinished,
    write_json,
    write_tensors,
    write_text,
)
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.hashes import changed_tensors
from scale_surgery.checkpoint.names import LOG_FILE, MANIFEST_FILE, SETTINGS_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.staging import staged, sync_folder
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.folder.folder import Folder, open_folder
from scale_surgery.folder.layout import lay_out, tensors_in, total_bytes
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.write import write_index, write_record
from scale_surgery.planning.plan import SHARD_STEM
from scale_surgery.progress import Track
from scale_surgery.running.in_memory import InMemory

CURVES_FILE = "curves.png"
EXPANSION_FILE = "expansion.safetensors"
CHECKPOINT = re.compile(r"checkpoint-\d+")
# written last into a checkpoint: without it the checkpoint is incomplete
COMPLETE_FILE = "complete.json"
NEW_LOSS = "new_nats_per_token"
MEASURED = {"old_nats_per_token", NEW_LOSS}
Log = Sequence[Mapping[str, Any]]


def check_resumable(target: Path, settings: Mapping[str, Any]) -> None:
    """Check that the folder has an unfinished run with these settings."""
    file = target / TRAINING_FOLDER / SETTINGS_FILE
    if not file.is_file():
        raise TrainingError(Problem("run-missing", target))
    begun = read_json(file)
    if begun.get("finished"):
        raise TrainingError(Problem("run-finished", target))
    now = json.loads(json.dumps(settings))
    # recomputed activations are the same
    differing = sorted(name for name in now if begun.get(name) != now[name] and name != "gradient_checkpointing")
    if differing:
        raise TrainingError(
            *(
                Problem("setting-changed", f"{target}: {name}", began=begun.get(name), now=now[name])
                for name in differing
            )
        )


def refuse_unfinished(target: Path) -> None:
    """Refuse to start a run in the folder of an unfinished one."""
    file = target / TRAINING_FOLDER / SETTINGS_FILE
    if file.is_file() and not read_json(file).get("finished"):
        raise TrainingError(Problem("run-unfinished", target))


@dataclass(frozen=True)
class TrainingRun:
    """A training run and its folder.

    Attributes:
        target: The folder.
        source: The folder that is trained, as if it held this expansion alone.
        decisive: Everything that decides the result; a resumed run must have the same.
        record: The run's entry in surgery.json, without its log.
        stored: The trained model, with the names of its stored tensors.
    """

    target: Path
    source: Folder
    decisive: Mapping[str, Any]
    record: Mapping[str, Any]
    stored: InMemory

    @property
    def name(self) -> str:
        """Name of the expansion."""
        return self.source.manifest.name

    @property
    def folder(self) -> Path:
        """The folder of the log, the curves and the checkpoints."""
        return self.target / TRAINING_FOLDER

    def whole_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the latest last."""
        folders = [path.parent for path in self.folder.glob(f"checkpoint-*/{COMPLETE_FILE}")]
        return sorted((path for path in folders if CHECKPOINT.fullmatch(path.name)), key=self.step_of)

    @staticmethod
    def step_of(checkpoint: Path) -> int:
        """Return the step of a checkpoint."""
        return int(checkpoint.name.removeprefix("checkpoint-"))

    def begin(self, base_weights: BaseWeights, track: Track, *, overwrite: bool) -> None:
        """Write the folder, with the expansion before the first step."""
        # one expansion is trained, but all are copied
        source = self.source.of_all
        base_files = {entry.stored_as for entry in source.manifest.base_files.values()}
        state = {"train": dict(self.decisive), "base_weights": base_weights}
        files = (*source.shards, *source.side_files, MANIFEST_FILE)
        taken = {file: source.path / file for file in files if not file.startswith(f"{TRAINING_FOLDER}/")}
        base = {file: path for file, path in taken.items() if file in base_files}
        stamps = {file: source.stamps[file] for file in taken.values()}
        with staged(self.target, state, stamps, overwrite=overwrite, is_locked=True) as partial:
            with track("files", total_bytes(taken)) as advance:
                lay_out(base, partial, base_weights, advance)
                # what the run replaces is no link
                lay_out({file: path for file, path in taken.items() if file not in base}, partial, "copy", advance)
            # sums are those of a run that has ended
            self._rewrite(partial, trained=None)
            write_json(partial / TRAINING_FOLDER / SETTINGS_FILE, self.decisive)

    def publish(self, saved: Path, log: Log) -> None:
        """Make a checkpoint of the run the content of the folder."""
        # torch writes without waiting for the disk, and the checkpoint before this one is removed below
        sync_folder(saved)
        write_json(saved / COMPLETE_FILE, {"step": self.step_of(saved)})
        publish_tensors(self.target, self.name, saved / EXPANSION_FILE, f"step-{self.step_of(saved)}-", self.stored)
        self.write(log)
        for folder in self.folder.glob("checkpoint-*"):
            if folder.name != saved.name:
                shutil.rmtree(folder)

    def write(self, log: Log, trained: Mapping[str, str] | None = None) -> None:
        """Write the log, and update surgery.json."""
        self.write_log(log)
        earlier = read_manifest(self.target).expansions[self.name].training[: self.decisive["earlier_runs"]]
        entry = {**self.record, "steps": log[-1]["step"] if log else 0, "measured": last_measured(log)}
        self._rewrite(self.target, training=(*earlier, entry), trained=trained)

    def _rewrite(self, folder: Path, **changes: Any) -> None:
        """Change fields of the expansion's record in surgery.json."""
        manifest = read_manifest(folder)
        # what is learned now is whole, whatever strength the tensors were written at before
        changed = replace(manifest.expansions[self.name], **changes, strength=1.0)
        expansions, verification = {**manifest.expansions, self.name: changed}, manifest.verification
        # a verification made during this run covers the tensors of an earlier step. Older ones stay, also one from the
        # second in which the run began: their date shows their age
        if verification is not None and str(verification.get("date")) > self.record["begun"]:
            verification = None
        written = replace(manifest, expansions=expansions, verification=verification)
        write_record(folder, written)

    def _sums(self) -> dict[str, str]:
        """Return the sha256 of the tensors that the run changed."""
        trained = open_folder(self.target)
        expansion = trained.manifest.expansions[self.name]
        return changed_tensors(trained, [tensor.name for tensor in expansion.plan.tensors], expansion.tensors)

    def draw(self, log: Log) -> None:
        """Draw the curves, only once: a figure takes as long as many steps of a small model."""
        from scale_surgery.drawing.figures import plot_training

        plot_training([dict(entry) for entry in log], self.folder / CURVES_FILE)

    def write_log(self, log: Log) -> None:
        """Write the log as JSON lines."""
        kept = (entry for entry in log if "train_runtime" not in entry)
        write_text(self.folder / LOG_FILE, "".join(json.dumps(dict(entry)) + "\n" for entry in kept))

    def finish(self, log: Log) -> None:
        """Rename the shards to names without a step, write log and sums, and remove the checkpoints of the run."""
        publish_tensors(self.target, self.name, self.whole_checkpoints()[-1] / EXPANSION_FILE, "", self.stored)
        self.write(log, self._sums())
        self.draw(log)
        write_json(self.folder / SETTINGS_FILE, {**self.decisive, "finished": True})
        for checkpoint in self.folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


def read_log(file: Path) -> list[dict[str, Any]]:
    """Read the log of a run."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def last_measured(log: Log) -> dict[str, float]:
    """Return the last measurement in a log; empty if nothing was measured."""
    measured = [entry for entry in log if MEASURED.intersection(entry)]
    return {name: measured[-1][name] for name in measured[-1] if name != "epoch"} if measured else {}


def publish_tensors(target: Path, name: str, trained: Path, step: str, model: InMemory) -> None:
    """Write trained tensors into a folder: new shards, then the index; then remove the old shards."""
    from safetensors import safe_open

    from scale_surgery.tensors.initialise import TORCH_DTYPES

    folder = open_folder(target)
    plan, stem = folder.manifest.expansions[name].plan, f"{SHARD_STEM}{name}-"
    before = {folder.tensors[tensor.name].file for tensor in plan.tensors}
    shards = [shard for shard in folder.shards if shard not in before]
    with safe_open(trained, framework="pt") as file:
        for shard in plan.shards:
            held = [tensor.name for tensor in plan.tensors if tensor.shard == shard]
            dtypes = {plan.stored_name(key): TORCH_DTYPES[folder.tensors[key].dtype] for key in held}
            # cast once, to their dtype in the folder
            tensors = {key: tensor.to(dtypes[key]) for key, tensor in model.tensors(file.get_tensor, dtypes)}
            published = shard.replace(stem, stem + step)
            write_tensors(target / published, {key: tensors[key] for key in dtypes})
            shards.append(published)
    write_index(target, tensors_in(target, shards))
    for written in target.glob(f"{stem}*.safetensors"):
        if written.name not in shards:
            written.unlink()
    remove_unfinished(target)
