"""What a ranking of layers says: scores of matrices and layers, what a budget pays for, where W12 is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.errors import counted
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers
from scale_surgery.training.pilot_settings import PilotBudget, PilotSettings

ScoreName = Literal["relative-norm", "effective-rank"]
SCORES: tuple[ScoreName, ...] = get_args(ScoreName)
# share of what all chosen layers are worth that the collaborative ones must hold
WORTH_SHARE = 0.8
# scores that differ by less are a tie: another number of steps turns them round
CLOSE = 0.1
# optimizer steps of a pilot, below which a ranking says that they are few
ENOUGH_STEPS = 50


@dataclass(frozen=True)
class MatrixScore:
    """How a pilot changed one matrix.

    Attributes:
        relative_norm: Frobenius norm of the change over that of the matrix.
        effective_rank: Effective rank of the change.
        singular_values: How many it has, the most that the effective rank can be.
    """

    relative_norm: float
    effective_rank: float
    singular_values: int


@dataclass(frozen=True)
class LayerScore:
    """How pilots changed one layer: its matrices as the blocks on the diagonal of one matrix; means over the pilots.

    Attributes:
        layer: Number of the layer.
        relative_norm: Frobenius norm of all changes over that of all matrices.
        effective_rank: Effective rank of all changes.
        equal_steps: What the relative norm would be if every weight had moved by one: with any text, up to a factor.
        matrices: Scores of each matrix by role: "gate", "up_proj", "down", "q", ...
        shares: By score, the score over the mean of all layers in each measurement: at the end of each pilot, and for
            the relative norm after half of its steps too.
    """

    layer: int
    relative_norm: float
    effective_rank: float
    equal_steps: float
    matrices: Mapping[str, MatrixScore]
    shares: Mapping[ScoreName, tuple[float, ...]]

    def score(self, name: ScoreName) -> float:
        """One of the two scores."""
        return self.relative_norm if name == "relative-norm" else self.effective_rank

    def noise(self, name: ScoreName) -> float:
        """Half of the range of a score over all measurements, in its unit."""
        shares = self.shares[name]
        mean = sum(shares) / len(shares)
        return self.score(name) * (max(shares) - min(shares)) / (2 * mean) if mean else 0.0

    def stands_above(self, other: LayerScore, name: ScoreName) -> bool:
        """Whether it scores higher than another layer in every measurement, and by more than CLOSE."""
        pairs = zip(self.shares[name], other.shares[name], strict=True)
        return all(own > theirs for own, theirs in pairs) and self.score(name) > (1 + CLOSE) * other.score(name)


@dataclass(frozen=True)
class RankingRequest:
    """What layers are ranked for.

    Attributes:
        expansion: The expansion to be, by which layers cost what they cost; its layers are those to choose among.
            Default: all layers, method scale, variant adapt where old text is given.
        budget: Parameters that the expansion may add: a share of the base's such as 30%, or a number such as 200M.
        score: What layers are ordered by: relative-norm or effective-rank.
    """

    expansion: Request | None = None
    budget: str = "30%"
    score: ScoreName = "relative-norm"


@dataclass(frozen=True)
class Pilot:
    """What the pilots were.

    Attributes:
        settings: How they trained.
        budget: How many there were, with how many steps, and what was estimated.
        tokens: Tokens of the data.
        passes: How often each token was read.
        first_loss: Loss of their first steps, nats per token.
        last_loss: Loss of their last steps.
        seconds: Time of the training.
        trained_parameters: Number of parameters that trained.
        peak_memory_bytes: Most memory in use until their end: of the device, or of the whole process on the CPU; None
            where the system does not say.
    """

    settings: PilotSettings
    budget: PilotBudget
    tokens: int
    passes: float
    first_loss: float
    last_loss: float
    seconds: float
    trained_parameters: int
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Proposal:
    """The layers that a score and a budget give.

    Attributes:
        score: Score by which layers were taken.
        layers: The layers, ascending.
        argument: The same as --layers takes them.
        parameters_added: What an expansion of them adds.
        tied: Layers among which the score does not decide, ascending: some are proposed, others are as good.
        is_of_any_text: Whether the order is that of equal steps, which any text gives; then all layers are tied.
    """

    score: ScoreName
    layers: tuple[int, ...]
    argument: str
    parameters_added: int
    tied: tuple[int, ...]
    is_of_any_text: bool


@dataclass(frozen=True)
class LayerWorth:
    """What W12 of one layer promises on new text, and what a step there costs on old text.

    Attributes:
        layer: Number of the layer.
        gradient_energy: Square of the norm of the gradient of the loss on new text by W12, at W12 = 0.
        divergence: KL(base || stepped) on old text, nats per token, after a step that promises `promised` nats on new
            text.
        worth: promised^2 / (2 divergence), in nats; see `preserved_depth`.
    """

    layer: int
    gradient_energy: float
    divergence: float
    worth: float


@dataclass(frozen=True)
class W12Estimate:
    """Where W12 is worth it.

    Attributes:
        promised: Nats per token of new text that each measured step promises, to first order.
        old_tokens: Tokens of the old text.
        layers: What each layer promises and costs, ascending.
        proposed: Collaborative layers among the proposed ones, ascending.
        argument: The same as --collaborative-layers takes them.
    """

    promised: float
    old_tokens: int
    layers: tuple[LayerWorth, ...]
    proposed: tuple[int, ...]
    argument: str

    @property
    def preserved_depth(self) -> int:
        """Proposed L_fp: number of lowest layers without W12."""
        return self.proposed[0]


def propose_collaboration(worth: Mapping[int, float], layers: Sequence[int]) -> tuple[int, ...]:
    """Choose the highest of some layers that hold most of what all of them are worth.

    Under a divergence that is quadratic, and adds up over layers, the most that a step of divergence e can learn, to
    first order, is sqrt(2 e sum_l worth_l), so that with 80% of the worth 89% of it is left.

    Args:
        worth: What W12 of each layer is worth, in nats.
        layers: The layers to choose among.

    Returns:
        The fewest highest layers with at least WORTH_SHARE of the worth of all, ascending; all of them where none is
        worth anything.
    """
    total = sum(worth[layer] for layer in layers)
    chosen: list[int] = []
    for layer in sorted(layers, reverse=True):
        chosen.append(layer)
        if total and sum(worth[other] for other in chosen) >= WORTH_SHARE * total:
            break
    return tuple(sorted(chosen))


@dataclass(frozen=True)
class Ranking:
    """The result of `rank_layers`.

    Attributes:
        name: Hub id, or name of the model's folder.
        model: The model as it was given.
        revision: Branch, tag or commit that was given.
        family: Its `model_type`.
        pilot: What was run.
        layers: How each layer changed, ascending.
        score: Score that orders the layers and gives the first proposal.
        request: The expansion to be, as it was asked for; its layers are those that were ranked.
        budget: Parameters that it may add.
        parameters: Parameters of the base as stored.
        proposals: What the budget pays for by each score, the chosen score first.
        depth: Where W12 is worth it; None without old text.
    """

    name: str
    model: str
    revision: str | None
    family: str
    pilot: Pilot
    layers: tuple[LayerScore, ...]
    score: ScoreName
    request: Request
    budget: int
    parameters: int
    proposals: tuple[Proposal, ...]
    depth: W12Estimate | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the order."""
        first, last = self.pilot.first_loss, self.pilot.last_loss
        found = []
        if not last < first:
            found.append(
                f"the pilot learned nothing: its loss was {first:.3f} in the first steps and {last:.3f} in the last, "
                "so the order says little. Lower --learning-rate, or raise --steps."
            )
        if self.pilot.budget.is_cut:
            found.append(
                f"--minutes {self.pilot.settings.minutes:g} left {counted(self.pilot.budget.steps, 'step')} to each "
                "pilot: the order may say little. Raise it, or lower --sequence-length."
            )
        steps = self.pilot.budget.steps
        if steps < ENOUGH_STEPS and not self.pilot.budget.is_cut:
            found.append(
                f"{counted(steps, 'step')} a pilot {'tells' if steps == 1 else 'tell'} little of the text, at least "
                f"{ENOUGH_STEPS} are usual: the first ones move every weight alike, whatever is learned. Give more "
                f"text, more --tokens, or --steps {ENOUGH_STEPS}."
            )
        if self.tie:
            found.append(f"{self.tie}. More --tokens, or a higher --learning-rate, may tell them apart.")
        return tuple(found)

    @property
    def tie(self) -> str:
        """Which layers are as good as some of those that are proposed, in words; empty where the choice stands out."""
        proposal = self.proposals[0]
        if proposal.is_of_any_text:
            return (
                "tie: the order is that of 1/|W|, which any text gives, and says nothing of this text; the usual "
                "choice is the last layers"
            )
        if not proposal.tied:
            return ""
        count = sum(layer in proposal.layers for layer in proposal.tied)
        some = f"any {count} of the layers {format_layers(proposal.tied)}"
        return f"tie: {some} {'is' if count == 1 else 'are'} as good; the usual choice is the last layers"

    def order(self, score: ScoreName) -> tuple[int, ...]:
        """Layers by a score, the best first; of equal ones the higher layer."""
        return order_layers(self.layers, score)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        content = asdict(self) | {"order": {name: self.order(name) for name in SCORES}}
        content |= {"tie": self.tie, "warnings": self.warnings}
        if self.depth is not None:
            content["depth"]["preserved_depth"] = self.depth.preserved_depth
        # JSON has neither NaN nor infinity: they become texts
        for layer, own in zip(self.layers, content["layers"], strict=True):
            own["noise"] = {name: layer.noise(name) for name in SCORES}
        plain: dict[str, Any] = plain_json(content)
        return plain


def order_layers(layers: Sequence[LayerScore], score: ScoreName) -> tuple[int, ...]:
    """Numbers of layers by a score, the best first; of equal ones the higher layer, as "the last k" would take it."""
    by_score = sorted(layers, key=lambda layer: (layer.score(score), layer.layer), reverse=True)
    return tuple(layer.layer for layer in by_score)
