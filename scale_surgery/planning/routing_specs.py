"""From facts about an architecture to what every path passes through, and what a router says in config.json.

What comes out are `base` and `router` under the key `scale_surgery`, which the exported modeling code executes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from scale_surgery.checkpoint.expansions import ROUTER_KEY, specs_of_expansions
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.schema import in_one_line, misfits
from scale_surgery.errors import PlanError
from scale_surgery.fields import Range, fields_of, problems_of
from scale_surgery.planning.architecture import Architecture, Block, Kind, Linear, Sizes
from scale_surgery.planning.specs import Spec, attention_values

# weights that differ by less are the same
EVEN = 1e-9


@dataclass(frozen=True)
class Routing:
    """How each token is routed over K + 1 paths: the base, and the base with each of K expansions.

    Attributes:
        router: posterior mixes all paths by how well each predicted the text so far. cosine decides by the cosine of
            the base logits of two paths (SCALE, arXiv 2511.03270, eq. 5).
        threshold: Cosine above which a token takes the preserve path (cosine).
        prior: Weight of the base at the start of a text (posterior). Default: as much as that of every other path.
        shares: What each expansion has of the rest, of sum 1 (posterior). Default: all the same.
        switch_rate: Share of its weight that each path gives to the others at every token (posterior).
        strict: The preserve path gives out the base model's logits alone (cosine). With posterior it always does.
    """

    router: Literal["posterior", "cosine"] = "posterior"
    threshold: Annotated[float, Range(least=-1, most=1, noun="a cosine")] = 0.5
    prior: Annotated[float, Range(above=0, below=1, noun="a probability")] | None = None
    shares: tuple[float, ...] | None = None
    switch_rate: Annotated[float, Range(least=0, below=1, noun="a share")] = 0.01
    strict: bool = False

    @property
    def is_strict(self) -> bool:
        """Whether the preserve path is the base model alone, without an up stream of its own."""
        return self.strict or self.router == "posterior"

    def weights(self, expansions: int = 1) -> tuple[float, ...]:
        """Weights of the base and of so many expansions at the start of a text (posterior)."""
        base = 1 / (1 + expansions) if self.prior is None else self.prior
        shares = self.shares or (1 / expansions,) * expansions
        return (base, *((1 - base) * share for share in shares))

    @property
    def bound(self) -> float | None:
        """Nats that a text may lose against the base with one expansion, -ln(prior); None where nothing bounds them."""
        return self.largest_loss()

    def largest_loss(self, expansions: int = 1) -> float | None:
        """Nats that a text may lose against any of its paths, whatever it says: the largest -ln of their weights.

        Of one expansion, against the base. None where nothing bounds them.
        """
        weights = self.weights(expansions)
        lightest = weights[0] if expansions == 1 else min(weights)
        return -math.log(lightest) if self.router == "posterior" else None

    @property
    def bound_per_token(self) -> float | None:
        """Nats that each further token adds to the bound, -ln(1 - switch rate); None where there is none."""
        return abs(math.log1p(-self.switch_rate)) if self.router == "posterior" else None

    @property
    def is_even(self) -> bool:
        """Whether all paths begin with the same weight."""
        return self.prior is None and self.shares is None

    @property
    def description(self) -> str:
        """The router and its numbers in one line."""
        if self.router == "cosine":
            return f"cosine, threshold {self.threshold:g}" + (", strict" if self.strict else "")
        return f"posterior, {self.numbers}"

    @property
    def is_default(self) -> bool:
        """Whether the numbers are those that nobody chose."""
        return self == Routing(self.router, strict=self.strict)

    @property
    def numbers(self) -> str:
        """The numbers alone, in words."""
        if self.router == "cosine":
            return f"threshold {self.threshold:.10g}"
        prior = "all paths alike" if self.prior is None else f"prior {self.prior:g}"
        shares = "" if self.shares is None else f", shares {', '.join(f'{own:g}' for own in self.shares)}"
        return f"{prior}{shares}, switch rate {self.switch_rate:g}"

    def specs(self, expansions: int = 1) -> Spec:
        """The router and its numbers as config.json keeps them, as plain JSON values."""
        if self.router == "cosine":
            return {"router": "cosine", "threshold": self.threshold, "strict": self.strict}
        return {"router": "posterior", "prior": list(self.weights(expansions)), "switch_rate": self.switch_rate}

    def problems(self, expansions: int = 1) -> list[str]:
        """What is wrong with its numbers for so many expansions."""
        found = problems_of(self, "{option}: {value}")
        shares = self.shares
        are_numbers = fields_of(Routing)["shares"].expects(shares) is None
        if shares is not None and are_numbers and not (_are_weights(shares) and len(shares) == expansions):
            found.append(f"shares: {shares}, expected {expansions} positive numbers of sum 1, one for each expansion.")
        if self.router == "cosine" and expansions > 1:
            found.append(f"router: cosine is for one expansion, and there are {expansions}; expected posterior.")
        return found


def _are_weights(values: Any) -> bool:
    are_numbers = isinstance(values, list | tuple) and all(isinstance(own, int | float) for own in values)
    return are_numbers and all(own > 0 for own in values) and abs(sum(values) - 1) <= 1e-6


def read_routing(specs: Mapping[str, Any]) -> Routing | None:
    """How a model routes, by the key `scale_surgery` of its config.json; None where it does not.

    Raises:
        PlanError: If a value is of another kind than a router has, or out of range.
    """
    own = specs.get(ROUTER_KEY)
    if own is None:
        return None
    expansions = len(specs_of_expansions(specs))
    numbers = dict(own) if isinstance(own, Mapping) else {}
    weights = numbers.pop("prior", None)
    is_whole = weights is None or (_are_weights(weights) and len(weights) == expansions + 1)
    problems = list(misfits(numbers if isinstance(own, Mapping) else own, Routing, f"{CONFIG_KEY}.{ROUTER_KEY}"))
    if not is_whole:
        problems.append(f"{CONFIG_KEY}.{ROUTER_KEY}.prior is {weights}, expected {expansions + 1} weights of sum 1")
    if problems:
        raise PlanError(f"{CONFIG_FILE}: {in_one_line(problems)}. Run route-export again.")
    return routing_of_weights(Routing(**numbers), weights) if weights is not None else Routing(**numbers)


def routing_of_weights(routing: Routing, weights: Sequence[float]) -> Routing:
    """The same routing with other weights of its paths; what is even is not said."""
    base, *others = map(float, weights)
    shares = tuple(own / sum(others) for own in others)
    is_split = max(shares) - min(shares) > EVEN
    is_prior = is_split or abs(base - 1 / len(weights)) > EVEN
    return replace(routing, prior=base if is_prior else None, shares=shares if is_split else None)


def base_specs(architecture: Architecture, sizes: Sizes, config: Mapping[str, Any]) -> Spec:
    """Say what the paths of a model pass through, whatever expansions it has.

    Args:
        architecture: Facts of the architecture.
        sizes: Sizes of the base model.
        config: Parsed config.json of the base.

    Returns:
        Names and sizes as plain JSON values; of each kind of layer the modules that a base stream passes through, and
        the heads of its attention.
    """
    kinds = [
        {
            "modules": _modules(kind, sizes),
            "attention": {block.name: _old_heads(block) for block in kind.blocks if block.query_heads},
        }
        for kind in architecture.kinds
    ]
    return {
        "hidden": sizes.hidden,
        "base_model": architecture.base_model,
        "layers": architecture.layers,
        "last": architecture.final_norm.name,
        "softcap": None if architecture.softcap is None else _text_part(config).get(*architecture.softcap),
        "softcap_key": None if architecture.softcap is None else architecture.softcap[0],
        "kinds": kinds,
        "kind_of_layer": list(architecture.kind_of_layer),
    }


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the language model; that of a model that sees images says it by itself."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _old_heads(block: Block) -> Spec:
    heads = {"heads": block.query_heads, "kv_heads": block.key_value_heads}
    return heads | attention_values(block, block.query_heads)


def path_problems(architecture: Architecture, fork: int | None) -> list[str]:
    """Why a model cannot be routed: blocks through which two paths cannot pass, or logits that are changed later.

    Args:
        architecture: Facts of the architecture.
        fork: The first layer with W12, where the paths begin; None where there is none.

    Returns:
        A line for each reason.
    """
    later = "its logits are changed after the head, where a router gives out probabilities; expected logits as they are"
    shape = "what leaves its last norm has to be as many texts as were given, expected room for two paths"
    kinds = [] if fork is None else [architecture.kind(layer) for layer in range(fork, len(architecture.kind_of_layer))]
    blocks = {block.kind: block for kind in kinds for block in kind.blocks if not _takes_two_paths(block)}
    about = [later] * architecture.alters_logits + [shape] * (architecture.keeps_batch and fork is not None)
    return [f"{architecture.model_type}: {reason}. Use the expanded model without a router." for reason in about] + [
        f"the block {block.name} ({block.kind}) stays as it is inside ({block.reason}), where one path runs; expected "
        "one that is split. Route an expansion of --variant preserve, which needs no second path there."
        for block in blocks.values()
    ]


def _takes_two_paths(block: Block) -> bool:
    return block.treatment == "split" or (block.treatment == "block" and block.group == "ffn")


def _stock(sections: tuple[int, ...] = ()) -> Spec:
    """A module without a block of its own."""
    return {"kind": "passing", "base": None, "up": 0} | ({"sections": list(sections)} if sections else {})


def _modules(kind: Kind, sizes: Sizes) -> Spec:
    """Modules of a layer through which a base stream passes."""
    specs = {linear.name: _stock(_sections(linear)) for linear in kind.linears}
    specs |= {norm.name: _stock() for norm in (*kind.pre_norms, *kind.post_norms)}
    for block in kind.blocks:
        heads = {"query": block.query_heads, "key_value": block.key_value_heads}
        for norm in block.inner_norms:
            own = {"kind": "head_norm", "heads": heads[norm.stream], "axis": norm.head_axis}
            specs[norm.name] = _stock() if norm.head_axis is None else own
        specs |= {name: {"kind": "activation", "base": block.inner} for name in block.activations}
        if block.treatment == "block":
            specs[block.name] = {"kind": "block", "base": sizes.hidden, "up": 0}
    return specs


def _sections(linear: Linear) -> tuple[int, ...]:
    is_one = len(linear.roles) == 1 or linear.fused_by == "head"
    return () if is_one else linear.outputs
