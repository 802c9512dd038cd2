"""Facts about ten architectures, written by hand: what is derived must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scale_surgery.planning.architecture import Architecture, Block, Kind, Linear, Norm, Sizes
from tests.families import FAMILIES, Family, read_sizes

OF_ATTENTION = ("q", "k", "v", "o")


def written_sizes(config: Mapping[str, Any]) -> Sizes:
    """Sizes by a parsed config.json."""
    return read_sizes(FAMILIES[config["model_type"]], config)


def written_architecture(config: Mapping[str, Any]) -> Architecture:
    """Facts by the tables, for a parsed config.json."""
    family, sizes = FAMILIES[config["model_type"]], written_sizes(config)
    style = family.norm_style
    norms = {"pre_norms": family.pre_norms, "post_norms": family.post_norms}
    kind = Kind(
        _blocks(family, sizes), **{name: tuple(Norm(norm, style) for norm in names) for name, names in norms.items()}
    )
    types = family.types_by_number and family.types_by_number.of(config, sizes.layers)
    return Architecture(
        model_type=family.model_type,
        config_class=family.config_class,
        classes=family.classes,
        base_model=family.base_model,
        layers=family.layers,
        embedding=family.embedding,
        final_norm=Norm(family.final_norm, style),
        head=family.head,
        kinds=(kind,),
        kind_of_layer=(0,) * sizes.layers,
        padded=(family.position_embedding,) if family.position_embedding else (),
        transposed=family.transposed,
        softcap=family.softcap,
        keys={name: family.key(name) for name in vars(sizes) if name not in ("epsilon", "is_tied", "unpredicted")},
        layer_types=tuple(types or ()),
        fixed_heads=family.fixed_heads or "",
        heads_divide_hidden=family.heads_divide_hidden,
        # GPT-2 stores the shape of what enters its layers
        keeps_width=family.transposed,
    )


def _blocks(family: Family, sizes: Sizes) -> tuple[Block, ...]:
    features = {
        "residual": sizes.hidden,
        "query": sizes.query_heads * sizes.head_size,
        "key_value": sizes.key_value_heads * sizes.head_size,
        "inner": sizes.inner,
    }
    made = [
        Linear(
            linear.name,
            linear.roles,
            features[linear.reads],
            tuple(features[feature] for feature in linear.writes()),
            linear.fused_by,
        )
        for linear in family.linears
    ]
    mlp = family.activation.rpartition(".")[0]
    attention = [linear for linear in made if linear.roles[0] in OF_ATTENTION]
    others = [linear for linear in made if linear.roles[0] not in OF_ATTENTION]
    inner = tuple(replace(norm, style=family.norm_style) for norm in family.inner_norms)
    return (
        Block(
            name=family.attention,
            kind="",
            group="attn",
            treatment="split",
            linears=tuple(attention),
            inner_norms=inner,
            query_heads=sizes.query_heads,
            key_value_heads=sizes.key_value_heads,
            head_size=sizes.head_size,
            attributes=family.attention_attributes,
            config=family.attention_config,
            mute=_mute(attention),
        ),
        Block(
            name=mlp,
            kind="",
            group="ffn",
            treatment="split",
            linears=tuple(others),
            activations=(family.activation,),
            inner=sizes.inner,
            mute=_mute(others),
        ),
    )


def _mute(linears: list[Linear]) -> tuple[str, ...]:
    return tuple(f"{linear.name}.{part}" for linear in linears[-1:] for part in ("weight", "bias"))
