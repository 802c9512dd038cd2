"""Stock classes: what expanded and fused models share to load, wrap and extend them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from .configuration_scale import find_stock_class
from .expanded_releases import ADDED_AFTER, ADDED_BEFORE, NO_WEIGHTS, warn, warn_of_new_release

# tensors that an error names
MOST_NAMED = 5
# a folder or repository without weights may be an extract; this code opens no file to find out
AN_EXTRACT = (
    "A folder with extract.json in place of weights is an extract: an expansion without its base, which extract.json "
    "names. Put it on that base: scale-surgery apply EXTRACT --base BASE -o FOLDER writes a model that loads so; or "
    "scale_surgery.load_expansion(BASE, EXTRACT) makes one in memory."
)
# an untrained gate is open, since 2 sigmoid(3) - 0.5 is above 1
BEGINS_OPEN, STRETCH, GATE_EPSILON = 3.0, 0.5, 1e-6


class View:
    """An object with some attributes replaced; all others are read live from the object."""

    def __init__(self, viewed: Any, values: dict[str, Any]) -> None:
        self.__dict__.update(values, viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "viewed":
            raise AttributeError(name)
        return getattr(self.viewed, name)


def twin(module: Any, **values: Any) -> Any:
    """Copy a module with the same tensors and modules, and with `values` as attributes."""
    copy = object.__new__(type(module))
    copy.__dict__.update(vars(module), **values)
    return copy


def refuse_tensor_parallelism(given: dict[str, Any]) -> None:
    """Refuse options of from_pretrained that split matrices over processes."""
    config = given.get("distributed_config")
    plans = (given.get("tp_plan"), getattr(config, "tp_plan", None))
    sizes = (given.get("tp_size"), getattr(config, "tp_size", None))
    if any(plan is not None for plan in plans) or any((size or 1) > 1 for size in sizes):
        raise ValueError(
            "Tensor parallelism splits the base's matrices and no blocks beside them, so it would add their products "
            "once for each process. Load with device_map, or serve a fused model with vLLM."
        )


def refuse_kernels(given: object) -> None:
    """Refuse kernels that replace modules."""
    if given:
        raise ValueError(
            "use_kernels: would replace norms and activations by kernels that read one stream, and this model has "
            "several. Leave it out; kernels of attention are chosen by attn_implementation."
        )


class StrictlyLoaded:
    """Mixin before a stock model class that loads as transformers does, and refuses files that do not fit."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, refuse files that do not fit, and freeze the base.

        `strict_loading=False` keeps missing tensors as they were initialised, as transformers does;
        `output_loading_info=True` then names them.
        """
        refuse_tensor_parallelism(kwargs)
        refuse_kernels(kwargs.get("use_kernels") or kwargs.get("kernel_config"))
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
        # loading resets requires_grad
        model.freeze_base()
        return (model, info) if says_more else model

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse nn.DataParallel, whose replicas have no parameters, and share what modules keep of a forward."""
        raise RuntimeError("nn.DataParallel cannot run this model, expected one process for each GPU: torchrun.")

    def set_use_kernels(self, use_kernels: bool, *args: Any, **options: Any) -> None:
        """Refuse kernels that replace modules."""
        refuse_kernels(use_kernels)
        super().set_use_kernels(use_kernels, *args, **options)

    def freeze_base(self) -> None:
        """Freeze all tensors."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def check_loaded(self, info: dict[str, Any]) -> None:
        """Refuse files whose tensors are not the model's; transformers would warn, and initialise missing ones.

        Tied tensors, and those that the stock class ignores, are not in `info`.

        Args:
            info: Loading info of transformers.

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
        """Name the tensors of the files that are not the model's, except those that the base's class does not load.

        If the model has no head, those of a head are expected.
        """
        left_out = self.config.scale_surgery.get("base", {}).get("not_loaded", ())
        unexpected = {name for name in info["unexpected_keys"] if not is_under(name, left_out)}
        return set() if self.get_output_embeddings() is None and is_head(unexpected) else unexpected

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: the stock class initialises the weights and skips loaded tensors, which custom code may not do.

        For custom code, transformers would not compute the buffers of modules whose tensors were all loaded.
        """
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return whether the stock model lets transformers 5 choose the kernels of experts.

        transformers looks for a word in the source of a class's module, which is not in ours. Experts would then be
        added up in another order than the base's, unless a stock model was made before.
        """
        stock: Any = next(parent for parent in cls.__mro__ if not issubclass(parent, StrictlyLoaded))
        return stock._can_set_experts_implementation()


class Hook:
    """A hook of a module that calls a method of the model; a copy of that module alone calls the same model."""

    def __init__(self, model: nn.Module, method: str, *values: Any) -> None:
        self.model, self.method, self.values = model, method, values

    def __call__(self, *given: Any) -> Any:
        return getattr(self.model, self.method)(*self.values, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(memo.get(id(self.model), self.model), self.method, *self.values)


def is_under(name: str, paths: Iterable[str]) -> bool:
    """Return whether a tensor of the base has one of these paths, or a path below one."""
    return ".expansions." not in name and any(f"{name}.".startswith(f"{path}.") for path in paths)


def is_head(names: set[str]) -> bool:
    """Return whether the unexpected tensors of a model without a head are those of one head."""
    modules = {
        name.partition(".expansions.")[0] if ".expansions." in name else name.rpartition(".")[0] for name in names
    }
    return len(modules) == 1 and ("." not in modules.pop() or any(".expansions." in name for name in names))


def find_base_model(model: nn.Module, path: str) -> nn.Module:
    """Find the module that holds embedding, layers and final norm.

    Args:
        model: The whole model, or one without its head, whose paths lack the first parts.
        path: Dotted path of that module in the whole model.
    """
    while path:
        try:
            return model.get_submodule(path)
        except AttributeError:
            path = path.partition(".")[2]
    return model


def find_module(parent: nn.Module, name: str) -> nn.Module:
    """Find a module that config.json names; releases of transformers rename modules."""
    try:
        return parent.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"config.json: scale_surgery names the module {name}, expected one of {type(parent).__name__} in "
            f"transformers {transformers.__version__}. Load the model with the release that surgery.json names."
        ) from error


def specs_of(plan: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the specs of one layer, of the base or an expansion; layers may be of several kinds."""
    return plan["kinds"][plan["kind_of_layer"][layer]] if "kinds" in plan else plan


def normalise(x: Tensor, style: str, epsilon: float, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the norm of one stream.

    Args:
        x: The stream.
        style: "rms" (gain w), "layer" (mean, variance, gain), or one of them with "_plus_one" (gain 1 + w).
        epsilon: Added to the variance.
        gain: w, as it is stored.
        bias: Added at the end, if there is one.
    """
    gain = gain + 1.0 if style.endswith("_plus_one") else gain
    if style.startswith("layer"):
        return functional.layer_norm(x, gain.shape, gain, bias, epsilon)
    y = functional.rms_norm(x, gain.shape, gain, epsilon)
    return y if bias is None else y + bias


def in_float32(device: torch.device) -> AbstractContextManager[Any]:
    """Multiply in float32 inside a `with` block, also under autocast."""
    # autocast does not know the device of a model without numbers
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_cast else nullcontext()


def gate_scores(gate: Tensor, base: Tensor, up: Tensor) -> Tensor:
    """Compute the scores of a gate from a base stream and the up stream beside it, both scaled to a mean square of 1.

        z = 3 + w x / rms(x) + w_up x_up / rms(x_up) + b      gate = [w, w_up, b], initially zero, which is open

    No gradient reaches the base stream through the gate.

    Args:
        gate: (d + u + 1).
        base: (b, t, d).
        up: (b, t, u).

    Returns:
        Scores (b, t, 1), float32.
    """
    *weights, bias = gate.float().split([base.shape[-1], up.shape[-1], 1])
    scores = BEGINS_OPEN + bias
    with in_float32(base.device):
        for stream, weight in zip((base.detach().float(), up.float()), weights, strict=True):
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + GATE_EPSILON)
            scores = scores + (stream @ weight)[..., None] * scale
    return scores


def opened(scores: Tensor) -> Tensor:
    """Compute the openings of gates, g = clamp(2 sigmoid(z) - 0.5, 0, 1), which reach 0 and 1 and have no gradient."""
    return (torch.sigmoid(scores.detach()) * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)


def through_gate(module: Any, base: Tensor, up: Tensor, values: Tensor) -> Tensor:
    """Multiply values by the opening of a module's gate; return them as they are if it has none.

    Args:
        module: If it has `keeps_scores`, its `scores` become those of this forward (b, t, 1).
        base: Base stream that the module reads.
        up: Up stream that it reads.
        values: Values to multiply.
    """
    gate = getattr(module, "gate", None)
    if gate is None:
        return values
    scores = gate_scores(gate, base, up)
    if getattr(module, "keeps_scores", False):
        vars(module)["scores"] = scores
    elif scores.requires_grad and module.training and not is_compiling():
        warn(
            "The gates of this model do not learn here: they have a loss of their own, which scale-surgery train adds "
            "and other trainers do not. They stay as open as they are."
        )
    return values * opened(scores).to(values.dtype)


def find_stock_model(name: str, module: str, prefix: str) -> tuple[Any, Any]:
    """Find the stock model class of one of our classes by its name, and the configuration class of its base."""
    class_name, _, config = name.partition("_of_")
    stock = find_stock_class(class_name, PreTrainedModel, module, prefix)
    if not config:
        return stock, stock.config_class
    return stock, find_stock_class(f"{prefix}{config}", PretrainedConfig, module, prefix)


def make_model_class(prefix: str, mixin: type, stock: Any, stock_config: type, **attributes: Any) -> Any:
    """Make a model class of a stock one: the mixin comes before it, and `config_class` is among the attributes.

    Its name contains the configuration class of the base if that is not the stock model's own.
    """
    suffix = "" if stock_config is stock.config_class else f"_of_{stock_config.__name__}"
    # without GenerationMixin as a direct base, transformers replaces a remote class that generates by another
    generates = (GenerationMixin,) if issubclass(stock, GenerationMixin) else ()
    made = type(f"{prefix}{stock.__name__}{suffix}", (mixin, stock, *generates), attributes)
    convert_as(made, stock, stock_config)
    return made


def convert_as(made: Any, stock: type, stock_config: Any) -> None:
    """Let transformers 5 convert names and tensors on disk as for the stock class, which it does not for custom code.

    Otherwise the experts of a mixture, one tensor each on disk, would be initialised anew. transformers 4 takes
    conversions from the class itself.
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
    """Append `width` zeros to a stream."""
    return functional.pad(x, (0, width)) if width else x


def adds_features(base_model: nn.Module) -> bool:
    """Return whether a model adds features of images to the hidden state between its layers."""
    return bool({ADDED_AFTER, ADDED_BEFORE}.intersection(signature(base_model.forward).parameters))


def wide_features(inputs: dict[str, Any], widen: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """Widen the inputs of a base model that it adds to the hidden state between layers.

    Args:
        inputs: Named inputs of its forward.
        widen: Widens features for the hidden state after a layer, given by its number (-1 before the first).
    """
    wider: dict[str, Any] = {}
    if inputs.get(ADDED_AFTER) is not None:
        wider[ADDED_AFTER] = [widen(features, layer) for layer, features in enumerate(inputs[ADDED_AFTER])]
    if inputs.get(ADDED_BEFORE) is not None:
        wider[ADDED_BEFORE] = {layer: widen(features, layer - 1) for layer, features in inputs[ADDED_BEFORE].items()}
    return inputs | wider
