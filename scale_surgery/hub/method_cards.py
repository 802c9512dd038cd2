"""Text of a model card on a method: how the model is made, whose idea it is, and which papers to cite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from scale_surgery.planning.costs import Costs
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import NO_LAYERS, Request
from scale_surgery.planning.selection import format_layers


class MethodCard(ABC):
    """The part of a model card that depends on the method.

    Attributes:
        opening: First sentence of a card, by the form of the folder; the default is that of scale.
        title: Heading of the part that tells what was done.
        source: Whose idea it is.
        citation: BibTeX of the paper.
        cites: Methods whose papers a card cites.
        about_loading: Text on loading.
    """

    opening: ClassVar[Mapping[str, str]] = {}
    title: ClassVar[str] = "What was widened"
    source: ClassVar[str]
    citation: ClassVar[str]
    cites: ClassVar[tuple[str, ...]]
    about_loading: ClassVar[str] = ""

    @abstractmethod
    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """Describe how a model is made."""

    @abstractmethod
    def beginning(self, request: Request) -> str:
        """Describe the initial values of the new tensors."""

    def card_rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Return the plan as rows of a card's table."""
        layers, groups = plan.collaboration.layers, " and ".join(plan.collaboration.groups)
        widths, costs = plan.widths, plan.costs
        tokens = f"{widths.new_tokens:,}, with rows of their own; those of the base stay as they are"
        return [
            ("variant", f"`{plan.variant}`"),
            *([("new tokens", tokens)] if widths.new_tokens else []),
            ("expanded layers", f"{format_layers(plan.layers)} of 0-{plan.sizes.layers - 1}"),
            ("layers with W12", f"{format_layers(layers)} ({groups})" if layers else "none"),
            (
                "added widths",
                f"hidden state {widths.up_width}, key/value heads {widths.up_kv_heads}, inner {widths.up_inner_width}",
            ),
            ("parameters", parameters_row(costs)),
            ("start", self.beginning(plan.request)),
        ]


class ScaleCard(MethodCard):
    """New heads, inner features and an up stream."""

    source = "The expansion is that of SCALE; width without a second stream is that of Grow, Don't Overwrite."
    cites = ("scale", "grow")
    citation = """@misc{scale2025,
  title         = {{SCALE}: Upscaled Continual Learning of Large Language Models},
  author        = {Lee, Jin-woo and Choi, Junhwa and Hwang, Bongkyu and Choo, Jinho and Kim, Bogun and Yi, JeongSeon
                   and Lee, Joonseok and Jung, DongYoung and Park, Jaeseon and Park, Kyoungwon and Jung, Suk-hoon},
  year          = {2025},
  eprint        = {2511.03270},
  archivePrefix = {arXiv}
}"""

    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """Describe the block matrix, or new tokens if nothing else was added."""
        if request.layers == NO_LAYERS:
            kept = "." if is_stock else "; the pretrained tensors are there byte for byte."
            return f"New tokens have rows of their own in embedding and head. Nothing else was added{kept}"
        if is_stock:
            return (
                "Linears of the chosen layers got new rows and columns, [W W12; W21 W22] in place of W; other layers "
                "were filled with zeros to the same width. W itself was not changed."
            )
        beside = (
            "W21 and W22 make and pass on a second stream beside the hidden state, and W12 writes from it into the "
            "hidden state; where W12 does not exist, nothing new is written there."
            if has_up_stream
            else "W21 makes new attention heads or inner features of the hidden state, and W12 writes what they "
            "compute into it."
        )
        return (
            "Every linear of an expanded layer is a block matrix [W W12; W21 W22]. W is the pretrained tensor, byte "
            f"for byte; the other blocks are new. {beside}"
        )

    def beginning(self, request: Request) -> str:
        """Describe the initial values of each block."""
        if request.layers == NO_LAYERS:
            return f"new rows {request.new_tokens_init}, seed {request.seed}"
        return f"W12 zero, W21 {request.init_w21}, W22 {request.init_w22}, seed {request.seed}"


class GrowCard(MethodCard):
    """Copies of the MLP."""

    source = "The expansion is that of Grow, Don't Overwrite; the way of keeping it apart from its base is SCALE's."
    cites = ("grow", "scale")
    citation = """@misc{grow2026,
  title         = {Grow, Don't Overwrite: Fine-tuning Without Forgetting},
  author        = {Adila, Dyah and Mazzawi, Hanna and Dherin, Benoit and Gonzalvo, Xavier},
  year          = {2026},
  eprint        = {2603.08647},
  archivePrefix = {arXiv}
}"""

    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """Describe the copies and their shares."""
        copies = request.copies
        trained = (
            "The base's gate and up projections are trained too, as copies beside them"
            if request.variant == "grow-train"
            else "The copies alone are new and are trained"
        )
        kept = "." if is_stock else "; the pretrained tensors are there byte for byte."
        return (
            f"The MLP of a chosen layer is there {copies} times, and the output of each counts 1/{copies}, so that at "
            f"first the output was the base's. {trained}{kept}"
        )

    def beginning(self, request: Request) -> str:
        """Describe the copied tensors."""
        return f"gate and up copied, down copied in {request.copies} equal shares, seed {request.seed}"


class DepthCard(MethodCard):
    """Copies of whole layers."""

    opening: ClassVar[Mapping[str, str]] = {
        "expanded": "A language model with new layers among its pretrained ones, made with `scale-surgery`.",
        "extract": "The new layers of a deepened language model, without the model itself, made with `scale-surgery`.",
    }
    title = "What was added"
    source = "The expansion is the block expansion of LLaMA Pro."
    cites = ("depth",)
    citation = """@misc{llamapro2024,
  title         = {{LLaMA} {Pro}: Progressive {LLaMA} with Block Expansion},
  author        = {Wu, Chengyue and Gan, Yukang and Ge, Yixiao and Lu, Zeyu and Wang, Jiahao and Feng, Ye
                   and Shan, Ying and Luo, Ping},
  year          = {2024},
  eprint        = {2401.02415},
  archivePrefix = {arXiv}
}"""
    about_loading = (
        '`model.config.scale_surgery["new_layers"]` lists the new layers. With the package `scale-surgery` installed, '
        "`scale_surgery.freeze_base(model)` lets them train, and nothing else."
    )

    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """Describe a copied layer."""
        return (
            "A copy of each chosen layer stands right after it. It began by adding zeros, so that at first it passed "
            "on what it was given, and the output was the base's. The pretrained tensors are there byte for byte; "
            "those above a copy are numbered higher."
        )

    def beginning(self, request: Request) -> str:
        """Describe which tensors start as zeros, and which as copies."""
        return "what is added to the hidden state zero, everything else as in the layer below"

    def card_rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Return the duplicated layers as rows of a card's table."""
        assert plan.numbering is not None
        layers, new = plan.sizes.layers, plan.numbering.new
        return [
            ("variant", f"`{plan.variant}`"),
            ("layers with a copy", f"{format_layers(plan.layers)} of 0-{layers - 1}"),
            ("new layers", f"{format_layers(new)} of 0-{layers + len(new) - 1}"),
            ("parameters", parameters_row(plan.costs)),
            ("start", self.beginning(plan.request)),
        ]


CARDS: dict[str, MethodCard] = {"scale": ScaleCard(), "grow": GrowCard(), "depth": DepthCard()}


def parameters_row(costs: Costs) -> str:
    """Return the numbers of old and new parameters, for a card."""
    added, before = costs.parameters_added, costs.parameters_before
    return f"{before:,} of the base, {added:,} new ({added / before:.1%})"
