"""The mixin before a stock model class: it expands the model's modules as its configuration says.

It also freezes the base after loading, says what trains, and switches the expansion and the routing off and on.
This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from .expanded_attention import Part, expand_attention, switch_attention
from .expanded_fused import fuse_layer, fuse_norm, widen
from .expanded_modules import EXPANSION_NAMES, ExpandedModule, GrownLinear, expand_module

# tensors that an error names
MOST_NAMED = 5
# what transformers says of a folder or repository without weights, and what such a one may be: this code opens no file
NO_WEIGHTS = "file named"
AN_EXTRACT = (
    "A folder with extract.json in place of weights is an extract: an expansion without its base, which extract.json "
    "names. Put it on that base: scale-surgery apply EXTRACT --base BASE -o FOLDER writes a model that loads so; or "
    "scale_surgery.load_expansion(BASE, EXTRACT) makes one in memory."
)
# what models that see images add to the hidden state between layers, by the number of a layer: after it, or before it
ADDED_AFTER, ADDED_BEFORE = "deepstack_visual_embeds", "deepstack_features"


class Wide(NamedTuple):
    """How wide the hidden state is: beside the base stream, and on the preserve path above the layer that forks."""

    up: int
    preserve: int = 0
    fork: int | None = None


def find_base_model(model: nn.Module, path: str) -> nn.Module:
    """The module that holds embedding, layers and final norm; a model without a head lacks the first parts of its path.

    Args:
        model: The whole model, or one without its head.
        path: Dotted path of that module in the whole model.
    """
    while path:
        try:
            return model.get_submodule(path)
        except AttributeError:
            path = path.partition(".")[2]
    return model


def find_module(parent: nn.Module, name: str) -> nn.Module:
    """The module that config.json names.

    Raises:
        ValueError: If there is none of that name: releases of transformers rename modules.
    """
    try:
        return parent.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"config.json: scale_surgery names the module {name}, expected one of {type(parent).__name__} in "
            f"transformers {transformers.__version__}. Load the model with the release that surgery.json names."
        ) from error


def specs_of(specs: dict[str, Any], plan: dict[str, Any], layer: int) -> dict[str, Any]:
    """What `specs` say of one layer: the plan itself, or its routing; layers may be of several kinds."""
    return specs["kinds"][plan["kind_of_layer"][layer]] if "kinds" in specs else specs


def expand_layer(layer: nn.Module, specs: dict[str, dict], collaborative_groups: list[str], dtype: str | None) -> None:
    """Expand the modules of one layer as `specs` say: module name to kind and sizes."""
    for name, spec in specs.items():
        sizes = {key: value for key, value in spec.items() if key != "group"}
        if spec["kind"] in ("linear", "grown", "block"):
            sizes["collaborative"] = spec.get("group") in collaborative_groups
        if spec["kind"] in ("linear", "grown", "block", "norm"):
            sizes["dtype"] = dtype
        expand_module(find_module(layer, name), **sizes)


def separate(layers: nn.Module) -> None:
    """Give every layer an activation of its own where one serves several: two paths may pass through some of them."""
    seen: set[nn.Module] = set()
    for name, module in list(layers.named_modules(remove_duplicate=False)):
        if module in seen and not (module._modules or module._parameters or module._buffers):
            parent, _, last = name.rpartition(".")
            own = module.__class__.__new__(module.__class__)
            parts = {key: part.copy() if isinstance(part, dict) else part for key, part in vars(module).items()}
            own.__dict__.update(parts)
            setattr(layers.get_submodule(parent), last, own)
        seen.add(module)


def expand_layers(base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Expand the chosen layers, and let the up stream pass through the others."""
    collaborative = plan["collaborative"]
    separate(base_model.get_submodule(plan["layers"]))
    for index, layer in enumerate(base_model.get_submodule(plan["layers"])):
        own = specs_of(plan, plan, index)
        if index not in plan["expanded_layers"]:
            fuse_layer(layer, own["passing"]) if is_fused(plan) else expand_layer(layer, own["passing"], [], None)
            continue
        if is_fused(plan):
            fuse_layer(layer, own["expanded"])
        else:
            groups = collaborative["groups"] if index in collaborative["layers"] else []
            expand_layer(layer, own["expanded"], groups, plan["dtype"])
        for name, spec in own["attention"].items():
            # in the fused form nothing is equal bit for bit, so that all heads may attend at once
            parts = [Part(spec["heads"], spec["kv_heads"], is_old=True), new_heads(plan, spec)]
            attending = [] if is_fused(plan) else parts
            expand_attention(layer.get_submodule(name), "expanded", attending, spec["attributes"], spec["config"])


def is_fused(plan: dict[str, Any]) -> bool:
    """Whether base weight and blocks of each linear are one matrix, and those of a head that is not tied."""
    return plan.get("fused", False)


def new_heads(plan: dict[str, Any], spec: dict[str, Any]) -> Part:
    """The heads that an expansion adds to a layer."""
    kv_heads = plan["widths"]["up_kv_heads"]
    return Part(kv_heads * (spec["heads"] // spec["kv_heads"]), kv_heads, is_old=False)


def change_hidden(args: tuple, kwargs: dict, change: Callable[[Tensor], Tensor]) -> tuple[tuple, dict]:
    """What a layer is called with, its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def enter(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Begin the up stream as zeros with what enters the first layer, whatever made that; a hook."""
    if not layer.is_entered:
        return None
    return change_hidden(args, kwargs, lambda hidden: functional.pad(hidden, (0, layer.entering_width)))


def fork(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Begin two paths with what enters the first collaborative layer; a hook, so that no stock forward is touched."""
    if not layer.is_forking:
        return None
    width = layer.preserve_width
    return change_hidden(args, kwargs, lambda hidden: torch.cat((hidden[..., :width], hidden), dim=-1))


def widen_added(base_model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Let what stock code adds to the hidden state between layers be as wide as that, zeros beside it; a hook.

    Models that see images may add features of them once more after each of the first layers, or before some.
    """
    if not base_model.is_widening:
        return None
    wide, own = base_model.wide, {}
    if kwargs.get(ADDED_AFTER) is not None:
        own[ADDED_AFTER] = [wide_for(features, layer + 1, wide) for layer, features in enumerate(kwargs[ADDED_AFTER])]
    if kwargs.get(ADDED_BEFORE) is not None:
        own[ADDED_BEFORE] = {layer: wide_for(features, layer, wide) for layer, features in kwargs[ADDED_BEFORE].items()}
    return args, kwargs | own


def wide_for(features: Tensor, layer: int, wide: Wide) -> Tensor:
    """Features as wide as the hidden state that enters a layer."""
    adapt = functional.pad(features, (0, wide.up))
    is_forked = wide.fork is not None and layer > wide.fork
    return torch.cat((adapt[..., : wide.preserve], adapt), dim=-1) if is_forked else adapt


def widen_what_is_added(base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Widen what stock code adds to the hidden state between layers, where there is any such thing."""
    if {ADDED_AFTER, ADDED_BEFORE}.intersection(signature(base_model.forward).parameters):
        base_model.wide, base_model.is_widening = Wide(plan["widths"]["up_width"]), False
        base_model.register_forward_pre_hook(widen_added, with_kwargs=True)


def route_layers(base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Let two paths pass through every module from the first collaborative layer to the last norm."""
    routing, layers = plan["routing"], base_model.get_submodule(plan["layers"])
    if routing["fork"] != min(plan["collaborative"]["layers"], default=None):
        raise ValueError(
            f"config.json: scale_surgery.routing.fork is {routing['fork']}, expected the first collaborative layer: "
            "the preserve path would not be the base model's. Was it changed by hand?"
        )
    if routing["fork"] is None:
        return
    first = layers[routing["fork"]]
    first.preserve_width, first.is_forking = routing["preserve_width"], False
    first.register_forward_pre_hook(fork, with_kwargs=True)
    for index, layer in enumerate(layers):
        if index >= routing["fork"]:
            route_layer(layer, index, plan)
    for name, spec in routing["last"].items():
        norm = base_model.get_submodule(name)
        if not isinstance(norm, ExpandedModule):
            expand_module(norm, **spec)
        norm.can_route, norm.is_last, norm.keeps_up = True, True, routing["keeps_up"]


def route_layer(layer: nn.Module, index: int, plan: dict[str, Any]) -> None:
    """Let two paths pass through one layer."""
    routing, kind = plan["routing"], "expanded" if index in plan["expanded_layers"] else "passing"
    own, has_new_heads = specs_of(routing, plan, index), bool(specs_of(plan, plan, index)["attention"])
    for name, spec in own["modules"][kind].items():
        expand_module(find_module(layer, name), **spec)
    for module in layer.modules():
        if isinstance(module, ExpandedModule):
            module.check_paths()
            module.can_route, module.keeps_up = True, routing["keeps_up"]
    for name, spec in own["attention"].items():
        old = Part(spec["heads"], spec["kv_heads"], is_old=True)
        new = [new_heads(plan, spec)] if kind == "expanded" and has_new_heads else []
        parts = [old._replace(is_detached=True), *(new if routing["keeps_up"] else []), old, *new]
        expand_attention(layer.get_submodule(name), "routed", parts, **spec[kind])


def detach_base(model: nn.Module, base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Let no gradient pass through the base stream where nothing that trains reaches it.

    That is below the first collaborative layer; without one it is the whole model, final norm and head included.
    """
    collaborative = plan["collaborative"]["layers"]
    layers = base_model.get_submodule(plan["layers"])
    parts = layers[: min(collaborative)] if collaborative else [model]
    for module in (module for part in parts for module in part.modules()):
        if hasattr(module, "base_detached"):
            module.base_detached = True


def refuse_adapter_names(inputs: dict[str, Any], instead: str) -> None:
    """Refuse PEFT's name for what each row runs: stock code would take it and do nothing."""
    if "adapter_names" in inputs:
        raise ValueError(f"adapter_names: is PEFT's, and this model has expansions. {instead}")


def is_head(names: set[str]) -> bool:
    """Whether tensors that a model without a head has no place for are those of one head."""
    modules = {name.rpartition(".")[0] for name in names}
    return len(modules) == 1 and ("." not in modules.pop() or any(name.endswith(".up_weight") for name in names))


class ExpandedPreTrainedModel:
    """Mixin before a stock model class: expands its modules as `config.scale_surgery` says, and freezes the base."""

    # set where the model was put around one that was quantised
    is_base_quantised = False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        plan = config.scale_surgery
        base_model = find_base_model(self, plan["base_model"])
        if plan.get("enter") == "hook":
            first = base_model.get_submodule(plan["layers"])[0]
            first.entering_width, first.is_entered = plan["widths"]["up_width"], True
            first.register_forward_pre_hook(enter, with_kwargs=True)
        widen_what_is_added(base_model, plan)
        for name, spec in plan["model"].items():
            own_dtype = {} if spec["kind"] in ("passing", "padding") else {"dtype": plan["dtype"]}
            if is_fused(plan) and spec["kind"] == "norm":
                fuse_norm(base_model.get_submodule(name), spec)
            else:
                expand_module(find_module(base_model, name), **spec, **own_dtype)
        head = self.get_output_embeddings()
        if head is not None and is_fused(plan) and plan["fused_head"]:
            widen(head, plan["head"]["base"] + plan["head"]["up"], head.weight.shape[0])
        elif head is not None:
            without = {"kind": "head", "base": head.weight.shape[1], "up": 0}
            expand_module(head, **(plan["head"] or without), dtype=plan["dtype"])
        expand_layers(base_model, plan)
        detach_base(self, base_model, plan)
        if "routing" in plan:
            route_layers(base_model, plan)
        if plan["dtype"] == "float32":
            # new tensors that were asked for in float32 stay so when the base is loaded in half precision, as does what
            # the stock class keeps
            kept = self._keep_in_fp32_modules_strict or ()
            self._keep_in_fp32_modules_strict = {*kept, *self.expansion_names()}
        # without a head there is nothing to route: then the model is the adapt path
        self.switches = {"expansion": True, "routing": "routing" in plan and head is not None}
        self.apply_switches()
        self.post_init()
        self.freeze_base()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, refuse what does not fit, then freeze the base: loading resets `requires_grad`.

        `expansion_enabled=False` gives the base model, `routing_enabled=False` the adapt path alone: see
        `enable_expansion` and `enable_routing`. `strict_loading=False` takes what is missing as it was initialised, as
        transformers does; `output_loading_info=True` then says what that is.
        """
        is_enabled, is_routed = kwargs.pop("expansion_enabled", True), kwargs.pop("routing_enabled", True)
        is_strict, says_more = kwargs.pop("strict_loading", True), kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except OSError as error:
            if NO_WEIGHTS not in str(error):
                raise
            raise OSError(f"{error}\n{AN_EXTRACT}") from error
        if is_strict:
            model.check_loaded(info)
        model.freeze_base()
        model.align_copies()
        model.enable_expansion(is_enabled)
        if not is_routed:
            model.enable_routing(False)
        return (model, info) if says_more else model

    def check_loaded(self, info: dict[str, Any]) -> None:
        """Refuse files whose tensors are not the model's; transformers warns, and initialises what is missing.

        Tied tensors, and what the stock class leaves out itself, are not in `info`. A model without a head needs none.

        Args:
            info: What transformers says of loading.

        Raises:
            ValueError: If a tensor is missing, unexpected or of another shape.
        """
        unexpected = set(info["unexpected_keys"])
        if self.get_output_embeddings() is None and is_head(unexpected):
            unexpected = set()
        found = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        found += [f"{name} is unexpected" for name in sorted(unexpected)]
        found += [f"{name[0]} is of another shape" for name in sorted(info["mismatched_keys"])]
        if found:
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            raise ValueError(
                f"{type(self).__name__}: the files do not hold its tensors: {', '.join(found[:MOST_NAMED])}{more}. "
                "Nothing may be initialised anew. Restore the files from where you got them, or load them with the "
                "release of transformers that wrote them; strict_loading=False loads what there is."
            )

    def freeze_base(self) -> None:
        """Let the expansion tensors train, and nothing else; in the fused form nothing trains."""
        names = () if is_fused(self.config.scale_surgery) else EXPANSION_NAMES
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.rsplit(".", 1)[-1] in names)

    def align_copies(self) -> None:
        """Let what a grown model copied from its base lie in memory as the base does."""
        for module in self.modules():
            if isinstance(module, GrownLinear):
                module.align_copies()

    def _set_gradient_checkpointing(self, enable=True, **kwargs):
        """As transformers; some of its releases let no gradient into a layer whose input requires none.

        Reentrant checkpointing is like that, and below the first expanded layer nothing requires a gradient.
        """
        super()._set_gradient_checkpointing(enable=enable, **kwargs)
        if enable:
            self.enable_input_require_grads()

    def enable_expansion(self, is_enabled: bool = True) -> None:
        """Switch the expansion on, or off for good: then the stock modules run alone, and the model is its base.

        A KV cache belongs to the state in which it was filled.
        """
        if not is_enabled:
            self._check_blocks()
        self.switches["expansion"] = is_enabled
        self.apply_switches()

    def _check_blocks(self) -> None:
        if is_fused(self.config.scale_surgery):
            raise ValueError(
                "This model is fused: base weights and blocks are one matrix, so the expansion cannot be switched off. "
                "Write its blocks again: scale-surgery merge FUSED --to blocks."
            )

    @property
    def is_expansion_enabled(self) -> bool:
        """Whether the expansion takes part in a forward."""
        return self.switches["expansion"]

    def expansion_disabled(self) -> AbstractContextManager[None]:
        """Run the base model alone inside a `with` block."""
        self._check_blocks()
        return self._switched_off("expansion")

    def enable_routing(self, is_enabled: bool = True) -> None:
        """Switch the routing on, or off for good: then the adapt path runs alone, as before the model was routed.

        A KV cache belongs to the state in which it was filled, and so does a backward pass that computes activations
        again.
        """
        if is_enabled and "routing" not in self.config.scale_surgery:
            raise ValueError("This model has no router. Write one that has: scale-surgery route-export.")
        if is_enabled and self.get_output_embeddings() is None:
            raise ValueError("This model has no head, so there is nothing to route. Load it as AutoModelForCausalLM.")
        self.switches["routing"] = is_enabled
        self.apply_switches()

    @property
    def is_routing_enabled(self) -> bool:
        """Whether the model routes: both paths run, and a router makes its logits."""
        return self.switches["routing"] and self.switches["expansion"]

    def routing_disabled(self) -> AbstractContextManager[None]:
        """Run the adapt path alone inside a `with` block."""
        return self._switched_off("routing")

    @contextmanager
    def _switched_off(self, name: str) -> Iterator[None]:
        before = self.switches[name]
        self.switches[name] = False
        self.apply_switches()
        try:
            yield
        finally:
            self.switches[name] = before
            self.apply_switches()

    def apply_switches(self) -> None:
        """Tell every module which of its forms runs; a cache that generation keeps belongs to another form."""
        self.__dict__.pop("_cache", None)
        is_enabled, is_routed = self.is_expansion_enabled, self.is_routing_enabled
        for module in self.modules():
            if isinstance(module, ExpandedModule):
                module.is_enabled, module.is_routed = is_enabled, is_routed and module.can_route
            if hasattr(module, "modes"):
                is_two = is_routed and "routed" in module.modes
                switch_attention(module, "routed" if is_two else "expanded" if is_enabled else "stock")
            if hasattr(module, "is_forking"):
                module.is_forking = is_routed
            if hasattr(module, "is_entered"):
                module.is_entered = is_enabled
            if hasattr(module, "is_widening"):
                routing = self.config.scale_surgery["routing"] if is_routed else {"preserve_width": 0, "fork": None}
                module.is_widening = is_enabled
                module.wide = module.wide._replace(preserve=routing["preserve_width"], fork=routing["fork"])

    def trainable_parameters(self) -> dict[str, dict[str, int]]:
        """Count what trains: for each layer, and for what lies outside the layers, parameters by group."""
        layers = self.config.scale_surgery["layers"] + "."
        counts: dict[str, dict[str, int]] = {}
        for path, module in self.named_modules():
            for name, parameter in getattr(module, "expansion_parameters", dict)().items():
                _, _, inside = path.partition(layers)
                place = f"layer {inside.split('.')[0]}" if inside else "outside"
                group = module.groups[name]
                row = counts.setdefault(place, {})
                row[group] = row.get(group, 0) + parameter.numel() * parameter.requires_grad
        return counts

    def print_trainable_parameters(self) -> None:
        """Print what trains as a table: a row a layer, a column a group."""
        counts = self.trainable_parameters()
        groups = sorted({group for row in counts.values() for group in row})
        width = max([10, *(len(place) + 1 for place in counts)])
        print(" " * width + "".join(f"{group:>12}" for group in groups))
        for place, row in counts.items():
            print(f"{place:<{width}}" + "".join(f"{row.get(group, 0):>12,}" for group in groups))
        total = sum(parameter.numel() for parameter in self.parameters())
        trained = sum(sum(row.values()) for row in counts.values())
        print(f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})")

    def expansion_names(self) -> set[str]:
        """Last parts of the names of this model's expansion tensors."""
        last_parts = {name.rsplit(".", 1)[-1] for name, _ in self.named_parameters()}
        return last_parts.intersection(EXPANSION_NAMES)

    def save_pretrained(self, *args, **options):
        """As transformers; on a quantised base the expansion tensors alone: the base's are not those of its files."""
        if self.is_base_quantised:
            found = options.get("state_dict") or self.state_dict()
            own = {name: tensor for name, tensor in found.items() if name.rsplit(".", 1)[-1] in EXPANSION_NAMES}
            options["state_dict"] = own
        super().save_pretrained(*args, **options)

    def resize_token_embeddings(self, *args, **kwargs):
        """Refuse: embedding and head have an up part that stock code does not resize."""
        raise NotImplementedError("Resize the base model's embeddings first, then expand it.")

    @classmethod
    def is_custom_code(cls) -> bool:
        """What initialises is stock code, which looks at each tensor whether a file gave it; code of others may not.

        transformers would not let it compute the buffers of modules whose own tensors all came from files.
        """
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether experts run by kernels that can be chosen, as the stock model's do; transformers 5 alone asks.

        It looks for a word in the source of a class's module, and ours is another: experts would be added up in another
        order than the base's, unless a stock model was made before.
        """
        stock: Any = next(own for own in cls.__mro__ if not issubclass(own, ExpandedPreTrainedModel))
        return stock._can_set_experts_implementation()

    def initialize_weights(self):
        """Initialise as the stock model does; expansion tensors that no file gave are zero."""
        zero_missing(self, super().initialize_weights)


@torch.no_grad()
def zero_missing(model: nn.Module, initialize: Callable[[], None]) -> None:
    """Initialise a model, and let expansion tensors that no file gave be zero.

    transformers lets the stock base model initialise its own modules, and it knows no expansion tensors.

    Args:
        model: The model.
        initialize: What initialises all else.
    """
    missing = [
        parameter
        for module in model.modules()
        if isinstance(module, ExpandedModule) and not getattr(module, "_is_hf_initialized", False)
        for parameter in module.expansion_parameters().values()
        if not getattr(parameter, "_is_hf_initialized", False)
    ]
    initialize()
    for parameter in missing:
        parameter.zero_()
