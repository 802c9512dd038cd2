"""Duplicate layers: a copy of a chosen layer comes right after it, and at first adds nothing to the residual stream.

    y = x + attn(x) + ...        where what the copy adds begins as zeros:  y = x, bit for bit

That is the block expansion of LLaMA Pro (arXiv 2401.02415). The result is a checkpoint of the base's own
architecture with more layers: stock classes load it, and only the copies are meant to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, Numbering
from scale_surgery.planning.base import Base
from scale_surgery.planning.costs import Costs, estimate_depth
from scale_surgery.planning.duplicable import PER_LAYER_LISTS, binding_problems, check_depth_config
from scale_surgery.planning.families import Family, Sizes
from scale_surgery.planning.method import Method, Resolved, parameters_row
from scale_surgery.planning.selection import format_layers, select_layers
from scale_surgery.planning.specs import FORMAT, NewTensor, Spec
from scale_surgery.planning.tensors import TensorPlan

if TYPE_CHECKING:
    from scale_surgery.planning.plan import Plan
    from scale_surgery.planning.request import Request


class Depth(Method):
    """A copy of each chosen layer comes right after it, and begins by adding zeros."""

    name = "depth"
    variants = ("depth",)
    verb = "duplicated"
    adds_layers = True
    refused: ClassVar[Mapping[str, str]] = {
        "route": "It is a stock checkpoint, whose classes run one path; a router needs --method scale or grow.",
        "merge": "It is a stock checkpoint already, which any program loads as it is, so there is nothing to merge.",
        "load_expansion": "Its copies of layers would renumber the layers of a model in memory. Put it on its base on "
        "disk (scale-surgery apply), and load that folder by from_pretrained.",
    }
    about_rows = "A row is the copy that follows that base layer"
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

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Keys by which layers share caches or weights, or depend on their numbers."""
        return binding_problems(config)

    def resolve(self, sizes: Sizes, request: Request) -> Resolved:
        """The layers that get a copy; nothing is widened."""
        return Resolved(select_layers(request.layers, sizes.layers))

    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """Which layers are copies."""
        check_depth_config(base.family, base.checkpoint.config, base.sizes.layers)
        return build_depth_specs(base.family, resolved.layers)

    def new_tensors(self, base: Base, specs: Spec) -> Iterator[NewTensor]:
        """Every tensor of every copy."""
        return depth_tensors(base.family, specs["expanded_layers"], base.prefix, base.checkpoint.tensors)

    def costs(self, base: Base, request: Request, specs: Spec, tensors: Sequence[TensorPlan]) -> Costs:
        """Nothing is decomposed, and training reaches down to the lowest copy."""
        return estimate_depth(base.family, base.sizes, specs, tensors, base.checkpoint)

    def guards(self, plan: Plan) -> tuple[TensorPlan, ...]:
        """What keeps a copy from adding anything."""
        return tuple(tensor for tensor in plan.tensors if tensor.init in ("zero", "mute"))

    def start(self, changed: int) -> str:
        """Whether copies still add nothing."""
        if not changed:
            return "new layers write zero"
        found = "1 tensor of a new layer is" if changed == 1 else f"{changed} tensors of new layers are"
        return f"{found} not as at the start"

    def rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Where the copies stand, and how they begin."""
        assert plan.numbering is not None
        new = plan.numbering.new
        return [
            ("new layers", f"{format_layers(new)}  (of {plan.sizes.layers + len(new)} then)"),
            ("initialisation", "what is added to the hidden state is zero, the rest a copy"),
        ]

    def stock_form(self, plan: Plan) -> str | None:
        """The folder itself is one."""
        listed = plan.architecture.types_by_number is not None
        caution = "; a program must read its layer_types, if it has them, and not go by numbers" if listed else ""
        return f"the folder itself: {plan.family} with more layers, no code of ours{caution}"

    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """What a copy is, in words."""
        return (
            "A copy of each chosen layer stands right after it. It began by adding zeros, so that at first it passed "
            "on what it was given, and the output was the base's. The pretrained tensors are there byte for byte; "
            "those above a copy are numbered higher."
        )

    def beginning(self, request: Request) -> str:
        """What is zero, and what is copied."""
        return "what is added to the hidden state zero, everything else as in the layer below"

    def card_rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Which layers were duplicated."""
        assert plan.numbering is not None
        layers, new = plan.sizes.layers, plan.numbering.new
        return [
            ("variant", f"`{plan.variant}`"),
            ("layers with a copy", f"{format_layers(plan.layers)} of 0-{layers - 1}"),
            ("new layers", f"{format_layers(new)} of 0-{layers + len(new) - 1}"),
            ("parameters", parameters_row(plan.costs)),
            ("start", self.beginning(plan.request)),
        ]


def build_depth_specs(family: Family, layers: Sequence[int]) -> Spec:
    """What config.json says of duplicated layers, under a key of our own that stock code does not read.

    Args:
        family: Facts of the architecture.
        layers: Base layers that get a copy, ascending.

    Returns:
        Plain JSON values; `new_layers` are the positions of the copies.
    """
    numbering = Numbering(family.base_model, family.layers, tuple(layers))
    return {
        "format": FORMAT,
        "method": Depth.name,
        "variant": Depth.name,
        "base_model": family.base_model,
        "layers": family.layers,
        "expanded_layers": list(layers),
        "new_layers": list(numbering.new),
    }


def mute_modules(family: Family) -> tuple[str, ...]:
    """Modules of a layer that give zeros at the start of a copy: the last before the residual stream.

    That is the output projections of attention and MLP (LLaMA Pro, arXiv 2401.02415, section 3.2). Where a norm comes
    after them, it is this norm (ours): it would make an output projection that has left zero by however little as
    large as any other in one step.
    """
    return family.post_norms or tuple(linear.name for linear in family.linears if linear.writes() == ("residual",))


def depth_tensors(
    family: Family, layers: Sequence[int], prefix: str, tensors: Mapping[str, TensorInfo]
) -> Iterator[NewTensor]:
    """List the tensors of every copy: what writes into the residual stream begins mute, everything else is copied.

    Args:
        family: Facts of the architecture.
        layers: Base layers that get a copy.
        prefix: What stands before the base model's names on disk.
        tensors: Tensors of the base.

    Yields:
        The new tensors; see numbering.py for their names.
    """
    mute = mute_modules(family)
    norms = (*family.pre_norms, *family.post_norms, *(norm.name for norm in family.inner_norms))
    kinds = dict.fromkeys((linear.name for linear in family.linears), "linear") | dict.fromkeys(norms, "norm")
    for layer in layers:
        path = f"{prefix}{family.layers}.{layer}."
        for module, kind in kinds.items():
            for block in ("weight", "bias"):
                if (source := tensors.get(f"{path}{module}.{block}")) is not None:
                    name = f"{path}{AFTER}{module}.{block}"
                    is_copy = module not in mute
                    yield NewTensor(name, source.shape, block, kind, layer, source.name, is_copy=is_copy)


def deepened_config(config: Mapping[str, Any], specs: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Edit a base model's config.json: more layers, each copy of the type of its source, everything else as it was.

    Where the config leaves the types of layers to their numbers, they are written out: a copy changes the numbers
    above it. Where all layers are alike nothing is written, since a list makes some classes behave in another way.

    Args:
        config: Parsed config.json of the base.
        specs: Result of `build_depth_specs`.
        family: Facts of the architecture.

    Returns:
        The new config.
    """
    copied = specs["expanded_layers"]
    key = family.key("layers")
    layers = int(config[key])
    edited = dict(config) | {key: layers + len(copied), CONFIG_KEY: dict(specs)}
    per_layer = {name: config[name] for name in PER_LAYER_LISTS if config.get(name) is not None}
    if "layer_types" not in per_layer and family.types_by_number is not None:
        found = family.types_by_number.of(config, layers)
        per_layer |= {} if found is None else {"layer_types": found}
    for name, values in per_layer.items():
        edited[name] = [value for i, value in enumerate(values) for _ in range(2 if i in copied else 1)]
    return edited
