"""The Hugging Face Trainer with three additions: it saves only the expansion, measures forgetting, and rehearses.

The Trainer provides batches, optimizer, schedule, accumulation, precision, several processes and resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from scale_surgery.checkpoint.expansions import ROUTER_KEY
from scale_surgery.checkpoint.files import write_tensors
from scale_surgery.checkpoint.trainer_files import STATE_FILE
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.progress import Finding, Progress
from scale_surgery.running.freeze import expansion_disabled, expansion_parts
from scale_surgery.running.gates import gated_blocks
from scale_surgery.running.loss import Measurement, measure
from scale_surgery.running.pieces import Tail
from scale_surgery.text.sequences import Sequences
from scale_surgery.training.chunked_loss import find_pieces, loss_in_pieces
from scale_surgery.training.gates import loss_of_gates
from scale_surgery.training.rehearsal import Rehearsal, divergence_from_base
from scale_surgery.training.resume_state import reading_state
from scale_surgery.training.run_folder import EXPANSION_FILE, TrainingRun
from scale_surgery.training.settings import SAMPLE

OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.pt", "scheduler.pt"
# infix in the names of modules with gradient checkpointing
WRAPPED = "_checkpoint_wrapped_module."
# end of the key of a measured loss in the log
NATS = "_nats_per_token"
# name of each text's change against the base, with its sign in the log
CHANGES = {"old": ("forgetting", 1), "new": ("learning", -1)}
TEXTS = {"old": "the old text", "new": "the new text", SAMPLE: "the texts to learn"}


def full_tensor(parameter: Tensor) -> Tensor:
    """Return a parameter as one tensor, gathered from all processes if it is sharded."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


def reshard(model: Any) -> None:
    """Shard a model of FSDP2 again: after a measurement some units are whole, in the dtype of the computation."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the expansion by name, as they train."""
    reshard(model)
    return {part.name.replace(WRAPPED, ""): full_tensor(part.parameter) for part in expansion_parts(model)}


class ExpansionTrainer(Trainer):
    """A Trainer whose checkpoints hold expansion tensors and optimizer state, and no base tensor."""

    def __init__(
        self,
        *,
        sides: Mapping[str, Sequences],
        base_sides: Mapping[str, Sequences],
        eval_batch: int,
        rehearsal: Rehearsal | None = None,
        **options: Any,
    ) -> None:
        # the Trainer requires a dataset to evaluate, although `evaluate` measures `sides`
        super().__init__(**options, eval_dataset=dict(sides) or None)
        self.remove_callback(PrinterCallback)
        self.sides, self.base_sides, self.eval_batch = sides, base_sides, eval_batch
        # scores of the base, on the text as its own tokenizer reads it
        self.base_scores: dict[str, Measurement] = {}
        self.measured_at: int | None = None
        self.rehearsal, self.rehearsed = rehearsal, (-1, 0)
        gates = [blocks for blocks in gated_blocks(self.model) if blocks.gate.requires_grad]
        self.has_gates = bool(gates)
        self.tail: Tail | None = None
        self.knows_pieces = False
        for blocks in gates:
            blocks.keeps_scores = True

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run the Trainer's step, then the backward pass of rehearsal, so that only one graph is held at a time."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss if self.rehearsal is None else loss + self._rehearse(model, self.rehearsal)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Trainer's loss, computed in pieces, plus the loss of gates on the text to learn."""
        inside = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        tail = self.find_pieces(model, inside, inputs)
        with nullcontext() if tail is None else loss_in_pieces(inside, tail, inputs):
            loss: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.has_gates:
            return loss
        part = loss_of_gates(inside, inputs["attention_mask"], is_new=True)
        # if the loss is a sum over all batches of a step, the Trainer does not divide it
        is_sum = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return loss + part / (self.current_gradient_accumulation_steps if is_sum else 1)

    def find_pieces(self, model: Any, inside: Any, inputs: dict[str, Any]) -> Tail | None:
        """Return the tail that runs in pieces, found on the first batch; None if the model computes its loss itself."""
        if not self.knows_pieces:
            self.tail, self.knows_pieces = find_pieces(model, inside, inputs), True
        return self.tail

    def _rehearse(self, model: Any, rehearsal: Rehearsal) -> Tensor:
        rows = rehearsal.batch(self._number_of_batch())
        batch = {name: tensor.to(self.args.device) for name, tensor in rows.items()}
        with self.compute_loss_context_manager():
            inside = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            loss = rehearsal.weight * divergence_from_base(model, inside, batch, self.tail)
            if self.has_gates:
                loss = loss + loss_of_gates(inside, batch["attention_mask"], is_new=False)
        part = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(part)
        return part.detach()

    def _number_of_batch(self) -> int:
        """Return the number of the rehearsal batch for this forward pass of this process; the same in a resumed run."""
        step, before = self.rehearsed
        place = before + 1 if step == self.state.global_step else 0
        self.rehearsed = (self.state.global_step, place)
        number: int = self.state.global_step * self.args.gradient_accumulation_steps + place
        return number * int(self.accelerator.num_processes) + int(self.accelerator.process_index)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; with FSDP2 in bfloat16, gradients are added and the loss is returned in float32."""
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the expansion tensors; every process takes part, because a tensor may be sharded over them."""
        tensors = whole_tensors(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        spoiled = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if spoiled:
            target = Path(str(self.args.output_dir)).parent
            raise TrainingError(Problem("tensors-not-finite", target, names=spoiled, step=self.state.global_step))
        if self.args.should_save:
            whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_tensors(Path(output_dir or str(self.args.output_dir)) / EXPANSION_FILE, whole)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the expansion tensors of a checkpoint; the base is already loaded."""
        model = self.accelerator.unwrap_model(model or self.model, keep_torch_compile=False)
        with reading_state(Path(resume_from_checkpoint)):
            tensors = load_file(Path(resume_from_checkpoint) / EXPANSION_FILE)
            names = {part.name.replace(WRAPPED, "") for part in expansion_parts(model)}
            if others := sorted(names ^ tensors.keys()):
                raise TrainingError(Problem("run-tensors-differ", EXPANSION_FILE, names=others))
            load_whole(model, tensors)

    def restore(self, checkpoint: Path) -> None:
        """Load the weights and the log of a checkpoint, without further training."""
        self._load_from_checkpoint(str(checkpoint))
        with reading_state(checkpoint):
            self.state = TrainerState.load_from_json(str(checkpoint / STATE_FILE))
        # what was measured at this step is in the log
        measured = [entry["step"] for entry in self.state.log_history if any(name.endswith(NATS) for name in entry)]
        self.measured_at = int(measured[-1]) if measured else None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer and schedule; with FSDP the Trainer's method would write the whole model, base included."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, schedule = self._optimizer_and_schedule()
        state = whole_optimizer_state(self.model, optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(schedule.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and schedule; pickled code is not run."""
        with reading_state(Path(checkpoint)) if checkpoint is not None else nullcontext():
            self._load_states(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random state as the Trainer does, without pickled code; a damaged file raises TrainingError."""
        with reading_state(Path(checkpoint)) if checkpoint is not None else nullcontext():
            super()._load_rng_state(checkpoint)

    def _load_states(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        optimizer, schedule = self._optimizer_and_schedule()
        load_whole_optimizer_state(self.model, optimizer, torch.load(Path(checkpoint) / OPTIMIZER_NAME, **options))
        schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, **options))

    def _optimizer_and_schedule(self) -> tuple[Any, Any]:
        prepared: Any = self.optimizer
        return prepared.optimizer, self.lr_scheduler

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> dict[str, float]:
        """Measure loss and accuracy on old and new text, and forgetting and learning against the base."""
        if not self.base_scores and self.base_sides:
            with expansion_disabled(self.accelerator.unwrap_model(self.model)):
                self.base_scores = {side: self.measure_on(text) for side, text in self.base_sides.items()}
        is_end = self.state.global_step in (0, self.args.max_steps)
        # the sample is measured only before and after the run
        scores = {side: self.measure_on(text) for side, text in self.sides.items() if side != SAMPLE or is_end}
        metrics = {f"{side}_nats_per_token": score.nats_per_token for side, score in scores.items()}
        metrics |= {f"{side}_accuracy": score.accuracy for side, score in scores.items() if score.accuracy is not None}
        if "old" in scores:
            metrics["forgetting"] = scores["old"].loss_against(self.base_scores["old"])
        if "new" in scores:
            metrics["learning"] = 0.0 - scores["new"].loss_against(self.base_scores["new"])
        self.measured_at = self.state.global_step
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}

    def measure_on(self, text: Sequences) -> Measurement:
        """Measure on a text, each process on its share; a model with a router routes."""
        inside = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # the base is measured without the expansion, and without the router
        routes = ROUTER_KEY in inside.config.scale_surgery and inside.is_expansion_enabled
        with inside.routing_enabled() if routes else nullcontext():
            return measure(self.model, text, self.eval_batch, self._tell, processes=self.accelerator.state)

    def _tell(self, advance: int, note: str = "") -> None:
        """Notify the callbacks of a measured batch."""
        self.callback_handler.on_prediction_step(self.args, self.state, self.control)


def _measured(metrics: Mapping[str, float]) -> Iterator[str]:
    """Generate the loss on each measured text, with its change against the base."""
    for side in ("old", "new", SAMPLE):
        if (loss := metrics.get(f"{side}_nats_per_token")) is not None:
            name, sign = CHANGES.get(side, ("", 0))
            change = f" ({sign * metrics[name]:+z.4f})" if name in metrics else ""
            yield f"{side} {loss:.4f}{change}"


def load_whole(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load whole tensors into parameters, which may be sharded over processes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(tensors), options=options)


def whole_optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, gathered on the CPU of the first process if parameters are sharded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    reshard(model)  # tensors of whole units are not the optimizer's
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_whole_optimizer_state(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state gathered by `whole_optimizer_state` into an optimizer."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


class Advance(TrainerCallback):
    """A callback that advances a progress bar with each step."""

    def __init__(self, advance: Progress) -> None:
        self.advance = advance

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Advance the bar."""
        self.advance(1)


class RunReport(TrainerCallback):
    """A callback that shows the progress of a run, and publishes its checkpoints in its folder.

    The shown loss is the latest one logged by the Trainer: a mean over the steps since the previous log entry.
    """

    def __init__(self, advance: Progress, run: TrainingRun) -> None:
        self.advance, self.run = advance, run
        self.note = ""
        self.reported = 0

    def _report(self, state: TrainerState, note: str) -> None:
        self.advance(state.global_step - self.reported, note)
        self.reported = state.global_step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Show the start, and the progress of a resumed run."""
        self._report(state, Finding("resumed" if state.global_step else "begins"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Show a step."""
        self._report(state, self.note)

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Show that a measurement is running."""
        self._report(state, "measuring")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **given: Any) -> None:
        """Show a measurement."""
        metrics = given["metrics"]
        changes = [f"{name} {metrics[name]:.3f}" for name, _ in CHANGES.values() if name in metrics]
        self._report(state, Finding(f"loss {', '.join(_measured(metrics))}", kept="  ".join(changes)))

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Write the log, and stop if a loss is not finite."""
        latest = state.log_history[-1]
        if "loss" in latest:
            self.note = f"loss {latest['loss']:.3f}"
        if state.is_world_process_zero:
            self.run.write_log(state.log_history)
        losses = {"loss": "the loss"} | {
            f"{side}_nats_per_token": f"the loss on {text}" for side, text in TEXTS.items()
        }
        for key, name in losses.items():
            value, step, target = latest.get(key, 0.0), state.global_step, self.run.target
            if not math.isfinite(value) and step:
                raise TrainingError(Problem("loss-not-finite", target, name=name, value=value, step=step))
            if not math.isfinite(value):
                raise TrainingError(Problem("first-loss-not-finite", target, name=name, value=value))

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: TrainerControl, **__: Any) -> None:
        """Publish a checkpoint once all processes have written their part."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self.run.publish(self.run.folder / f"checkpoint-{state.global_step}", state.log_history)
