"""What is derived for each causal language model of transformers: python -m tests.deriving.sweep [TYPE ...]."""

from __future__ import annotations

import logging
import sys
import time
import warnings

import torch
from transformers import CONFIG_MAPPING
from transformers import logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from scale_surgery.deriving.build import build_model, find_place
from scale_surgery.deriving.derive import derive
from scale_surgery.planning.architecture import Block
from tests.deriving.configs import OPTIONS


def describe(block: Block) -> str:
    reason = f" ({block.reason})" if block.reason else ""
    mute = "" if block.mute else " NO MUTE"
    return f"{block.name or '-'} {block.kind} {block.group} {block.treatment}{mute}{reason}"


def row(model_type: str) -> tuple[bool, str]:
    """Whether a type derives, and its row of the table."""
    start = time.perf_counter()
    try:
        facts = derive(CONFIG_MAPPING[model_type](**OPTIONS.get(model_type, {})))
    except Exception as error:
        seconds = time.perf_counter() - start
        return False, f"{model_type}\t{seconds:.1f}s\tFAILED {type(error).__name__}: {str(error)[:300]}"
    kinds = " || ".join(" | ".join(map(describe, kind.blocks)) for kind in facts.architecture.kinds)
    about = facts.architecture
    extra = f"enters {about.enters}" + (f", softcap {about.softcap}" if about.softcap else "")
    sizes = [twin_parameters(model_type, twin) for twin in facts.twins]
    return True, f"{model_type}\t{facts.seconds:.1f}s\t{sizes}\t{extra}\t{kinds}"


def twin_parameters(model_type: str, values: dict[str, object]) -> int:
    config = CONFIG_MAPPING[model_type].from_dict(values)
    with torch.device("meta"):
        model = build_model(config)
    assert find_place(model) is not None
    return sum(parameter.numel() for parameter in model.parameters())


def main(types: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for model_type in types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(row(model_type))
        print(rows[-1][1], flush=True)
    print(f"{sum(good for good, _ in rows)} of {len(rows)} types derive")


if __name__ == "__main__":
    main(sys.argv[1:])
