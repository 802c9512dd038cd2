"""Rules that judge the answer to a probe.

exact   the answer, without blanks around it, begins with the right one, which does not end inside a word or number: "4"
        does not begin "4.5", "4/5" or "4th". In scripts that put no space before what follows a word, any text may
        follow
number  the first number in the answer equals the right one: "1,024" equals 1024.0
python  prompt, answer and test run without an error in a process of its own
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import unicodedata
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path

from scale_surgery.evidence.languages import script_of

# letters of scripts without spaces, after which a number may begin
UNSPACED_LETTER = r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"
BEGIN = rf"(?:(?<![\w.])|(?<={UNSPACED_LETTER}))"
SIGN, WHOLE = rf"(?:{BEGIN}[-+−])?", r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"{SIGN}(?:{WHOLE}(?:\.[0-9]+)?|{BEGIN}\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# what goes on with a word, and with a number
REST_OF_WORD, REST_OF_NUMBER = re.compile(r"[-'’]?\w"), re.compile(r"\w|[.,:/]\d")
# signs that go on with a number: 3万 is 30,000
NUMERALS = "十百千万萬億亿兆십백천만억조"
# scripts without spaces between words, or, in Hangul, between a word and its particle
UNSPACED = {"Han", "Ideographic", "Japanese", "Hangul", "Thai", "Lao", "Khmer", "Myanmar"}
# bytes of the address space, and of a written file
LIMITS = {"RLIMIT_AS": 4 * 1024**3, "RLIMIT_FSIZE": 64 * 1024**2}
# limits for the code and its children, on systems that have them; prompts may begin with `from __future__`, so the code
# is a file of its own
RUNNER = """
try:
    import resource, signal
    # whatever happens to the process that waits for this one
    signal.alarm({seconds})
    for name, most in {limits}.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (OSError, ValueError):
            pass
except ImportError:
    pass
with open("probe.py", encoding="utf-8") as file:
    code = compile(file.read(), "probe.py", "exec")
exec(code, {{"__name__": "__main__"}})
open("{passed}", "x").close()
"""


def is_exact(answer: str, right: str) -> bool:
    """Return True if an answer begins with the right one."""
    answer, right = (unicodedata.normalize("NFC", text.strip()) for text in (answer, right))
    last, rest = right[-1:], answer[len(right) :]
    if not answer.startswith(right) or not _is_letter(last) or not rest:
        return answer.startswith(right)
    if last.isdigit() and rest[0] in NUMERALS:
        return False
    if script_of(last) in UNSPACED or script_of(rest[0]) in UNSPACED:
        return True
    goes_on = REST_OF_NUMBER if last.isdigit() else REST_OF_WORD
    return not (goes_on.match(rest) or _is_letter(rest[:1]))


def _is_letter(text: str) -> bool:
    """Return True for a letter, a digit, or a mark that belongs to a letter, such as a vowel sign."""
    return text.isalnum() or (text != "" and unicodedata.category(text).startswith("M"))


def is_number(answer: str, right: str) -> bool:
    """Return True if the first number in an answer is the right one."""
    number = first_number(answer)
    return number is not None and number == first_number(right)


def first_number(text: str) -> Decimal | None:
    """Return the first number in a text; None if there is none, or its exponent is too long."""
    if (found := NUMBER.search(text)) is None:
        return None
    try:
        return Decimal(found[0].replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return None


def passes(prompt: str, answer: str, test: str, seconds: float) -> bool:
    """Run prompt, answer and test as one program, and return True if it ends without an error in time.

    The process has an empty environment and a temporary folder, both by itself, and limits of time and memory. That
    keeps accidents away. It is no sandbox: the code can read files, and use the network.
    """
    passed = secrets.token_hex(16)
    most = int(seconds) + 1
    runner = RUNNER.format(limits=LIMITS | {"RLIMIT_CPU": most}, seconds=most, passed=passed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "probe.py").write_text(f"{prompt}{first_block(answer)}\n{test}\n", encoding="utf-8")
        _run([sys.executable, "-I", "-c", runner], folder, seconds)
        # code that exits before its test has an exit code of 0, too
        return Path(folder, passed).is_file()


def first_block(answer: str) -> str:
    """Return the first line of an answer, and the lines after it up to one that is not indented."""
    first, *rest = answer.split("\n")
    end = next((place for place, line in enumerate(rest) if line.strip() and not line[0].isspace()), len(rest))
    return "\n".join([first, *rest[:end]])


def _run(line: list[str], folder: str, seconds: float) -> None:
    # Windows starts no process without it
    environment = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        line, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        # the code may have started others
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
