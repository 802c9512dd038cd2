"""Settings of training, with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.evidence.rehearsed import ITSELF
from scale_surgery.fields import NO_OPTION, Count, Range, Seed, SequenceLength, fields_of, problems_of

if TYPE_CHECKING:
    from scale_surgery.planning.plan import Plan

TensorGroup = Literal[
    "w12", "w21", "w22", "w11", "gates", "biases", "norms", "embedding", "head", "new_tokens", "attn", "ffn"
]
GROUPS: tuple[TensorGroup, ...] = get_args(TensorGroup)
Quantisation = Literal["int8", "nf4"]
AtLeastZero = Annotated[float, Range(least=0)]
AboveZero = Annotated[float, Range(above=0)]
# names of text sides besides "old" and "new": rehearsed texts, a sample of the texts to learn
REHEARSAL, SAMPLE = "rehearsal", "text"


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of training; schedule and warm-up default to those of the paper (arXiv 2511.03270, section 5).

    Attributes:
        name: Expansion to train. Other expansions stay unchanged and are not used. Default: the only one.
        sequence_length: Tokens in a sequence. Default: the model's context length, at most 1024.
        packing: Join all documents and cut them into full sequences (the default). Without it, each document is a
            padded sequence of its own.
        learn_prompts: Include questions and prompts in the loss, not only answers.
        steps: Optimizer steps. Default: the number of steps in the epochs.
        epochs: Passes over the data. Ignored if steps are given.
        batch_size: Sequences in one forward pass of one process.
        gradient_accumulation: Forward passes in one optimizer step.
        learning_rate: Peak learning rate of all tensors, after the warm-up. Default: 0.4 / width of the model, three
            times as much in preserve without new tokens, and an eighth of it in grow.
        schedule: Shape of the learning rate after the warm-up.
        warmup: Share of the steps in which the learning rate rises from zero. Default: 0.06, and at least 10 steps. A
            run without so many steps ends before the peak rate.
        weight_decay: Weight decay of AdamW.
        max_gradient_norm: Norm to which gradients are clipped. 0 clips nothing.
        groups: Groups of new tensors to train, such as w12,w21.
        routed: Compute the loss on the router's output, so that the adapt path learns the tokens that the router gives
            it. Without this flag, the loss is that of the adapt path. Needs a router.
        seed: Seed of the data order and of all other random numbers.
        bf16: Compute in bfloat16 (autocast). Default: on if the base is stored in bfloat16 or float16.
            Exception: a CPU without instructions for it loads the base in float32.
        base_quantization: Quantise the base in memory during training, with bitsandbytes: int8 (LLM.int8) or nf4 (4
            bits, as in QLoRA). Its files do not change. Default: no quantisation.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them: less memory, more
            time.
        save_every: Steps between checkpoints. Default: a tenth of the run.
        eval_every: Steps between measurements on old and new text. Default: a tenth of the run.
        log_every: Steps between log entries. Default: 10, or a tenth of the run if that is less.
        rehearse: Regularise towards the base on this text (KL divergence): a file, a folder, a dataset, or self for
            text sampled from the base. Can be repeated. Default: none.
        rehearsal_weight: Weight of the divergence from the base in the loss.
        rehearsal_share: Share of rehearsed sequences in a step. It is rounded to whole sequences for each batch of each
            process, at least one.
        rehearsal_samples: Number of texts to sample from the base (rehearse self). Default: half of the tokens that the
            run rehearses, in at most 800 texts.
        rehearsal_length: Tokens in a sample (rehearse self). Default: the sequence length.
        rehearsal_temperature: Sampling temperature (rehearse self).
        rehearsal_prompts: File of instructions that the base answers through its chat template, one a line, or JSONL
            with {"prompt"}, {"system", "prompt"} or {"messages"}; without a template, of beginnings that it continues
            (rehearse self). Default: 200 instructions of this package, or the tokenizer's first token of a text.
        rehearsal_raw: Sample plain text without the chat template (rehearse self).
    """

    name: str | None = None
    sequence_length: SequenceLength | None = None
    packing: bool = field(default=True, metadata=NO_OPTION)
    learn_prompts: bool = field(default=False, metadata=NO_OPTION)
    steps: Count | None = None
    epochs: AboveZero = 1.0
    batch_size: Count = 8
    gradient_accumulation: Count = 1
    learning_rate: AboveZero | None = None
    schedule: Literal["linear", "cosine", "constant"] = field(default="linear", metadata=NO_OPTION)
    warmup: Annotated[float, Range(least=0, below=1, noun="a share of the steps")] | None = field(
        default=None, metadata=NO_OPTION
    )
    weight_decay: AtLeastZero = field(default=0.0, metadata=NO_OPTION)
    max_gradient_norm: AtLeastZero = field(default=1.0, metadata=NO_OPTION)
    groups: tuple[TensorGroup, ...] = field(default=GROUPS, metadata={"option": "train-only"})
    routed: bool = False
    seed: Seed = 0
    bf16: bool | None = None
    base_quantization: Quantisation | None = None
    gradient_checkpointing: bool = False
    save_every: Count | None = field(default=None, metadata=NO_OPTION)
    eval_every: Count | None = field(default=None, metadata=NO_OPTION)
    log_every: Count | None = field(default=None, metadata=NO_OPTION)
    rehearse: tuple[str, ...] = ()
    rehearsal_weight: AboveZero = field(default=1.0, metadata=NO_OPTION)
    rehearsal_share: Annotated[float, Range(above=0, below=1, noun="a share")] = field(default=0.25, metadata=NO_OPTION)
    rehearsal_samples: Count | None = field(default=None, metadata=NO_OPTION)
    rehearsal_length: SequenceLength | None = field(default=None, metadata=NO_OPTION)
    rehearsal_temperature: AboveZero = field(default=1.0, metadata=NO_OPTION)
    rehearsal_prompts: str | None = field(default=None, metadata=NO_OPTION)
    rehearsal_raw: bool = field(default=False, metadata=NO_OPTION)

    @property
    def rehearses_itself(self) -> bool:
        """True if the base writes the rehearsal text."""
        return self.rehearse == (ITSELF,)

    @property
    def rehearsed_rows(self) -> int:
        """Rehearsed sequences per batch, at least one: `rehearsal_share` of the batch and themselves together."""
        return max(1, round(self.batch_size * self.rehearsal_share / (1 - self.rehearsal_share)))


@dataclass(frozen=True)
class EvalData:
    """Texts on which a model is measured while it trains.

    Attributes:
        old: Files with old text, to measure forgetting.
        new: Files with new text, to measure learning.
    """

    old: str | Path | Sequence[str | Path] = ()
    new: str | Path | Sequence[str | Path] = ()


@dataclass(frozen=True)
class TrainingSchedule:
    """The schedule of a run, known before its first step.

    Attributes:
        steps: Optimizer steps.
        warmup_steps: Steps of the warm-up; a shorter run ends within it.
        learning_rate: Highest learning rate of any step; None if the settings leave it to the model.
        sequences: Sequences to learn.
        tokens: Scored tokens in them.
        passes: Passes over them.
        rehearses: Description of the rehearsal text; empty without rehearsal.
        precision: Precision of a base stored in bfloat16; empty for other bases.
        warnings: What may go wrong.
    """

    steps: int
    warmup_steps: int
    learning_rate: float | None
    sequences: int
    tokens: int
    passes: float
    rehearses: str = ""
    precision: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingStart:
    """Start of a training run.

    Attributes:
        resume: Continue an interrupted run in the output folder from its last whole checkpoint.
        base_weights: How a new run takes over base shards: "auto", "copy" or "link".
        overwrite: True if a new run may replace an existing output folder.
        announce: Called with the schedule of the run before its first step.
        report_to: Other loggers, such as tensorboard and wandb: any that the Trainer of transformers supports.
        cache_dir: Folder for the tokens of the texts to learn. Default: tokens of large texts go to the cache of the
            library datasets (HF_DATASETS_CACHE).
    """

    resume: bool = False
    base_weights: BaseWeights = "auto"
    overwrite: bool = False
    announce: Callable[[TrainingSchedule], None] = lambda schedule: None
    report_to: tuple[str, ...] = ()
    cache_dir: Path | None = None


# settings that also apply to the rehearsal of given texts
OF_ANY_REHEARSAL = ("rehearsal_weight", "rehearsal_share")


def check_settings(settings: TrainingSettings) -> None:
    """Check that settings make sense, on any model."""
    problems = problems_of(settings)
    if unknown := [name for name in settings.groups if name not in GROUPS]:
        problems.append(Problem("choices-unknown", "--train-only", value=unknown, choices=GROUPS))
    if ITSELF in settings.rehearse and not settings.rehearses_itself:
        problems.append(Problem("rehearsal-of-both", "--rehearse", texts=settings.rehearse))
    if not settings.rehearses_itself:
        code = "setting-without-samples" if settings.rehearse else "setting-without-rehearsal"
        problems += [
            Problem(code, field.typed, value=value)
            for name, field in fields_of(TrainingSettings).items()
            if name.startswith("rehearsal_") and (value := getattr(settings, name)) != field.default
            if not (settings.rehearse and name in OF_ANY_REHEARSAL)
        ]
    if problems:
        raise TrainingError(*problems)


# the block that shows that a group is present, if there is such a block
BLOCK_OF_GROUP: dict[TensorGroup, str] = {
    "w12": "w12",
    "w21": "w21",
    "w22": "w22",
    "w11": "w11",
    "gates": "gate",
    "new_tokens": "new_rows",
    "attn": "weight",  # of a copied layer
    "ffn": "weight",
}


def check_groups(path: str | Path, plan: Plan, settings: TrainingSettings) -> None:
    """Refuse groups without any tensor in the plan."""
    blocks = {tensor.block for tensor in plan.tensors}
    present = [group for group in GROUPS if BLOCK_OF_GROUP.get(group) in blocks]
    if all(group in BLOCK_OF_GROUP and group not in present for group in settings.groups):
        raise TrainingError(groups_problem(path, settings, present))


def groups_problem(path: str | Path, settings: TrainingSettings, present: Sequence[TensorGroup]) -> Problem:
    """Return the problem of an expansion without tensors of the chosen groups, with the groups that it has."""
    return Problem("groups-without-tensors", path, groups=settings.groups or "none", present=present)


def check_gates(path: str | Path, plan: Plan, settings: TrainingSettings) -> None:
    """Refuse to train gates without rehearsal."""
    if plan.has_gates and "gates" in settings.groups and not settings.rehearse:
        raise TrainingError(Problem("gates-without-rehearsal", path))
