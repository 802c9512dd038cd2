"""Tables of results: functions named `render_*` convert a result to a rich renderable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.command_lines import command
from scale_surgery.errors import counted, in_one_line, name_some
from scale_surgery.folder.routers import describe_router
from scale_surgery.planning.architecture import Sizes
from scale_surgery.planning.methods import METHODS
from scale_surgery.planning.selection import format_layers
from scale_surgery.planning.specs import Widths
from scale_surgery.show.commands import verify_command
from scale_surgery.show.layout import NEXT, Facts, NamedRows, Warned, heading, sentence
from scale_surgery.visible import visible

if TYPE_CHECKING:
    from scale_surgery.evidence.answer_scores import AnswerScore
    from scale_surgery.evidence.evaluate import Evaluation
    from scale_surgery.evidence.forgetting_limit import ForgettingLimit
    from scale_surgery.evidence.inspect import ExpansionSummary, FolderSummary, Inspection
    from scale_surgery.evidence.probe_scores import GroupCount
    from scale_surgery.running.learned_tokens import ChosenTokens, SavingToken
    from scale_surgery.running.loss import Measurement
    from scale_surgery.surgery.expand import Expansion
    from scale_surgery.surgery.route import Routed
    from scale_surgery.surgery.strip import Stripped
    from scale_surgery.training.result import Training
    from scale_surgery.training.settings import TrainingSchedule


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units: 163.0 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        # compare the printed value: 999,950 prints as 1.0 MB
        if round(count, 1) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_count(count: float) -> str:
    """Format a number of parameters: 40.8 k, 1.24 B."""
    for unit in ("", "k", "M", "B"):
        # compare the printed value: 999,500 prints as 1 M
        if float(f"{count:.3g}") < 1000:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} T"


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds."""
    return "under a second" if seconds < 1 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def format_nats(value: float) -> str:
    """Format a change of the loss with a sign; 0 if it is exactly zero."""
    return "0" if value == 0 else f"{value:+z.{4 if abs(value) < 10 else 3}f}"


def render_inspection(inspection: Inspection, model: str | None = None, options: Sequence[str] = ()) -> RenderableType:
    """Render an inspection.

    If the name of the model and the options are given, the next command is included.
    """
    sizes = inspection.sizes
    rows = [
        ("family", inspection.family),
        ("layers", _layers(inspection)),
        ("widths", f"hidden {sizes.hidden}, inner {sizes.inner}, vocabulary {sizes.vocabulary}"),
        ("heads", _heads(sizes)),
        *inspection.treatments.items(),
        ("dtype", inspection.dtype),
        ("head", describe_head(sizes.is_tied, inspection.has_own_head)),
        ("parameters", f"{inspection.parameters_stored:,} stored, {inspection.parameters_unique:,} unique"),
        (
            "shards",
            f"{len(inspection.shards)}, {counted(inspection.tensors, 'tensor')}, {format_bytes(inspection.bytes)}",
        ),
        ("not copied", ", ".join(inspection.left_out)),
        ("not loaded", name_some(inspection.not_loaded)),
    ]
    if inspection.expanded is None:
        # the quick start expands the last quarter
        last = f"last:{max(1, sizes.layers // 4)}"
        reason = inspection.quantisation or in_one_line(inspection.not_found)
        planned = "" if model is None or reason else command("plan", model, "--layers", last, *options)
        rows += [("not expandable", reason), (NEXT, planned)]
        return Facts(inspection.name, rows)
    return Group(Facts(inspection.name, rows), Text(), *_render_expanded(inspection.expanded, model))


def describe_head(is_tied: bool, has_own_head: bool) -> str:
    """Describe the head: tied to the embedding, or its own tensor."""
    other = ", although config.json ties it to the embedding; the values differ" * has_own_head
    return "tied to the embedding" if is_tied else f"its own tensor{other}"


def _render_expanded(added: FolderSummary, model: str | None) -> Iterator[RenderableType]:
    """Yield the rows of an expanded folder: all facts of a single expansion, or a line for each of several."""
    revision = f" at {added.base_revision[:12]}" if added.base_revision else ""
    base = ("base", f"{added.base_name or 'unknown'}{revision}")
    router = ("router", "none" if added.routing is None else describe_router(added.routing, list(added.expansions)))
    rows = [("last verified", "; ".join(filter(None, [added.verified or "never", added.changed_since])))]
    rows.append((NEXT, added.adopt or ("" if model is None or added.is_current else verify_command(Path(model)))))
    if len(added.expansions) == 1:
        ((name, only),) = added.expansions.items()
        first, *others = _expansion_rows(only, router)
        yield Facts("expansion" if name == DEFAULT_NAME else f"expansion {name}", [first, base, *others, *rows])
        return
    table = NamedRows(["variant", "layers", "parameters", "steps"], name="expansion", left=(1, 2))
    for name, each in added.expansions.items():
        table.add_row(name, each.variant, format_layers(each.layers), format_count(each.parameters), f"{each.steps:,}")
    paths = f"{len(added.expansions) + 1}: the base, {', '.join(added.expansions)}"
    yield from (table, Text(), Facts("expansions", [base, ("paths", paths), router, *rows]))


def _heads(sizes: Sizes) -> str:
    if not sizes.query_heads:
        return "none that an expansion can widen"
    return f"{sizes.query_heads} query, {sizes.key_value_heads} key/value, head size {sizes.head_size}"


def _layers(inspection: Inspection) -> str:
    expansions = [] if inspection.expanded is None else inspection.expanded.expansions.values()
    of_base, new = inspection.sizes.layers, sum(len(expansion.new_layers) for expansion in expansions)
    whose = f", {of_base} of them the base's" if new else ""
    return f"{of_base + new}  (0 to {of_base + new - 1}){whose}"


def _expansion_rows(added: ExpansionSummary, router: tuple[str, str]) -> list[tuple[str, str]]:
    """Return all facts of one expansion, its variant first."""
    blocks = ", ".join(f"{block} {format_count(count)}" for block, count in added.parameters_by_block.items())
    where = "none" if not added.collaborative_layers else format_layers(added.collaborative_layers)
    groups = f" ({' and '.join(added.collaborative_groups)})" if added.collaborative_groups else ""
    if added.new_layers:
        how = [("new layers", format_layers(added.new_layers))]
    elif added.copies is not None:
        how = [router, ("MLPs in each", f"{added.copies}, each with weight 1/{added.copies}")]
    else:
        widths = Widths(added.up_width, added.up_kv_heads, added.up_inner_width)
        how = [("collaborative", where + groups), router, ("added widths", widths.description)]
    return [
        ("variant", added.variant),
        (f"{METHODS[added.method].verb} layers", format_layers(added.layers)),
        *how,
        ("trains", "nothing: the fused form has one matrix for base and blocks" if added.is_fused else blocks),
        ("trained", counted(added.steps, "step") if added.steps else ""),
        ("strength", "" if added.strength == 1 else f"{added.strength:g} of what was learned"),
    ]


def render_expansion(done: Expansion) -> RenderableType:
    """Render the output of `expand`."""
    is_renumbered = done.plan.numbering is not None
    taken = "same data, layers renumbered in headers" if is_renumbered else "copied or linked as files"
    rows = [
        ("written", str(done.path)),
        ("new shards", f"{len(done.plan.shards)}, {format_bytes(done.plan.costs.bytes_added)}"),
        ("base shards", f"{format_bytes(done.base_bytes_written)} written, {taken}"),
        ("not copied", ", ".join(done.left_out)),
    ]
    return finished("expanded", rows, done.warnings, verify_command(done.path))


def finished(title: str, rows: Sequence[tuple[str, str]], warnings: tuple[str, ...], following: str) -> RenderableType:
    """Render the facts of a finished command, its warnings, and the next command."""
    next_row = (NEXT, following)
    if not warnings:
        return Facts(title, [*rows, next_row])
    return Group(Facts(title, rows), *render_warnings(warnings), Facts("", [next_row]))


def render_chosen_tokens(chosen: ChosenTokens) -> RenderableType:
    """Render the savings of new tokens on the text from which they were chosen."""
    before = chosen.tokens_before
    table = NamedRows(["tokens", "characters each", "bytes each", "saved"])
    for number, tokens in {0: before, **chosen.tokens_after}.items():
        name = f"with {counted(number, 'new token')}" if number else "the base's tokenizer"
        saved = f"{1 - tokens / before:.1%}" if number else ""
        sizes = [f"{size / tokens:.2f}" for size in (chosen.characters, chosen.bytes)]
        table.add_row(name, f"{tokens:,}", *sizes, saved)
    most = NamedRows(["count", "tokens before", "saves"], name="largest savings")
    for saving in chosen.most_saving:
        most.add_row(_token_text(saving), f"{saving.count:,}", f"{saving.pieces}", f"{saving.saved:,}")
    count = len(chosen.new_tokens.tokens)
    few = f"note: {count:,} of {chosen.wanted:,}; no other pair of tokens occurs twice in the text"
    notes = [sentence(few, "yellow")] if count < chosen.wanted else []
    text = f"on {counted(chosen.characters, 'character')}, {format_bytes(chosen.bytes)}"
    return Group(heading("new tokens", text), table, Text(), most, *notes)


def _token_text(saving: SavingToken) -> str:
    """Return a token with visible blanks. A part of a character is written as bytes."""
    return visible("" if "\ufffd" in saving.text else saving.text.replace(" ", "·"), saving.token)


def render_stripped(done: Stripped) -> RenderableType:
    """Render the output of `strip`."""
    rows = [
        ("written", str(done.path)),
        ("base", done.base_name),
        ("files", f"{len(done.files)}, each equal to the base's by sha256"),
        ("never copied", ", ".join(done.left_out)),
        (NEXT, command("inspect", done.path)),
    ]
    return Facts("stripped", rows)


def render_routed(done: Routed) -> RenderableType:
    """Render the output of `route-export`: a checkpoint with a router, or without one after removal."""
    forks = ", ".join(map(str, sorted(set(done.forks))))
    parts = f"from layer {forks} of {done.layers} on" if forks else "in the head alone"
    rows = [("written", str(done.path)), ("base", done.base_name)]
    if done.routing is None:
        rows.append(("router", "none; later training is kept"))
    else:
        rows += [
            ("router", describe_router(done.routing)),
            ("two paths", parts),
            ("cost", f"{done.cost:.2f} x the layers of a forward without a router, and the router's own"),
        ]
    rows += [
        ("shards", f"{format_bytes(done.bytes_written)} written, others copied or linked as files"),
        ("not copied", ", ".join(done.left_out)),
        (NEXT, verify_command(done.path)),
    ]
    return Facts("router removed" if done.routing is None else "routed", rows)


def render_training(done: Training) -> RenderableType:
    """Render a finished training run."""
    rows = [
        ("written", str(done.path)),
        ("steps", _steps(done)),
        ("trained", f"{done.trained_parameters:,} parameters, none of the base"),
        *_loss_rows(done),
    ]
    measured = done.measured
    for side, change in (("old", "forgetting"), ("new", "learning")):
        if f"{side}_nats_per_token" in measured:
            accuracy = f", accuracy {measured[f'{side}_accuracy']:.1%}" if f"{side}_accuracy" in measured else ""
            loss = f"{measured[f'{side}_nats_per_token']:.4f} nats per token{accuracy}"
            rows.append((f"{side} text", f"{loss}; {change} {measured[change]:+z.4f}"))
    rows += [("not copied", ", ".join(done.left_out)), ("curves", str(done.curves))]
    following = [(NEXT, verify_command(done.path))]
    return Group(Facts("trained", rows), *render_warnings(done.warnings), Facts("", following))


def _steps(done: Training) -> str:
    again = f", {done.steps - done.resumed:,} of them" if done.resumed else ""
    return f"{done.steps:,}{again} in {format_seconds(done.seconds)}"


def render_schedule(schedule: TrainingSchedule) -> RenderableType:
    """Render the schedule of a training run, before its first step."""
    passes = "once" if schedule.passes == 1 else f"{schedule.passes:.3g} times"
    texts, tokens = counted(schedule.sequences, "sequence"), counted(schedule.tokens, "token")
    rate = "" if schedule.learning_rate is None else f" to {schedule.learning_rate:g}"
    rising = min(schedule.warmup_steps, schedule.steps)
    rows = [
        ("texts", f"{texts}, {tokens} to learn, read {passes}"),
        (
            "steps",
            f"{schedule.steps:,}, the learning rate rises{rate} in {rising:,} of them",
        ),
        ("rehearses", schedule.rehearses),
        ("computes in", schedule.precision),
    ]
    return Group(Facts("to train", rows), *render_warnings(schedule.warnings), Text())


def render_warnings(warnings: tuple[str, ...]) -> list[Text]:
    """Render warnings, one per line."""
    return [Warned(warning) for warning in warnings]


def _loss_rows(done: Training) -> list[tuple[str, str]]:
    change = done.change
    if change is None:
        return []
    which = "the new text" if change.text == "new" else f"{counted(change.sequences, 'sequence')} to learn"
    before = "unknown" if change.before is None else f"{change.before:.4f}"
    return [("loss", f"{before} before, {change.after:.4f} after (nats per token, {which})")]


def render_evaluation(result: Evaluation) -> RenderableType:
    """Render the scores of models: a table for old text, one for new text, and one for each group of probes."""
    sides = (
        ("old text", "forgetting", [(score.name, score.old, score.forgetting) for score in result.scores]),
        ("new text", "learning", [(score.name, score.new, score.learning) for score in result.scores]),
    )
    parts: list[RenderableType] = []
    for title, change, scores in sides:
        rows = [(name, measured, value) for name, measured, value in scores if measured is not None]
        if rows:
            parts += [_render_side(title, change, rows), Text()]
    for table in _probe_tables(result):
        parts += [table, Text()]
    if any(score.answers for score in result.scores):
        parts += [_render_answers([(score.name, score.answers) for score in result.scores]), Text()]
    notes = [sentence(f"note: {note}", "yellow") for note in result.notes]
    notes += [] if result.limit is None else [_limit_line(result.limit)]
    return Group(*(parts if notes else parts[:-1]), *notes)


def _probe_tables(result: Evaluation) -> Iterator[RenderableType]:
    """Render right answers to probes, a table for each group, and one for all of several groups."""
    asked = [(score.name, score.probes) for score in result.scores if score.probes is not None]
    if not asked:
        return
    groups = range(len(asked[0][1].groups))
    for number in groups:
        yield _render_group([(name, probes.groups[number]) for name, probes in asked])
    if len(groups) > 1:
        yield _render_group([(name, probes.total) for name, probes in asked])


def _render_group(rows: Sequence[tuple[str, GroupCount]]) -> RenderableType:
    table = NamedRows(["right", "share", "kept", "of the base's"])
    first = rows[0][1]
    for name, count in rows:
        kept = "" if count.kept_share is None else f"{count.kept_share:.1%}"
        known = "" if count.known is None else f"{count.kept} of {count.known}"
        table.add_row(name, f"{count.right}", f"{count.share:.1%}", kept, known)
    title = f"probes: {first.group}" if first.group else "all probes"
    return Group(heading(title, f"{counted(first.asked, 'probe')}"), table)


def _render_answers(rows: Sequence[tuple[str, AnswerScore | None]]) -> RenderableType:
    table = NamedRows(["end", "repeat", "other language"])
    for name, score in rows:
        if score is not None:
            other = "" if score.other_share is None else f"{score.other_share:.1%} of {score.compared}"
            table.add_row(name, f"{score.ended_share:.1%}", f"{score.repeating_share:.1%}", other)
    asked = max(score.asked for _, score in rows if score is not None)
    return Group(heading("answers", f"to {counted(asked, 'instruction')}"), table)


def _limit_line(limit: ForgettingLimit) -> Text:
    most = f"at most {limit.most:g} ({limit.unit})"
    if limit.holds:
        return sentence(f"forgetting: {most}, holds", "green")
    reasons = [f"{name} forgets more" for name in limit.exceeded]
    asks = limit.unit == "share of probes lost"
    why = "has no base whose answers are right" if asks else "cannot be compared with a base"
    reasons += [f"{name} {why}" for name in limit.unmeasured]
    return sentence(f"forgetting: {most}, does not hold: {', '.join(reasons)}", "red")


def _render_side(title: str, change: str, rows: list[tuple[str, Measurement, float | None]]) -> RenderableType:
    first = rows[0][1]
    asked = f", {counted(first.questions, 'question')}" if first.questions else ""
    counts = f"{counted(first.scored, 'token')} scored{asked}"
    # if models tokenize differently, losses per token cannot be compared
    reads_others = len({measured.scored for _, measured, _ in rows}) > 1
    bits = ["bits/byte"] * reads_others
    table = NamedRows(["loss", "perplexity", *bits, *(["accuracy"] if first.questions else []), change])
    for name, measured, value in rows:
        accuracy = [] if measured.accuracy is None else [f"{measured.accuracy:.1%}"]
        gained = "" if value is None else format_nats(value)
        bits = [f"{measured.bits_per_byte:.4f}"] * reads_others
        table.add_row(name, f"{measured.nats_per_token:.4f}", f"{measured.perplexity:.4g}", *bits, *accuracy, gained)
    return Group(heading(title, f"{counts}; losses in nats per token"), table)
