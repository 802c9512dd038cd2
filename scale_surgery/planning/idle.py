"""New tensors of a plan that never learn."""

from __future__ import annotations

from collections.abc import Iterable

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.tensors import TensorPlan


def idle_tensors(plan: Plan) -> tuple[TensorPlan, ...]:
    """New tensors that never get a gradient, as they read zeros in every step."""
    # where the embedding is not widened, zeros enter the lowest expanded layer as its up stream
    if not plan.widths.up_width or (plan.layers[0] == 0 and plan.architecture.enters == "embedding"):
        return ()
    first = plan.layers[0]
    kind = plan.architecture.kind(first)
    norm = kind.blocks[0].norm
    modules: dict[str, tuple[str, ...]] = {norm: ("up_weight",)} if norm else {}

    def named(module: str, part: str) -> str:
        return tensor_name(f".{first}.{kind.on_disk(module)}", plan.request.name, part)

    # the first block, and those that read the same norm; a second norm that reads the same stream is not listed
    reading = [kind.blocks[0], *(block for block in kind.blocks[1:] if block.norm and block.norm == norm)]
    linears = [linear.name for block in reading for linear in block.linears if linear.reads == "residual"]

    def has(names: Iterable[str], part: str) -> bool:
        ends = tuple(named(name, part) for name in names)
        return any(tensor.name.endswith(ends) for tensor in plan.tensors)

    # W12 and W22 of the linears that read zeros, such as q, k and v, stay as they are, and so does the norm before
    # them; a norm with a bias turns zeros into its bias, which starts at zero and learns only if W22 is not zero
    reads_bias = plan.request.init_w22 != "zero" and has([*linears, *(block.name for block in reading)], "w22")
    if not (has([norm] if norm else [], "up_bias") and reads_bias):
        modules |= {norm: ("up_weight", "up_bias")} | dict.fromkeys(linears, ("w12", "w22"))
        modules |= {block.name: ("w22",) for block in reading if block.is_whole}
    names = tuple(named(name, part) for name, parts in modules.items() for part in parts)
    return tuple(tensor for tensor in plan.tensors if tensor.name.endswith(names))
