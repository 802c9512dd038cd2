"""A Hub on the loopback: it speaks the part of the Hub's protocol with which the real client pushes and downloads.

Git commits (as ndjson, with or without a pull request), LFS (batch, basic transfers),
branches, accounts with tokens, and faults that a test asks for. It counts every byte that arrives, and of each file
those that it sends.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

WRITER = {"name": "me", "type": "user", "orgs": [{"name": "lab", "roleInOrg": "write"}]}


@dataclass
class Repository:
    """Branches, each from file names to contents; an LFS file is its oid as text."""

    private: bool
    branches: dict[str, dict[str, bytes | str]] = field(default_factory=lambda: {"main": {".gitattributes": b"\n"}})
    messages: list[str] = field(default_factory=list)

    def find(self, revision: str) -> dict[str, bytes | str] | None:
        """Files of a branch or of a commit that is the head of one."""
        named = {commit_of(files): files for files in self.branches.values()}
        return self.branches.get(revision, named.get(revision))


@dataclass
class Fault:
    """What happens to the next request whose method and path match: a refusal, or an act before the answer."""

    where: str
    status: int = 0
    message: str = "as the test asked"
    act: Callable[[], Any] | None = None


@dataclass
class Hub:
    """The state of the server; tests read and change it."""

    address: str = ""
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    gitignore: str | tuple[str, ...] | None = None

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Contents of a repository's files."""
        branch = self.repositories[repo].branches[revision]
        return {name: self.objects[held] if isinstance(held, str) else held for name, held in branch.items()}


def account(role: str) -> dict[str, Any]:
    """What whoami tells of a token."""
    return {**WRITER, "auth": {"type": "access_token", "accessToken": {"role": role}}}


def commit_of(files: dict[str, bytes | str]) -> str:
    """A commit's name, from what it holds."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def oid_of(held: bytes | str) -> str:
    """A git blob's name; of an LFS file the sha256."""
    return held if isinstance(held, str) else hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()


class Refusal(Exception):  # noqa: N818
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    """One request: find its route, look for a fault, answer."""

    protocol_version = "HTTP/1.1"
    # heads and bodies are two writes: the second is not held back until the client's kernel has confirmed the first
    disable_nagle_algorithm = True
    hub: Hub

    def handle(self) -> None:
        # a client that was stopped leaves between two requests
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def serve(self) -> None:
        parts = urlsplit(self.path)
        self.query, path = parse_qs(parts.query), parts.path
        self.hub.requests.append(f"{self.command} {path}")
        fault = next(
            (candidate for candidate in self.hub.faults if re.fullmatch(candidate.where, f"{self.command} {path}")),
            None,
        )
        try:
            self.body = self.read_body(int(self.headers.get("Content-Length") or 0))
            if fault is not None:
                self.hub.faults.remove(fault)
                if fault.act is None:
                    raise Refusal(fault.status, fault.message)
                fault.act()  # and it is answered as ever
            for method, pattern, answer in ROUTES:
                match = re.fullmatch(pattern, path)
                if match is not None and self.command in method.split():
                    answer(self, *(unquote(group) for group in match.groups()))
                    return
            raise Refusal(404, f"no such route: {path}", "EntryNotFound")
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self.reply({"error": refusal.message}, refusal.status, headers)
        except ConnectionError:
            self.close_connection = True

    def read_body(self, length: int) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
            if len(body) < length:
                raise ConnectionError  # the client was stopped
        if self.command == "PUT":
            self.hub.received[self.path.split("?")[0]] += len(body)
        return body

    def reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Keep the test output clean."""

    # -- who asks

    def account(self) -> dict[str, Any] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.accounts:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.accounts.get(token)

    def find(self, repo: str, *, to_write: bool = False) -> Repository:
        repository, who = self.hub.repositories.get(repo), self.account()
        if repository is None or (repository.private and who is None):
            raise Refusal(404 if who else 401, "Repository not found", "RepoNotFound")
        if to_write:
            self.check_write(repo)
        return repository

    def check_write(self, repo: str) -> None:
        who = self.account()
        if who is None:
            raise Refusal(401, "Unauthorized")
        if who["auth"]["accessToken"]["role"] == "read":
            raise Refusal(403, "This token can only read")
        namespaces = {who["name"], *(entry["name"] for entry in who["orgs"] if entry["roleInOrg"] != "read")}
        is_pull_request = "create_pr" in self.query or "refs%2Fpr%2F" in self.path
        if repo.split("/")[0] not in namespaces and not is_pull_request:
            raise Refusal(403, f"You don't have the rights to write to {repo}")

    def revision_of(self, repo: str, revision: str) -> dict[str, bytes | str]:
        files = self.find(repo).find(revision)
        if files is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return files

    # -- answers

    def whoami(self) -> None:
        who = self.account()
        if who is None:
            raise Refusal(401, "Unauthorized")
        self.reply(who)

    def create_repository(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization'] or (self.account() or {}).get('name')}/{asked['name']}"
        self.check_write(repo)
        if repo in self.hub.repositories:
            raise Refusal(409, "You already created this model repo")
        is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[repo] = Repository(is_private)
        self.reply({"url": f"{self.hub.address}/{repo}"})

    def auth_check(self, repo: str) -> None:
        self.find(repo, to_write=True)
        self.reply({})

    def create_branch(self, repo: str, branch: str) -> None:
        repository = self.find(repo, to_write=True)
        repository.branches[branch] = dict(repository.branches["main"])
        self.reply({})

    def validate_card(self) -> None:
        content = json.loads(self.body)["content"]
        head = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
        data = yaml.safe_load(head[1]) if head else {}
        named = data.get("base_model", [])
        errors = [
            {"message": f'"base_model" with value "{name}" is not valid. Use a model id from https://hf.co/models.'}
            for name in ([named] if isinstance(named, str) else named)
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        ]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def model_info(self, repo: str, revision: str = "main") -> None:
        files = self.revision_of(repo, revision)
        siblings = [
            {"rfilename": name} | (self.described(held, "sha256") if "blobs" in self.query else {})
            for name, held in files.items()
        ]
        private = self.hub.repositories[repo].private
        self.reply({"id": repo, "sha": commit_of(files), "private": private, "siblings": siblings, "tags": []})

    def described(self, held: bytes | str, digest: str) -> dict[str, Any]:
        size = self.size(held)
        lfs = {"lfs": {digest: held, "size": size, "pointerSize": 134}} if isinstance(held, str) else {}
        return {"size": size, "blobId": oid_of(held), "oid": oid_of(held), **lfs}

    def size(self, held: bytes | str) -> int:
        return len(self.hub.objects[held] if isinstance(held, str) else held)

    def tree(self, repo: str, revision: str) -> None:
        files = self.revision_of(repo, revision).items()
        self.reply([{"type": "file", "path": name, **self.described(held, "oid")} for name, held in files])

    def preupload(self, repo: str, revision: str) -> None:
        self.find(repo, to_write=True)
        there = self.revision_of(repo, revision)
        answers = []
        for asked in json.loads(self.body)["files"]:
            name = asked["path"]
            entry = {
                "path": name,
                "uploadMode": "lfs" if name.endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": self.hub.gitignore is not None and name.endswith(self.hub.gitignore),
            }
            answers.append(entry | ({"oid": oid_of(there[name])} if name in there else {}))
        self.reply({"files": answers})

    def batch(self, repo: str) -> None:
        # for a pull request the client names no ref, and needs no write access
        content = json.loads(self.body)
        self.find(repo, to_write="ref" in content)
        objects = []
        for asked in content["objects"]:
            actions = {"upload": {"href": f"{self.hub.address}/lfs/{asked['oid']}"}}
            objects.append(asked if asked["oid"] in self.hub.objects else {**asked, "actions": actions})
        self.reply({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "content has another sha256")
        self.hub.objects[oid] = self.body
        self.reply({})

    def commit(self, repo: str, revision: str) -> None:
        repository = self.find(repo, to_write=True)
        files = dict(self.revision_of(repo, revision))
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", commit_of(files)) != commit_of(files):
                    raise Refusal(412, "the branch is at another commit")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, f"LFS pointer points to a file that does not exist: {value['path']}")
                files[value["path"]] = value["oid"]
            elif key == "deletedFile":
                del files[value["path"]]
        pull_request = {}
        if "create_pr" in self.query:
            number = sum(name.startswith("refs/pr/") for name in repository.branches) + 1
            revision = f"refs/pr/{number}"
            pull_request = {"pullRequestUrl": f"{self.hub.address}/{repo}/discussions/{number}"}
        repository.branches[revision] = files
        repository.messages.append(message)
        oid = commit_of(files)
        self.reply({"commitOid": oid, "commitUrl": f"{self.hub.address}/{repo}/commit/{oid}", **pull_request})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        files = self.revision_of(repo, revision)
        if name not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        held = files[name]
        content, status = self.hub.objects[held] if isinstance(held, str) else held, 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last or len(content)) + 1], 206
        if self.command == "GET":
            self.hub.sent[name] += len(content)
        self.reply(content, status, {"X-Repo-Commit": commit_of(files), "ETag": f'"{oid_of(held)}"'})


MODEL = r"/api/models/([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create_repository),
    ("POST", "/api/validate-yaml", Handler.validate_card),
    ("GET", f"{MODEL}/auth-check/write", Handler.auth_check),
    ("POST", f"{MODEL}/branch/([^/]+)", Handler.create_branch),
    ("GET", MODEL, Handler.model_info),
    ("GET", f"{MODEL}/revision/([^/]+)", Handler.model_info),
    ("GET", f"{MODEL}/tree/([^/]+)", Handler.tree),
    ("POST", f"{MODEL}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"{MODEL}/commit/([^/]+)", Handler.commit),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/(\\w+)", Handler.put_object),
    ("GET HEAD", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Start a server; its accounts are a writer with the token "hf_writer" and a reader with "hf_reader"."""
    hub = Hub(accounts={"hf_writer": account("write"), "hf_reader": account("read")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def asked(hub: Hub) -> Iterator[None]:
    """Let this process ask a Hub, as if it had been started with that address; large files go by LFS."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, hub.address))
        patch.setattr(constants, "ENDPOINT", hub.address)
        huggingface_hub.close_session()
        yield
        huggingface_hub.close_session()
