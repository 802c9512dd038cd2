"""What libraries save in shares, written by two processes for test_adopt_shares.py: KIND EXPANDED OUTPUT, by torchrun.

OUTPUT/trained.safetensors has what was trained, gathered in another way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from scale_surgery import modeling
from scale_surgery.running.freeze import expansion_parts
from tests.distributed_steps import batch, load_moved, shard_layers, take_fsdp_on_the_cpu, whole


def save_trained(model: Any, output: Path) -> None:
    tensors = {part.name: whole(part.parameter).contiguous() for part in expansion_parts(model)}
    if distributed.get_rank() == 0:
        save_file(tensors, output / "trained.safetensors")


def trainable(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_torch(expanded: Path, output: Path, *, with_optimizer: bool) -> None:
    """FSDP2 by hand, and torch's own checkpoint of the model, or of a dictionary with its optimizer."""
    distributed.init_process_group("gloo")
    model = shard_layers(load_moved(expanded))
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01)
    rows = batch().chunk(2)[distributed.get_rank()]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    states: Any = get_model_state_dict(model)
    if with_optimizer:
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=str(output / "saved"))
    # as safetensors, which take one of two tied tensors, and with all shares put together at the end
    tensors = {name: tensor for name, tensor in get_model_state_dict(model).items() if name != "lm_head.weight"}
    options: dict[str, Any] = {"save_distributed": True, "enable_consolidation": True}
    options["fqn_to_index_mapping"] = dict.fromkeys(tensors, 1)
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(output / "consolidated"), **options))
    save_trained(model, output)


def by_trainer(expanded: Path, output: Path) -> None:
    """The Trainer with FSDP2, whose checkpoints accelerate writes in shares."""
    take_fsdp_on_the_cpu()
    model = transformers.AutoModelForCausalLM.from_pretrained(expanded)
    rows = [{"input_ids": row, "labels": row} for row in batch()]
    arguments = transformers.TrainingArguments(
        str(output),
        max_steps=2,
        save_steps=2,
        learning_rate=0.01,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    (output / "checkpoint-2").rename(output / "saved") if distributed.get_rank() == 0 else None
    save_trained(trainer.accelerator.unwrap_model(trainer.model), output)


def by_deepspeed(expanded: Path, output: Path) -> None:
    """ZeRO-3, which shares parameters, gradients and optimizer state."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = load_moved(expanded)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    rows = batch().chunk(2)[distributed.get_rank()]
    engine.backward(engine(input_ids=rows, labels=rows).loss)
    engine.step()
    engine.save_checkpoint(str(output / "saved"))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        save_trained(model, output)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "torch": lambda expanded, output: by_torch(expanded, output, with_optimizer=False),
    "torch_with_optimizer": lambda expanded, output: by_torch(expanded, output, with_optimizer=True),
    "trainer": by_trainer,
    "deepspeed": by_deepspeed,
}


if __name__ == "__main__":
    modeling.register()
    kind, *places = sys.argv[1:]
    KINDS[kind](*map(Path, places))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # at the end of the interpreter, gloo's threads abort it now and then
