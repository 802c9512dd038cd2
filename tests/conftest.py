"""Shared fixtures: tiny models of every family, their expansions, each made once a session, without a network."""

from __future__ import annotations

import os
import tempfile

# before transformers is imported: nothing is looked up on the Hub, nothing is written into the user's cache
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="scale-surgery-tests-")
for _name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN"):
    os.environ.pop(_name, None)
# before torch is imported, and for the processes that tests start: tiny matrices gain nothing from threads, threads of
# a busy machine wait for each other, and another number of threads may round the last bit another way
os.environ["OMP_NUM_THREADS"] = "1"

# torch and transformers make a million objects that stay; looking through them for garbage, again and again, takes a
# fifth of the time of the tests. No collection while they are imported; afterwards see out_of_the_collectors_sight
import gc

gc.disable()

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import other
from rich.console import Console
from safetensors.torch import load_file, save_file

from scale_surgery import modeling
from scale_surgery.errors import Problem, SurgeryError
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import Expansion, expand
from tests.long import read_long
from tests.tiny import save_tiny

transformers.utils.logging.disable_progress_bar()
STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"

# a request for each way in which a layer can be expanded; w22 random, so that nothing hides behind a zero
REQUESTS = {
    "preserve": Request("1-2", init_w22="random"),
    "adapt": Request("0,2", variant="adapt", collaborate="both", init_w22="random"),
    "adapt_without_up_stream": Request("1", variant="adapt", up_width=0, init_w22="random"),
}
# the lowest layer and the last one, so that something is renumbered and something is not
DEEPENED = Request("0,2", method="depth")


# their tests run in forks of one process, which takes ten seconds to begin: all in one worker
FORKING = {
    "learning/test_killed.py",
    "learning/test_processes.py",
    "surgery/test_interruptions.py",
    "surgery/test_own_code.py",
    "test_torture.py",
    "training/test_allocator.py",
    "training/test_train.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the longest tests of each file to `make test-slow`; see tests/long.py."""
    names = read_long()
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers whole, as `--dist loadfile` has it, and those of FORKING together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "forking" if file.removeprefix("tests/") in FORKING else file

    return Files(config, log)


@dataclass(frozen=True)
class Pair:
    """A base model and its expansion, on disk and loaded when asked for; tests that change a model load their own."""

    base_path: Path
    path: Path
    expansion: Expansion

    @functools.cached_property
    def base(self) -> Any:
        return load(self.base_path)

    @functools.cached_property
    def expanded(self) -> Any:
        return load(self.path)

    def load(self, **options: Any) -> Any:
        """Load the expanded model once more, for a test that changes it."""
        return load(self.path, **options)


class Bars(dict[str, list[int]]):
    """Bars by label: how much there is to do, and how much is done; in front of `stop` somebody presses Ctrl-C."""

    def __init__(self, stop: str = "") -> None:
        super().__init__()
        self.stop = stop
        self.seen: list[tuple[str, list[int]]] = []  # also those whose label came again

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[..., None]]:
        """Begin one."""
        self[label] = bar = [total, 0]
        self.seen.append((label, bar))

        def advance(amount: int, note: str = "") -> None:
            bar[1] += amount
            if label == self.stop:
                raise KeyboardInterrupt

        yield advance

    @property
    def unfinished(self) -> list[tuple[str, list[int]]]:
        """Those that did not end where they said they would."""
        return [(label, bar) for label, bar in self.seen if bar[0] != bar[1]]


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder, by relative name."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextlib.contextmanager
def edited(file: Path) -> Iterator[dict[str, Any]]:
    """What a JSON or a safetensors file holds, to be changed while the block runs."""
    if file.suffix == ".safetensors":
        yield (tensors := load_file(file))
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        yield (content := json.loads(file.read_text()) if file.is_file() else {})
        file.write_text(json.dumps(content, indent=2) + "\n")


def refusal(call: Callable[..., object], *args: Any, error: type[Exception] = SurgeryError, **options: Any) -> str:
    """What an operation says when it refuses."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def problems(
    call: Callable[..., object], *args: Any, error: type[SurgeryError] = SurgeryError, **options: Any
) -> list[Problem]:
    """The problems for which an operation refuses."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return list(caught.value.problems)


@contextmanager
def refused(code: str, where: object, error: type[SurgeryError] = SurgeryError) -> Iterator[None]:
    """Check that a block is refused for one problem, of this code and at this place."""
    with pytest.raises(error) as caught:
        yield
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [(code, f"{where}")]


def flip(file: Path, place: int = -1) -> None:
    """Change one bit of a file, of its last byte unless another place is given."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def shown(renderable: object, width: int = 80) -> str:
    """What a terminal without colours shows of something."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def shake(path: Path, seed: int = 1, by: float = 0.1) -> Path:
    """Change every expansion tensor on disk, as training does, so that nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(seed)
    for file in path.glob("expansion-*.safetensors"):
        with edited(file) as tensors:
            for name, tensor in tensors.items():
                tensors[name] = (tensor.float() + by * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    return path


def name_base(path: Path, name: str, revision: str) -> None:
    """Let an expanded folder say that its base is on the Hub: in its record, and where its config keeps its origin."""
    with edited(path / "surgery.json") as record, edited(path / "config.json") as config:
        for expansion in config["scale_surgery"]["expansions"]:
            expansion["origin"].update(base_name=name, base_revision=revision)
        record.update(base_name=name, base_revision=revision)


def load(path: Path, **options: Any) -> Any:
    """Load a model without remote code, for inference."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.fixture(scope="session", autouse=True)
def registered() -> Iterator[None]:
    """Register the expanded families, and remove the session's cache afterwards."""
    modeling.register()
    yield
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """What tests write outlives no loss of power: the bytes are the same, and ten thousands of waits are saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def nobody_installs_deepspeed_meanwhile() -> Iterator[None]:
    """accelerate looks through the whole path for it whenever a model is saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other, "is_deepspeed_available", functools.cache(other.is_deepspeed_available))
        yield


@pytest.fixture(scope="session", autouse=True)
def nobody_reads_what_is_not_logged() -> Iterator[None]:
    """transformers writes out each config that it reads, for a line that is not shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture
def refuse_to_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let the system refuse that a file gets its name, as a disk that fails does, also for a user who may all."""
    replace = Path.replace

    def refuse(wanted: Path) -> None:
        def checked(file: Path, target: Path) -> Path:
            if target == wanted:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file), None, str(target))
            return replace(file, target)

        monkeypatch.setattr(Path, "replace", checked)

    return refuse


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails: what is refused is refused before."""

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("scale_surgery.running.loading.loaded", loaded)


@pytest.fixture(scope="session")
def begun() -> Iterator[int]:
    """Counts the tests of a session."""
    return itertools.count()


@pytest.fixture(autouse=True)
def out_of_the_collectors_sight(begun: Iterator[int]) -> None:
    """After the first test, which imports most, and then at every tenth: hide from the collector what is to stay."""
    if next(begun) % 10 == 1:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny base model: a tied one is sharded, an untied one is a single file."""

    @functools.cache
    def make(family: str, dtype: str = "float32", tied: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("base") / f"{family}_{dtype}_{'tied' if tied else 'untied'}"
        shard_size = "30KB" if tied else "1GB"
        return save_tiny(folder, family, dtype=getattr(torch, dtype), shard_size=shard_size, tie_word_embeddings=tied)

    return make


@pytest.fixture(scope="session")
def made_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Expand a tiny base model several times: see `tests.composed`."""
    from tests.composed import make_expansions

    @functools.cache
    def make(family: str, names: tuple[str, ...], dtype: str = "float32") -> Any:
        return make_expansions(base_of, tmp_path_factory.mktemp(family), family, names, dtype)

    return make


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Expansions of a tiny model with a tokenizer, and a composed folder of them: see `tests.composed`."""
    from tests.composed import make_speaking

    return make_speaking(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="session")
def pair_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Expand a tiny base model by one of REQUESTS, or duplicate layers."""

    @functools.cache
    def make(family: str, request: str = "preserve", dtype: str = "float32", tied: bool = False) -> Pair:
        base = base_of(family, dtype, tied)
        asked = DEEPENED if request == "deepened" else REQUESTS[request]
        expansion = expand(base, asked, tmp_path_factory.mktemp("expanded") / f"{base.name}_{request}")
        return Pair(base, expansion.path, expansion)

    return make


@pytest.fixture(scope="session")
def deep_of(pair_of: Callable[..., Pair]) -> Callable[..., Pair]:
    """Duplicate layers of a tiny base model."""
    return lambda family="llama", *form, **options: pair_of(family, "deepened", *form, **options)


@pytest.fixture
def llama(pair_of: Callable[..., Pair]) -> Pair:
    """The tiny llama, single file, untied, preserve."""
    return pair_of("llama")


@pytest.fixture
def llama_base(base_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the tiny llama's folder, to be damaged by a test."""
    return Path(shutil.copytree(base_of("llama"), tmp_path / "base"))


@pytest.fixture
def sharded_base(base_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the tiny sharded llama's folder, to be damaged by a test."""
    return Path(shutil.copytree(base_of("llama", tied=True), tmp_path / "sharded"))


@pytest.fixture(scope="session")
def stories() -> Path:
    """A small trained model, where the workshop has it."""
    if not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not there; it belongs to the workshop, not to the project")
    return STORIES
