"""Facts about an architecture, as data: what its layers are made of, and how wide their parts are.

    residual stream --norm--> block --(norm)--> + residual stream          a block is attention, an MLP, a mixture, ...

Facts are derived from the model itself (`deriving`), and travel in the plan. Names are those of the stock transformers
modules, inside their layer or inside the base model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from scale_surgery.checkpoint.names import CODE_FILES, FUSED_CODE_FILES, OWN_CODE_FILE, OWN_FUSED_FILE

Role = Literal["q", "k", "v", "o", "gate", "up_proj", "down", "read", "write"]
Group = Literal["attn", "ffn"]
Stream = Literal["residual", "query", "key_value", "inner", "private"]
# how a block is expanded, the strongest first
HeadSize = Literal["query_heads", "key_value_heads", "query_features"]
Treatment = Literal["split", "edges", "block"]
NormStyle = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]

# our names of sizes and the usual keys of config.json
CONFIG_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
}

# role -> (what it reads, what it writes); a private stream lies inside a block that stays as it is
STREAMS: Mapping[Role, tuple[Stream, Stream]] = {
    "q": ("residual", "query"),
    "k": ("residual", "key_value"),
    "v": ("residual", "key_value"),
    "o": ("query", "residual"),
    "gate": ("residual", "inner"),
    "up_proj": ("residual", "inner"),
    "down": ("inner", "residual"),
    "read": ("residual", "private"),
    "write": ("private", "residual"),
}


def numberless(name: str) -> str:
    """A name inside a layer with stars for numbers, so that all experts share it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class Linear:
    """A linear of a block that is expanded.

    Attributes:
        name: Module name inside the layer.
        roles: Its roles; several are one fused projection.
        inputs: Features that it reads.
        outputs: Features that it writes, for each role.
        fused_by: Rows of fused roles: all of q, then all of k, ... (`section`), or head by head: the queries that share
            a key, the key, its value (`head`).
    """

    name: str
    roles: tuple[Role, ...]
    inputs: int
    outputs: tuple[int, ...]
    fused_by: Literal["section", "head"] = "section"

    @property
    def reads(self) -> Stream:
        """The stream it reads."""
        return STREAMS[self.roles[0]][0]

    def writes(self) -> tuple[Stream, ...]:
        """The streams it writes, one for each role."""
        return tuple(STREAMS[role][1] for role in self.roles)


@dataclass(frozen=True)
class Norm:
    """A norm over all of a stream; `style` is its formula."""

    name: str
    style: NormStyle = "rms"


@dataclass(frozen=True)
class InnerNorm:
    """A norm on queries or keys: over the whole projection, or inside each head on axis `head_axis`.

    Attributes:
        name: Module name inside the layer.
        stream: The stream that it normalises.
        head_axis: Axis of the heads, None for a norm over the whole projection.
        style: Its formula.
    """

    name: str
    stream: Literal["query", "key_value"]
    head_axis: int | None = None
    style: NormStyle = "rms"


@dataclass(frozen=True)
class Block:
    """A part of a layer that reads the residual stream, and whose output is added to it.

    Attributes:
        name: Module name inside the layer; empty where its linears lie in the layer itself.
        kind: Class of the stock module.
        group: Whether it counts as attention or as feed-forward network.
        treatment: "split": heads or inner features are widened; "edges": only the linears that read or write the
            residual stream are expanded, what lies between them is stock; "block": all of it runs as it is on the base
            stream, and a small dense MLP beside it.
        reason: Why no stronger treatment is possible; empty for the strongest.
        linears: The linears that are expanded; none for "block".
        activations: Activation modules between them, of a split MLP.
        inner_norms: Norms on queries or keys, of split attention.
        query_heads: Query heads of split attention, otherwise 0.
        key_value_heads: Key/value heads of split attention, otherwise 0.
        head_size: Features of a head of split attention, otherwise 0.
        inner: Features inside a split MLP, otherwise 0.
        attributes: Attributes that split attention reads from itself, each to query_heads, key_value_heads or
            query_features.
        config: Keys of the config that it reads, likewise.
        mute: Names of tensors in memory, inside the layer and `numberless`: if they are zero, the block adds nothing.
        norm: Norm of the layer whose output it reads; empty where it reads the residual stream as it is.
        post_norm: Norm of the layer that reads its output, alone or in a sum; empty where its output is added as it is.
    """

    name: str
    kind: str
    group: Group
    treatment: Treatment
    reason: str = ""
    linears: tuple[Linear, ...] = ()
    activations: tuple[str, ...] = ()
    inner_norms: tuple[InnerNorm, ...] = ()
    query_heads: int = 0
    key_value_heads: int = 0
    head_size: int = 0
    inner: int = 0
    attributes: Mapping[str, HeadSize] = field(default_factory=dict)
    config: Mapping[str, HeadSize] = field(default_factory=dict)
    mute: tuple[str, ...] = ()
    norm: str = ""
    post_norm: str = ""

    @property
    def is_whole(self) -> bool:
        """True if it runs unchanged, beside its new features."""
        return self.treatment == "block"

    @property
    def queries_per_key_value(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // max(1, self.key_value_heads)

    def heads_through(self, norm: InnerNorm) -> int:
        """Heads that an inner norm reads; the fewer where queries and keys share one norm."""
        heads = {"query": self.query_heads, "key_value": self.key_value_heads}
        return min(heads[inner.stream] for inner in self.inner_norms if inner.name == norm.name)


@dataclass(frozen=True)
class Kind:
    """Blocks and norms of one kind of layer; a model may have several kinds.

    Attributes:
        blocks: Its blocks, in the order in which they run.
        pre_norms: Norms that read the residual stream.
        post_norms: Norms whose output is added to the residual stream.
        direct: Linears that read the residual stream without a norm before them, where others have one.
        stored_as: Modules that have another name in the checkpoint's files, such as `mlp` to `block_sparse_moe`; both
            inside the layer.
    """

    blocks: tuple[Block, ...]
    pre_norms: tuple[Norm, ...] = ()
    post_norms: tuple[Norm, ...] = ()
    direct: tuple[str, ...] = ()
    stored_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules beside which something may be added: norms, linears, and blocks that run as they are."""
        norms = (norm.name for norm in (*self.pre_norms, *self.post_norms))
        inner = (norm.name for block in self.blocks for norm in block.inner_norms)
        whole = (block.name for block in self.blocks if block.is_whole)
        return tuple(dict.fromkeys([*norms, *inner, *(linear.name for linear in self.linears), *whole]))

    def on_disk(self, name: str) -> str:
        """Name of a module inside its layer, as it is in files."""
        return self.stored_as.get(name, name)

    @property
    def linears(self) -> Iterator[Linear]:
        """The linears that are expanded, of all blocks."""
        return (linear for block in self.blocks for linear in block.linears)


@dataclass(frozen=True)
class Architecture:
    """Facts about the architecture of one model.

    Attributes:
        model_type: `model_type` of the base model's config.json.
        config_class: Its stock configuration class.
        classes: Auto class to stock class, such as AutoModelForCausalLM to LlamaForCausalLM.
        base_model: Module of the language model that holds embedding, layers and final norm; dotted where deeper.
        layers: Module list of the layers, inside the base model.
        embedding: Token embedding, inside the base model.
        final_norm: Norm after the last layer, inside the base model.
        head: Name of the head's module, as in the base's files.
        kinds: The kinds of layers.
        kind_of_layer: For each layer the number of its kind.
        padded: Modules inside the base model that add to the embeddings, such as learned positions.
        first_norms: Norms of the embeddings, inside the base model.
        enters: Whether the up stream begins in the embedding, or as zeros before the first layer ("hook"), because
            something else is scattered into the embeddings, or reads them.
        transposed: Whether linears store (inputs, outputs), as transformers' Conv1D does.
        softcap: Key of config.json that caps the logits after the head, and what counts where it holds none.
        keys: Our names of sizes to their keys in config.json.
        layer_types: Type of each layer where they differ and the config derives them; otherwise empty.
        weightless: Norms that have no weight: "layers.0.input_layernorm", or "norm".
        stored_as: Modules around the layers that have another name in the checkpoint's files; both inside the base
            model.
        unread: Patterns of names of tensors in old files that the stock class ignores.
        fixed_heads: Why the stock class has no form with more heads, all else equal; empty where it has one.
        heads_divide_hidden: Whether the stock config wants a number of query heads that divides the hidden size.
        fixed_vocabulary: Why tokens cannot be added; empty where they can.
        alters_logits: Whether logits are changed after the head, other than by a cap.
        keeps_batch: Whether what leaves the last norm has to be as many texts as were given.
        keeps_width: Whether what leaves the last norm has to be as wide as what entered the first layer.
        own_code: Auto class to module and class in the base's own files, such as `modeling_own.OwnForCausalLM`, where
            transformers does not have its model type; otherwise empty.
    """

    model_type: str
    config_class: str
    classes: Mapping[str, str]
    base_model: str
    layers: str
    embedding: str
    final_norm: Norm
    head: str
    kinds: tuple[Kind, ...]
    kind_of_layer: tuple[int, ...]
    padded: tuple[str, ...] = ()
    first_norms: tuple[Norm, ...] = ()
    enters: Literal["embedding", "hook"] = "embedding"
    transposed: bool = False
    softcap: tuple[str, float | None] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    layer_types: tuple[str, ...] = ()
    weightless: tuple[str, ...] = ()
    stored_as: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    fixed_heads: str = ""
    heads_divide_hidden: bool = False
    fixed_vocabulary: str = ""
    alters_logits: bool = False
    keeps_batch: bool = False
    keeps_width: bool = False
    own_code: Mapping[str, str] = field(default_factory=dict)

    @property
    def code_files(self) -> tuple[str, ...]:
        """Names of the Python files that an expanded model of it carries."""
        return (*CODE_FILES, OWN_CODE_FILE) if self.own_code else CODE_FILES

    @property
    def fused_code_files(self) -> tuple[str, ...]:
        """Names of the Python files that a fused model of it carries."""
        return (*FUSED_CODE_FILES, OWN_FUSED_FILE) if self.own_code else FUSED_CODE_FILES

    @property
    def expanded_type(self) -> str:
        """`model_type` of the expanded model."""
        return f"scale_{self.model_type}"

    @property
    def fused_type(self) -> str:
        """`model_type` of the fused model."""
        return f"fused_{self.model_type}"

    @property
    def layers_path(self) -> str:
        """Module list of the layers, inside the whole model."""
        return f"{self.base_model}.{self.layers}" if self.base_model else self.layers

    @property
    def final_norm_path(self) -> str:
        """Norm after the last layer, inside the whole model."""
        return f"{self.base_model}.{self.final_norm.name}" if self.base_model else self.final_norm.name

    def kind(self, layer: int) -> Kind:
        """The kind of a layer."""
        return self.kinds[self.kind_of_layer[layer]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules around the layers beside which something may be added."""
        return (self.embedding, *self.padded, *(norm.name for norm in self.first_norms), self.final_norm.name)

    def on_disk(self, name: str) -> str:
        """Name on disk of a module around the layers; see `Kind.on_disk` for those of a layer."""
        return self.stored_as.get(name, name)

    @property
    def embedding_weight(self) -> str:
        """Name of the embedding's weight in files, inside the base model."""
        return f"{self.on_disk(self.embedding)}.weight"

    @property
    def mute_gain(self) -> int:
        """The weight with which a post norm gives zeros."""
        styles = [norm.style for kind in self.kinds for norm in kind.post_norms]
        return -1 if any(style.endswith("_plus_one") for style in styles) else 0

    def find_linear(self, module: str) -> tuple[Block, Linear] | None:
        """Find a linear that is expanded, and its block."""
        _, _, inside = f".{module}".rpartition(f".{self.layers}.")
        number, _, name = inside.partition(".")
        if not number.isdecimal() or int(number) >= len(self.kind_of_layer):
            return None
        kind = self.kind(int(number))
        pairs = ((block, linear) for block in kind.blocks for linear in block.linears)
        return next(((block, linear) for block, linear in pairs if kind.on_disk(linear.name) == name), None)

    @property
    def is_uniform(self) -> bool:
        """True if all layers are of one kind, and every block is split."""
        return len(self.kinds) == 1 and all(block.treatment == "split" for block in self.kinds[0].blocks)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a base model, in features, heads, layers or tokens; 0 where it has no such thing.

    Heads and inner features are those of the first block that has any.

    Attributes:
        vocabulary: Tokens that the head predicts.
        unpredicted: Tokens that are embedded beside them.
    """

    hidden: int
    layers: int
    query_heads: int
    key_value_heads: int
    head_size: int
    inner: int
    vocabulary: int
    epsilon: float
    is_tied: bool
    unpredicted: int = 0

    @property
    def embedded(self) -> int:
        """Rows of the embedding."""
        return self.vocabulary + self.unpredicted

    @property
    def queries_per_key_value(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // max(1, self.key_value_heads)
