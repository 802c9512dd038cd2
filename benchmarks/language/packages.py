"""The text of benchmarks/language: documentation packages of Debian, fetched when they are needed and never committed.

`apt-get download` brings a package of the release that the machine runs; nothing is installed. What was fetched is
recorded with its version, its size, its sha256 and the licences that its copyright file names.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

ENGLISH = "en"
# the region by which a handbook and GNOME's help tell languages apart
REGIONS = {"en": "US", "de": "DE", "fr": "FR", "ja": "JP", "ko": "KR", "ru": "RU"}
LEARNED = tuple(language for language in REGIONS if language != ENGLISH)
# runs the manual pages through a parser, from its own unpacked folder
MANUAL_READER = "mandoc"
KINDS = {".html": "html", ".page": "xml", ".gz": "manual"}


@dataclass(frozen=True)
class Package:
    """A package of documentation.

    Attributes:
        name: What Debian calls it, with {language} where each language has its own.
        files: Pattern of the files with text, below the package's folder; {language} and {region} stand in it.
        english: The same of English, where it is another.
        english_name: Name of the English package, where it is another.
    """

    name: str
    files: str
    english: str | None = None
    english_name: str | None = None

    def of(self, language: str) -> tuple[str, str] | None:
        """Name and pattern of a language; None where the package has no text in it."""
        named = (self.name, self.files)
        if language == ENGLISH:
            named = (self.english_name or self.name, self.files if self.english is None else self.english)
        if not named[1]:
            return None
        filled = [part.format(language=language, region=f"{language}-{REGIONS[language]}") for part in named]
        return filled[0], filled[1]


# a pattern of "" says that there is no such text
PACKAGES = (
    Package("libreoffice-help-{language}", "**/text/**/*.html", english_name="libreoffice-help-en-us"),
    Package("debian-handbook", "**/html/{region}/*.html"),
    Package("debian-reference-{language}", "**/*.html"),
    Package("debian-faq-{language}", "**/*.html", english_name="debian-faq"),
    Package("developers-reference-{language}", "**/*.html", english_name="developers-reference"),
    Package("maint-guide-{language}", "**/*.html", english_name="maint-guide"),
    Package("installation-guide-amd64", "**/{language}/*.html"),
    Package("gnome-user-docs", "**/help/{language}/**/*.page", english="**/help/C/**/*.page"),
    Package("manpages-{language}", "**/man*/*.gz", english_name="manpages"),
    Package("manpages-{language}-dev", "**/man*/*.gz", english_name="manpages-dev"),
    Package("aptitude-doc-{language}", "**/*.html"),
    Package("python3.11-doc", "", english="**/html/**/*.html"),
    Package("postgresql-doc-15", "", english="**/*.html"),
    Package("git-doc", "", english="**/*.html"),
    Package("rust-doc", "", english="**/html/*book*/**/*.html"),
    Package("linux-doc-6.1", "**/html/translations/{language}_*/**/*.html", english="**/html/**/*.html"),
)


@dataclass(frozen=True)
class Fetched:
    """What was fetched.

    Attributes:
        package: Name of the package.
        version: Its version.
        bytes: Size of its file.
        sha256: Of its file.
        licences: What its copyright file names.
    """

    package: str
    version: str
    bytes: int
    sha256: str
    licences: tuple[str, ...]


def fetch(work: Path, languages: tuple[str, ...]) -> list[Fetched]:
    """Fetch and unpack the packages of some languages, and record what they are."""
    named = {source[0] for package in PACKAGES for language in languages if (source := package.of(language))}
    # what the folder has is not fetched again; one that this release does not have is left out
    fetched = [download for name in sorted({*named, MANUAL_READER}) if (download := _fetch_one(work, name))]
    lines = [json.dumps(asdict(package)) + "\n" for package in fetched]
    (work / "packages.jsonl").write_text("".join(lines), encoding="utf-8")
    return fetched


def _fetch_one(work: Path, name: str) -> Fetched | None:
    folder = work / "packages" / name
    if not folder.exists():
        archives = work / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", name], cwd=archives, capture_output=True, text=True)
        if done.returncode and "Unable to locate package" not in done.stderr:
            raise click.ClickException(f"{name}: apt-get download says {done.stderr.strip()}")
        if done.returncode:
            click.echo(f"{name}: not in this release of Debian")
            return None
        unpacked = folder.with_name(f".{name}")
        unpacked.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "--extract", _archive(work, name), unpacked], check=True)
        unpacked.rename(folder)
    archive = _archive(work, name)
    version = archive.name.split("_")[1].replace("%3a", ":")
    content = archive.read_bytes()
    return Fetched(name, version, len(content), hashlib.sha256(content).hexdigest(), tuple(_licences(folder)))


def _archive(work: Path, name: str) -> Path:
    (archive,) = (work / "archives").glob(f"{name}_*.deb")
    return archive


def _licences(folder: Path) -> Iterator[str]:
    licences = set()
    for file in folder.glob("usr/share/doc/*/copyright*"):
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode(errors="replace")
        licences |= {line.strip() for line in re.findall(r"^License:(.*)$", text, re.MULTILINE)}
    yield from sorted(licences - {""})


def files_of(work: Path, language: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that have text in a language, with the package each is from, in a fixed order."""
    for package in PACKAGES:
        if (source := package.of(language)) is None:
            continue
        name, pattern = source
        for file in sorted((work / "packages" / name).glob(pattern)):
            if not file.is_symlink() and (language != ENGLISH or "translations" not in file.parts):
                yield name, file
