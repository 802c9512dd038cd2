"""What is asked of the Hub before a push, and the one error that every refusal of its client becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import HubError, SurgeryError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

    from scale_surgery.hub.push import Push

TOKENS_PAGE = "https://huggingface.co/settings/tokens"
# what to do, by the status of the Hub's answer, which is in brackets before it
ADVICE = {
    401: "The Hub does not know this token: log in with hf auth login, or check HF_TOKEN and --token.",
    403: f"The token may not do that: take one with write access there, see {TOKENS_PAGE}.",
    404: "Check the name and --revision; what the token may not see looks the same.",
    429: "Too many requests: try again in some minutes.",
}
REFUSED = "The Hub does not accept this: see its reason."
TROUBLE = "The Hub has trouble: try again later; https://status.huggingface.co tells more."
UNREACHABLE = "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE."
# for the first answer of a Hub; what follows has the client's own limits
WAIT_SECONDS = 60


@contextmanager
def hub_errors(thing: str, problem: str, hint: str = "") -> Iterator[None]:
    """Turn whatever the client raises into one `HubError`; its HTTP library, and so its errors, differ by release."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        answered: Any = next((each for each in chain if getattr(each, "response", None) is not None), None)
        if answered is None:
            reason = next((str(each) for each in reversed(chain) if str(each).strip()), type(error).__name__)
            advice = UNREACHABLE
        else:
            response = answered.response
            message = getattr(answered, "server_message", None) or response.headers.get("X-Error-Message")
            reason = f"{response.status_code} {message or response.reason_phrase}"
            advice = ADVICE.get(response.status_code, REFUSED if response.status_code < 500 else TROUBLE)
        sentences = [f"{thing}: {problem} ({' '.join(reason.split()).rstrip('.')}).", advice, hint]
        raise HubError(" ".join(filter(None, sentences))) from error


def check_repo_id(repo: str) -> None:
    """Refuse what is no Hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo if "/" in repo else "")
    except HFValidationError as error:
        raise HubError(
            f"{repo}: is no Hub id, expected user/name or organisation/name, such as me/qwen3-wide. The folder comes "
            "first: scale-surgery push FOLDER user/name."
        ) from error


def look_at(api: HfApi, repo: str, how: Push) -> ModelInfo | None:
    """What lies where a push goes, None where no repository is; refused is one that this token may not write to."""
    if api.token is None:
        raise HubError(f"{repo}: no token is known. Log in with hf auth login, set HF_TOKEN, or give --token.")
    with hub_errors(repo, "not pushed"):
        info = _find(api, repo, how.revision)
        if info is None:
            _check_owner(api, repo, how)
        elif not how.create_pr:
            api.auth_check(repo, write=True)
    if info is not None and how.private not in (None, info.private):
        there, expected = ("private", "public") if info.private else ("public", "private")
        raise HubError(
            f"{repo}: is {there}, expected a {expected} repository. Leave out --{expected}, or take another id."
        )
    return info


def _find(api: HfApi, repo: str, revision: str | None) -> ModelInfo | None:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return api.model_info(repo, revision=revision, timeout=WAIT_SECONDS)
    except RevisionNotFoundError:
        return api.model_info(repo, timeout=WAIT_SECONDS)  # a new branch begins with the files of the main one
    except RepositoryNotFoundError:
        return None


def _check_owner(api: HfApi, repo: str, how: Push) -> None:
    """Refuse what keeps a token from making a repository, as far as the Hub tells before it is asked for one."""
    account, owner = api.whoami(), repo.split("/")[0]
    user = account["name"]
    if how.create_pr:
        raise HubError(
            f"{repo}: is not there, or this token may not see it, and a pull request needs a repository. Check the "
            f"name, or push to {user}/{repo.split('/')[1]} without --create-pr."
        )
    if (account.get("auth", {}).get("accessToken") or {}).get("role") == "read":
        raise HubError(f"{repo}: the token can only read, expected one with write access: make one at {TOKENS_PAGE}.")
    if owner not in (user, *(organisation["name"] for organisation in account.get("orgs") or ())):
        raise HubError(f"{repo}: the token belongs to {user}, who is no member of {owner}. Push to {user}/...")
