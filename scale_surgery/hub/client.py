"""What a push asks of a Hub, through huggingface_hub, and what every refusal becomes: one error that says what to do.

whoami, revision    before anything is sent: who the token belongs to, whether it may write, what lies there already
validate-yaml       the model card
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import HubError, SurgeryError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w][\w.-]{0,95}", re.ASCII)
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
# what to do, by the status of the Hub's answer
ADVICE = {
    400: "The Hub does not accept this request: see its reason.",
    401: "The Hub does not know this token: log in with hf auth login, or check HF_TOKEN and --token.",
    402: "The account has no room for it: see its billing page on the Hub.",
    403: f"The token may not do that: take one with write access there, see {TOKENS_PAGE}.",
    404: "Check the name and --revision; what the token may not see looks the same.",
    409: "Something else is writing there: try again in a moment.",
    412: "Something else has written there meanwhile: try again.",
    413: "A file is too large for the Hub.",
    429: "Too many requests: try again in some minutes.",
}
TROUBLE = "The Hub has trouble: try again later; https://status.huggingface.co tells more."
# for an answer to a question; a file, and the commit of many, may take any time
WAIT_SECONDS = 60
UNREACHABLE = "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE."


@dataclass(frozen=True)
class Remote:
    """A repository on a Hub as it is before a push.

    Attributes:
        repo: Its id.
        exists: Whether it is there.
        is_private: Whether it is private.
        has_revision: Whether the branch is there.
        commit: Its last commit, or None.
        files: Names of its files.
    """

    repo: str
    exists: bool
    is_private: bool
    has_revision: bool
    commit: str | None
    files: tuple[str, ...]


def check_repo_id(repo: str) -> None:
    """Check the form of a Hub id.

    Raises:
        HubError: If it is none.
    """
    if REPO_ID.fullmatch(repo) is None or "--" in repo or ".." in repo or repo.endswith((".git", ".", "-")):
        raise HubError(
            f"{repo}: is no Hub id, expected user/name or organisation/name, such as me/qwen3-wide. The folder comes "
            "first: scale-surgery push FOLDER user/name."
        )


def make_api(token: str | None, endpoint: str | None) -> HfApi:
    """The client of a Hub; by default with the token and the address that it finds itself."""
    from huggingface_hub import HfApi, get_token

    # named here, since the client may be told not to send the one that it finds
    return HfApi(
        endpoint=endpoint,
        token=token or get_token(),
        library_name="scale-surgery",
        library_version=version("scale-surgery"),
    )


def look_at(api: HfApi, repo: str, revision: str | None, *, create_pr: bool) -> Remote:
    """Check the token, and look at a repository before a push.

    Args:
        api: The client.
        repo: Hub id.
        revision: The branch to be written, or None for the main one.
        create_pr: Whether a pull request is to be opened, for which no write access is needed.

    Returns:
        What is there.

    Raises:
        HubError: If there is no token, it may not write there, or the Hub does not answer.
    """
    if api.token is None:
        raise HubError(f"{repo}: no token is known. Log in with hf auth login, set HF_TOKEN, or give --token.")
    with hub_errors(repo, "not pushed"):
        account = _account(api)
        if problem := access_problem(account, repo, create_pr=create_pr):
            raise HubError(f"{repo}: {problem}")
        found = _find(api, repo, revision)
        if create_pr and not found.exists and access_problem(account, repo, create_pr=False):
            raise HubError(
                f"{repo}: is not there, or this token may not see it, and a pull request needs a repository. Check the "
                f"name, or push to {account.get('name')}/{repo.split('/')[1]}."
            )
        return found


def _account(api: HfApi) -> dict[str, Any]:
    """What the Hub knows of a token; the client's own whoami waits for ever."""
    from huggingface_hub import get_session, hf_raise_for_status

    headers = {"Authorization": f"Bearer {api.token}"}
    answer = get_session().get(f"{api.endpoint}/api/whoami-v2", headers=headers, timeout=WAIT_SECONDS)
    hf_raise_for_status(answer)
    account: dict[str, Any] = answer.json()
    return account


def access_problem(account: Mapping[str, Any], repo: str, *, create_pr: bool) -> str | None:
    """What keeps an account from writing to a repository, as far as whoami tells; None where nothing does."""
    namespace, user = repo.split("/")[0], account.get("name")
    token = account.get("auth", {}).get("accessToken") or {}
    if token.get("role") == "read":
        return f"the token can only read, expected one with write access: make one at {TOKENS_PAGE}."
    if create_pr:
        return None
    organisations = {entry.get("name"): entry.get("roleInOrg") for entry in account.get("orgs") or ()}
    if namespace != user and namespace not in organisations:
        return f"the token belongs to {user}, who is no member of {namespace}. Push to {user}/..., or give --create-pr."
    if organisations.get(namespace) == "read":
        return f"{user} can only read in {namespace}. Ask for write access there, or give --create-pr."
    if token.get("role") == "fineGrained" and not _writes(token.get("fineGrained") or {}, {namespace, repo}):
        return f"the token has no write access to {namespace} or {repo}. Add it at {TOKENS_PAGE}."
    return None


def _writes(scopes: Mapping[str, Any], names: set[str]) -> bool:
    """Whether a fine-grained token may write to one of the named owners or repositories."""
    scoped = scopes.get("scoped") or ()
    return any(
        scope.get("entity", {}).get("name") in names and "repo.write" in scope.get("permissions", ())
        for scope in scoped
    )


def _find(api: HfApi, repo: str, revision: str | None) -> Remote:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.model_info(repo, timeout=WAIT_SECONDS)
        has_revision = True
        if revision is not None:
            try:
                info = api.model_info(repo, revision=revision, timeout=WAIT_SECONDS)
            except RevisionNotFoundError:
                has_revision = False  # a new branch begins with the files of the main one
    except RepositoryNotFoundError:
        return Remote(repo, False, False, False, None, ())
    files = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
    return Remote(repo, True, bool(info.private), has_revision, info.sha, files)


def read_text(api: HfApi, remote: Remote, file: str) -> str:
    """Read a small text file of a repository."""
    with hub_errors(remote.repo, f"{file} cannot be read"):
        path = api.hf_hub_download(remote.repo, file, revision=remote.commit)
        return Path(path).read_bytes().decode("utf-8", errors="replace")


def validate_card(api: HfApi, repo: str, text: str) -> tuple[str, ...]:
    """Let the Hub check the metadata of a model card.

    Args:
        api: The client.
        repo: Hub id, for messages.
        text: The card.

    Returns:
        The Hub's warnings.

    Raises:
        HubError: If the Hub refuses the metadata, with its reasons, or does not answer.
    """
    from huggingface_hub import get_session, hf_raise_for_status

    with hub_errors(repo, "the model card was not checked"):
        content = {"content": text, "repoType": "model"}
        answer = get_session().post(f"{api.endpoint}/api/validate-yaml", json=content, timeout=WAIT_SECONDS)
        if answer.status_code == 400:
            reasons = [str(error.get("message")) for error in answer.json().get("errors", ())]
            raise HubError(
                f"README.md: the Hub refuses its metadata ({'; '.join(reasons)}). Mend it, or give another by --card."
            )
        hf_raise_for_status(answer)
        return tuple(str(warning.get("message")) for warning in answer.json().get("warnings", ()))


@contextmanager
def hub_errors(repo: str, what: str, hint: str = "") -> Iterator[None]:
    """Turn whatever the client raises into one `HubError`; its HTTP library, and so its errors, differ by release."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        status, reason = _read_error(error)
        advice = UNREACHABLE if status is None else ADVICE.get(status, TROUBLE)
        raise HubError(f"{repo}: {what} ({reason}). {advice}" + (f" {hint}" if hint else "")) from error


def _read_error(error: BaseException) -> tuple[int | None, str]:
    """Status of the Hub's answer, where there was one, and the reason in one line."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    answered = next((found for found in chain if getattr(found, "response", None) is not None), None)
    if answered is None:
        told = next((found for found in reversed(chain) if str(found).strip()), error)
        return None, _one_line(str(told) or type(told).__name__)
    response: Any = answered.response  # type: ignore[attr-defined]
    message = getattr(answered, "server_message", None) or response.headers.get("X-Error-Message") or ""
    return response.status_code, _one_line(f"{response.status_code} {message or response.reason_phrase}")


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
