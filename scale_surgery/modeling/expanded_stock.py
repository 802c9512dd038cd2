"""What expanded and fused models need of the stock classes that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from .configuration_scale import find_stock_class
from .expanded_releases import ADDED_AFTER, ADDED_BEFORE, NO_WEIGHTS, warn_of_new_release

# tensors that an error names
MOST_NAMED = 5
# what a folder or repository without weights may be: this code opens no file
AN_EXTRACT = (
    "A folder with extract.json in place of weights is an extract: an expansion without its base, which extract.json "
    "names. Put it on that base: scale-surgery apply EXTRACT --base BASE -o FOLDER writes a model that loads so; or "
    "scale_surgery.load_expansion(BASE, EXTRACT) makes one in memory."
)
# a gate that nothing has trained is open: 2 sigmoid(3) - 0.5 is above 1
BEGINS_OPEN, STRETCH, GATE_EPSILON = 3.0, 0.5, 1e-6


class View:
    """An object with some values replaced; everything else is read live from the object."""

    def __init__(self, viewed: Any, values: dict[str, Any]) -> None:
        self.__dict__.update(values, viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "viewed":
            raise AttributeError(name)
        return getattr(self.viewed, name)


def twin(module: Any, **values: Any) -> Any:
    """A copy of a module that shares its tensors and modules; `values` are replaced."""
    copy = object.__new__(type(module))
    copy.__dict__.update(vars(module), **values)
    return copy


class StrictlyLoaded:
    """Mixin before a stock model class: loads as transformers does, and refuses files that do not fit."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, refuse what does not fit, and let nothing of the base train.

        `strict_loading=False` takes what is missing as it was initialised, as transformers does;
        `output_loading_info=True` then says what that is.
        """
        warn_of_new_release(next(iter(args), kwargs.get("pretrained_model_name_or_path")))
        is_strict, says_more = kwargs.pop("strict_loading", True), kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except OSError as error:
            if NO_WEIGHTS not in str(error):
                raise
            raise OSError(f"{error}\n{AN_EXTRACT}") from error
        if is_strict:
            model.check_loaded(info)
        # loading resets what trains
        model.freeze_base()
        return (model, info) if says_more else model

    def freeze_base(self) -> None:
        """Let no tensor train."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def check_loaded(self, info: dict[str, Any]) -> None:
        """Refuse files whose tensors are not the model's; transformers warns, and initialises what is missing.

        Tied tensors, and what the stock class leaves out itself, are not in `info`.

        Args:
            info: What transformers says of loading.

        Raises:
            ValueError: If a tensor is missing, unexpected or of another shape.
        """
        problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        problems += [f"{name} is unexpected" for name in sorted(self.unexpected_tensors(info))]
        problems += [f"{name[0]} is of another shape" for name in sorted(info["mismatched_keys"])]
        if problems:
            more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
            raise ValueError(
                f"{type(self).__name__}: the files do not hold its tensors: {', '.join(problems[:MOST_NAMED])}{more}. "
                "Nothing may be initialised anew. Restore the files from where you got them, or load them with the "
                "release of transformers that wrote them; strict_loading=False loads what there is."
            )

    def unexpected_tensors(self, info: dict[str, Any]) -> set[str]:
        """Name the tensors of the files that are not the model's, but for those that its base's class does not load.

        A model without a head needs none.
        """
        left_out = self.config.scale_surgery.get("base", {}).get("not_loaded", ())
        unexpected = {name for name in info["unexpected_keys"] if not is_under(name, left_out)}
        return set() if self.get_output_embeddings() is None and is_head(unexpected) else unexpected

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
        stock: Any = next(parent for parent in cls.__mro__ if not issubclass(parent, StrictlyLoaded))
        return stock._can_set_experts_implementation()


def is_under(name: str, paths: Iterable[str]) -> bool:
    """Whether a tensor that is no expansion's has one of these paths, or lies under it."""
    return ".expansions." not in name and any(f"{name}.".startswith(f"{path}.") for path in paths)


def is_head(names: set[str]) -> bool:
    """Whether tensors that a model without a head has no place for are those of one head."""
    modules = {
        name.partition(".expansions.")[0] if ".expansions." in name else name.rpartition(".")[0] for name in names
    }
    return len(modules) == 1 and ("." not in modules.pop() or any(".expansions." in name for name in names))


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
    """The module that config.json names; releases of transformers rename modules."""
    try:
        return parent.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"config.json: scale_surgery names the module {name}, expected one of {type(parent).__name__} in "
            f"transformers {transformers.__version__}. Load the model with the release that surgery.json names."
        ) from error


def specs_of(plan: dict[str, Any], layer: int) -> dict[str, Any]:
    """The specs of one layer, of the base or an expansion; layers may be of several kinds."""
    return plan["kinds"][plan["kind_of_layer"][layer]] if "kinds" in plan else plan


def normalise(x: Tensor, style: str, epsilon: float, gain: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of one stream.

    Args:
        x: The stream.
        style: "rms" (gain w), "layer" (mean, variance, gain), or one of them with "_plus_one" (gain 1 + w).
        epsilon: What is added to the variance.
        gain: w, as it is stored.
        bias: Added at last, if there is one.
    """
    gain = gain + 1.0 if style.endswith("_plus_one") else gain
    if style.startswith("layer"):
        return functional.layer_norm(x, gain.shape, gain, bias, epsilon)
    y = functional.rms_norm(x, gain.shape, gain, epsilon)
    return y if bias is None else y + bias


def gate_scores(gate: Tensor, base: Tensor, up: Tensor) -> Tensor:
    """Scores of a gate, which reads a base stream and the up stream beside it, both scaled to a mean square of 1.

        z = 3 + w x / rms(x) + w_up x_up / rms(x_up) + b      gate = [w, w_up, b], zero at first, so that it begins open

    No gradient reaches the base stream through it.

    Args:
        gate: (d + u + 1).
        base: (b, t, d).
        up: (b, t, u).

    Returns:
        Scores (b, t, 1), float32.
    """
    *weights, bias = gate.float().split([base.shape[-1], up.shape[-1], 1])
    scores = BEGINS_OPEN + bias
    for stream, weight in zip((base.detach().float(), up.float()), weights, strict=True):
        scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + GATE_EPSILON)
        scores = scores + (stream @ weight)[..., None] * scale
    return scores


def opened(scores: Tensor) -> Tensor:
    """How far gates are open: g = clamp(2 sigmoid(z) - 0.5, 0, 1), which reaches 0 and 1; it has no gradient."""
    return (torch.sigmoid(scores.detach()) * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)


def through_gate(module: Any, base: Tensor, up: Tensor, values: Tensor) -> Tensor:
    """What the gate of a module lets through of values: all of them where it has none.

    Args:
        module: Has `gate`, or none; one that `keeps_scores` has those of its last forward in `scores` (b, t, 1).
        base: Base stream that the module reads.
        up: Up stream that it reads.
        values: What passes.
    """
    gate = module._parameters.get("gate")
    if gate is None:
        return values
    scores = gate_scores(gate, base, up)
    if getattr(module, "keeps_scores", False):
        vars(module)["scores"] = scores
    return values * opened(scores).to(values.dtype)


def find_stock_model(name: str, module: str, prefix: str) -> tuple[Any, Any]:
    """The stock model class that a class of ours is made of, by its name, and the configuration class of its base."""
    class_name, _, config = name.partition("_of_")
    stock = find_stock_class(class_name, PreTrainedModel, module, prefix)
    if not config:
        return stock, stock.config_class
    return stock, find_stock_class(f"{prefix}{config}", PretrainedConfig, module, prefix)


def make_model_class(prefix: str, mixin: type, stock: Any, stock_config: type, **attributes: Any) -> Any:
    """The class of a model that is made of a stock one: the mixin before it, and `config_class` among the attributes.

    Its name says the configuration class of the base where that is not the stock model's own.
    """
    suffix = "" if stock_config is stock.config_class else f"_of_{stock_config.__name__}"
    # where GenerationMixin is no direct base, transformers makes another class of a remote one that generates
    generates = (GenerationMixin,) if issubclass(stock, GenerationMixin) else ()
    made = type(f"{prefix}{stock.__name__}{suffix}", (mixin, stock, *generates), attributes)
    convert_as(made, stock, stock_config)
    return made


def convert_as(made: Any, stock: type, stock_config: Any) -> None:
    """Let transformers 5 convert names and tensors on disk as for the stock class; code of others gets no conversion.

    Without it the experts of a mixture, one tensor each on disk, would be initialised anew. transformers 4 reads what
    it knows of from the class.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:
        return
    for name, base in {made.__name__: stock.__name__, made.config_class.model_type: stock_config.model_type}.items():
        if (known := get_checkpoint_conversion_mapping(base)) is not None:
            register_checkpoint_conversion_mapping(name, known, overwrite=True)


def padded(x: Tensor, width: int) -> Tensor:
    """A stream with so many zeros beside it."""
    return functional.pad(x, (0, width)) if width else x


def adds_features(base_model: nn.Module) -> bool:
    """Whether a model adds features of images to the hidden state between its layers."""
    return bool({ADDED_AFTER, ADDED_BEFORE}.intersection(signature(base_model.forward).parameters))


def wide_features(inputs: dict[str, Any], widen: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """Inputs of a base model, with what is added to the hidden state between layers as wide as that is there.

    Args:
        inputs: Named inputs of its forward.
        widen: Gives features, and the number of the layer after which they are added (-1 before the first), their
            width.
    """
    wider: dict[str, Any] = {}
    if inputs.get(ADDED_AFTER) is not None:
        wider[ADDED_AFTER] = [widen(features, layer) for layer, features in enumerate(inputs[ADDED_AFTER])]
    if inputs.get(ADDED_BEFORE) is not None:
        wider[ADDED_BEFORE] = {layer: widen(features, layer - 1) for layer, features in inputs[ADDED_BEFORE].items()}
    return inputs | wider
