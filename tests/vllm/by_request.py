"""Serve folders of two expansions with vLLM; each request names one of them, or none. Run by `make test-vllm`.

`export.py` writes the folders, each with prompts and the tokens that `generate` makes for the base and each expansion.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # this script runs without the package of tests
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.check import AT_ONCE, SETTINGS, client_of, tokens_of

# tokens of a block of the KV cache: a prefix is shared by whole blocks
BLOCK, LONGEST = 32, 128
# prompts of each name that are asked over HTTP
OVER_HTTP = 4
# the name of a request without an expansion
BASE = ""
# settings of vLLM by their part, a value that is refused, and the option that the error names
REFUSED = (
    ("parallel_config", "tensor_parallel_size", 2, "--tensor-parallel-size"),
    ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size"),
    ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype"),
    ("load_config", "load_format", "dummy", "--load-format"),
    ("model_config", "hf_overrides", {"rope_theta": 1.0}, "--hf-overrides"),
    ("model_config", "enforce_eager", False, "--enforce-eager"),
)


class Server:
    """A folder in vLLM, with the tokens that it should give."""

    def __init__(self, path: Path) -> None:
        from vllm import LLM, SamplingParams

        expected = json.loads(path.with_name(f"{path.name}.by-request.json").read_text())
        self.path, self.prompts, self.tokens = path, expected["prompts"], expected["tokens"]
        self.names = list(self.tokens)
        options = {"dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": AT_ONCE, "block_size": BLOCK}
        options |= {"enforce_eager": True, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2}
        self.model = LLM(model=str(path), **options)
        new_tokens = len(self.tokens[BASE][0])
        self.wanted = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)

    def ask(self, requests: list[tuple[int, str]], number: int = 1) -> list[Any]:
        """Answer prompts, each under a name, in one call; all requests claim the same number of an adapter."""
        from vllm.lora.request import LoRARequest

        prompts = [{"prompt_token_ids": self.prompts[prompt]} for prompt, _ in requests]
        named = [LoRARequest(name, number, str(self.path)) if name else None for _, name in requests]
        return list(self.model.generate(prompts, self.wanted, lora_request=named, use_tqdm=False))

    def wrong(self, requests: list[tuple[int, str]]) -> int:
        """Count the answers that are not those of `generate`."""
        answers = [list(answer.outputs[0].token_ids) for answer in self.ask(requests)]
        pairs = zip(answers, requests, strict=True)
        return sum(answer != self.tokens[name][prompt] for answer, (prompt, name) in pairs)

    def forget(self) -> None:
        """Empty the cache of prefixes."""
        assert self.model.reset_prefix_cache()

    def requests(self) -> list[tuple[int, str]]:
        """Name every prompt with every name, in mixed order, so that rows of several expansions run at once."""
        names = len(self.names)
        numbers = range(names * len(self.prompts))
        return [(place // names, self.names[(place + place // names) % names]) for place in numbers]


def check_alone(server: Server) -> str:
    """Check one request at a time."""
    wrong = sum(server.wrong([request]) for request in server.requests()[:6])
    return f"{wrong} answers alone are not those of generate" if wrong else ""


def check_mixed(server: Server) -> str:
    """Check batches whose rows name different expansions; requests start and end while others run."""
    requests = server.requests()
    wrong = server.wrong(requests)
    return f"{wrong} of {len(requests)} answers are not those of generate" if wrong else ""


def check_control(server: Server) -> str:
    """Check that any two of expansions and base answer most prompts differently, else nothing is compared."""
    for one, other in combinations(server.names, 2):
        pairs = zip(server.tokens[one], server.tokens[other], strict=True)
        if 2 * sum(first != second for first, second in pairs) <= len(server.prompts):
            return f"{one or 'the base'} and {other} answer half of the prompts alike"
    return ""


def check_unknown(server: Server) -> str:
    """Check that a name that does not exist is refused, also among others, and that vLLM answers afterwards."""
    from vllm.exceptions import VLLMValidationError

    for requests in ([(0, "missing")], [(0, BASE), (1, "missing"), (2, server.names[1])]):
        try:
            server.ask(requests)
            return "a name that does not exist is answered"
        except VLLMValidationError as error:
            if "missing: no expansion of the served model, expected one of" not in str(error):
                return f"the error is {error}"
    return check_mixed(server)


def check_prefixes(server: Server) -> str:
    """Check that a cached prefix is reused under its own name, and under no other."""
    server.forget()
    last = len(server.prompts) - 1
    for name in server.names:
        first, again = (server.ask([(last, name)])[0] for _ in range(2))
        if first.num_cached_tokens:
            return f"{name or 'the base'} reads {first.num_cached_tokens} tokens that another name has cached"
        if again.num_cached_tokens < BLOCK:
            return f"{name or 'the base'} does not find its own prefix"
        if list(again.outputs[0].token_ids) != server.tokens[name][last]:
            return f"{name or 'the base'} answers otherwise with a cached prefix"
    return check_mixed(server)


@contextmanager
def prefixes_without_names() -> Iterator[None]:
    """Let vLLM find cached prefixes by their tokens alone."""
    from vllm.v1.core import kv_cache_utils

    kept = kv_cache_utils._gen_lora_extra_hash_keys
    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []
    try:
        yield
    finally:
        kv_cache_utils._gen_lora_extra_hash_keys = kept


def check_prefix_control(server: Server) -> str:
    """Check that answers are wrong if a prefix of another name is reused, so that the check above would see it."""
    server.forget()
    last = len(server.prompts) - 1
    with prefixes_without_names():
        wrong = [server.wrong([(last, name)]) for name in server.names]
    server.forget()
    return "" if sum(wrong) else "a prefix of another name changes no answer: nothing is compared"


def check_refused(server: Server) -> str:
    """Check that settings which might cost tokens their expansions are refused, and those of this server are not."""
    from scale_surgery.errors import PlanError
    from scale_surgery.serving.model import refuse

    settings = server.model.llm_engine.vllm_config
    refuse(settings)
    for part, name, value, option in REFUSED:
        owner = getattr(settings, part)
        kept = getattr(owner, name)
        setattr(owner, name, value)
        try:
            refuse(settings)
            return f"{option} is accepted"
        except PlanError as error:
            if [problem.where for problem in error.problems] != [option]:
                return f"{option}: the error is {error}"
        finally:
            setattr(owner, name, kept)
    return ""


CHECKS: tuple[Callable[[Server], str], ...] = (
    check_control,
    check_refused,
    check_alone,
    check_mixed,
    check_unknown,
    check_prefixes,
    check_prefix_control,
)


def ask_by_name(path: Path) -> str:
    """What is wrong with the answers that the client of OpenAI gets, with names of expansions as names of models."""
    from openai import NotFoundError

    expected = json.loads(path.with_name(f"{path.name}.by-request.json").read_text())
    named = [f"{name}={path}" for name in expected["tokens"] if name]
    options = ("--served-model-name", "base", "--enable-lora", "--max-loras", "2", "--lora-modules", *named)
    try:
        with client_of(path, "--max-model-len", str(LONGEST), *options) as client:
            listed = {model.id for model in client.models.list()}
            if listed != {name or "base" for name in expected["tokens"]}:
                return f"it lists the models {listed}"
            for name, answers in expected["tokens"].items():
                for prompt, wanted in list(zip(expected["prompts"], answers, strict=True))[:OVER_HTTP]:
                    if tokens_of(client, name or "base", prompt, len(wanted)) != wanted:
                        return f"an answer of {name or 'the base'} is not that of generate"
            try:
                tokens_of(client, "missing", expected["prompts"][0], 1)
                return "a name that does not exist is answered"
            except NotFoundError:
                return ""
    except RuntimeError as error:
        return str(error)


def serve(path: Path) -> int:
    """Run all checks in this process; returns how many failed."""
    server, failed = Server(path), 0
    for check in CHECKS:
        problem = check(server)
        print(f"{path.parent.name}, {check.__name__.removeprefix('check_')}: {problem or 'ok'}", flush=True)
        failed += bool(problem)
    return failed


def main(folder: Path) -> int:
    """Check every folder, each in a process of its own; returns how many failed."""
    failed = 0
    for file in sorted(folder.rglob("*.by-request.json")):
        path = file.with_name(file.name.removesuffix(".by-request.json"))
        run = subprocess.run(
            [sys.executable, __file__, "--serve", str(path)], env=os.environ | SETTINGS, capture_output=True, text=True
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith(f"{path.parent.name}, ")]
        print("\n".join(lines), flush=True)
        if run.returncode or len(lines) < len(CHECKS):
            print(f"{path.parent.name}: FAILED {(run.stderr.strip().splitlines() or [''])[-1][:300]}", flush=True)
            failed += 1
    problem = ask_by_name(path)
    print(f"{path.parent.name}, over HTTP: {problem or 'ok'}", flush=True)
    return failed + bool(problem)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.exit(serve(Path(sys.argv[2])) > 0)
    else:
        sys.exit(main(Path(sys.argv[1])) > 0)
