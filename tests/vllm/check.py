"""Serve exported models with vLLM and compare greedy tokens with those of `generate`; run by `make test-vllm`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# fewer than there are prompts, so that requests come and go while others run
AT_ONCE, LONGEST = 4, 64
SECONDS_TO_START = 180


def serve(path: Path) -> None:
    """Print the tokens that vLLM makes of the prompts, all in one call."""
    from vllm import LLM, SamplingParams

    expected = json.loads(path.with_name(f"{path.name}.expected.json").read_text())
    prompts, new_tokens = [{"prompt_token_ids": ids} for ids in expected["prompts"]], len(expected["tokens"][0])
    longest = max(LONGEST, new_tokens + max(map(len, expected["prompts"])))
    options = {"dtype": "float32", "max_model_len": longest, "max_num_seqs": AT_ONCE, "enforce_eager": True}
    model = LLM(model=str(path), trust_remote_code=True, skip_tokenizer_init=True, **options)
    wanted = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in model.generate(prompts, wanted, use_tqdm=False)]))


def check(path: Path) -> str:
    """What is wrong with the answers of a model; nothing where all are those of `generate`."""
    run = subprocess.run(
        [sys.executable, __file__, "--serve", str(path)], env=os.environ | SETTINGS, capture_output=True, text=True
    )
    if run.returncode:
        return f"does not run: {run.stderr.strip().splitlines()[-1][:300]}"
    answers = json.loads(run.stdout.strip().splitlines()[-1])
    wanted = json.loads(path.with_name(f"{path.name}.expected.json").read_text())["tokens"]
    equal = sum(answer == expected for answer, expected in zip(answers, wanted, strict=True))
    if path.name == "routed":
        alternative = json.loads(path.with_name("other-threshold.expected.json").read_text())["tokens"]
        if answers == alternative:
            return "its answers are those of another threshold, too: nothing is compared"
    return "" if equal == len(wanted) else f"{equal} of {len(wanted)} answers are those of generate"


@contextmanager
def client_of(path: Path, *options: str) -> Iterator[Any]:
    """Serve a model, and make a client of OpenAI for it.

    Raises:
        RuntimeError: If the server ends or does not answer.
    """
    from openai import OpenAI

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    # what the command `vllm serve` runs; that asks for a package called vllm, and one for processors has another name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), *options, *place]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with subprocess.Popen(
        command, env=os.environ | SETTINGS, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as server:
        try:
            wait(client, server)
            yield client
        finally:
            server.terminate()


def tokens_of(client: Any, model: str, prompt: str | list[int], count: int) -> list[int]:
    """Ask a model of a server for so many tokens."""
    # tokens, since the server keeps the bytes of a character that an answer does not end to itself
    further = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=count, temperature=0, extra_body=further)
    return list(answer.choices[0].token_ids)


def ask(path: Path) -> str:
    """What is wrong with the answers that the client of OpenAI gets."""
    expected = json.loads(path.with_name(f"{path.name}.expected.json").read_text())
    options = ("--trust-remote-code", "--max-model-len", str(LONGEST), "--served-model-name", "fused")
    try:
        with client_of(path, *options) as client:
            pairs = list(zip(expected["texts"], expected["tokens"], strict=True))
            equal = sum(tokens_of(client, "fused", text, len(wanted)) == wanted for text, wanted in pairs)
    except RuntimeError as error:
        return str(error)
    return "" if equal == len(pairs) else f"{equal} of {len(pairs)} answers are those of generate"


def wait(client: object, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended: {server.stderr.read().decode().strip().splitlines()[-1][:300]}")
        try:
            client.models.list()
            return
        except Exception:
            time.sleep(1)
    raise RuntimeError(f"the server did not answer in {SECONDS_TO_START} s")


def main(folder: Path) -> int:
    """Check every exported model; returns how many failed."""
    failed = 0
    for file in sorted(folder.rglob("*.expected.json")):
        path = file.with_name(file.name.removesuffix(".expected.json"))
        problem = ask(path) if path.parent.name == "text" else check(path)
        print(f"{path.relative_to(folder)}: {problem or 'ok'}", flush=True)
        failed += bool(problem)
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]))
    else:
        sys.exit(main(Path(sys.argv[1])) > 0)
