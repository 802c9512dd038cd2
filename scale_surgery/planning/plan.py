"""From a request to a plan: everything that `expand` will write, decided before any weight is read.

    Request + config.json + headers  ->  Plan   (print it, save it, review it, execute it)

A plan is a value. Saved as JSON it can be executed later; `expand --plan` plans again from the same request
and refuses if anything differs, so what was reviewed is what is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import DTYPE_BYTES, FLOAT_DTYPES, Checkpoint, TensorInfo, read_json
from scale_surgery.checkpoint.sources import open_model
from scale_surgery.checkpoint.staging import write_json
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning import costs
from scale_surgery.planning.depth import build_depth_specs, check_depth_config, check_duplicable, depth_tensors
from scale_surgery.planning.families import Family, Sizes, get_family, read_sizes
from scale_surgery.planning.request import Request, complete, resolve
from scale_surgery.planning.specs import (
    Collaboration,
    NewTensor,
    Widths,
    build_specs,
    expected_shapes,
    find_prefix,
    new_tensors,
)
from scale_surgery.planning.tensors import Init, TensorPlan

SHARD_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Plan:
    """Everything that `expand` will do.

    Attributes:
        base_name: Hub id, or name of the base model's folder.
        base_revision: Commit of the Hub repository, where known.
        base_fingerprint: sha256 over the base's config and the names, dtypes and shapes of its tensors.
        family: `model_type` of the base model.
        request: What was asked for.
        sizes: Sizes of the base model.
        widths: What is added.
        layers: Expanded layers.
        collaboration: Where W12 exists.
        prefix: What stands before the base model's names on disk.
        specs: Module specifications, the key `scale_surgery` of the new config.json.
        tensors: Every new tensor.
        shards: Names of the new shards.
        costs: Parameters, bytes, forward cost, training depth, and estimates of time and memory.
    """

    base_name: str
    base_revision: str | None
    base_fingerprint: str
    family: str
    request: Request
    sizes: Sizes
    widths: Widths
    layers: tuple[int, ...]
    collaboration: Collaboration
    prefix: str
    specs: Mapping[str, Any]
    tensors: tuple[TensorPlan, ...]
    shards: tuple[str, ...]
    costs: costs.Costs

    @property
    def variant(self) -> str:
        """The variant."""
        return str(self.request.variant)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def plan(model: str | Path, request: Request, *, revision: str | None = None) -> Plan:
    """Decide everything that `expand` would do, from headers and config only.

    Args:
        model: A folder or a Hub id.
        request: What is asked for.
        revision: Branch, tag or commit of a Hub repository.

    Returns:
        The plan.

    Raises:
        SurgeryError: If the model cannot be read or the request does not fit it.
    """
    source, checkpoint = open_model(model, revision)
    return make_plan(checkpoint, request, name=source.name, revision=source.revision)


def make_plan(checkpoint: Checkpoint, request: Request, *, name: str, revision: str | None = None) -> Plan:
    """Decide everything that an expansion will do; no weight is read.

    Args:
        checkpoint: The base model.
        request: What the user asks for.
        name: Hub id or folder name of the base model.
        revision: Commit of the Hub repository, where known.

    Returns:
        The plan.

    Raises:
        UnsupportedFamilyError: If the architecture is not supported.
        PlanError: If the request does not fit the model; every problem is listed.
        CheckpointError: If the model is expanded already, or a base tensor is missing or has a wrong shape.
    """
    _refuse_expanded(checkpoint)
    if request.method == "depth":
        # what cannot be duplicated in any family is said before the family is asked for
        check_duplicable(checkpoint.config)
    family = get_family(checkpoint.config.get("model_type"))
    sizes = read_sizes(family, checkpoint.config)
    request = complete(request, sizes.layers)
    prefix = find_prefix(family, checkpoint.tensors)
    _check_base(family, sizes, prefix, checkpoint)
    layers, widths, collaboration = resolve(sizes, request)
    if request.method == "depth":
        check_depth_config(family, checkpoint.config, sizes.layers)
        specs = build_depth_specs(family, layers)
        found = tuple(depth_tensors(family, layers, prefix, checkpoint.tensors))
    else:
        specs = build_specs(family, sizes, widths, layers, collaboration, request.variant)
        specs |= {"variant": request.variant, "dtype": "float32" if request.dtype == "float32" else None}
        head = _find_head(family, checkpoint.tensors)
        biased = frozenset(tensor.removesuffix(".bias") for tensor in checkpoint.tensors if tensor.endswith(".bias"))
        found = tuple(new_tensors(family, sizes, specs, prefix, head, biased))
    embedding = checkpoint.tensors[f"{prefix}{family.embedding}.weight"]
    tensors, shards = _place(found, request, checkpoint.tensors, embedding)
    return Plan(
        base_name=name,
        base_revision=revision,
        base_fingerprint=fingerprint(checkpoint),
        family=family.model_type,
        request=request,
        sizes=sizes,
        widths=widths,
        layers=layers,
        collaboration=collaboration,
        prefix=prefix,
        specs=specs,
        tensors=tensors,
        shards=shards,
        costs=(costs.estimate_depth if request.method == "depth" else costs.estimate)(
            family, sizes, specs, tensors, checkpoint, request.svd
        ),
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a base model by its config and the names, dtypes and shapes of its tensors, as a sha256."""
    tensors = sorted((info.name, info.dtype, list(info.shape)) for info in checkpoint.tensors.values())
    text = json.dumps([checkpoint.config, tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _find_head(family: Family, tensors: Mapping[str, TensorInfo]) -> str:
    # transformers 5 renamed GPT-NeoX's head; a checkpoint saved by either release is taken as it is
    return "lm_head" if "lm_head.weight" in tensors else family.head


def _refuse_expanded(checkpoint: Checkpoint) -> None:
    if "scale_surgery" in checkpoint.config or checkpoint.manifest is not None:
        first = "Strip it first (scale-surgery strip), or expand" if checkpoint.manifest is not None else "Expand"
        raise CheckpointError(f"{checkpoint.path}: this model is expanded already. {first} its base model.")


def _check_base(family: Family, sizes: Sizes, prefix: str, checkpoint: Checkpoint) -> None:
    problems = [
        f"config.json: {key} is {checkpoint.config[key]!r}: {reason}."
        for key, reason in family.refused.items()
        if checkpoint.config.get(key)
    ]
    problems += _missing_biases(family, sizes, prefix, checkpoint)
    shapes = expected_shapes(family, sizes, prefix) | _optional_shapes(family, sizes, prefix, checkpoint)
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


def _optional_shapes(family: Family, sizes: Sizes, prefix: str, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of what only some models of a family store: a head of its own, position embeddings, biases."""
    tensors = checkpoint.tensors
    head = f"{_find_head(family, tensors)}.weight"
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


def _missing_biases(family: Family, sizes: Sizes, prefix: str, checkpoint: Checkpoint) -> list[str]:
    """A bias that stands in some layers must stand in all: the model has one switch for it."""
    problems = []
    modules = (*(linear.name for linear in family.linears), *family.pre_norms, *family.post_norms)
    for module in modules:
        names = [f"{prefix}{family.layers}.{layer}.{module}.bias" for layer in range(sizes.layers)]
        missing = [name for name in names if name not in checkpoint.tensors]
        if 0 < len(missing) < len(names):
            problems += [
                f"{name}: no such tensor, other layers have one. Is the checkpoint complete?" for name in missing
            ]
    return problems


def _place(
    found: tuple[NewTensor, ...], request: Request, base: Mapping[str, TensorInfo], embedding: TensorInfo
) -> tuple[tuple[TensorPlan, ...], tuple[str, ...]]:
    # a tied head has no tensor of its own on disk: it lies with the embedding
    beside = [base.get(tensor.source, embedding).dtype for tensor in found]
    dtypes = [FLOAT_DTYPES[request.dtype] for _ in found] if request.dtype else beside
    numbers = _shard_numbers(found, dtypes)
    count = max(numbers)
    names = [f"expansion-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    tensors = tuple(
        TensorPlan(
            name=tensor.name,
            shape=tensor.shape,
            dtype=dtype,
            block=tensor.block,
            layer=tensor.layer,
            shard=names[number - 1],
            init=_init(tensor, request),
            source=tensor.source,
        )
        for tensor, dtype, number in zip(found, dtypes, numbers, strict=True)
    )
    return tensors, tuple(names)


def _shard_numbers(found: tuple[NewTensor, ...], dtypes: list[str]) -> list[int]:
    numbers, number, filled = [], 1, 0
    for tensor, dtype in zip(found, dtypes, strict=True):
        size = DTYPE_BYTES[dtype]
        for width in tensor.shape:
            size *= width
        if filled and filled + size > SHARD_BYTES:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    return numbers


def _init(tensor: NewTensor, request: Request) -> Init:
    if tensor.is_copy:
        return "copy"
    if tensor.kind == "norm" and tensor.block == "weight":
        return "mute"
    if tensor.block == "w21":
        return request.init_w21
    if tensor.block == "w22":
        return request.init_w22
    if tensor.block == "up_weight" and tensor.kind == "norm":
        return "mean"
    if tensor.block == "up_weight" and tensor.kind == "embedding":
        return request.init_embedding
    return "zero"


def save_plan(plan: Plan, file: Path) -> None:
    """Write a plan as JSON."""
    write_json(file, plan.to_json())


def read_plan(plain: Mapping[str, Any]) -> Plan:
    """Make a plan of what `Plan.to_json` made of it, such as the plan in surgery.json.

    Raises:
        KeyError, TypeError: If it is none.
    """
    tensors = [TensorPlan(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in plain["tensors"]]
    where = {name: tuple(values) for name, values in plain["collaboration"].items()}
    return Plan(
        **{
            **plain,
            "request": Request(**plain["request"]),
            "sizes": Sizes(**plain["sizes"]),
            "widths": Widths(**plain["widths"]),
            "layers": tuple(plain["layers"]),
            "collaboration": Collaboration(**where),
            "tensors": tuple(tensors),
            "shards": tuple(plain["shards"]),
            "costs": costs.read_costs(plain["costs"]),
        }
    )


def load_request(file: Path) -> Request:
    """Read the request of a saved plan.

    Raises:
        PlanError: If the file is not a plan of this program.
    """
    try:
        content = read_json(file)
        _ = content["base_fingerprint"], content["tensors"]
        return Request(**content["request"])
    except (KeyError, TypeError, CheckpointError) as error:
        found = "" if isinstance(error, CheckpointError) else f" ({error})"
        missing = "" if file.is_file() else "there is no such file, it "
        raise PlanError(f"{file}: {missing}is not a plan of scale-surgery{found}. Make one with plan -o.") from error


def check_same_plan(plan: Plan, file: Path) -> None:
    """Refuse to execute a saved plan that this base model and this release would not make.

    Raises:
        PlanError: If the saved plan differs; the keys that differ are named.
    """
    saved, made = read_json(file), plan.to_json()
    differing = sorted(key for key in made if key != "costs" and saved.get(key) != made[key])
    if differing:
        raise PlanError(
            f"{file}: this plan was made for another base model or by another release; it differs in "
            f"{', '.join(differing)}. Make it again with plan -o."
        )
