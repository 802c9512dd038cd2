"""Commands of a job in several processes, by the launcher of accelerate: their lines, and what they print as JSON."""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from scale_surgery.checkpoint.plain_yaml import PlainLoader
from scale_surgery.command_lines import command
from scale_surgery.errors import Problem, TrainingError

# that the launcher handles, as far as this system has them
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


def launch_options(processes: int, config: str | None = None) -> list[str]:
    """Options of `accelerate launch`, none for one process; --multi_gpu is its word for several, on CPUs too."""
    if processes == 1:
        return []
    return [*(["--multi_gpu"] if config is None else ["--config_file", config]), "--num_processes", str(processes)]


def unfit_type(config: Path) -> str | None:
    """Return the distributed type of a configuration of accelerate if no processes train by it, or None.

    The launcher starts one process for some types without a word. Training refuses DeepSpeed, and FSDP of version 1.
    """
    try:
        content = yaml.load(config.read_bytes(), PlainLoader)
    except (OSError, yaml.YAMLError):
        content = None
    content = content if isinstance(content, dict) else {}
    kind = str(content.get("distributed_type", "NO"))
    if kind == "FSDP":
        version = str((content.get("fsdp_config") or {}).get("fsdp_version", 1))
        return None if version == "2" else f"FSDP, fsdp_version: {version}"
    return None if kind.startswith("MULTI_") and kind != "MULTI_CPU" else kind


def launch_line(words: Sequence[object], options: Sequence[str]) -> str:
    """A command of this program, in several processes where there are options of the launcher."""
    if not options:
        return command(*words)
    return shlex.join(["accelerate", "launch", *options, "-m", "scale_surgery", *map(str, words)])


def run_launched(words: Sequence[object], options: Sequence[str], *, quiet: bool = True) -> Any:
    """Run a command in several processes; give what the first prints by --json. It also shows how far it is, or not."""
    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torch.cuda.empty_cache()  # what earlier stages left cached
    program = ["-m", "scale_surgery", *map(str, words), "--json", *["-q"] * quiet]
    given = launch_command_parser().parse_args([*options, *program])
    # what is written to files: 1 stdout, 2 stderr, 3 both
    first = 3 if quiet else 1
    with tempfile.TemporaryDirectory() as folder, _as_it_was():
        given.log_dir, given.num_machines, given.main_process_port = folder, 1, 0  # any free port
        given.redirects = ",".join(f"{rank}:{3 if rank else first}" for rank in range(given.num_processes))
        try:
            launch_command(given)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            process = {"rank": rank, "processes": given.num_processes}
            output = _written(folder, rank, "stderr")
            raise TrainingError(_ended(words[0], failure.exitcode, output, **process)) from error
        # libraries may write to stdout too
        output = _written(folder, 0, "stdout")
        if (found := re.search(r"^\{", output, re.MULTILINE)) is None:
            values = {"rank": 0, "processes": given.num_processes, "error": "it printed no result"}
            raise TrainingError(Problem("process-failed", words[0], **values))
        return json.JSONDecoder().raw_decode(output, found.start())[0]


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Give signals back to those who handled them, and drop what the launcher logs: it raises errors too."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        for number, handler in handlers.items():
            if handler is not signal.getsignal(number):
                signal.signal(number, handler)


def _ended(command: object, code: int, output: str, **process: int) -> Problem:
    if code < 0:
        return Problem("process-killed", command, signal=signal.Signals(-code).name, **process)
    _, is_said, reason = output.rpartition("error: ")
    # what the process said ends with a full stop
    error = " ".join(reason.split()).removesuffix(".") if is_said else f"exit code {code}"
    return Problem("process-failed", command, error=error, **process)


def _written(folder: str, rank: int, stream: str) -> str:
    """Return the output of a process; empty if it wrote to the terminal."""
    return "".join(file.read_text(encoding="utf-8") for file in Path(folder).glob(f"*/attempt_0/{rank}/{stream}.log"))
