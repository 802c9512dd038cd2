"""Pushing to a Hub on the loopback with the real client: what arrives, what breaks, and what is refused before."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file

from scale_surgery import Probes
from scale_surgery.checkpoint.expansions import renamed
from scale_surgery.errors import CheckpointError, HubError, Problem
from scale_surgery.evidence.verify import verify
from scale_surgery.hub import client
from scale_surgery.hub.client import check_repo_id
from scale_surgery.hub.push import Push, push
from scale_surgery.hub.repository import is_same_base, is_written_card
from scale_surgery.planning.request import Request
from scale_surgery.show.tables_push import render_pushed
from scale_surgery.surgery.apply import apply
from scale_surgery.surgery.compose import compose
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export
from scale_surgery.surgery.strip import strip
from tests.command import run
from tests.conftest import DEEPENED, REQUESTS, digests, edited, flip, load, problems, refused, shake
from tests.each import mostly
from tests.hub_server import Fault, Hub, Repository, asked, running

REPO = "me/wide"
BASE_CARD = b"---\nlicense: mit\n---\r\n# caf\xc3\xa9, no final newline"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running Hub, which this process asks."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running() as server, asked(server):
        yield server


@pytest.fixture(scope="module")
def base(base_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in several shards, with a card, code and other files of its own."""
    folder = Path(shutil.copytree(base_of("llama", tied=True), tmp_path_factory.mktemp("own") / "base"))
    files = {"README.md": BASE_CARD, "LICENSE": b"MIT", "helper.py": b"print(1)\n", "notes/deep/file.txt": b"below"}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def expanded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expansion of it; tests that change it copy it."""
    return expand(base, REQUESTS["adapt"], tmp_path_factory.mktemp("expanded") / "wide").path


@pytest.fixture(scope="module")
def stock(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock export of it; tests that change it copy it."""
    request, folder = Request("1", variant="adapt", up_width=0, up_kv_heads=0, collaborate="ffn"), tmp_path_factory
    wide = expand(base, request, folder.mktemp("wide") / "wide").path
    return merge(wide, folder.mktemp("stock") / "stock", "stock").path


@pytest.fixture
def copied(expanded: Path, tmp_path: Path) -> Path:
    """A copy of the expansion, to be changed by a test."""
    return Path(shutil.copytree(expanded, tmp_path / "own"))


def send(hub: Hub, folder: Path, repo: str = REPO, token: str | None = "hf_writer", **options: Any) -> Any:
    """Push without the check, which costs a second, unless a test is about it."""
    dry_run, how = options.pop("dry_run", False), Push(**{"check": False, **options})
    return push(folder, repo, how, token=token, dry_run=dry_run)


def download(hub: Hub, folder: Path) -> Path:
    options: Any = {"endpoint": hub.address, "token": "hf_writer", "local_dir": folder}
    return Path(huggingface_hub.snapshot_download(REPO, **options))


def changing(hub: Hub) -> list[str]:
    """Requests that change something on a Hub."""
    return [line for line in hub.requests if not line.startswith(("GET", "HEAD")) and "validate-yaml" not in line]


def problem(hub: Hub, folder: Path, **options: Any) -> Problem:
    """The one problem for which a push is refused."""
    (only,) = problems(send, hub, folder, **options, error=HubError)
    return only


# -- what arrives


def test_a_composed_folder_arrives_and_comes_apart(hub: Hub, base: Path, expanded: Path, tmp_path: Path) -> None:
    """The download verifies; its base and its expansions come back; its card says what lies in it."""
    extract_folder = extract(expanded, tmp_path / "own").path
    folder = compose(base, {"law": extract_folder, "art": extract_folder}, tmp_path / "composed").path
    done = send(hub, folder, check=True)
    downloaded = download(hub, tmp_path / "found")
    assert verify(downloaded, base, probes=None).passed
    assert digests(strip(downloaded, tmp_path / "back").path) == digests(base)
    records = dict.fromkeys((".gitattributes", "README.md", "surgery.json", "extract.json"), "")
    (blocks,) = map(load_file, extract_folder.glob("expansion-*.safetensors"))
    for name in ("law", "art"):
        first, second = (
            extract(path, tmp_path / f"{name}-{path.name}", name=name).path for path in (downloaded, folder)
        )
        assert digests(first) | records == digests(second) | records
        (taken,) = map(load_file, first.glob("expansion-*.safetensors"))
        assert taken.keys() == {renamed(block, name) for block in blocks}
        assert all(torch.equal(taken[renamed(block, name)], blocks[block]) for block in blocks)
        assert verify(apply(first, tmp_path / f"applied-{name}", base).path, base, probes=None, record=False).passed
    assert done.form == "expanded" and done.card_origin == "written"
    assert {file.origin for file in done.files if file.name.startswith("expansion-")} == {"model"}
    card = (downloaded / "README.md").read_text()
    assert "| paths | base, `law`, `art` |" in card and "| `law` | adapt | 0,2 |" in card
    assert "| router | posterior, all paths alike, switch rate 0.01 |" in card
    assert "| `recoverable` | holds |" in card and "`surgery.json` holds the hashes" in card
    assert 'model.set_expansion("law")' in card and "extract expanded --name law -o law" in card
    assert "license: mit" in card and "- composed" in card
    assert problem(hub, expanded).code == "repository-more-files", "on the same base"


@pytest.mark.parametrize(
    "form", mostly(("expanded", "routed", "fused", "deepened"), ("expanded", "routed").__contains__)
)
def test_a_download_is_the_folder_and_verifies_and_strips(
    hub: Hub, base: Path, expanded: Path, form: str, tmp_path: Path
) -> None:
    make: Any = {"routed": route_export, "fused": merge, "deepened": lambda _, out: expand(base, DEEPENED, out)}.get(
        form
    )
    folder = expanded if make is None else make(expanded, tmp_path / "made").path
    before = digests(folder)
    done = send(hub, folder, check=True)
    assert digests(folder) == before, "the folder is only read"
    downloaded = download(hub, tmp_path / "found")
    after = {name: digest for name, digest in digests(downloaded).items() if not name.startswith(".")}
    moved = before.pop("README.md")
    assert after.pop("README.base.md") == moved
    assert is_written_card((downloaded / "README.md").read_text())
    assert {**after, "README.md": "", "surgery.json": ""} == {**before, "README.md": "", "surgery.json": ""}
    manifests = [json.loads((path / "surgery.json").read_text()) for path in (folder, downloaded)]
    assert manifests[1]["base_files"]["README.md"].pop("stored_as") == "README.base.md"
    assert manifests[0]["base_files"]["README.md"].pop("stored_as") == "README.md"
    fused = [manifest.pop("fused") for manifest in manifests]
    assert manifests[0] == manifests[1] and (fused[0] is None) == (form != "fused")
    assert verify(downloaded, probes=None, record=False).passed
    blocks = merge(downloaded, tmp_path / "blocks", "blocks").path if form == "fused" else downloaded
    strip(blocks, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(base)
    assert done.commit and done.url == f"{hub.address}/{REPO}/commit/{done.commit}"
    assert hub.repositories[REPO].messages == ["Push an expanded model with scale-surgery"]
    assert done.is_private and "license: mit\n" in done.card


def test_a_second_push_of_the_same_folder_makes_no_commit(hub: Hub, expanded: Path) -> None:
    first, second = send(hub, expanded, check=True), send(hub, expanded, check=True)
    assert second.commit == first.commit and len(hub.repositories[REPO].messages) == 1
    assert (first.is_unchanged, second.is_unchanged) == (False, True)
    for done, title in ((first, "pushed"), (second, "nothing to push: the Hub has all files")):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(render_pushed(done))
        shown = console.export_text().splitlines()
        assert shown[0].strip() == title
        assert f"URL         {hub.address}/{REPO}" in [line.rstrip() for line in shown]


@pytest.mark.slow
def test_a_downloaded_push_is_pushed_again_with_a_new_card(hub: Hub, expanded: Path, tmp_path: Path) -> None:
    send(hub, expanded)
    downloaded = download(hub, tmp_path / "found")
    with edited(downloaded / "surgery.json") as record:
        record["expansions"]["default"]["training"] = [{"steps": 3, "trained_parameters": 5, "begun": "2026-01-02"}]
    send(hub, downloaded, repo="me/other")
    files = hub.files("me/other")
    assert files["README.md"].startswith(b"---\n") and b"# other\n" in files["README.md"]
    assert files["README.base.md"] == BASE_CARD and "README.base-2.md" not in files


@pytest.mark.parametrize("has_base", (True, False))
def test_what_the_hub_has_already_is_not_sent(hub: Hub, base: Path, expanded: Path, has_base: bool) -> None:
    shards = {name: digest for name, digest in digests(base).items() if name.endswith(".safetensors")}
    if has_base:
        hub.objects |= {digest: (base / name).read_bytes() for name, digest in shards.items()}
    done = send(hub, expanded)
    sent = list(expanded.glob("expansion-*.safetensors" if has_base else "*.safetensors"))
    assert sum(hub.received.values()) == sum(file.stat().st_size for file in sent)
    assert len(shards) > 1 and {file.name for file in done.files if file.origin == "base"} >= set(shards)


def test_code_that_no_release_wrote_is_told(hub: Hub, copied: Path) -> None:
    (copied / "expanded_model.py").write_text("# edited\n")
    with edited(copied / "surgery.json") as record:
        record["code"]["expanded_model.py"] = digests(copied)["expanded_model.py"]
    (note,) = [note for note in send(hub, copied, check=True).notes if "expanded_model.py" in note]
    assert "Read it before you let it run" in note


def test_nothing_goes_up_but_the_model_s_files(hub: Hub, copied: Path, tmp_path: Path) -> None:
    """No secrets, no links to elsewhere, no states of trainers, no pickles, no weights that no index names."""
    (tmp_path / "secret").write_text("key")
    left = (".env", ".ssh/id_rsa", "checkpoint-500/trainer_state.json", "runs/host/events.out.tfevents.1.host")
    left += ("training/checkpoint-7/optimizer.pt", "old.bin", "stray.safetensors", "x.tmp")
    for name in (*left, ".cache/lock", ".gitattributes", "notes.txt", "training/log.jsonl"):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes(b"x")
    (copied / "link.txt").symlink_to(tmp_path / "secret")
    (copied / "folder").symlink_to(tmp_path)
    (copied / "inside.txt").symlink_to("notes.txt")
    done = send(hub, copied)
    assert set(done.left_out) == {*left, "link.txt", "folder"}
    assert {".gitattributes", "notes.txt", "inside.txt", "training/log.jsonl"} <= set(hub.files(REPO))
    assert not {*left, "link.txt", ".cache/lock"} & set(hub.files(REPO))


def test_what_an_extract_does_not_list_is_no_part_of_it(hub: Hub, expanded: Path, tmp_path: Path) -> None:
    taken = extract(expanded, tmp_path / "extract").path
    strays = ("pytorch_model.bin", "model.safetensors", "helper.py")
    for name in (*strays, "picture.png"):
        (taken / name).write_bytes(b"x")
    (taken / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["helper.Tokenizer", null]}}')
    done = send(hub, taken)
    assert {*strays, "tokenizer_config.json"} == set(done.left_out)
    assert "picture.png" in hub.files(REPO) and not set(done.left_out) & set(hub.files(REPO))


def test_a_folder_that_changes_on_the_way_is_told(hub: Hub, copied: Path) -> None:
    def change() -> None:
        with edited(copied / "config.json") as config:
            config["another"] = 1

    hub.faults = [Fault(r"POST .*/preupload/main", act=change)]
    with refused("file-changed", copied / "config.json", CheckpointError):
        send(hub, copied)


def test_a_base_file_that_became_a_link_to_elsewhere_is_not_sent(hub: Hub, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (copied / "generation_config.json").unlink()
    (copied / "generation_config.json").symlink_to(tmp_path / "secret")
    for check in (True, False):
        with refused("file-is-link", "generation_config.json", CheckpointError):
            send(hub, copied, check=check)


def test_a_snapshot_of_the_hubs_cache_is_made_of_links(hub: Hub, expanded: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--me--wide" / "snapshots" / "abc", tmp_path / "models--me--wide" / "blobs"
    shutil.copytree(expanded, blobs)
    for name in digests(blobs):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / name)
    assert send(hub, snapshot).left_out == ()


def test_a_stock_export_is_pushed(hub: Hub, stock: Path, tmp_path: Path) -> None:
    done = send(hub, stock, check=True)
    downloaded = download(hub, tmp_path / "found")
    assert done.form == "stock" and "the code of `helper.py`" in (downloaded / "README.md").read_text()
    assert (downloaded / "README.base.md").read_bytes() == BASE_CARD
    assert torch.equal(*(load(path)(torch.arange(6)[None]).logits for path in (stock, downloaded)))
    repeated = send(hub, downloaded, repo="me/again", check=True)
    assert "license: mit\n" in repeated.card and "README.base-2.md" not in hub.files("me/again")


def test_a_stock_export_that_is_not_what_merge_wrote(hub: Hub, stock: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stock, tmp_path / "stock"))
    written = json.loads((folder / "merge.json").read_text())["files"]
    assert set(written) == set(digests(folder)) - {"merge.json"}
    name = sorted(file.name for file in folder.glob("model-*.safetensors"))[1]
    flip(folder / name)
    (folder / "LICENSE").unlink()
    (folder / "evil.py").write_text("import os\n")
    (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "a/b--c.D"}}')
    (folder / "notes.txt").write_text("welcome")
    details = (
        Problem("file-missing", "LICENSE"),
        Problem("stock-file-changed", name, found=digests(folder)[name], recorded=written[name]["sha256"]),
        Problem("stock-code-added", "evil.py"),
        Problem("stock-code-added", "processor_config.json"),
    )
    expected = Problem("push-not-merged", folder, *details)
    assert problems(send, hub, folder, check=True, error=CheckpointError) == [expected]
    with edited(folder / "merge.json") as record:
        record["files"] = None
    with refused("stock-without-hashes", folder / "merge.json", CheckpointError):
        send(hub, folder, check=True)
    assert changing(hub) == []


def test_an_extract_comes_back_whole_has_the_licence_and_is_checked(
    hub: Hub, base: Path, expanded: Path, tmp_path: Path
) -> None:
    folder = extract(expanded, tmp_path / "blocks").path
    done = send(hub, folder, check=True)
    assert done.form == "extract" and not [file for file in done.files if file.origin == "base"]
    assert "license: mit\n" in done.card and not any("license" in note for note in done.notes)
    downloaded = download(hub, tmp_path / "found")
    assert digests(apply(downloaded, tmp_path / "whole", base=base).path) == digests(expanded)
    assert send(hub, downloaded, repo="me/again", check=True).form == "extract"
    with edited(folder / "extract.json") as record:
        record["licence"] = {"tags": ["x"]}
    assert "license" not in send(hub, folder, dry_run=True).card
    flip(folder / "expansion-default-00001-of-00001.safetensors")
    hub.requests.clear()
    with pytest.raises(CheckpointError, match=r"^expansion-default-00001-of-00001\.safetensors: sha256 "):
        send(hub, folder, check=True)
    assert changing(hub) == []


def test_the_card_of_an_extract_shows_what_was_verified_of_its_tensors(hub: Hub, copied: Path, tmp_path: Path) -> None:
    verify(copied)
    card = send(hub, extract(copied, tmp_path / "blocks").path, check=True, dry_run=True).card
    assert "| `output_at_init` | holds |" in card and "They are about the whole model, applied to its base" in card
    with edited(copied / "expansion-default-00001-of-00001.safetensors") as tensors:
        name = next(name for name in tensors if name.endswith("w21"))
        tensors[name] += 1
    other = extract(copied, tmp_path / "other").path
    assert "No verification is recorded" in send(hub, other, check=True, dry_run=True).card


def test_prompts_of_users_are_not_published(hub: Hub, copied: Path, tmp_path: Path) -> None:
    """What a base wrote for its own rehearsal begins with the instructions that somebody gave."""
    (copied / "training").mkdir()
    for name in ("rehearsal.jsonl", "log.jsonl"):
        (copied / "training" / name).write_text("{}\n")
    for number, folder in enumerate((copied, extract(copied, tmp_path / "blocks").path)):
        done = send(hub, folder, repo=f"me/{number}")
        names = {file.name for file in done.files}
        assert "training/log.jsonl" in names and "training/rehearsal.jsonl" not in names
    assert "training/rehearsal.jsonl" in extract(copied, tmp_path / "again").left_out
    assert "training/rehearsal.jsonl" in send(hub, copied, dry_run=True).left_out


# -- what breaks on the way


def test_a_second_push_sends_only_what_is_missing(hub: Hub, expanded: Path) -> None:
    wanted = {f"/lfs/{digests(expanded)[file.name]}" for file in expanded.glob("*.safetensors")}
    lost = f"/lfs/{digests(expanded)['expansion-default-00001-of-00001.safetensors']}"
    hub.faults = [Fault(f"PUT {lost}", 403, message="Request has expired")]
    answer = Problem("hub-forbidden", "the Hub", error="403 Request has expired")
    assert problem(hub, expanded) == Problem("push-broken-off", REPO, answer)
    assert REPO in hub.repositories and hub.files(REPO) == {".gitattributes": b"\n"}, "nothing, not a part"
    arrived = {f"/lfs/{oid}" for oid in hub.objects}
    assert arrived and lost not in arrived
    hub.received.clear()
    send(hub, expanded)
    assert set(hub.received) == wanted - arrived


@pytest.mark.parametrize(
    ("status", "code"),
    (
        (401, "hub-unauthorised"),
        (403, "hub-forbidden"),
        (409, "hub-refuses"),
        (429, "hub-too-many-requests"),
        (500, "hub-in-trouble"),
    ),
)
def test_a_refusal_says_what_to_do(hub: Hub, expanded: Path, status: int, code: str) -> None:
    hub.faults = [Fault(f"GET /api/models/{REPO}", status)]
    answer = Problem(code, "the Hub", error=f"{status} as the test asked")
    assert problem(hub, expanded) == Problem("push-refused", REPO, answer)


def test_a_file_that_does_not_arrive_as_it_is_is_named(hub: Hub, copied: Path) -> None:
    """The Hub keeps what it has of a file that a .gitignore covers."""
    name = "expansion-default-00001-of-00001.safetensors"
    send(hub, copied)
    shake(copied)
    (copied / "more.txt").write_text("new")
    hub.gitignore = (".safetensors", ".txt")
    assert problems(send, hub, copied, error=HubError) == [
        Problem("pushed-file-missing", f"{REPO}: more.txt"),
        Problem("pushed-file-differs", f"{REPO}: {name}"),
    ]
    hub.gitignore = None
    assert send(hub, copied).commit


def test_a_hub_that_is_not_there_or_does_not_answer(hub: Hub, expanded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.3)
    hub.faults = [Fault(f"GET /api/models/{REPO}", act=lambda: time.sleep(1))]
    (answer,) = problem(hub, expanded).details
    assert answer.code == "hub-unreachable" and "timed out" in answer.found
    # the Hub's own address comes back before the Hub is stopped
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        failure = problem(hub, expanded)
    answer = Problem("hub-unreachable", "the Hub", error="[Errno 111] Connection refused")
    assert failure == Problem("push-refused", REPO, answer)


# -- what is refused before anything is sent


def test_a_repository_that_is_a_path() -> None:
    for repo in (
        "./wide",
        "/srv/wide",
        "wide",
        "a/b/c",
        "me/",
        "/me",
        "~/wide",
        "me/a--b",
        "me/x.git",
        "https://hf.co/me/x",
    ):
        with refused("hub-id-invalid", repo, HubError):
            check_repo_id(repo)
    for repo in ("me/wide", "Qwen/Qwen3-0.6B", "a_b/c.d_e-f", "0/1"):
        check_repo_id(repo)


def test_no_token_and_no_write_access(hub: Hub, expanded: Path) -> None:
    for token, repo, code, values in (
        (None, REPO, "hub-token-missing", {}),
        ("hf_reader", REPO, "hub-token-read-only", {}),
        ("hf_writer", "they/wide", "hub-token-of-other", {"user": "me", "owner": "they"}),
    ):
        expected = Problem(code, repo, **values)
        assert problem(hub, expanded, token=token, repo=repo) == expected
        looked = send(hub, expanded, token=token, repo=repo, dry_run=True)
        assert looked.obstacle == str(expected) and looked.files
    assert send(hub, expanded, repo="lab/wide", dry_run=True).obstacle is None, "a member of lab"
    # of a repository that is there the Hub says it
    hub.repositories |= {repo: Repository(private=False) for repo in ("they/wide", REPO)}
    for token, repo in (("hf_writer", "they/wide"), ("hf_reader", REPO)):
        refusal = problem(hub, expanded, token=token, repo=repo)
        assert (refusal.code, refusal.where) == ("push-refused", repo)
        assert [answer.code for answer in refusal.details] == ["hub-forbidden"]
    assert changing(hub) == []


def test_a_folder_that_does_not_verify_is_not_pushed(hub: Hub, copied: Path) -> None:
    shard = next(copied.glob("model-*.safetensors"))
    flip(shard)
    (expected,) = problems(send, hub, copied, check=True, error=CheckpointError)
    assert (expected.code, expected.where) == ("push-unverified", str(copied))
    assert any(finding.found.startswith(f"{shard.name}: bytes differ") for finding in expected.details)
    assert changing(hub) == []
    assert not send(hub, copied).is_checked
    assert hub.files(REPO)[shard.name] == shard.read_bytes()


def test_a_folder_that_is_no_work_of_ours(hub: Hub, base: Path) -> None:
    with refused("folder-not-ours", base, CheckpointError):
        send(hub, base)


def test_a_repository_is_private_unless_public_is_asked_for_and_one_that_exists_stays(hub: Hub, expanded: Path) -> None:
    for repo, is_private, options in (
        ("me/hidden", True, {"private": True}),
        ("me/unsaid", True, {}),
        (REPO, False, {"private": False}),
    ):
        assert send(hub, expanded, repo=repo, **options).is_private == is_private
        assert send(hub, expanded, repo=repo).is_private == hub.repositories[repo].private == is_private
    for repo, found, expected in ((REPO, "public", "private"), ("me/hidden", "private", "public")):
        otherwise = Problem("repository-visible-otherwise", repo, found=found, expected=expected)
        assert problem(hub, expanded, repo=repo, private=expected == "private") == otherwise
    assert [len(hub.repositories[repo].messages) for repo in (REPO, "me/hidden")] == [1, 1]


def test_a_licence_is_for_a_card_that_is_written(hub: Hub, copied: Path) -> None:
    assert "license: apache-2.0\n" in send(hub, copied, license="apache-2.0").card
    hub.repositories["me/carded"] = Repository(private=True)
    hub.repositories["me/carded"].branches["main"] = {"README.md": b"# Mine\n"}
    there = Problem("license-beside-card", "--license", license="mit", place="me/carded")
    assert problem(hub, copied, repo="me/carded", license="mit") == there
    (copied / "README.md").write_text("# Mine\n")
    here = Problem("license-beside-card", "--license", license="mit", place=copied)
    assert problem(hub, copied, repo="me/other", license="mit") == here
    assert "license: mit\n" in send(hub, copied, repo="me/other", license="mit", write_card=True).card


def test_another_model_s_files_are_not_mixed_with_it(hub: Hub, expanded: Path) -> None:
    hub.repositories[REPO] = Repository(private=False)
    there = hub.repositories[REPO].branches["main"]
    # a template or a tokenizer that this model does not have would change how it is asked
    there |= {
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer.model": b"",
        "additional_chat_templates/a.jinja": b"",
    }
    there |= {"model.safetensors": b"another model", "odd [1].py": b"", "notes.txt": b"stays"}
    files = ("additional_chat_templates/a.jinja", "chat_template.jinja", "model.safetensors", "odd [1].py")
    files += ("tokenizer.model",)
    assert problem(hub, expanded) == Problem("repository-more-files", REPO, files=files)
    assert hub.repositories[REPO].messages == []
    done = send(hub, expanded, replace=True)
    assert done.removed == files
    assert not set(done.removed) & set(hub.files(REPO)) and hub.files(REPO)["notes.txt"] == b"stays"


def test_a_model_of_somebody_else_is_not_overwritten(hub: Hub, base: Path, expanded: Path) -> None:
    """The base's own repository above all: its shards have the same names."""
    hub.repositories["me/base"] = Repository(private=False)
    there = {file.name: file.read_bytes() for file in base.iterdir() if file.is_file()}
    hub.repositories["me/base"].branches["main"] = dict(there)
    expected = Problem("repository-not-ours", "me/base")
    assert problem(hub, expanded, repo="me/base") == expected
    assert send(hub, expanded, repo="me/base", dry_run=True).obstacle == str(expected)
    assert hub.files("me/base") == there
    assert send(hub, expanded, repo="me/base", replace=True).commit


def test_a_model_on_another_base_is_not_overwritten(
    hub: Hub, base_of: Any, copied: Path, stock: Path, tmp_path: Path
) -> None:
    send(hub, copied)
    other_folder = expand(base_of("llama", tied=True, dtype="bfloat16"), REQUESTS["adapt"], tmp_path / "other").path
    before = hub.files(REPO)
    expected = Problem("repository-other-base", REPO, file="surgery.json")
    assert problem(hub, other_folder) == expected
    assert send(hub, other_folder, dry_run=True).obstacle == str(expected)
    assert hub.files(REPO) == before
    assert send(hub, shake(copied)).commit, "the same base, other blocks"
    assert send(hub, other_folder, replace=True).commit
    send(hub, stock, repo="me/stock")
    expected = Problem("repository-other-base", "me/stock", file="merge.json")
    assert problem(hub, other_folder, repo="me/stock") == expected


def test_bases_are_compared_by_their_shards() -> None:
    record = {"base_files": {"model.safetensors": {"sha256": "a"}, "README.md": {"sha256": "b"}}}
    assert is_same_base(record, json.dumps({"base_files": {"other.safetensors": {"sha256": "a"}}}))
    another = {"base_files": {"model.safetensors": {"sha256": "b"}}}
    for there in (another, {"base_files": {}}, {}, [], {"base_files": [1]}):
        assert not is_same_base(record, json.dumps(there))
    assert not is_same_base(record, "no JSON")


def test_a_dry_run_changes_nothing(hub: Hub, expanded: Path) -> None:
    looked = send(hub, expanded, dry_run=True)
    assert changing(hub) == [] and hub.repositories == {}
    assert (looked.commit, looked.url, looked.obstacle) == (None, None, None)
    done = send(hub, expanded)
    assert [(file.name, file.bytes) for file in looked.files] == [
        (name, len(content)) for name, content in sorted(hub.files(REPO).items()) if name != ".gitattributes"
    ]
    assert looked.files == done.files and looked.card == done.card == hub.files(REPO)["README.md"].decode()


# -- where it goes


def test_a_pull_request_needs_a_repository_and_leaves_the_branch_as_it_is(hub: Hub, expanded: Path) -> None:
    expected = Problem("repository-missing", "they/none", own="me/none")
    assert problem(hub, expanded, repo="they/none", create_pr=True) == expected
    assert send(hub, expanded, repo="they/none", create_pr=True, dry_run=True).obstacle == str(expected)
    hub.repositories["they/wide"] = Repository(private=False)
    before = hub.files("they/wide")
    done = send(hub, expanded, repo="they/wide", create_pr=True, commit_message="Widened")
    assert done.url == f"{hub.address}/they/wide/discussions/1"
    assert hub.files("they/wide") == before
    assert "surgery.json" in hub.files("they/wide", "refs/pr/1")
    assert hub.repositories["they/wide"].messages == ["Widened"]


def test_a_branch_is_made_and_written(hub: Hub, expanded: Path) -> None:
    send(hub, expanded, revision="v2")
    assert hub.files(REPO) == {".gitattributes": b"\n"}
    assert "surgery.json" in hub.files(REPO, "v2")
    assert send(hub, expanded, revision="v2").commit


# -- the model card


def test_a_card_of_the_user_s_own_is_pushed_as_it_is(hub: Hub, base_of: Any, tmp_path: Path) -> None:
    folder = expand(base_of("llama"), REQUESTS["preserve"], tmp_path / "wide").path
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    assert send(hub, folder).card_origin == "own"
    assert hub.files(REPO)["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    assert verify(folder, probes=None, record=False).passed
    given = tmp_path / "card.md"
    given.write_text("---\ntags: [x]\n---\nGiven.\n")
    send(hub, folder, card=given)
    assert hub.files(REPO)["README.md"] == given.read_bytes()
    send(hub, folder, write_card=True)
    assert is_written_card(hub.files(REPO)["README.md"].decode())


@pytest.mark.slow
def test_a_card_of_one_s_own_in_place_of_the_base_s(hub: Hub, copied: Path, tmp_path: Path) -> None:
    mine = tmp_path / "card.md"
    mine.write_text("---\nlicense: mit\n---\nMine.\n")
    shutil.copyfile(mine, copied / "README.md")
    for options in ({}, {"write_card": True}):
        details = (
            Problem("verify-finding", text="README.md: bytes differ from the base's README.md"),
            Problem("card-of-base-changed", "README.md"),
        )
        expected = Problem("push-unverified", copied, *details)
        assert problems(send, hub, copied, check=True, **options, error=CheckpointError) == [expected]
    assert changing(hub) == []
    assert send(hub, copied).card_origin == "own"
    assert hub.files(REPO)["README.md"] == mine.read_bytes() and "README.base.md" not in hub.files(REPO)
    (copied / "README.md").write_bytes(BASE_CARD)
    send(hub, copied, card=mine, check=True)
    files = hub.files(REPO)
    assert (files["README.md"], files["README.base.md"]) == (mine.read_bytes(), BASE_CARD)


def test_a_certificate_is_shown_until_the_model_changes(hub: Hub, copied: Path) -> None:
    for seed in (1, 2):  # the second time as many tensors are trained as before, but they are others
        date = verify(copied, probes=Probes(max_new_tokens=0)).date
        shown = f"`scale-surgery verify`, {date}, "
        assert shown in send(hub, copied, check=True).card
        assert "No verification is recorded" in send(hub, copied).card, "nobody looked"
        card = send(hub, shake(copied, seed), check=True).card
        assert shown not in card and "`scale-surgery verify --files-only`" in card


def test_a_card_that_was_edited_in_the_repository_stays(hub: Hub, expanded: Path) -> None:
    send(hub, expanded)
    there = hub.repositories[REPO].branches["main"]
    assert isinstance(there["README.md"], bytes)
    there["README.md"] = edited = there["README.md"].replace(b"# wide", b"# Wide, my model")
    done = send(hub, expanded)
    assert hub.files(REPO)["README.md"] == edited
    assert (done.card, done.card_origin) == (None, "kept")
    assert done.notes == (
        f"README.md in {REPO} was written by somebody and stays, though it may describe an earlier push; --write-card "
        "replaces it.",
    )
    send(hub, expanded, write_card=True)
    assert b"# wide" in hub.files(REPO)["README.md"]


def test_a_card_that_is_edited_while_files_are_sent_stays(hub: Hub, copied: Path) -> None:
    send(hub, copied)
    (copied / "more.txt").write_text("new")

    def edit() -> None:
        hub.repositories[REPO].branches["main"]["README.md"] = b"# My own words"

    hub.faults = [Fault(r"POST .*/preupload/main", act=edit)]
    answer = Problem("hub-changed", "the Hub", error="412 the branch is at another commit")
    assert problem(hub, copied) == Problem("push-broken-off", REPO, answer)
    assert send(hub, copied).card_origin == "kept"
    assert hub.files(REPO)["README.md"] == b"# My own words"


def test_the_hub_s_word_on_a_card(hub: Hub, expanded: Path, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("---\nbase_model: /srv/models/base\n---\n")
    reason = '"base_model" with value "/srv/models/base" is not valid. Use a model id from https://hf.co/models.'
    answer = Problem("hub-refuses", "the Hub", error=f"400 {reason.rstrip('.')}")
    assert problem(hub, expanded, card=card) == Problem("card-metadata-refused", "README.md", answer)
    card.write_text("---\nlicense: [\n---\n")
    with refused("card-metadata-unreadable", "README.md", HubError):
        send(hub, expanded, card=card)
    card.write_bytes(b"\xff")
    with refused("card-unreadable", card, HubError):
        send(hub, expanded, card=card)
    assert changing(hub) == []


# -- the command


def test_the_command_in_a_process_of_its_own(hub: Hub, expanded: Path, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    variables |= {"HF_TOKEN": "hf_writer", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
    command = [sys.executable, "-m", "scale_surgery", "push", str(expanded), REPO, "--json", "--no-verify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["commit"] and "hf_writer" not in done.stdout + done.stderr
    assert {file["name"] for file in result["files"]} == set(hub.files(REPO)) - {".gitattributes"}


@pytest.mark.slow
def test_the_command_lists_what_it_sends(hub: Hub, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied / "old.bin").write_bytes(b"x")
    shown = run("push", copied, REPO, "--token", "hf_writer", "--dry-run", "--show-card")
    text = " ".join(shown.output.split())
    for part in ("LICENSE 3 B the base's, unchanged", "left out: old.bin", "# wide", "would be pushed"):
        assert part in text
    assert f"repository {REPO}, private" in text and "Hub would accept the push" in text and "hf_writer" not in text
    # there is no token
    refused = run("push", copied, REPO, "--dry-run", code=1).output
    assert all(len(line.rstrip()) <= 80 for line in refused.splitlines())
    sent = run("push", copied, REPO, "--token", "hf_writer")
    assert f"URL {hub.address}/{REPO} " in " ".join(sent.output.split())


def test_ctrl_c(hub: Hub, expanded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults = [Fault(r"POST .*/preupload/main", act=lambda: os.kill(os.getpid(), signal.SIGINT))]
    # a shell lets what it runs in the background ignore interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = run("push", expanded, REPO, "--token", "hf_writer", "--no-verify", "-q", code=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.output == f"error: {Problem('push-interrupted', REPO)}\n"
    assert hub.files(REPO) == {".gitattributes": b"\n"}
    run("push", expanded, REPO, "--token", "hf_writer", "--no-verify", "-q")


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        (("--create-pr", "--revision", "v2"), "--create-pr goes to the main branch: leave out --revision."),
        (("--card", "x.md", "--write-card"), "Give --card or --write-card, one of the two."),
    ),
)
def test_options_that_do_not_go_together(expanded: Path, options: tuple[str, ...], expected: str) -> None:
    assert expected in run("push", expanded, REPO, *options, code=2).output


@pytest.mark.parametrize("flag", ("--public", "--private"))
def test_what_a_dry_run_proposes_can_be_typed(hub: Hub, expanded: Path, flag: str) -> None:
    shown = run("push", expanded, "me/new", flag, "--dry-run", "--no-verify", "--token", "hf_writer").stdout
    line = shlex.join(["scale-surgery", "push", str(expanded), "me/new", flag, "--no-verify"])
    assert shown.splitlines()[-1].split(maxsplit=1) == ["next", line]
    assert run(*shlex.split(line)[1:], "--dry-run", "--token", "hf_writer").stdout == shown
