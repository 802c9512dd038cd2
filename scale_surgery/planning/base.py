"""A base model as planning sees it, checked against what its family and its config say it has to hold."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.families import Family, Sizes, get_family, read_sizes
from scale_surgery.planning.specs import expected_shapes, find_prefix


@dataclass(frozen=True)
class Base:
    """A base model as planning sees it: its family, its sizes, what stands before its names, and its headers."""

    family: Family
    sizes: Sizes
    prefix: str
    checkpoint: Checkpoint

    @property
    def head(self) -> str:
        """Name of the head on disk; transformers 5 renamed GPT-NeoX's, and either name is taken as it is."""
        return "lm_head" if "lm_head.weight" in self.checkpoint.tensors else self.family.head

    @property
    def biased(self) -> frozenset[str]:
        """Names on disk of the modules that have a bias."""
        return frozenset(name.removesuffix(".bias") for name in self.checkpoint.tensors if name.endswith(".bias"))


def read_base(checkpoint: Checkpoint) -> Base:
    """Read family, sizes and the prefix of names from a checkpoint's config and headers.

    Raises:
        UnsupportedFamilyError: If the architecture is not supported.
        PlanError: If config.json lacks a size, or sizes do not fit each other.
        CheckpointError: If config.json promises more layers than there are.
    """
    family = get_family(checkpoint.config.get("model_type"))
    sizes = read_sizes(family, checkpoint.config)
    prefix = find_prefix(family, checkpoint.tensors)
    check_layers(family, sizes.layers, checkpoint.tensors)
    return Base(family, sizes, prefix, checkpoint)


def check_layers(family: Family, layers: int, names: Iterable[str]) -> None:
    """Check that there are as many layers as config.json says, before anything counts up to that number.

    Args:
        family: Facts of the architecture.
        layers: Number of base layers that config.json promises.
        names: Names of tensors.

    Raises:
        CheckpointError: If there are fewer.
    """
    numbered = re.compile(rf"(?:{re.escape(family.base_model)}\.)?{re.escape(family.layers)}\.(\d+)\.")
    found = {match[1] for name in names if (match := numbered.match(name))}
    if layers > len(found):
        raise CheckpointError(
            f"config.json: {family.key('layers')} is {layers}, found tensors of {len(found)} layers. Is config.json "
            "from this checkpoint, and is the checkpoint complete?"
        )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a base model by its config and the names, dtypes and shapes of its tensors, as a sha256."""
    tensors = sorted((info.name, info.dtype, list(info.shape)) for info in checkpoint.tensors.values())
    text = json.dumps([checkpoint.config, tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_expanded(checkpoint: Checkpoint) -> None:
    """Refuse a model that is expanded already.

    Raises:
        CheckpointError: If it is.
    """
    if "scale_surgery" in checkpoint.config or checkpoint.manifest is not None:
        first = "Strip it first (scale-surgery strip), or expand" if checkpoint.manifest is not None else "Expand"
        raise CheckpointError(f"{checkpoint.path}: this model is expanded already. {first} its base model.")


def check_base(base: Base) -> None:
    """Check that every tensor that its family asks for is there, in the shape that its config says.

    Raises:
        CheckpointError: If not; every problem is listed.
    """
    family, checkpoint = base.family, base.checkpoint
    problems = [
        f"config.json: {key} is {checkpoint.config[key]!r}: {reason}."
        for key, reason in family.refused.items()
        if checkpoint.config.get(key)
    ]
    problems += _missing_biases(base)
    shapes = expected_shapes(family, base.sizes, base.prefix) | _optional_shapes(base)
    for name, shape in shapes.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            problems.append(f"{name}: no such tensor, expected one of shape {shape}. Is the checkpoint complete?")
        elif info.shape != shape:
            problems.append(
                f"{name}: shape {info.shape}, expected {shape} from config.json. Is config.json from this checkpoint?"
            )
        elif info.dtype not in FLOAT_DTYPES.values():
            problems.append(
                f"{name}: dtype {info.dtype}, expected one of {', '.join(FLOAT_DTYPES.values())}. "
                "A quantised checkpoint must be dequantised first."
            )
    if problems:
        raise CheckpointError.from_problems(problems)


def _optional_shapes(base: Base) -> dict[str, tuple[int, ...]]:
    """Shapes of what only some models of a family store: a head of its own, position embeddings, biases."""
    family, sizes, prefix, checkpoint = base.family, base.sizes, base.prefix, base.checkpoint
    tensors, head = checkpoint.tensors, f"{base.head}.weight"
    shapes: dict[str, tuple[int, ...]] = {}
    if head in tensors or not sizes.is_tied:
        shapes[head] = (sizes.vocabulary, sizes.hidden)
    if family.position_embedding and "n_positions" in checkpoint.config:
        shapes[f"{prefix}{family.position_embedding}.weight"] = (checkpoint.config["n_positions"], sizes.hidden)
    for name, shape in expected_shapes(family, sizes, prefix).items():
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in tensors:
            shapes[bias] = (shape[-1] if family.transposed else shape[0],)
    return shapes


def _missing_biases(base: Base) -> list[str]:
    """A bias that stands in some layers must stand in all: the model has one switch for it."""
    problems, family = [], base.family
    modules = (*(linear.name for linear in family.linears), *family.pre_norms, *family.post_norms)
    for module in modules:
        names = [f"{base.prefix}{family.layers}.{layer}.{module}.bias" for layer in range(base.sizes.layers)]
        missing = [name for name in names if name not in base.checkpoint.tensors]
        if 0 < len(missing) < len(names):
            problems += [
                f"{name}: no such tensor, other layers have one. Is the checkpoint complete?" for name in missing
            ]
    return problems
