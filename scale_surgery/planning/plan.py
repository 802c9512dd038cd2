"""From a request to a plan: everything that `expand` will write, decided before any weight is read.

    Request + config.json + headers  ->  Plan   (print it, save it, review it, execute it)

A plan is a value: `expand` executes it. Saved as JSON it can be executed later; `load_plan` plans again from the same
request and refuses if anything differs. Facts about the architecture come in with the base: they are derived from the
model itself, see `deriving`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.headers import DTYPE_BYTES, FLOAT_DTYPES
from scale_surgery.checkpoint.numbering import Numbering, numbering_of
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning import costs
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.base import Base, BaseFacts, check_base, fingerprint
from scale_surgery.planning.method import Method
from scale_surgery.planning.methods import METHODS, complete, get_method
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Collaboration, Spec, Widths, specs_of_layer
from scale_surgery.planning.tensors import Init, NewTensor, TensorPlan

SHARD_BYTES = 512 * 1024 * 1024
# start of the names of an expansion's shards; its name follows
SHARD_STEM = "expansion-"


@dataclass(frozen=True)
class Origin:
    """Base and request, from which a plan can be made again; config.json keeps them, as all trainers save it.

    Attributes:
        base_name: Hub id, or name of the base model's folder.
        base_revision: Commit of the Hub repository, where known.
        request: The request.
    """

    base_name: str
    base_revision: str | None
    request: Request


@dataclass(frozen=True)
class Plan:
    """Everything that `expand` will do.

    Attributes:
        base_name: Hub id, or name of the base model's folder.
        base_revision: Commit of the Hub repository, where known.
        base_fingerprint: sha256 over the base's config and the names, dtypes and shapes of its tensors.
        family: `model_type` of the base model.
        facts: Facts about it: architecture, sizes, and their proof.
        request: The request.
        widths: Added widths.
        layers: Expanded layers.
        collaboration: Layers and groups with W12.
        prefix: What stands before the base model's names on disk.
        head: Name of the head on disk.
        specs: Module specifications, the key `scale_surgery` of the new config.json.
        tensors: Every new tensor.
        shards: Names of the new shards.
        costs: Parameters, bytes, forward cost, training depth, and an estimate of memory.
    """

    base_name: str
    base_revision: str | None
    base_fingerprint: str
    family: str
    facts: BaseFacts
    request: Request
    widths: Widths
    layers: tuple[int, ...]
    collaboration: Collaboration
    prefix: str
    head: str
    specs: Mapping[str, Any]
    tensors: tuple[TensorPlan, ...]
    shards: tuple[str, ...]
    costs: costs.Costs

    @property
    def architecture(self) -> Architecture:
        """Facts of the base's architecture."""
        return self.facts.architecture

    @property
    def sizes(self) -> Sizes:
        """Sizes of the base model."""
        return self.facts.sizes

    @property
    def variant(self) -> str:
        """The variant."""
        return str(self.request.variant)

    @property
    def method(self) -> Method:
        """How the model grows."""
        return get_method(self.request.method)

    @property
    def origin(self) -> Origin:
        """The part of the plan that config.json keeps."""
        return Origin(self.base_name, self.base_revision, self.request)

    @property
    def vocabulary(self) -> int:
        """Tokens that the expanded model predicts, added ones included."""
        return self.sizes.vocabulary + self.widths.new_tokens

    @property
    def embedding(self) -> str:
        """Name of the embedding's weight."""
        return f"{self.prefix}{self.architecture.embedding_weight}"

    @property
    def has_gates(self) -> bool:
        """True if up streams are read through gates."""
        return any(tensor.block == "gate" for tensor in self.tensors)

    @property
    def code_files(self) -> tuple[str, ...]:
        """Names of the Python files that the expanded checkpoint carries."""
        return () if self.method.adds_layers else self.architecture.code_files

    @cached_property
    def numbering(self) -> Numbering | None:
        """Positions of layers among copies; None if no layer is duplicated."""
        return numbering_of(self.specs)

    def expanded_linears(self, layer: int) -> dict[str, Spec]:
        """Specifications of the linears of an expanded layer, by name."""
        modules = specs_of_layer(self.specs, layer).get("expanded", {})
        return {name: spec for name, spec in modules.items() if spec["kind"] in ("linear", "grown")}

    @property
    def head_parts(self) -> tuple[TensorPlan, ...]:
        """Up parts of the head: tensors neither in a layer nor in a module of the base model, nor new rows."""
        around = map(self.architecture.on_disk, self.specs.get("model", ()))
        inside = tuple(f"{self.prefix}{part}." for part in (self.architecture.layers, *around))
        others = [tensor for tensor in self.tensors if not tensor.name.endswith(".new_rows")]
        return tuple(tensor for tensor in others if not tensor.name.startswith(inside))

    @property
    def guards(self) -> tuple[TensorPlan, ...]:
        """New tensors that keep the output the base's as long as they keep their initial values."""
        return self.method.guards(self.tensors, self.head_parts)

    @property
    def is_exact_at_init(self) -> bool:
        """True if the initial output equals the base's bit for bit, not only up to rounding."""
        return self.method.is_exact_at_init(self.request, self.tensors)

    def stored_name(self, name: str) -> str:
        """Name that a tensor has in the files, where layers are duplicated or not."""
        return name if self.numbering is None else self.numbering.stored(name)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def base_title(name: str, revision: str | None) -> str:
    """Return the name of a base, with its commit if known."""
    return f"{name} at {revision}" if revision else name


def plan_expansion(base: Base, request: Request, *, name: str, revision: str | None = None) -> Plan:
    """Decide everything that an expansion will do; no weight is read."""
    request = complete(request, base.sizes.layers)
    check_base(base)
    method = METHODS[request.method]
    if problems := list(_new_token_problems(base, method, request)):
        raise PlanError(*problems)
    resolved = method.resolve(base, request)
    if request.token_count:
        resolved = replace(resolved, widths=replace(resolved.widths, new_tokens=request.token_count))
    specs = method.specs(base, request, resolved)
    tensors, shards = _place(tuple(method.new_tensors(base, specs)), request, base)
    return Plan(
        base_name=name,
        base_revision=revision,
        base_fingerprint=fingerprint(base.checkpoint),
        family=base.architecture.model_type,
        facts=base.facts,
        request=request,
        widths=resolved.widths,
        layers=resolved.layers,
        collaboration=resolved.collaboration,
        prefix=base.prefix,
        head=base.head,
        specs=specs,
        tensors=tensors,
        shards=shards,
        costs=method.costs(base, request, specs, tensors),
    )


def _new_token_problems(base: Base, method: Method, request: Request) -> Iterator[Problem]:
    """Yield why tokens cannot be added to a base."""
    if not request.token_count:
        if request.new_tokens_init != Request.new_tokens_init:
            yield Problem("new-tokens-init-without-tokens", "--new-tokens-init", init=request.new_tokens_init)
        return
    if method.adds_layers:
        yield Problem("new-tokens-with-method", "--new-tokens", method=method.name)
    if reason := base.architecture.fixed_vocabulary:
        yield Problem("vocabulary-fixed", "--new-tokens", reason=reason)


def _place(
    added: tuple[NewTensor, ...], request: Request, base: Base
) -> tuple[tuple[TensorPlan, ...], tuple[str, ...]]:
    """Give new tensors their dtypes, initial values and shards."""
    # a tied head has no tensor of its own on disk: it lies with the embedding
    stored = base.checkpoint.tensors
    embedding = stored[f"{base.prefix}{base.architecture.embedding_weight}"]
    sources = [stored.get(tensor.source, embedding).dtype for tensor in added]
    # beside a quantised tensor the dtype is that of the embedding
    beside = [dtype if dtype in FLOAT_DTYPES.values() else embedding.dtype for dtype in sources]
    dtypes = [FLOAT_DTYPES[request.dtype] for _ in added] if request.dtype else beside
    numbers = _shard_numbers(added, dtypes)
    count = max(numbers)
    stem = f"{SHARD_STEM}{request.name}"
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    tensors = tuple(
        TensorPlan(
            name=tensor.name,
            shape=tensor.shape,
            dtype=dtype,
            block=tensor.block,
            layer=tensor.layer,
            shard=names[number - 1],
            init=_init(tensor, request, has_source=tensor.source in stored),
            source=tensor.source,
        )
        for tensor, dtype, number in zip(added, dtypes, numbers, strict=True)
    )
    return tensors, tuple(names)


def _shard_numbers(added: tuple[NewTensor, ...], dtypes: list[str]) -> list[int]:
    numbers, number, filled = [], 1, 0
    for tensor, dtype in zip(added, dtypes, strict=True):
        size = DTYPE_BYTES[dtype] * prod(tensor.shape)
        if filled and filled + size > SHARD_BYTES:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    return numbers


def _init(tensor: NewTensor, request: Request, *, has_source: bool) -> Init:
    if tensor.is_copy:
        return "copy"
    if tensor.block == "new_rows":
        return request.new_tokens_init
    if tensor.kind == "block":
        # beside a block that runs as a whole, no one matrix is there to be decomposed
        wished = {"w21": request.init_w21, "w22": request.init_w22, "up_weight": "random"}.get(tensor.block, "zero")
        return "random" if wished == "svd" else wished
    if tensor.kind == "norm" and tensor.block == "weight":
        return "mute"
    if tensor.block == "w21":
        return request.init_w21
    if tensor.block == "w22":
        return request.init_w22
    if tensor.block == "up_weight" and tensor.kind == "norm":
        return "mean" if has_source else "one"
    if tensor.block == "up_weight" and tensor.kind == "embedding":
        return request.init_embedding
    return "zero"


def check_fits(plan: Plan, checkpoint: Checkpoint) -> None:
    """Check that a plan was made for a base model."""
    if plan.base_fingerprint != fingerprint(checkpoint):
        raise PlanError(Problem("plan-unfit", checkpoint.path, base=plan.base_name))
