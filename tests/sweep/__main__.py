"""Take model types through the program, and write what became of them.

python -m tests.sweep                         all that transformers knows as causal language models
python -m tests.sweep llama qwen3_moe         these
python -m tests.sweep --table docs/families.md --rows rows.json      and the page of the documentation
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click

from tests.sweep.table import render
from tests.sweep.take import Row, is_broken, model_types, take_several

# enough that a process's imports are paid for, and few enough that what a type leaves behind does not pile up
TYPES_AT_ONCE = 8


def rows_of(types: list[str], jobs: int) -> Iterator[Row]:
    """What became of each type, as it is known."""
    parts = [types[start : start + TYPES_AT_ONCE] for start in range(0, len(types), TYPES_AT_ONCE)]
    with ProcessPoolExecutor(jobs, max_tasks_per_child=1) as pool:
        for records in pool.map(take_several, parts):
            yield from (Row(**row) for row in records)  # type: ignore[arg-type]


@click.command()
@click.argument("types", nargs=-1)
@click.option("--jobs", default=2, show_default=True, help="Processes at a time.")
@click.option("--rows", type=click.Path(path_type=Path), help="Write what became of each type as JSON.")
@click.option("--table", type=click.Path(path_type=Path), help="Write the page of the documentation.")
@click.option("--least", default=0, show_default=True, help="Types that have to pass.")
def main(types: tuple[str, ...], jobs: int, rows: Path | None, table: Path | None, least: int) -> None:
    """Take model types through the program."""
    done = []
    for row in rows_of(list(types) or list(model_types()), jobs):
        done.append(row)
        click.echo(f"{row.model_type}: {row.broken or row.blocks} {row.seconds} s")
        if rows is not None:
            rows.write_text(json.dumps([asdict(entry) for entry in done], indent=1) + "\n")
    if table is not None:
        table.write_text(render(done), encoding="utf-8")
    passed = sum(not row.broken for row in done)
    click.echo(f"{passed} of {len(done)} pass")
    # what need not work is refused in words, and nothing of it breaks
    tried = [(f"{row.model_type}: {name}: {outcome}", outcome) for row in done for name, outcome in row.works.items()]
    spoiled = [line for line, outcome in tried if is_broken(outcome)]
    click.echo("\n".join(spoiled))
    sys.exit(passed < least or bool(spoiled))


if __name__ == "__main__":
    main()
