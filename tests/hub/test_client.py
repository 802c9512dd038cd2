"""Models on a Hub: a loopback server that speaks the parts of its protocol that reading needs, and the real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from scale_surgery import Request, expand, plan, strip
from scale_surgery.cli.program import main
from tests.conftest import digests
from tests.own_code import save_pine
from tests.tiny import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"


@dataclass
class Hub:
    """A running server: its address, and the bytes that it sent of each file."""

    address: str
    sent: dict[str, int] = field(default_factory=dict)


def make_handler(folder: Path, hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0]
            if path.startswith(f"/api/models/{REPO}/tree/"):
                files = [(name, (folder / name).stat().st_size, digest) for name, digest in digests(folder).items()]
                tree = [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in files]
                self.reply(json.dumps(tree).encode(), with_body)
            elif path.startswith(f"/api/models/{REPO}"):
                siblings = [{"rfilename": name} for name in digests(folder)]
                self.reply(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
            elif path.startswith(f"/{REPO}/resolve/") and (folder / path.split("/", 5)[5]).is_file():
                self.send_file(path.split("/", 5)[5], with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound" if REPO not in path else "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send_file(self, name: str, with_body: bool) -> None:
            content = (folder / name).read_bytes()
            part, status = content, 200
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                part, status = content[int(first) : int(last or len(content)) + 1], 206
            if with_body:
                hub.sent[name] = hub.sent.get(name, 0) + len(part)
            self.reply(part, with_body, status, hashlib.sha256(content).hexdigest())

        def reply(self, body: bytes, with_body: bool, status: int = 200, etag: str = "info") -> None:
            self.send_response(status)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Keep the test output clean."""

    return Handler


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("repository") / "tiny", "llama", shard_size="40KB")


@contextmanager
def served(model: Path) -> Iterator[Hub]:
    """A Hub with one repository."""
    found = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(model, found))
    found.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(base: Path) -> Iterator[Hub]:
    with served(base) as found:
        yield found


@contextmanager
def asked(hub: Hub, home: Path) -> Iterator[None]:
    """Let this process ask a Hub, as if it had been started with that address, and an empty cache."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, hub.address))
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        huggingface_hub.close_session()
        yield
        huggingface_hub.close_session()


@pytest.fixture
def here(hub: Hub, tmp_path: Path) -> Iterator[Hub]:
    with asked(hub, tmp_path / "home"):
        yield hub


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def test_a_plan_downloads_headers_only(here: Hub, base: Path, tmp_path: Path) -> None:
    result = run("plan", REPO, "--layers", "last:1", "--json")
    plan = json.loads(result.stdout)
    assert (plan["base_name"], plan["base_revision"], plan["layers"]) == (REPO, COMMIT, [2])
    downloaded = list(tmp_path.rglob("*.safetensors"))
    assert downloaded == [] and result.stderr == ""
    inspected, local = (run("inspect", model, "--json").stdout for model in (REPO, str(base)))
    assert json.loads(inspected) | {"name": "tiny"} == json.loads(local)
    shards = {file.name: file.stat().st_size for file in base.glob("*.safetensors")}
    assert len(shards) > 1 and all(here.sent[name] > 0 for name in shards), "headers come by range"


def test_a_plan_of_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    with served(save_pine(tmp_path / "pine")) as own, asked(own, tmp_path / "own"):
        result = run("plan", REPO, "--layers", "last:1", "--json", "--trust-remote-code")
    classes = json.loads(result.stdout)["facts"]["architecture"]["own_code"]
    assert classes["AutoModelForCausalLM"] == "modeling_pine.PineForCausalLM"
    assert list(tmp_path.rglob("own/**/*.safetensors")) == []


@pytest.mark.slow
def test_an_expansion_downloads_once_and_records_the_commit(hub: Hub, base: Path, tmp_path: Path) -> None:
    """In a process of its own, which finds the Hub and its cache by the variables of the environment."""
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own
    words = ["expand", REPO, "--layers", "last:1", "-o", str(tmp_path / "e"), "--json"]
    command = [sys.executable, "-m", "scale_surgery", *words]
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "e" / "surgery.json").read_text())
    assert (manifest["base_name"], manifest["base_revision"]) == (REPO, COMMIT)
    assert digests(strip(tmp_path / "e", tmp_path / "back").path) == digests(base)


def test_what_was_downloaded_is_not_asked_for_again(here: Hub, tmp_path: Path) -> None:
    expanded = expand(REPO, Request("last:1"), tmp_path / "e")
    manifest = json.loads((tmp_path / "e" / "surgery.json").read_text())
    assert (manifest["base_name"], manifest["base_revision"]) == (REPO, COMMIT)
    sent = dict(here.sent)
    assert plan(REPO, Request("last:1")).tensors == expanded.plan.tensors
    assert here.sent == sent != {}


def test_a_repository_that_is_not_there(here: Hub) -> None:
    for verb in ("plan", "expand"):
        message = " ".join(run(verb, "org/none", "--layers", "0", code=1).stderr.split())
        assert "Traceback" not in message
        assert message.startswith("error: org/none: no such folder, and the Hub does not give it (")
        assert "Check the name, your access (hf auth login), the network, and HF_HUB_OFFLINE." in message
