"""Settings and result of ranking layers: the change of each layer, and the layers that fit a budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.errors import counted
from scale_surgery.fields import Count, Range, Seed, SequenceLength
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers

# fewer optimizer steps of a pilot cause a warning
ENOUGH_STEPS = 50


@dataclass(frozen=True)
class RankingSettings:
    """Budget of an expansion, and settings of the pilot, which trains by AdamW without weight decay.

    Attributes:
        budget: Parameters that the expansion may add: a share of the base's, such as 30%, or a number, such as 200M.
        steps: Optimizer steps of the pilot. Default: 100, or fewer so that each token is read at most 4 times.
        batch_size: Sequences in one optimizer step.
        sequence_length: Tokens in a sequence. Default: the model's context length, at most 1024.
        learning_rate: Peak learning rate. It rises over the first 6% of the steps, then falls linearly to zero.
        seed: Seed of the data order and of dropout.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them: less memory, more
            time.
    """

    budget: str = "30%"
    steps: Count | None = None
    batch_size: Count = 2
    sequence_length: SequenceLength | None = None
    learning_rate: Annotated[float, Range(above=0, most=1)] = 1e-4
    seed: Seed = 0
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class LayerChange:
    """The change of a layer in the pilot.

    Attributes:
        layer: Number of the layer.
        change: |W' - W| / |W|, Frobenius norms of all its trained matrices together.
    """

    layer: int
    change: float


@dataclass(frozen=True)
class Ranking:
    """The result of `rank_layers`.

    Attributes:
        name: Hub id, or name of the model's folder.
        model: The model as given.
        revision: Branch, tag or commit as given.
        trust_remote_code: True if the model's own code was allowed to run.
        family: Its `model_type`.
        request: The requested expansion; its layers are the ranked layers.
        settings: Settings of the pilot.
        steps: Its optimizer steps.
        tokens: Tokens of the text.
        passes: Passes over them.
        trained_parameters: Number of trained parameters.
        first_loss: Loss of its first steps, nats per token.
        last_loss: Loss of its last steps, nats per token.
        layers: Change of each layer, from the largest to the smallest.
        parameters: Parameters of the base as stored.
        budget: Parameters that the expansion may add.
        proposed: The layers that fit the budget, ascending.
        argument: The proposed layers as the value of --layers.
        parameters_added: Parameters added by expanding them.
        tied: Layers too close to rank, ascending: those within a tenth of the least changed layer that fits the budget.
            Empty if all of them are proposed.
    """

    name: str
    model: str
    revision: str | None
    trust_remote_code: bool
    family: str
    request: Request
    settings: RankingSettings
    steps: int
    tokens: int
    passes: float
    trained_parameters: int
    first_loss: float
    last_loss: float
    layers: tuple[LayerChange, ...]
    parameters: int
    budget: int
    proposed: tuple[int, ...]
    argument: str
    parameters_added: int
    tied: tuple[int, ...]

    @property
    def tie(self) -> str:
        """The layers tied with proposed ones, in a sentence; empty if there are none."""
        if not self.tied:
            return ""
        count = sum(layer in self.proposed for layer in self.tied)
        return (
            f"layers {format_layers(self.tied)} changed alike, within a tenth, and the budget pays for {count} of "
            "them. The last are proposed."
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the order."""
        warnings = []
        if not self.last_loss < self.first_loss:
            warnings.append(
                f"the pilot learned nothing: its loss was {self.first_loss:.3f} in the first steps and "
                f"{self.last_loss:.3f} in the last, so the order says little. Lower --learning-rate, or raise --steps."
            )
        if self.steps < ENOUGH_STEPS:
            warnings.append(
                f"{counted(self.steps, 'step')} {'tells' if self.steps == 1 else 'tell'} little of the text, at least "
                f"{ENOUGH_STEPS} are usual: the first ones move every weight alike, whatever is learned. Give more "
                f"text, or --steps {ENOUGH_STEPS}."
            )
        return tuple(warnings)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return plain_json(asdict(self) | {"tie": self.tie, "warnings": self.warnings})
