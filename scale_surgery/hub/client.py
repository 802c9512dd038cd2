"""Requests to the Hub before a push, and the conversion of its client's errors into HubError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import HubError, Problem, SurgeryError
from scale_surgery.hub.settings import Push

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

# the cause by HTTP status
CAUSES = {
    401: "hub-unauthorised",
    403: "hub-forbidden",
    404: "hub-not-found",
    412: "hub-changed",
    429: "hub-too-many-requests",
}
# timeout of the first request; later ones use the client's own limits
WAIT_SECONDS = 60


@contextmanager
def hub_errors(code: str, where: str) -> Iterator[None]:
    """Turn any error of the client into a problem of this code, with its cause as a detail.

    The client's HTTP library differs by release, and so do its errors.
    """
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(earlier)
        answered: Any = next((each for each in chain if getattr(each, "response", None) is not None), None)
        if answered is None:
            reason = next((str(each) for each in reversed(chain) if str(each).strip()), type(error).__name__)
            cause = "hub-unreachable"
        else:
            response = answered.response
            message = getattr(answered, "server_message", None) or response.headers.get("X-Error-Message")
            reason = f"{response.status_code} {message or response.reason_phrase}"
            other = "hub-refuses" if response.status_code < 500 else "hub-in-trouble"
            cause = CAUSES.get(response.status_code, other)
        answer = Problem(cause, "the Hub", error=" ".join(reason.split()).rstrip("."))
        raise HubError(Problem(code, where, answer)) from error


def check_repo_id(repo: str) -> None:
    """Refuse an invalid Hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo if "/" in repo else "")
    except HFValidationError as error:
        raise HubError(Problem("hub-id-invalid", repo)) from error


def look_at(api: HfApi, repo: str, how: Push) -> ModelInfo | None:
    """Return the facts of the repository, or None if it does not exist; refuse it if the token may not write to it."""
    if api.token is None:
        raise HubError(Problem("hub-token-missing", repo))
    with hub_errors("push-refused", repo):
        info = _find(api, repo, how.revision)
        if info is None:
            _check_owner(api, repo, how)
        elif not how.create_pr:
            api.auth_check(repo, write=True)
    if info is not None and how.private not in (None, info.private):
        there, expected = ("private", "public") if info.private else ("public", "private")
        raise HubError(Problem("repository-visible-otherwise", repo, found=there, expected=expected))
    return info


def _find(api: HfApi, repo: str, revision: str | None) -> ModelInfo | None:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return api.model_info(repo, revision=revision, timeout=WAIT_SECONDS)
    except RevisionNotFoundError:
        return api.model_info(repo, timeout=WAIT_SECONDS)  # a new branch starts with the files of the main branch
    except RepositoryNotFoundError:
        return None


def _check_owner(api: HfApi, repo: str, how: Push) -> None:
    """Refuse a token that cannot create the repository, as far as the Hub shows this in advance."""
    account, owner = api.whoami(), repo.split("/")[0]
    user = account["name"]
    if how.create_pr:
        raise HubError(Problem("repository-missing", repo, own=f"{user}/{repo.split('/')[1]}"))
    if (account.get("auth", {}).get("accessToken") or {}).get("role") == "read":
        raise HubError(Problem("hub-token-read-only", repo))
    if owner not in (user, *(organisation["name"] for organisation in account.get("orgs") or ())):
        raise HubError(Problem("hub-token-of-other", repo, user=user, owner=owner))
