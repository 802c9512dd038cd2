"""A process of its own that loads folders as a user would, by remote code, and tells what they give.

a line of JSON in    {"path": ..., further options of from_pretrained}
a line of JSON out   {"logits": sha256, "row": sha256, "tokens": [...], "trains": [...]}
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROWS, TOKENS, NEW_TOKENS = 2, 19, 6
LEAST_ID, MOST_IDS = 3, 60


def ids_of() -> Any:
    """The tokens that every model reads."""
    import torch

    return torch.randint(LEAST_ID, MOST_IDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))


def digest(tensor: Any) -> str:
    """sha256 of the values of a tensor, in float32, which holds those of half precision exactly."""
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()


def read(path: str, **options: Any) -> dict[str, Any]:
    """Load a folder in a process like this one, and run it: logits of two rows and of one, and cached generation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=True, **options).eval()
    ids = ids_of()
    with torch.no_grad():
        outputs = {"logits": digest(model(ids).logits), "row": digest(model(ids[:1, :7]).logits)}
        try:
            tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0).tolist()
        except Exception as error:  # some stock models cannot: then no expanded one has to
            tokens = [type(error).__name__]
    return outputs | {
        "tokens": tokens,
        "trains": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


class Reader:
    """A process that is asked folder by folder, so that its imports are paid for once."""

    def __init__(self) -> None:
        """Start it; it is ready when it answers."""
        command = [sys.executable, "-m", "tests.sweep.reader"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process: Any = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]

    def read(self, path: Path, **options: Any) -> dict[str, Any]:
        """What a folder gives there; RuntimeError if it cannot be loaded or run."""
        self.process.stdin.write(json.dumps({"path": str(path), **options}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main() -> None:
    """Answer until the input ends."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        try:
            answer = read(**json.loads(line))
        except Exception as error:  # the one who asked reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
