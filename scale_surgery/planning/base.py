"""A base model as planning sees it, checked against its config and the facts about its architecture."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.headers import FLOAT_DTYPES, TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, numbering_of
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.errors import CheckpointError, PlanError, Problem, name_some, problems_of
from scale_surgery.modeling import AUTO_CLASSES
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.planning.stored import expected_shapes, find_prefix, module_path

QUANTISATION_KEY = "quantization_config"
FLOATS = {*FLOAT_DTYPES.values(), "F64"}


@dataclass(frozen=True)
class BaseFacts:
    """Facts about a base model beside its config and headers; with the request, a plan follows from them.

    Attributes:
        architecture: Facts of its architecture, as they were derived, names on disk included.
        sizes: Its sizes, by its config.
        proof: The proof of the facts on a tiny twin: checks, sizes of twins, versions.
        in_memory: Names of loaded tensors, where they differ from those on disk.
        not_loaded: Paths of tensors that its class does not load, on disk and in memory; no loaded tensor lies under
            one of them.
        has_own_head: Whether its files hold another head than the embedding, to which config.json says that it is tied.
    """

    architecture: Architecture
    sizes: Sizes
    proof: Mapping[str, Any] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=dict)
    not_loaded: tuple[str, ...] = ()
    has_own_head: bool = False

    @property
    def sizes_by_config(self) -> Sizes:
        """Its sizes as config.json alone gives them."""
        return replace(self.sizes, is_tied=self.sizes.is_tied or self.has_own_head)

    def is_loaded(self, name: str) -> bool:
        """Return True if the class of the model loads a tensor of its files."""
        return not any(name == path or name.startswith(f"{path}.") for path in self.not_loaded)


@dataclass(frozen=True)
class Base:
    """A base model as planning sees it: its config and headers, and the facts.

    Attributes:
        checkpoint: Its config and headers.
        facts: Facts beside them.
        not_found: What its files do not hold of the model, a problem a tensor.
    """

    checkpoint: Checkpoint
    facts: BaseFacts
    not_found: tuple[Problem, ...] = ()

    @property
    def architecture(self) -> Architecture:
        """Facts of its architecture."""
        return self.facts.architecture

    @property
    def sizes(self) -> Sizes:
        """Its sizes."""
        return self.facts.sizes

    @cached_property
    def loaded(self) -> dict[str, TensorInfo]:
        """Tensors that its class loads; a bias that config.json knows nothing of is none."""
        return {name: info for name, info in self.checkpoint.tensors.items() if self.facts.is_loaded(name)}

    @cached_property
    def read(self) -> dict[str, TensorInfo]:
        """The tensors that its class loads and reads; old files have masks, which it ignores."""
        return {name: info for name, info in self.loaded.items() if self.is_read(name)}

    def is_read(self, name: str) -> bool:
        """Return True unless its class passes over tensors of this name."""
        return not any(re.search(pattern, name) for pattern in self.architecture.unread)

    @cached_property
    def prefix(self) -> str:
        """Prefix of its names on disk."""
        return find_prefix(self.architecture, self.checkpoint.tensors)

    @property
    def head(self) -> str:
        """Name of the head on disk, which may differ from the module's; a tied head is not stored."""
        embedding = f"{self.prefix}{self.architecture.embedding_weight}"
        shape = (self.sizes.vocabulary, self.sizes.hidden)
        layers = f"{self.prefix}{self.architecture.layers}."
        heads = [
            name.removesuffix(".weight")
            for name, info in self.loaded.items()
            if info.shape == shape and name.endswith(".weight") and name != embedding and not name.startswith(layers)
        ]
        if self.architecture.head in heads or self.sizes.is_tied or not heads:
            return self.architecture.head
        return min(heads, key=len)


def check_facts(facts: BaseFacts) -> None:
    """Check that facts which were read from a file fit together."""
    kinds, numbers, place = facts.architecture.kinds, facts.architecture.kind_of_layer, "facts.architecture"
    if not kinds:
        raise PlanError(Problem("value-empty", f"{place}.kinds"))
    if len(numbers) != facts.sizes.layers:
        counts = {"found": len(numbers), "expected": facts.sizes.layers}
        raise PlanError(Problem("facts-layer-count", f"{place}.kind_of_layer", **counts))
    if unknown := sorted(set(numbers) - set(range(len(kinds)))):
        raise PlanError(Problem("facts-kind-unknown", f"{place}.kind_of_layer", numbers=unknown, kinds=len(kinds)))
    for key in ("classes", "own_code"):
        named = list(getattr(facts.architecture, key))
        if named and not {*named} & {*AUTO_CLASSES}:
            raise PlanError(Problem("facts-class-unknown", f"{place}.{key}", names=named, classes=AUTO_CLASSES))
    linears = (linear for kind in kinds for linear in kind.linears)
    hidden = [("hidden", linear.inputs) for linear in linears if linear.reads == "residual"]
    problems = [
        Problem("facts-size", f"facts.sizes.{name}", size=size, expected=expected)
        for name, expected in dict.fromkeys([*hidden, *sizes_of_blocks(facts.architecture).items()])
        if (size := getattr(facts.sizes, name)) != expected
    ]
    if problems:
        raise PlanError(*problems)


def sizes_of_blocks(architecture: Architecture) -> dict[str, int]:
    """Heads and inner features of a model: those of its first block that has any, 0 where none has."""
    blocks = [block for number in architecture.kind_of_layer for block in architecture.kinds[number].blocks]
    attention = next((block for block in blocks if block.query_heads), None)
    return {
        "query_heads": attention.query_heads if attention else 0,
        "key_value_heads": attention.key_value_heads if attention else 0,
        "head_size": attention.head_size if attention else 0,
        "inner": next((block.inner for block in blocks if block.inner), 0),
    }


def check_layers(architecture: Architecture, layers: int, names: Iterable[str]) -> None:
    """Check that there are as many layers as config.json says, before anything counts up to that number."""
    numbered = re.compile(rf"(?:.*\.)?{re.escape(architecture.layers)}\.(\d+)\.")
    numbers = {match[1] for name in names if (match := numbered.match(name))}
    if layers > len(numbers):
        place = f"{CONFIG_FILE}: {architecture.keys.get('layers', 'num_hidden_layers')}"
        raise CheckpointError(Problem("layers-missing", place, layers=layers, found=len(numbers)))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a base model by its config and the names, dtypes and shapes of its tensors, as a sha256."""
    tensors = sorted((info.name, info.dtype, list(info.shape)) for info in checkpoint.tensors.values())
    text = json.dumps([checkpoint.config, tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def base_in(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The base on which an expansion of this name is planned: a base model, or that of an expanded folder."""
    base = base_alone(checkpoint)
    if checkpoint.recorded is not None and name in checkpoint.recorded["expansions"]:
        raise CheckpointError(Problem("expansion-exists", checkpoint.path, name=name))
    return base


def check_is_base(checkpoint: Checkpoint, where: Path | str) -> None:
    """Check that a folder holds a base model, without expansions."""
    if CONFIG_KEY in checkpoint.config or checkpoint.recorded is not None:
        refuse_form(where, "expanded", "base")


def base_alone(checkpoint: Checkpoint) -> Checkpoint:
    """Config and tensors of the base of a folder to which expansions can be added."""
    record, path = checkpoint.recorded, checkpoint.path
    if record is None and CONFIG_KEY not in checkpoint.config:
        return checkpoint
    if record is None:
        refuse_form(path, "saved", "expanded")
    try:
        set(record["expansions"])  # `base_in` looks for a name among them
        files = record["base_files"].values()
        config, names = parse_json(record["replaced"][CONFIG_FILE]), record["base_tensors"]
        stored = {file["stored_as"] for file in files} - {None}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(Problem("record-incomplete", path / MANIFEST_FILE, *problems_of(error))) from error
    if record.get("fused") is not None:
        refuse_form(path, "fused", "expanded")
    if numbering_of(checkpoint.config.get(CONFIG_KEY)) is not None:
        raise CheckpointError(Problem("base-deepened", path))
    return replace(
        checkpoint,
        config=config,
        tensors={name: info for name, info in checkpoint.tensors.items() if name in names},
        shards=tuple(shard for shard in checkpoint.shards if shard in stored),
        side_files=tuple(file for file in checkpoint.side_files if file in stored),
    )


def remarks_on(facts: BaseFacts) -> tuple[str, ...]:
    """Say what of a base may surprise: tensors that its class does not load, and a head that is not tied after all."""
    remarks = []
    if facts.not_loaded:
        widest = list(facts.architecture.classes.values())[-1]
        remarks.append(
            f"the base has tensors that {widest} does not load: {name_some(facts.not_loaded)}. They keep their bytes "
            "and take no part, in the base as in what is made of it. Expect transformers to name them when it loads."
        )
    if facts.has_own_head:
        remarks.append(
            f"config.json says that the head is tied to the embedding, and {facts.architecture.head}.weight has other "
            "values. transformers 5 loads both, so the head counts as a tensor of its own; transformers 4 puts the "
            "embedding in its place. Write tie_word_embeddings: false into config.json of the base, or delete the head "
            "from its files if the embedding is meant."
        )
    return tuple(remarks)


def check_base(base: Base) -> None:
    """Check that every tensor beside which something may be added is there, in the shape that its config says."""
    if (quantised := quantisation_of(base)) is not None:
        raise CheckpointError(quantised.within(base.checkpoint.path))
    tensors, problems, dtypes = base.checkpoint.tensors, _missing_biases(base), list(FLOAT_DTYPES.values())
    for name, shape in (_needed_shapes(base) | _optional_shapes(base)).items():
        info = tensors.get(name)
        if info is None:
            problems.append(Problem("weight-missing", name, shape=shape))
        elif info.shape != shape:
            problems.append(Problem("tensor-unlike-config", name, shape=info.shape, wanted=shape))
        elif info.dtype not in dtypes:
            problems.append(Problem("weight-dtype", name, dtype=info.dtype, choices=dtypes))
    # names in memory, which may be others
    if found := problems or base.not_found:
        raise CheckpointError(*found)


def quantisation_of(base: Base) -> Problem | None:
    """Return the problem of a base whose weights, or whose config.json, are quantised; None if it can be expanded."""
    tensors, (_, quantisation) = base.checkpoint.tensors, quantisation_config(base.checkpoint.config)
    # experts may be quantised: beside a mixture stands a small MLP, which is computed from none of its weights
    needed = [tensors.get(name) for name in _needed_shapes(base)]
    dtypes = sorted({info.dtype for info in needed if info is not None} - FLOATS)
    method = str(quantisation.get("quant_method", "")) if isinstance(quantisation, Mapping) else ""
    # some quantisers store other tensors in place of a weight
    if not dtypes and (not isinstance(quantisation, Mapping) or None not in needed):
        return left_over_quantisation(base.checkpoint.config, _dtypes(base))
    return Problem("base-quantised", schemes=[*filter(None, [method]), *dtypes])


def left_over_quantisation(config: Mapping[str, Any], dtypes: Collection[str]) -> Problem | None:
    """Return the problem of a config.json that says how weights are quantised, if none of these dtypes is quantised."""
    key, said = quantisation_config(config)
    if said is None or not {*dtypes} <= {*FLOATS, "I64", "BOOL"}:
        return None
    return Problem("quantisation-left-over", f"{CONFIG_FILE}: {key}")


def _dtypes(base: Base) -> set[str]:
    """Dtypes of the tensors that a model is made of; names of packed experts are known to no class."""
    return {info.dtype for name, info in base.checkpoint.tensors.items() if base.is_read(name)}


def quantisation_config(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key of the quantisation in config.json, and its value; the value is None if there is none."""
    text = config.get("text_config")
    inside = text.get(QUANTISATION_KEY) if isinstance(text, Mapping) else None
    if config.get(QUANTISATION_KEY) is None and inside is not None:
        return f"text_config.{QUANTISATION_KEY}", inside
    return QUANTISATION_KEY, config.get(QUANTISATION_KEY)


def _needed_shapes(base: Base) -> dict[str, tuple[int, ...]]:
    bare = {f"{base.prefix}{name}.weight" for name in base.architecture.weightless}
    shapes = expected_shapes(base.architecture, base.sizes, base.prefix)
    return {name: shape for name, shape in shapes.items() if name not in bare}


def _optional_shapes(base: Base) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that only some models of an architecture store: an untied head, biases."""
    sizes, tensors, head = base.sizes, base.loaded, f"{base.head}.weight"
    shapes: dict[str, tuple[int, ...]] = {}
    if head in tensors or not sizes.is_tied:
        shapes[head] = (sizes.vocabulary, sizes.hidden)
    for name, shape in expected_shapes(base.architecture, sizes, base.prefix).items():
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in tensors:
            shapes[bias] = (shape[-1] if base.architecture.transposed else shape[0],)
    return shapes


def _missing_biases(base: Base) -> list[Problem]:
    """List biases that some layers of a kind lack: a config has one switch for all of them."""
    architecture, tensors, problems = base.architecture, base.loaded, list[Problem]()
    for number, kind in enumerate(architecture.kinds):
        layers = [layer for layer in range(base.sizes.layers) if architecture.kind_of_layer[layer] == number]
        modules = [linear.name for linear in kind.linears]
        modules += [norm.name for norm in (*kind.pre_norms, *kind.post_norms)]
        for module in modules:
            names = [f"{module_path(architecture, base.prefix, layer, module)}.bias" for layer in layers]
            missing = [name for name in names if name not in tensors]
            if 0 < len(missing) < len(names):
                problems += [Problem("bias-missing", name) for name in missing]
    return problems
