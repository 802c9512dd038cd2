"""Make a release out of the last commit and try it as a user does; nothing is published.

`make release` runs this in an environment with the pinned build tools. Each step stops at the first wrong thing:

1. build: sdist and wheel of two clean clones are the same, byte by byte;
2. metadata: `twine check --strict`, a classifier for each release of Python, the version in CHANGELOG and CITATION;
3. files: the sdist has the files of release/sdist.txt, and the wheel has the package;
4. wheel: installed alone, without constraints, it runs `scale-surgery demo` and the quick start of README.

What an index needs and a trial does not is listed at the end; with --to-publish, it is an error.
`python release/check.py --list` writes release/sdist.txt again. Of this file, tests import the functions.
"""

from __future__ import annotations

import argparse
import difflib
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = Path("release", "sdist.txt")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_MODEL = "Qwen/Qwen3-0.6B-Base"
PYTHON = "Programming Language :: Python :: 3."
NEWEST = 14
# texts that the quick start names
TEXTS = {
    "domain.jsonl": "".join(f'{{"text": "A new text, number {number}."}}\n' for number in range(400)),
    "held_out.jsonl": "".join(f'{{"text": "A new text, number {number}."}}\n' for number in range(400, 440)),
    "general.txt": "\n\n".join(f"An old text, number {number}." for number in range(40)),
}


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return its output; stop if it fails."""
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return str(done.stdout)


def require(wrong: list[str], title: str) -> None:
    """Stop and list what is wrong, if anything is."""
    if wrong:
        sys.exit("\n".join([title, *wrong]))


def build(place: Path) -> tuple[Path, Path]:
    """Build sdist and wheel from a clean clone of the last commit; return the clone, and the folder that holds both."""
    clone, output = place / "clone", place / "dist"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone)
    # the clone of a clone has the branch that is checked out, which may be none
    run("git", "-C", clone, "checkout", "--quiet", run("git", "-C", ROOT, "rev-parse", "HEAD").strip())
    # times in archives are those of the commit, so that a second build gives the same bytes
    epoch = run("git", "-C", clone, "log", "-1", "--format=%ct").strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PIP_CONSTRAINT": str(clone / "constraints.txt")}
    run(sys.executable, "-m", "build", "--outdir", output, clone, env=environment, stderr=subprocess.STDOUT)
    return clone, output


def differing(first: Path, second: Path) -> list[str]:
    """List the files of two folders that are not the same, byte by byte."""
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (first, second)]
    return sorted(name for name in files[0].keys() | files[1].keys() if files[0].get(name) != files[1].get(name))


def sdist_files(sdist: Path) -> list[str]:
    """List the files of an sdist, without the folder that holds them all."""
    with tarfile.open(sdist) as archive:
        return sorted(member.name.partition("/")[2] for member in archive.getmembers() if member.isfile())


def wheel_files(wheel: Path) -> list[str]:
    """List the files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def changes(listed: list[str], found: list[str]) -> list[str]:
    """List the files that are missing (-) and those that are new (+)."""
    return [line for line in difflib.ndiff(listed, found) if line[0] in "-+"]


def read_metadata(wheel: Path) -> Message:
    """Read the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def wrong_classifiers(metadata: Message) -> list[str]:
    """List the classifiers of releases of Python that are missing or too many."""
    oldest = int(str(metadata["Requires-Python"]).removeprefix(">=3."))
    named = {int(line.removeprefix(PYTHON)) for line in metadata.get_all("Classifier", []) if line.startswith(PYTHON)}
    return [f"{PYTHON}{minor}" for minor in sorted(set(range(oldest, NEWEST + 1)) ^ named)]


def without_version(folder: Path, version: str) -> list[str]:
    """List the files of a clone that do not name the version."""
    lines = {"CHANGELOG.md": f"## [{version}]", "CITATION.cff": f"version: {version}\n"}
    return [name for name, line in lines.items() if line not in (folder / name).read_text(encoding="utf-8")]


def missing_to_publish(metadata: Message) -> list[str]:
    """List what a release on an index still needs, and a trial does not."""
    links = re.findall(r"\]\((?!https://|#)([^)\s]+)\)", str(metadata.get_payload()))
    missing = [] if metadata.get_all("Project-URL") else ["[project.urls] in pyproject.toml"]
    return missing + ([f"{len(links)} links of README that are relative lead nowhere on an index"] if links else [])


def quick_start(readme: str, model: str) -> list[tuple[str, str]]:
    """Return the quick start's blocks, each with its language, on another model."""
    section = readme.partition("\n## Quick start\n")[2].partition("\n## ")[0]
    blocks = [(language, body.replace(NAMED_MODEL, model)) for language, body in BLOCK.findall(section)]
    require([] if [language for language, _ in blocks] == ["sh", "python"] else ["README.md"], "no quick start")
    return blocks


def install_alone(wheel: Path, place: Path, torch: str) -> Path:
    """Install a wheel in a new environment, without constraints; return the folder of its programs."""
    venv.create(place, with_pip=True)
    programs = place / "bin"
    environment = without_settings()
    if torch:
        run(programs / "pip", "install", "--quiet", torch, env=environment)
    run(programs / "pip", "install", "--quiet", wheel, env=environment)
    run(programs / "pip", "check", env=environment)
    return programs


def without_settings() -> dict[str, str]:
    """Return the environment of a user, who has neither constraints nor a path to the source."""
    return {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}


def try_wheel(programs: Path, place: Path, readme: str) -> None:
    """Run the demo and the quick start of README where only the wheel is."""
    place.mkdir()
    environment = {**without_settings(), "PATH": f"{programs}:{os.environ['PATH']}"}
    options = {"cwd": place, "env": environment, "stdin": subprocess.DEVNULL}
    where = "from scale_surgery.biographies import SHIPPED_MODEL; print(SHIPPED_MODEL)"
    shipped = Path(run(programs / "python", "-c", where, **options).strip())
    require([] if shipped.is_relative_to(programs.parent) else [str(shipped)], "the package is not that of the wheel:")
    demo = run(programs / "scale-surgery", "demo", **options)
    say(*demo.rstrip().splitlines()[-12:])
    shutil.copytree(shipped, place / "biographies")
    for name, text in TEXTS.items():
        (place / name).write_text(text, encoding="utf-8")
    for language, body in quick_start(readme, "biographies"):
        program = ("sh", "-ex", "-c") if language == "sh" else (programs / "python", "-c")
        run(*program, body, **options)
    wrong = differing(place / "biographies", place / "qwen3-again")
    require(wrong, "strip did not give the base again:")


def say(*lines: str) -> None:
    """Print lines at once."""
    print(*lines, sep="\n", flush=True)


def check(torch: str, *, to_publish: bool) -> None:
    """Build, check and try a release, and leave it in dist/."""
    started = time.monotonic()
    if run("git", "-C", ROOT, "status", "--porcelain"):
        say("changes that are not committed are in no release")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (clone, built), (_, again) = build(place / "first"), build(place / "second")
        require(differing(built, again), "a second build gave other bytes:")
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        say(*(f"built     {file.name}, {file.stat().st_size:,} bytes, twice the same" for file in (sdist, wheel)))

        run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", sdist, wheel)
        metadata = read_metadata(wheel)
        require(wrong_classifiers(metadata), "classifiers:")
        require(without_version(clone, metadata["Version"]), f"version {metadata['Version']} is not in:")
        missing = missing_to_publish(metadata)
        require(missing if to_publish else [], "to publish, it lacks:")
        say("metadata  twine check --strict passed, classifiers and versions agree")

        files, listed = sdist_files(sdist), (clone / LISTED).read_text().splitlines()
        require(changes(listed, files), "make release-list, if the sdist should change:")
        package = [name for name in files if name.startswith("scale_surgery/")]
        require(changes(package, wheel_files(wheel)), "the wheel is not the package of the sdist:")
        say(f"files     {len(files)} in the sdist, {len(package)} in the wheel")

        programs = install_alone(wheel, place / "alone", torch)
        frozen = run(programs / "pip", "freeze", env=without_settings())
        say("wheel     with " + ", ".join(re.findall(r"^(?:torch|transformers|huggingface_hub)==\S+", frozen, re.M)))
        try_wheel(programs, place / "trial", (clone / "README.md").read_text(encoding="utf-8"))
        say("wheel     demo and quick start ran")

        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(built, ROOT / "dist")
    lacks = (f"to publish, it lacks: {some}" for some in missing)
    say(f"dist/     ready, in {time.monotonic() - started:.0f} s", *lacks)


def write_list() -> None:
    """Write release/sdist.txt from a build of the last commit."""
    with tempfile.TemporaryDirectory() as folder:
        _, built = build(Path(folder))
        (sdist,) = built.glob("*.tar.gz")
        (ROOT / LISTED).write_text("\n".join(sdist_files(sdist)) + "\n")


def main() -> None:
    """Check a release, or write the list of its files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--list", action="store_true", help="write release/sdist.txt")
    parser.add_argument("--to-publish", action="store_true", help="fail if something is missing that an index needs")
    parser.add_argument("--torch", default="", help="the torch to install before the wheel, such as torch==2.13.0")
    options = parser.parse_args()
    write_list() if options.list else check(options.torch, to_publish=options.to_publish)


if __name__ == "__main__":
    main()
