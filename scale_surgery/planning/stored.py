"""Names on disk of the modules of a base model, and the shapes of their weights there."""

from __future__ import annotations

from collections.abc import Collection

from scale_surgery.planning.architecture import Architecture, Block, Sizes


def find_prefix(architecture: Architecture, names: Collection[str]) -> str:
    """The prefix of the base model's names on disk."""
    embedding, first = architecture.embedding_weight, f"{architecture.layers}.0."
    for name in sorted(names, key=len):
        prefix = name.removesuffix(embedding)
        is_whole = name.endswith(embedding) and (not prefix or prefix.endswith("."))
        if is_whole and any(tensor.startswith(prefix + first) for tensor in names):
            return prefix
    return f"{architecture.base_model}." if architecture.base_model else ""


def layer_path(architecture: Architecture, prefix: str, layer: int) -> str:
    """Start of the names of a layer's tensors."""
    return f"{prefix}{architecture.layers}.{layer}."


def module_path(architecture: Architecture, prefix: str, layer: int, name: str) -> str:
    """Name on disk of a module of a layer."""
    return f"{layer_path(architecture, prefix, layer)}{architecture.kind(layer).on_disk(name)}"


def expected_shapes(architecture: Architecture, sizes: Sizes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes that weights beside which something is added must have on disk, by the model that config.json makes."""
    hidden = (sizes.hidden,)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}{architecture.embedding_weight}": (sizes.embedded, sizes.hidden),
        f"{prefix}{architecture.on_disk(architecture.final_norm.name)}.weight": hidden,
    }
    for layer in range(sizes.layers):
        kind = architecture.kind(layer)
        inside: dict[str, tuple[int, ...]] = {norm.name: hidden for norm in (*kind.pre_norms, *kind.post_norms)}
        for block in kind.blocks:
            inside |= {name: (size,) for name, size in _inner_norm_sizes(block).items()}
            for linear in block.linears:
                shape = (sum(linear.outputs), linear.inputs)
                inside[linear.name] = shape[::-1] if architecture.transposed else shape
        shapes |= {f"{module_path(architecture, prefix, layer, name)}.weight": shape for name, shape in inside.items()}
    return shapes


def _inner_norm_sizes(block: Block) -> dict[str, int]:
    """Features of the weights of norms on queries or keys."""
    heads = {"query": block.query_heads, "key_value": block.key_value_heads}
    return {
        norm.name: block.head_size * (heads[norm.stream] if norm.head_axis is None else 1) for norm in block.inner_norms
    }
