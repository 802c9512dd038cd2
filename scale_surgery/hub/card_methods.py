"""What a model card says that depends on how the model grew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.planning.methods import Method
from scale_surgery.planning.selection import format_layers

SOURCES: Mapping[Method, str] = {
    "scale": "The expansion is that of SCALE; width without a second stream is that of Grow, Don't Overwrite.",
    "grow": "The expansion is that of Grow, Don't Overwrite; the way of keeping it apart from its base is SCALE's.",
    "depth": "The expansion is the block expansion of LLaMA Pro.",
}
# whose papers a card cites
CITED: Mapping[Method, tuple[Method, ...]] = {
    "scale": ("scale", "grow"),
    "grow": ("grow", "scale"),
    "depth": ("depth",),
}
# of models with duplicated layers
COPIES = {
    "expanded": "A language model with new layers among its pretrained ones, made with `scale-surgery`.",
    "extract": "The new layers of a deepened language model, without the model itself, made with `scale-surgery`.",
}
COPIED = (
    "A copy of each chosen layer stands right after it. It began by adding zeros, so that at first it passed on "
    "what it was given, and the output was the base's. The pretrained tensors are there byte for byte; those "
    "above a copy are numbered higher."
)
FREEZING = (
    '`model.config.scale_surgery["new_layers"]` lists the new layers. With the package `scale-surgery` installed, '
    "`scale_surgery.freeze_base(model)` lets them train, and nothing else."
)
CITATIONS: Mapping[Method, str] = {
    "scale": """@misc{scale2025,
  title         = {{SCALE}: Upscaled Continual Learning of Large Language Models},
  author        = {Lee, Jin-woo and Choi, Junhwa and Hwang, Bongkyu and Choo, Jinho and Kim, Bogun and Yi, JeongSeon
                   and Lee, Joonseok and Jung, DongYoung and Park, Jaeseon and Park, Kyoungwon and Jung, Suk-hoon},
  year          = {2025},
  eprint        = {2511.03270},
  archivePrefix = {arXiv}
}""",
    "grow": """@misc{grow2026,
  title         = {Grow, Don't Overwrite: Fine-tuning Without Forgetting},
  author        = {Adila, Dyah and Mazzawi, Hanna and Dherin, Benoit and Gonzalvo, Xavier},
  year          = {2026},
  eprint        = {2603.08647},
  archivePrefix = {arXiv}
}""",
    "depth": """@misc{llamapro2024,
  title         = {{LLaMA} {Pro}: Progressive {LLaMA} with Block Expansion},
  author        = {Wu, Chengyue and Gan, Yukang and Ge, Yixiao and Lu, Zeyu and Wang, Jiahao and Feng, Ye
                   and Shan, Ying and Luo, Ping},
  year          = {2024},
  eprint        = {2401.02415},
  archivePrefix = {arXiv}
}""",
}


def grown(request: Mapping[str, Any], *, is_stock: bool) -> str:
    """How a grown model is made.

    Args:
        request: Its request, as its record holds it.
        is_stock: Whether it is a stock export, which holds no base tensor by itself.
    """
    copies = request["copies"]
    trained = (
        "The base's gate and up projections are trained too, as copies beside them"
        if request["variant"] == "grow-train"
        else "The copies alone are new and are trained"
    )
    kept = "." if is_stock else "; the pretrained tensors are there byte for byte."
    return (
        f"The MLP of a chosen layer is there {copies} times, and the output of each counts 1/{copies}, so that at "
        f"first the output was the base's. {trained}{kept}"
    )


def start(request: Mapping[str, Any]) -> str:
    """How the new blocks of a widened model began."""
    if request.get("method") == "grow":
        return f"gate and up copied, down copied in {request['copies']} equal shares, seed {request['seed']}"
    return f"W12 zero, W21 {request['init_w21']}, W22 {request['init_w22']}, seed {request['seed']}"


def copied_rows(plan: Mapping[str, Any], numbering: Numbering) -> list[tuple[str, str]]:
    """Which layers were duplicated, as rows of a table."""
    added, before = plan["costs"]["parameters_added"], plan["costs"]["parameters_before"]
    layers = plan["sizes"]["layers"]
    return [
        ("variant", f"`{plan['request']['variant']}`"),
        ("layers with a copy", f"{format_layers(tuple(plan['layers']))} of 0-{layers - 1}"),
        ("new layers", f"{format_layers(numbering.new)} of 0-{layers + len(numbering.new) - 1}"),
        ("parameters", f"{before:,} of the base, {added:,} new ({added / before:.1%})"),
        ("start", "what is added to the hidden state zero, everything else as in the layer below"),
    ]


def putting_layers_back(repo: str, base: str) -> str:
    """How an extract of new layers becomes a model again; both are Hub ids."""
    return (
        "## How to load\n\nThis repository holds no whole model. Put the layers back among those of their base:\n\n"
        f"```sh\nscale-surgery apply {repo} --base {base} -o deepened\n```"
    )
