"""Help with headings: the most used options of a command first, the rest below by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

# names of options, which mean the same in every command; unlisted options are under More options
SUBJECTS: Mapping[str, Sequence[str]] = {
    "New blocks": (
        *("name", "collaborative_layers", "collaborate", "up_width", "up_kv_heads", "up_inner_width", "copies"),
        *("groups", "routed"),
    ),
    "New tokens": ("token_file", "token_texts", "token_count", "new_tokens_init"),
    "Batches and memory": (
        *("sequence_length", "batch_size", "gradient_accumulation", "gradient_checkpointing", "bf16"),
        "base_quantization",
    ),
    "Answers": ("instructions", "system", "raw", "expansion", "max_new_tokens", "temperature", "top_p", "top_k"),
}
# options of every command; in a command without `first`, all others are under Options
COMMON: Mapping[str, Sequence[str]] = {
    "Files": ("resume", "overwrite", "base_weights", "cache_dir"),
    "Model and device": ("revision", "device", "dtype", "memory_bytes", "trust_remote_code"),
    "Messages": ("details", "paths", "as_json", "quiet", "debug"),
}


class Headed(click.Command):
    """A command with headings in its help. Options in `first` come first, in this order."""

    def __init__(self, *arguments: Any, first: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.first = first

    def heading_of(self, option: click.Option) -> str:
        """Return the heading of an option."""
        if option.name in self.first:
            return "Options"
        if "--help" in option.opts:
            return "Messages"
        headings = {**SUBJECTS, **COMMON} if self.first else COMMON
        usual = "More options" if self.first else "Options"
        return next((heading for heading, names in headings.items() if option.name in names), usual)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading."""
        rows: dict[str, list[tuple[str, str]]] = {
            heading: [] for heading in ("Options", "More options", *SUBJECTS, *COMMON)
        }
        options = {str(option.name): option for option in self.get_params(context) if isinstance(option, click.Option)}
        for name in dict.fromkeys((*self.first, *options)):
            if (row := options[name].get_help_record(context)) is not None:
                rows[self.heading_of(options[name])].append(row)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
