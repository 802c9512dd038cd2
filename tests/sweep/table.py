"""docs/families.md, made of what became of each model type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tests.sweep.take import Row

HEAD = """# Model types

Look up whether a model type of transformers was tried, and what works with it. `make test-families` writes this page
from a tiny twin of each type's default config; do not edit it.

Your model need not be listed. The program derives the facts of an architecture from its config, and proves them on tiny
twins ([how](concepts.md#any-decoder)). This page lists every type that the installed transformers knows as a causal
language model. *split*, *edges* and *block* say how much of attention and MLP is widened
([treatments](concepts.md#treatments)).

A type passes if all of this holds:

* An expansion, in float32 and in bfloat16, loaded in a new process, gives the logits and the tokens of its base bit for
  bit.
* Three training steps change the new tensors and nothing else.
* `verify`, `strip`, `extract`, `apply` and `load_expansion` keep their promises.

The columns say what else works with the default widths: `route-export` of `preserve` and of `adapt`, the variant
`gated`, `merge --to fused`, `merge --to stock` of an expansion without an up stream, and the methods `grow` and
`depth`. If no heads are added either, [more types](commands-share.md#stock) have a stock form.

"""
# what names one model in a reason, and what stands for it where reasons are counted
NAMES = (
    (r"^\w+: (?=its logits|the output of its last norm)", ""),
    (r"(?<!-)\blayers \d+(-\d+)?", "some layers"),
    (r"(?<!-)\blayer \d+", "a layer"),
    (r"--layers \d+", "--layers"),
    (r"the block [\w.]* ?\(\w+\)", "a block"),
    (r"the block [\w.]+ runs", "a block runs"),
    (r"\b(for|of) a \w+ model\b", r"\1 this type of model"),
    (r"\b\w+\.(\d+\.)?(?=\w+_proj\b)", ""),
    (r"copied \(\w+: ", "copied ("),
    (r"text_config\.", ""),
    (r"per_layer_config is .*}", "per_layer_config"),
)
COLUMNS = ("route preserve", "route adapt", "gate", "fuse", "stock", "grow", "depth")


def render(rows: Sequence[Row]) -> str:
    """The page: what became of each type."""
    passed, failed = [row for row in rows if not row.broken], [row for row in rows if row.broken]
    lines = [HEAD, f"{len(passed)} of {len(rows)} pass.\n", _counts(passed), *_table(passed), *_reasons(passed)]
    if failed:
        lines += ["\n## What does not pass\n", "| type | reason |", "|---|---|"]
        lines += [f"| `{row.model_type}` | {_cell(row.broken)} |" for row in failed]
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[Row]) -> str:
    counts = {group: Counter(_strongest(row.blocks.get(group, [])) for row in rows) for group in ("attn", "ffn")}
    return "\n".join(
        f"* {title}: " + ", ".join(f"{name or 'none'} {count}" for name, count in counts[group].most_common())
        for group, title in (("attn", "attention"), ("ffn", "feed-forward network"))
    )


def _strongest(blocks: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(block.split()[0] for block in blocks))


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["\n## What passes\n", f"| type | attention | feed-forward | {' | '.join(COLUMNS)} |"]
    lines.append("|---" * (3 + len(COLUMNS)) + "|")
    for row in rows:
        groups = (_cell(", ".join(row.blocks.get(group, []))) for group in ("attn", "ffn"))
        works = ("yes" if row.works.get(name) == "yes" else "no" for name in COLUMNS)
        lines.append(f"| `{row.model_type}` | {' | '.join([*groups, *works])} |")
    return lines


def _reasons(rows: Sequence[Row]) -> list[str]:
    lines = ["\n## Why something does not work\n"]
    for name in COLUMNS:
        reasons = Counter(_general(row.works.get(name, "not tried")) for row in rows if row.works.get(name) != "yes")
        lines += [f"* {name}: {_cell(reason)} ({count})" for reason, count in reasons.most_common()]
    return lines


def _general(reason: str) -> str:
    """A reason without the names of one model: its type, its layers, its modules."""
    for pattern, general in NAMES:
        reason = re.sub(pattern, general, reason)
    return reason


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")[:300]
