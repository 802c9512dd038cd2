"""Take one model type through the program: everything that has to hold of it, and what works beside that."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from scale_surgery import Request, SurgeryError, expand, merge, register, route_export
from scale_surgery.checkpoint.expansions import expansion_of
from tests.deriving.configs import OPTIONS
from tests.sweep.files import BrokenError, check_files
from tests.sweep.reader import Reader, ids_of

STEPS = 3
BROKEN = "broken: "
SHUT = -9.0  # a bias of a gate that lets nothing through
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """What became of a model type.

    Attributes:
        model_type: Its name.
        blocks: Treatment of each kind of block, by group: "split self_attn", "block mlp".
        works: What works beside what has to: name to "yes", or to the reason why not.
        broken: What does not hold; empty where everything does.
        seconds: How long it took.
    """

    model_type: str
    blocks: dict[str, list[str]] = field(default_factory=dict)
    works: dict[str, str] = field(default_factory=dict)
    broken: str = ""
    seconds: float = 0.0


def take_several(types: list[str]) -> list[dict[str, object]]:
    """Take types through in a process of their own; it is found by the name of this module."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reader = Reader()
    try:
        return [asdict(take_through(name, reader)) for name in types]
    finally:
        reader.close()


def take_through(model_type: str, reader: Reader, *, beside: bool = True) -> Row:
    """Take a model type through the program, as the tiny twin of its default config."""
    row, started = Row(model_type), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"{model_type}-"))
    try:
        check_all(row, folder, reader)
        # what need not work
        row.works = {name: tried(work, folder, reader) for name, work in BESIDE.items()} if beside else {}
    except Exception as error:  # whatever it is, it stands in the table
        row.broken = " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        shutil.rmtree(folder)
    row.seconds = round(time.monotonic() - started, 1)
    return row


def check_all(row: Row, folder: Path, reader: Reader) -> None:
    """Everything that has to hold, in both dtypes."""
    config = twin_config(row.model_type)
    register()
    for name, dtype in DTYPES.items():
        base = write_base(config, dtype, folder / f"base-{name}")
        made = expand(base, Request("last:2", variant="adapt", collaborate="both"), folder / f"adapt-{name}")
        row.blocks = blocks_of(made.plan)
        check_same(reader.read(base), reader.read(made.path), f"adapt, {name}")
        check_training(made.path)
    check_files(folder / "base-float32", folder / "adapt-float32", folder)


def default_config(model_type: str) -> Any:
    """The default config of a type, completed where it lacks something."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**OPTIONS.get(model_type, {}))


def twin_config(model_type: str) -> Any:
    """A tiny config of a type, made of its default one."""
    from scale_surgery.deriving.derive import derive

    config = default_config(model_type)
    return type(config).from_dict(dict(derive(config).twins[0]))


def write_base(config: Any, dtype: torch.dtype, path: Path) -> Path:
    """Write a random model of a stock class, whose norms and biases do not have the values that they begin with."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # what a state space decays by has a range of its own
            if parameter.is_floating_point() and not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    model.to(dtype).save_pretrained(path)
    return path


def blocks_of(made: Any) -> dict[str, list[str]]:
    """Treatments by group, of all kinds of layers."""
    treatments: dict[str, list[str]] = {"attn": [], "ffn": []}
    for kind in made.architecture.kinds:
        for block in kind.blocks:
            title = f"{block.treatment} {block.name}".strip()
            if title not in treatments[block.group]:
                treatments[block.group].append(title)
    return treatments


def check_same(base: dict[str, Any], expanded: dict[str, Any], title: str) -> None:
    """Logits and generation are the base's, and the expansion trains, and nothing else."""
    for name in ("logits", "row", "tokens"):
        if base[name] != expanded[name]:
            raise BrokenError(f"{title}: {name} are not those of the base")
    if not expanded["trains"] or not all(map(expansion_of, expanded["trains"])):
        raise BrokenError(f"{title}: {expanded['trains'][:2]} trains")


def check_training(path: Path) -> None:
    """Three steps change the logits, every new tensor gets a gradient at last, and the base stays what it was."""
    from transformers import AutoModelForCausalLM

    model, ids = AutoModelForCausalLM.from_pretrained(path, dtype="auto"), ids_of()
    frozen = [
        (parameter, parameter.detach().clone()) for parameter in model.parameters() if not parameter.requires_grad
    ]
    with torch.no_grad(), model.expansion_disabled():
        base = model.eval()(ids).logits
    before = model(ids).logits.detach()
    model.train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-2)
    for _ in range(STEPS):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        if torch.equal(model(ids).logits, before):
            raise BrokenError("three steps change nothing")
        with model.expansion_disabled():
            if not torch.equal(model(ids).logits, base):
                raise BrokenError("after three steps the base's logits are others")
    if not all(map(torch.equal, *zip(*frozen, strict=True))):
        raise BrokenError("a frozen tensor changed")


def is_broken(outcome: str) -> bool:
    """Whether something that was tried stopped with an error that is no refusal."""
    return outcome.startswith(BROKEN)


def tried(work: Callable[[Path, Reader], None], folder: Path, reader: Reader) -> str:
    """Whether something works: "yes", or why it does not; what is refused is said in the words of the refusal."""
    try:
        work(folder, reader)
    except SurgeryError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # whatever it is, it stands in the table
        return BROKEN + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "yes"


def route_preserve(folder: Path, reader: Reader) -> None:
    """A routed model of the milder variant begins as the base."""
    base = folder / "base-float32"
    made = expand(base, Request("last:2", variant="preserve"), folder / "preserve")
    routed = route_export(made.path, folder / "routed-preserve").path
    check_same(reader.read(base), reader.read(routed, routing_enabled=False), "routed, preserve")
    check_paths(routed, base)


def route_adapt(folder: Path, reader: Reader) -> None:
    """Two paths through the layers."""
    routed = route_export(folder / "adapt-float32", folder / "routed-adapt").path
    check_paths(routed, folder / "base-float32")


def check_paths(routed: Path, base: Path) -> None:
    """Each path alone gives what the base gives, as nothing was trained."""
    from transformers import AutoModelForCausalLM

    ids = ids_of()
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()(ids).logits
        preserve, adapt = AutoModelForCausalLM.from_pretrained(routed, dtype="auto").eval().path_logits(ids)
    if not (torch.equal(preserve, wanted) and torch.equal(adapt, wanted)):
        raise BrokenError("a path of the routed model is not the base")


def fuse(folder: Path, reader: Reader) -> None:
    """One matrix for each linear; equal up to rounding, which `merge` itself measures."""
    merge(folder / "adapt-float32", folder / "fused", "fused")


def gate(folder: Path, reader: Reader) -> None:
    """With gates a model begins as the base, and is it again where they are shut, whatever else was learned."""
    from transformers import AutoModelForCausalLM

    base = folder / "base-float32"
    made = expand(base, Request("last:2", variant="gated", collaborate="both"), folder / "gated").path
    check_same(reader.read(base), reader.read(made), "gated")
    ids, model = ids_of(), AutoModelForCausalLM.from_pretrained(made, dtype="auto").eval()
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()(ids).logits
        for parameter in (weight for weight in model.parameters() if weight.requires_grad):
            parameter.add_(torch.randn_like(parameter))
        learned = model(ids).logits
        for name, shut in model.named_parameters():
            if name.endswith(".gate"):
                shut.zero_()[-1] = SHUT
        if torch.equal(learned, wanted) or not torch.equal(model(ids).logits, wanted):
            raise BrokenError("gated: shut gates do not make the base of a model that learned")


def stock(folder: Path, reader: Reader) -> None:
    """A plain checkpoint with more heads and wider MLPs."""
    made = expand(folder / "base-float32", Request("last:2", variant="adapt", up_width=0), folder / "narrow")
    merge(made.path, folder / "stock", "stock")


def grow(folder: Path, reader: Reader) -> None:
    """Two copies of each MLP count a half."""
    base = folder / "base-float32"
    made = expand(base, Request("last:2", method="grow"), folder / "grown")
    check_same(reader.read(base), reader.read(made.path), "grow")


def depth(folder: Path, reader: Reader) -> None:
    """A copy of a layer begins by adding nothing."""
    base = folder / "base-float32"
    made = expand(base, Request("1", method="depth"), folder / "deep")
    base_read, deep = reader.read(base), reader.read(made.path)
    if any(base_read[name] != deep[name] for name in ("logits", "tokens")):
        raise BrokenError("depth: logits or tokens are not those of the base")


BESIDE: dict[str, Callable[[Path, Reader], None]] = {
    "route preserve": route_preserve,
    "route adapt": route_adapt,
    "gate": gate,
    "fuse": fuse,
    "stock": stock,
    "grow": grow,
    "depth": depth,
}


def model_types() -> Iterator[str]:
    """Every type that transformers knows as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield from sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
