"""Two processes that talk by gloo, for test_distributed.py: `python -m tests.distributed_steps JOBS.json`.

torch and transformers are imported once; each job is then two forks of this process.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure  # noqa: F401  (not again in each fork)
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from scale_surgery import modeling
from scale_surgery.cli.program import main as command_line
from scale_surgery.training.trainer import RunReport

PROCESSES = 2
SECONDS = 120


def batch() -> torch.Tensor:
    """Four rows, two for each process."""
    return torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(3))


def load_moved(path: Path) -> Any:
    """Load an expanded model for training; every tensor that may train has moved, so nothing hides behind a zero."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def shard_layers(model: Any, **options: Any) -> Any:
    """FSDP2 by hand: a unit for each decoder layer, and one for the rest."""
    plan = model.config.scale_surgery["base"]
    for layer in model.get_submodule(f"{plan['base_model']}.{plan['layers']}"):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def shard_in_bfloat16(model: Any) -> Any:
    return shard_layers(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))


def shard_by_accelerate(model: Any) -> Any:
    """FSDP2 as accelerate prepares it, from its settings in the environment."""
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin())
    device = torch.device("cpu")
    options = {"mixed_precision": "no", "device": device, "is_main_process": distributed.get_rank() == 0}
    return fsdp2_prepare_model(SimpleNamespace(state=state, torch_device_mesh=None, **options), model)


def checkpointed(model: Any) -> Any:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return shard_layers(model)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp2": shard_layers,
    "fsdp2_checkpointed": checkpointed,
    "fsdp2_bfloat16": shard_in_bfloat16,
    "accelerate": shard_by_accelerate,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded over the processes, gathered."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def step(model: Any, run: Any, rows: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """One step of all parameters, those without a gradient too: gradients, and parameters after it, by name."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    run(input_ids=rows, labels=rows).loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimiser.step()
    return {"gradients": gradients, "parameters": {name: whole(p) for name, p in model.named_parameters()}}


@torch.no_grad()
def base_logits(model: Any, run: Any) -> torch.Tensor:
    """Logits with the expansion disabled."""
    model.eval()
    with model.expansion_disabled():
        return run(input_ids=batch()).logits


def take_steps(job: dict[str, Any], rank: int) -> None:
    """Wrap each model in its way, take a step on half of the batch, and write what came out."""
    distributed.init_process_group("gloo")
    share = batch().chunk(PROCESSES)[rank]
    for name, (path, wrapper) in job["cases"].items():
        model = load_moved(path)
        run = WRAPPERS[wrapper](model)
        outputs = {**step(model, run, share), "base_logits": base_logits(model, run)}
        if rank == 0:
            torch.save(outputs, Path(job["out"]) / f"{name}.pt")
    distributed.destroy_process_group()


def take_fsdp_on_the_cpu() -> None:
    """accelerate uses FSDP on accelerators only, and on CPUs passes over it; it is told here that these are some."""
    begin = PartialState.__init__

    def begin_elsewhere(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begin_elsewhere


def stop_at(step: int) -> None:
    """Somebody presses Ctrl-C after a step."""
    tell = RunReport.on_step_end

    def tell_and_stop(self: Any, args: Any, state: Any, *rest: Any, **options: Any) -> None:
        tell(self, args, state, *rest, **options)
        if state.global_step == step:
            raise KeyboardInterrupt

    RunReport.on_step_end = tell_and_stop


def run_command(job: dict[str, Any], rank: int) -> None:
    """Run a command of scale-surgery, as a launcher would; what a folder holds before it is written down."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        take_fsdp_on_the_cpu()
    if "stop_at" in job:
        stop_at(job["stop_at"])
    if rank == 0 and "listed" in job:
        files = [file for file in Path(job["listed"]).rglob("*") if file.is_file()]
        sizes = {file.relative_to(job["listed"]).as_posix(): file.stat().st_size for file in files}
        Path(job["out"]).write_text(json.dumps(sizes))
    command_line(job["command"])


def run_process(job: dict[str, Any], rank: int, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    os.environ.update({name: str(value) for name, value in ranks.items()} | job["environment"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    (take_steps if "cases" in job else run_command)(job, rank)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(job: dict[str, Any]) -> list[int | None]:
    """Exit codes of the processes of one job; None is one that did not end."""
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=run_process, args=(job, rank, port)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def main(file: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    modeling.register()
    gc.collect()
    gc.freeze()  # the forks' collectors pass over what was imported, and do not copy it
    codes = {name: run_job(job) for name, job in json.loads(file.read_text()).items()}
    file.with_name("codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
