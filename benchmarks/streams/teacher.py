"""Could the base teach itself? What it answers with the right answer before its eyes.

    python -m benchmarks.streams.teacher

Self-distillation (SDFT, arXiv 2601.19897; `SDFTTrainer` of TRL) trains a model to answer as it does itself after a
demonstration: here the same question with its answer. It can teach no more than such a teacher answers.
"""

from __future__ import annotations

import click
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.streams.asking import Examiner
from benchmarks.streams.compare import prepare
from benchmarks.streams.learning import Settings
from benchmarks.streams.tasks import Asked, Task, base_task, tasks
from scale_surgery.biographies import SHIPPED_MODEL

# as in TRL between a prompt and what is told beside it
SEPARATOR = "\n\n"


def prompted(task: Task) -> list[Asked]:
    """The questions of a task, each after itself and its answer."""
    return [Asked(f"{question.text}{SEPARATOR}{question.prompt}", question.answer) for question in task.asked]


@click.command()
def main() -> None:
    """Print right answers without and with the demonstration, for what the base knows and for each task."""
    prepare()
    examiner = Examiner(AutoTokenizer.from_pretrained(SHIPPED_MODEL))
    base = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL).eval()
    click.echo("| task | alone | after the answer |\n|---|--:|--:|")
    for task in (base_task(Settings.old_questions), *tasks(Settings.tasks, 0, Settings.size)):
        shares = (examiner.accuracy(base, asked) for asked in (task.asked, prompted(task)))
        click.echo(f"| {task.kind} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
