"""The values of a config made small: numbers of features and heads become small ones, all else stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from scale_surgery.deriving.build import read, text_config
from scale_surgery.deriving.real_model import RealModel
from scale_surgery.planning.per_layer import TOKEN, is_per_layer

Values = dict[str, Any]


@dataclass(frozen=True)
class SmallSizes:
    """Sizes of a twin, where the config leaves them free.

    Attributes:
        hidden: Features of the residual stream, where the size of a head does not depend on it.
        head: Features of a head, where it does.
        groups: Key/value heads, if there are several with several query heads each.
        heads: Query heads, where each has keys and values of its own, or all share one.
        experts: Experts of a mixture.
        vocabulary: Tokens.
        others: Whatever else there is.
    """

    hidden: int
    head: int
    groups: int
    heads: int
    experts: int
    vocabulary: int
    others: tuple[int, ...]


SCALES = (
    SmallSizes(48, 16, 2, 4, 4, 131, (52, 36, 28, 44, 76, 92, 20, 116, 124, 148, 164, 172)),
    SmallSizes(72, 24, 3, 6, 6, 149, (68, 60, 84, 100, 108, 132, 140, 156, 180, 188, 196, 204)),
)
# the same with sizes that kernels and groups divide
ROUND_SCALES = (
    SmallSizes(64, 16, 2, 4, 8, 131, (32, 96, 160, 192, 224, 288, 320, 352, 416)),
    SmallSizes(96, 32, 4, 8, 16, 149, (128, 64, 224, 256, 352, 320, 416, 480, 544)),
)
HEADS = re.compile(r"heads|n_head|query_groups")
HEAD_SIZE = re.compile(r"head_?(dim|size)|d_head|dim_head|kv_channels|rotary_dim")
STATE = re.compile(r"state(_size)?$")
# tokens that attention reads
WINDOW = re.compile(r"(?<!max_)window(?!_layers|_pattern)|chunk|index_topk$")
INNER = re.compile(r"intermediate|ffn|inner|ff_dim|dff|dim_ff|feed_forward")
POSITIONS = re.compile(r"positions?(_embeddings)?$|max_seq_len|max_length|n_ctx|context_length")
LAYER = re.compile(r"layer|first|last|start|(^|_)end|offset")


@dataclass(frozen=True)
class Way:
    """How a twin is made, first as small as can be, then with more care.

    Attributes:
        scale: Which of the two twins it is.
        keeps_heads: Whether sizes of heads stay as they are stated.
        is_by_value: Whether sizes that are equal stay equal.
        is_round: Whether sizes are such that kernels and groups divide them.
        keeps_ratios: Whether sizes that are multiples of the hidden size stay so.
        keeps_share: Whether a head that is a share of the hidden size stays as large.
    """

    scale: int = 0
    keeps_heads: bool = True
    is_by_value: bool = False
    is_round: bool = False
    keeps_ratios: bool = False
    keeps_share: bool = False

    @property
    def sizes(self) -> SmallSizes:
        """Sizes that the twin gets."""
        return (ROUND_SCALES if self.is_round else SCALES)[self.scale]


def ways(scale: int) -> Iterator[Way]:
    """Ways to make a twin, the best first."""
    for is_round in (False, True):
        for keeps_ratios in (False, True):
            for is_by_value in (False, True):
                # rope may fit one size of a head alone, whether or not that is a key of its own
                for keeps_heads, keeps_share in ((True, False), (False, False), (True, True)):
                    yield Way(scale, keeps_heads, is_by_value, is_round, keeps_ratios, keeps_share)


def shrink_values(real: RealModel, way: Way) -> Values:
    """The values of a config, with sizes made small."""
    values = real.config.to_dict()
    values.pop("quantization_config", None)
    text = text_config(real.config)
    if text is real.config:
        return _shrink_text(real, way, values, text)
    for key, value in list(values.items()):
        part: Any = read(real.config, key)
        if part is text:
            values[key] = _shrink_text(real, way, value, part)
        elif isinstance(part, PreTrainedConfig):
            values[key] = _Shrinking(real, way, part, dict(value), (0, 1)).all()
        elif TOKEN.search(key) and isinstance(value, int):
            values[key] = value % 40 + 3
    return values


def _shrink_text(real: RealModel, way: Way, values: Values, config: PreTrainedConfig) -> Values:
    return _Shrinking(real, way, config, dict(values), real.chosen).all()


class _Shrinking:
    """Makes the values of one config small."""

    def __init__(
        self, real: RealModel, way: Way, config: PreTrainedConfig, values: Values, shown: tuple[int, ...]
    ) -> None:
        self.real, self.way, self.values, self.config = real, way, values, config
        self.names = dict(config.attribute_map)
        common = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        self.old = {name: self._old(name) for name in common}
        self.others, self.given = iter(way.sizes.others), dict[Any, int]()
        self.dimensions, self.layers = real.dimensions, real.place.count
        self.shown = tuple(layer for layer in shown if layer < self.layers)
        self.heads, self.groups = self._new_heads()
        self.hidden = way.sizes.hidden if self._is_hidden_free() else self.heads * self._head_size()

    def _old(self, name: str) -> int | None:
        value = read(self.config, name)
        return value if isinstance(value, int) else self.values.get(self._key(name))

    def _key(self, name: str) -> str:
        return self.names.get(name, name)

    def _new_heads(self) -> tuple[int, int]:
        """Query and key/value heads: one for each, one for all, or groups."""
        sizes, heads = self.way.sizes, self.old["num_attention_heads"] or 1
        groups = self.old["num_key_value_heads"] or self._old("num_kv_heads") or heads
        if groups in (1, heads):
            return min(heads, sizes.heads), min(groups, sizes.heads)
        return 2 * sizes.groups, sizes.groups

    def _is_hidden_free(self) -> bool:
        """Return True if the head size has its own key, so that heads need not fill the residual stream."""
        names = [key for key, value in self.values.items() if isinstance(value, int) and "rotary" not in key]
        heads, size = self.old["num_attention_heads"] or 1, self.old["head_dim"] or 0
        is_filled = not self.way.keeps_heads and heads * size == self.old["hidden_size"]
        return any(map(HEAD_SIZE.search, names)) and not is_filled

    def _head_size(self) -> int:
        """Features of a head that fills its share of the stream."""
        share = (self.old["hidden_size"] or 0) // (self.old["num_attention_heads"] or 1)
        is_text = self.config is text_config(self.real.config)
        return share if self.way.keeps_share and is_text and share else self.way.sizes.head

    def all(self) -> Values:
        """The values, made small."""
        for key, value in self.values.items():
            self.values[key] = self._small(key, value)
        self._fit_products()
        return self.values

    def _small(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return value if "rope" in key else self._small_dict(value)
        if isinstance(value, (list, tuple)):
            return self._small_list(key, list(value))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return value
        return self._number(key, value)

    def _small_dict(self, value: Values) -> Values:
        """Keys that are numbers of layers become those of the chosen layers."""
        there = {key: entry for key, entry in value.items() if not str(key).isdigit() or int(key) in self.shown}
        return {
            type(key)(self.shown.index(int(key))) if str(key).isdigit() else key: self._small(str(key), entry)
            for key, entry in there.items()
        }

    def _small_list(self, key: str, value: list[Any]) -> list[Any]:
        """A list with an entry for each layer keeps those of the chosen layers; a list of layers names these."""
        if TOKEN.search(key):
            return [min(2, entry) if isinstance(entry, int) else entry for entry in value]
        if is_per_layer(key, value, self.layers):
            shown = [value[layer] for layer in self.shown]
            return [self._small(key, entry) if self._is_size(key, entry) else entry for entry in shown]
        if re.search("layer|idx|ids", key):
            shown = [entry for entry in value if type(entry) is not int or entry < 0 or entry in self.shown]
            return [self._renumbered(entry) for entry in shown]
        return value

    def _renumbered(self, layer: Any) -> Any:
        return self.shown.index(layer) if type(layer) is int and layer >= 0 else layer

    @staticmethod
    def _is_size(key: str, value: Any) -> bool:
        return (
            isinstance(value, int) and not isinstance(value, bool) and value > 1 and "layer" not in key.split("_per")[0]
        )

    def _number(self, key: str, value: int) -> int:
        # a limit that equals the hidden size stays a limit
        for rule in (self._token, self._layer, self._depth, self._limit, self._stream, self._expert, self._head):
            small = rule(key, value)
            if small is not None:
                return small
        return self._other(key, value)

    def _token(self, key: str, value: int) -> int | None:
        if TOKEN.search(key):
            names = [name for name in self.values if TOKEN.search(name)]
            return names.index(key) if key in names else len(names)
        if "vocab" in key and value > 64:
            return self.way.sizes.vocabulary
        return None

    def _layer(self, key: str, value: int) -> int | None:
        """The new number of a chosen layer, or how many of the last layers are chosen."""
        if not LAYER.search(key) or HEADS.search(key):
            return None
        # or of the layer before a chosen one, where a range ends
        for layer in (value, value + 1):
            if layer in self.shown:
                moved = self.shown.index(layer) - (layer - value)
                return moved if moved != value else None
        start = self.layers - value
        # the number of all layers is no such number
        is_count = "layers" in key and start > 0 and start in self.shown
        return sum(layer >= start for layer in self.shown) if is_count else None

    def _depth(self, key: str, value: int) -> int | None:
        if self.config is not text_config(self.real.config):
            return min(value, len(self.shown)) if re.search("layers?$|blocks?$|depth$", key) else None
        is_count = re.search("layers?$|blocks?$|layers_per_stack", key) and value % self.layers == 0
        return len(self.shown) * (value // self.layers) if is_count else None

    def _stream(self, key: str, value: int) -> int | None:
        if key == self._key("hidden_size"):
            return self.hidden
        is_inner = INNER.search(key)
        return self.hidden if value == self.old["hidden_size"] and not is_inner and value > 64 else None

    def _expert(self, key: str, value: int) -> int | None:
        if re.search("experts_per|moe_k$|moe_top_?k$|top_k_experts|shared_experts$", key):
            return min(value, 2)
        if re.search("topk_group$", key):
            return 1
        if re.search("n_groups?$|expert_group$|o_groups$", key):
            return min(value, 2)
        return min(value, self.way.sizes.experts) if re.search("experts$|expert_num$", key) else None

    def _head(self, key: str, value: int) -> int | None:
        if HEAD_SIZE.search(key):
            return value if self.way.keeps_heads or value <= 16 else self.way.sizes.head
        if not HEADS.search(key):
            return None
        heads, groups = self.old["num_attention_heads"], self.old["num_key_value_heads"]
        if value == heads:
            return self.heads
        return self.groups if value == groups else max(1, value * self.heads // (heads or value))

    def _limit(self, key: str, value: int) -> int | None:
        """Windows, positions and states: limits, and no sizes of parameters."""
        if STATE.search(key):
            return min(value, 8 if self.way.scale == 0 else 16)
        if WINDOW.search(key):
            # a kernel may want chunks of its own size
            return value if self.way.is_round and "chunk" in key else min(value, 8)
        if POSITIONS.search(key):
            return 128 if value > 512 and self.dimensions & set(range(value, value + 3)) else value
        return None

    def _other(self, key: str, value: int) -> int:
        hidden = self.old["hidden_size"] or value
        is_ratio = value % hidden == 0 or hidden % value == 0
        if value <= 32 or (value not in self.dimensions and not is_ratio and not INNER.search(key)):
            return value
        if is_ratio and (self.way.keeps_ratios or not (INNER.search(key) or "rank" in key)):
            return max(4, value * self.hidden // hidden)
        name = value if self.way.is_by_value else key
        if name not in self.given:
            self.given[name] = next(self.others)
        return self.given[name]

    def _fit_products(self) -> None:
        """Keep heads x size = a multiple of the hidden size where the user's config has it so."""
        stated = _plain(self.config.to_dict())
        small = _plain(self.values)
        expands = [value for key, value in stated.items() if "expand" in key and value]
        counts = [key for key in stated if HEADS.search(key) and not HEAD_SIZE.search(key)]
        sizes = [key for key in stated if HEAD_SIZE.search(key)]
        # attention and a state-space mixer have heads of different sizes; the mixer decides last
        pairs = [(a, b) for a in counts for b in sizes if ("mamba" in a) == ("mamba" in b)]
        for count, size in sorted(pairs, key=lambda pair: "mamba" in pair[0]):
            for expand in expands:
                if stated[count] * stated[size] == expand * (self.old["hidden_size"] or 0):
                    small[size] = min(small[size], 8)
                    small[count] = int(expand * self.hidden) // small[size]
            for third in (key for key in stated if re.search("d_ssm|d_inner", key)):
                if stated[count] * stated[size] == stated[third]:
                    small[third] = small[count] * small[size]
        self.values |= {key: small[key] for key in small}


def _plain(values: Mapping[str, Any]) -> dict[str, int]:
    return {key: value for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
