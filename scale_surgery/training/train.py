"""Train the expansion of a checkpoint; the base's files and values stay unchanged.

check everything -> folder of the run -> Trainer, which saves only expansion tensors -> the folder is the result

The Trainer and accelerate provide batches, optimizer, schedule, precision and several processes.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import BASE_NAME, ROUTER_KEY
from scale_surgery.checkpoint.files import way_to
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.locks import locked
from scale_surgery.checkpoint.names import SAMPLES_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import listed
from scale_surgery.checkpoint.staging import check_space, check_target
from scale_surgery.checkpoint.trainer_files import chat_template
from scale_surgery.errors import CheckpointError, Problem, TrainingError
from scale_surgery.evidence.integrity import Integrity, bytes_to_check, check_files
from scale_surgery.evidence.rehearsed import ITSELF
from scale_surgery.folder.folder import Folder, open_folder, refuse_fused, refuse_linked
from scale_surgery.folder.parts import base_tokenizer, tokenizer_alone
from scale_surgery.folder.record import tool_versions
from scale_surgery.progress import Steps, Track, no_track
from scale_surgery.running.in_memory import InMemory
from scale_surgery.running.options import RunOptions
from scale_surgery.running.processes import LONGEST_WAIT
from scale_surgery.text.sources import parse_source, paths_of
from scale_surgery.training.allocator import keep_freed_memory
from scale_surgery.training.arguments import (
    check_device,
    choose_precision,
    describe_rehearsal,
    is_cpu,
    make_arguments,
    training_schedule,
)
from scale_surgery.training.load_model import check_quantisation, check_reach, load_to_train
from scale_surgery.training.rates import with_rate
from scale_surgery.training.reports import find_reports, reporting
from scale_surgery.training.result import Training, describe_run, turn_warnings, use_warnings
from scale_surgery.training.resume_state import check_state
from scale_surgery.training.run_folder import (
    TrainingRun,
    check_resumable,
    refuse_unfinished,
)
from scale_surgery.training.settings import (
    REHEARSAL,
    SAMPLE,
    EvalData,
    TrainingSchedule,
    TrainingSettings,
    TrainingStart,
    check_gates,
    check_settings,
)

if TYPE_CHECKING:
    from accelerate import PartialState

    from scale_surgery.text.sequences import Sequences
    from scale_surgery.training.trainer import ExpansionTrainer


# without new text one in ten sequences is measured before and after a run: at least those of one step, and at most
# this number
SAMPLED_SHARE, MOST_SAMPLED = 10, 64
# what the messages of errors name if torch cannot write a file
WRITERS_OF_TORCH = ("PytorchStreamWriter", "inline_container")


def default_output(expanded: Path) -> Path:
    """Return the default folder of a trained model: `<name>-trained` in the current folder."""
    return Path(f"{expanded.resolve().name}-trained")


def train(
    expanded: str | Path,
    data: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    settings: TrainingSettings | None = None,
    *,
    eval_data: EvalData = EvalData(),
    start: TrainingStart = TrainingStart(),
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Training:
    """Train the new blocks of an expanded checkpoint on texts, with the Trainer of transformers.

    Expansion tensors in half precision are trained in float32 and rounded once whenever they are written.

    Args:
        expanded: Folder of the expanded checkpoint; it is not changed.
        data: Files, folders and ids of datasets to learn from; see `documents.read_documents`.
        output: Output folder; default `<name>-trained` in the current folder.
        settings: Settings of the training.
        eval_data: Files on which forgetting and learning are measured during the run.
        start: Start of the run: a new one, with the treatment of base shards, or an interrupted one that continues.
        run: Options of the run: device, "cpu" or the accelerator; and trust_remote_code.
        track: Makes progress bars.

    Returns:
        The result of the run.

    Raises:
        CheckpointError: If this is no expanded checkpoint, its base has changed, or the output cannot be written.
        DataError: If the data cannot be read, are empty or do not fit the model.
        TrainingError: If nothing would train, a run cannot be resumed, or it had to stop.
    """
    path, data, settings = Path(expanded), listed(data), settings or TrainingSettings()
    target = Path(output) if output is not None else default_output(path)
    check_settings(settings)
    folder = _open(path, settings)
    settings = with_rate(settings, folder.manifest.plan)
    files = _sources(data, eval_data, settings)
    # these imports take seconds, so the checks above come first
    from scale_surgery.running.loading import quiet_transformers
    from scale_surgery.training.base_samples import as_learned, read_samples, write_own_text, write_samples
    from scale_surgery.training.kept_samples import OwnText
    from scale_surgery.training.training_texts import made_by_one, read_texts

    # the Trainer imports peft, peft imports bitsandbytes, and that warns about a missing inference kernel
    with quiet_transformers():
        from scale_surgery.training.trainer import RunReport
    check_device(run)
    reports = find_reports(start.report_to)
    _check_ways(folder, settings, run)
    _check_target(target, folder, files, settings, start)
    processes = _join(run)
    if is_cpu(run):
        keep_freed_memory()
    with locked(target) if processes.is_main_process else nullcontext():
        _check_files(folder, processes, run, track)
        texts = read_texts(folder, files, settings, run, cache=start.cache_dir, processes=processes, track=track)
        precision = choose_precision(folder.running_dtype, settings, run)
        schedule = training_schedule(settings, texts["learn"], processes.num_processes)
        schedule = replace(schedule, precision=precision.reason)
        with track("loading", 1) as advance:
            model = load_to_train(folder, settings, run)
            advance(1)
        samples = target / TRAINING_FOLDER / SAMPLES_FILE
        if settings.rehearses_itself:
            # new tokens are nothing to the base, and their rows change as they learn
            tokenizer = base_tokenizer(folder, tokenizer_alone(folder, run), run)
            if start.resume and samples.is_file():
                own = OwnText(read_samples(samples), "of this run")
            else:
                batches = schedule.steps * settings.gradient_accumulation * processes.num_processes
                given = (folder, tokenizer, settings, batches, start.cache_dir, track)
                own = made_by_one(processes, lambda: write_own_text(model.to(processes.device), *given))
            schedule = replace(schedule, rehearses=describe_rehearsal(settings, own.description))
            texts[REHEARSAL] = as_learned(own.texts, settings, folder, tokenizer)
        warnings = use_warnings(data, eval_data, settings)
        if chat_template(folder) is not None:
            warnings += turn_warnings(data, settings)
        schedule = replace(schedule, warnings=warnings)
        decisive = _decisive(settings, folder, texts, processes.num_processes)
        # a run may resume on another processor, which would choose another precision
        decisive |= {"precision": asdict(precision)}
        if start.resume:
            check_resumable(target, decisive)
        stored = InMemory(model, [info.stored_as or name for name, info in folder.tensors.items()])
        check_reach(stored, folder)
        record = _record(model, settings, decisive)
        training = TrainingRun(target, folder, decisive, record, stored)
        if not start.resume and processes.is_main_process:
            training.begin(start.base_weights, track, overwrite=start.overwrite)
        if settings.rehearses_itself and processes.is_main_process and not samples.is_file():
            write_samples(samples, own.texts, tokenizer)
        processes.wait_for_everyone()
        start.announce(schedule)
        started = time.monotonic()
        steps = Steps(schedule.steps, round(schedule.passes * texts["learn"].tokens))
        trainer = _make_trainer(model, training, texts, schedule, settings, run, bf16=precision.bf16)
        with quiet_transformers(), track("training", steps) as advance:
            trainer.add_callback(RunReport(advance, training))
            with reporting(trainer, reports, training, is_main=processes.is_main_process, resume=start.resume):
                resumed = _run(trainer, training, resume=start.resume)
        if processes.is_main_process:
            training.finish(trainer.state.log_history)
        processes.wait_for_everyone()
    return describe_run(trainer, training, schedule, resumed, time.monotonic() - started)


def _open(path: Path, settings: TrainingSettings) -> Folder:
    """Open the expansion to train, in a folder with its own files."""
    folder = open_folder(path).one(settings.name)
    refuse_fused(folder)
    refuse_linked(folder)
    return folder


def _sources(
    data: Sequence[str | Path], eval_data: EvalData, settings: TrainingSettings
) -> dict[str, Sequence[str | Path]]:
    """Return the sources of texts by their purpose, after checking their names."""
    files = {"learn": data, "old": listed(eval_data.old), "new": listed(eval_data.new)}
    files |= {} if settings.rehearses_itself else {REHEARSAL: settings.rehearse}
    for text in chain.from_iterable(files.values()):
        parse_source(text)
    return files


def _check_ways(folder: Folder, settings: TrainingSettings, run: RunOptions) -> None:
    """Check that this expansion supports the requested settings."""
    manifest = folder.manifest
    check_quantisation(folder.path, manifest.plan, settings.base_quantization, run)
    if settings.routed and manifest.routing is None:
        raise TrainingError(Problem("router-missing", folder.path, name=manifest.name))
    check_gates(folder.path, manifest.plan, settings)


def _check_target(
    target: Path,
    checkpoint: Folder,
    files: Mapping[str, Sequence[str | Path]],
    settings: TrainingSettings,
    start: TrainingStart,
) -> None:
    """Check that the output can be written, or that its run can be resumed."""
    if start.resume:
        check_resumable(target, _published(settings))
    else:
        if not start.overwrite:
            refuse_unfinished(target)
        texts = [*chain.from_iterable(files.values()), *filter(None, [settings.rehearsal_prompts])]
        check_target(target, [checkpoint.path, *paths_of(texts)], overwrite=start.overwrite)
        way = way_to(target, checkpoint.path / checkpoint.shards[0], start.base_weights)
        copied = sum(info.bytes for info in checkpoint.tensors.values()) if way == "copy" else 0
        # two checkpoints at a time, each with parameters and moments of AdamW in float32, and the new shards of both
        costs = checkpoint.manifest.plan.costs
        check_space(target, copied + 2 * (12 * costs.parameters_added + costs.bytes_added))
    if target.resolve() == checkpoint.path.resolve():
        raise TrainingError(Problem("output-touches-input", target, input=checkpoint.path))


def _join(run: RunOptions) -> PartialState:
    """Join the processes that train together; a single process if none was launched."""
    from accelerate import DistributedType, PartialState
    from accelerate.utils import parse_flag_from_env

    # the other processes wait while the first one hashes and copies the base
    processes = PartialState(cpu=is_cpu(run), timeout=LONGEST_WAIT)
    if processes.distributed_type == DistributedType.DEEPSPEED:
        raise TrainingError(Problem("deepspeed-unsupported"))
    # as accelerate reads them
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise TrainingError(Problem("fsdp-outdated"))
    return processes


def _check_files(folder: Folder, processes: Any, run: RunOptions, track: Track) -> None:
    """Check the folder's bytes in one process, and raise its problems in all."""
    from accelerate.utils import broadcast_object_list

    problems: list[Any] = [()]
    if processes.is_main_process:
        with track("check of files", bytes_to_check(folder, None)) as advance:
            integrity = check_files(folder, None, advance)
        problems[0] = _file_problems(folder, integrity, run)
    if processes.num_processes > 1:
        broadcast_object_list(problems)
    if problems[0]:
        raise CheckpointError(*problems[0])


def _file_problems(checkpoint: Checkpoint, integrity: Integrity, run: RunOptions) -> tuple[Problem, ...]:
    unread = () if run.trust_remote_code else integrity.config + integrity.code
    if found := (*integrity.base, *integrity.structure, *unread):
        findings = (Problem("verify-finding", text=text.removesuffix(".")) for text in found)
        return (Problem("expansion-changed", checkpoint.path, *findings),)
    if integrity.foreign_code and not run.trust_remote_code:
        return (Problem("code-of-other-release", checkpoint.path),)
    return ()


def _decisive(
    settings: TrainingSettings,
    folder: Folder,
    texts: Mapping[str, Sequences],
    processes: int,
) -> dict[str, Any]:
    """Return everything that decides the result; a resumed run must have the same."""
    manifest = folder.manifest
    names = [tensor.name for tensor in manifest.plan.tensors]
    hashes = repr(sorted(hash_tensors(folder, names).items()))
    return _published(settings) | {
        "base": hashlib.sha256(repr(sorted(manifest.base_hashes.items())).encode()).hexdigest(),
        "expansion": hashlib.sha256(hashes.encode()).hexdigest(),
        "earlier_runs": len(manifest.training),
        "texts": {side: sequences.fingerprint() for side, sequences in texts.items()},
        "processes": processes,
    }


def _record(model: Any, settings: TrainingSettings, decisive: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's entry in surgery.json, without its log."""
    return {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "trained_parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "texts": decisive["texts"],
        "settings": _published(settings),
        "precision": decisive["precision"],
        # a model with a router is measured with it, whatever it learns by
        "routed": ROUTER_KEY in getattr(model.config, CONFIG_KEY),
        "tool": tool_versions(),
    }


def _published(settings: TrainingSettings) -> dict[str, Any]:
    """Return settings as records have them, which are published with a model: names of texts, without their folders."""
    return asdict(settings) | {
        "rehearse": [_without_folders(text) for text in settings.rehearse],
        # samples are kept, so a resumed run does not need the file
        "rehearsal_prompts": settings.rehearsal_prompts and Path(settings.rehearsal_prompts).name,
    }


def _without_folders(text: str) -> str:
    """Return the name of a text without its folders."""
    source = parse_source(text)
    return text.replace(source.name, source.path.name, 1) if source.is_here and source.path.name != ITSELF else text


def _make_trainer(
    model: Any,
    training: TrainingRun,
    texts: Mapping[str, Sequences],
    schedule: TrainingSchedule,
    settings: TrainingSettings,
    run: RunOptions,
    *,
    bf16: bool,
) -> ExpansionTrainer:
    from scale_surgery.text.tokenizing import collate
    from scale_surgery.training.rehearsal import make_rehearsal
    from scale_surgery.training.trainer import ExpansionTrainer

    sides = {side: texts[side] for side in ("old", "new") if side in texts}
    args = make_arguments(settings, training.folder, schedule.steps, run, bf16=bf16, is_measured=bool(sides))
    if "new" not in sides:
        sides[SAMPLE] = sample_of(texts["learn"], schedule)
    return ExpansionTrainer(
        model=model,
        args=args,
        train_dataset=texts["learn"],
        data_collator=collate,
        sides=sides,
        base_sides={side: texts.get(f"{BASE_NAME} {side}", texts[side]) for side in ("old", "new") if side in texts},
        eval_batch=settings.batch_size,
        rehearsal=make_rehearsal(texts.get(REHEARSAL), settings),
    )


def sample_of(learned: Sequences, schedule: TrainingSchedule) -> Sequences:
    """Return the sequences measured before and after a run without new text: few, evenly spread."""
    # independent of the number of processes
    read = round(schedule.passes * len(learned))
    share = max(read // SAMPLED_SHARE, math.ceil(read / schedule.steps))
    return learned.some(min(share, MOST_SAMPLED))


def _run(trainer: ExpansionTrainer, training: TrainingRun, *, resume: bool) -> int:
    """Train to the end, then measure. Return the steps that earlier runs did."""
    latest = training.whole_checkpoints()[-1:] if resume else []
    for checkpoint in latest:
        check_state(checkpoint)
    is_over = bool(latest) and training.step_of(latest[0]) >= trainer.args.max_steps
    if is_over:
        trainer.restore(latest[0])  # the run was stopped after its last step
    else:
        _step(trainer, training, latest)
    if trainer.measured_at != trainer.state.global_step:
        # a model that takes no step was not prepared to compute in the precision of the run
        with trainer.accelerator.autocast() if is_over else nullcontext():
            trainer.evaluate()
    return training.step_of(latest[0]) if latest else 0


def _step(trainer: ExpansionTrainer, training: TrainingRun, latest: list[Path]) -> None:
    # the log of a resumed run already holds the measurement before the first step
    trainer.args.eval_on_start = not latest
    try:
        trainer.train(resume_from_checkpoint=str(latest[0]) if latest else None)
    except KeyboardInterrupt as error:
        raise TrainingError(Problem("training-interrupted", training.target, **_steps(trainer, training))) from error
    except (OSError, RuntimeError) as error:
        # torch.save writes in C++
        if isinstance(error, RuntimeError) and not any(name in f"{error}" for name in WRITERS_OF_TORCH):
            raise
        for checkpoint in {*training.folder.glob("checkpoint-*")}.difference(training.whole_checkpoints()):
            shutil.rmtree(checkpoint, ignore_errors=True)
        steps, reason = _steps(trainer, training), getattr(error, "strerror", None) or error
        raise TrainingError(Problem("training-unwritten", training.target, error=reason, **steps)) from error


def _steps(trainer: ExpansionTrainer, training: TrainingRun) -> dict[str, int]:
    """Return the last step, and the step of the last complete checkpoint."""
    kept = training.whole_checkpoints()[-1:]
    return {"step": trainer.state.global_step, "kept": training.step_of(kept[0]) if kept else 0}
