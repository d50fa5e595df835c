"""Downloads that go on where an earlier command broke off.

Newer versions of ``huggingface_hub`` give each download a file of its own name and remove it when the download fails.
So large files are fetched here, with that library's own functions, into ``blobs/ETAG.incomplete`` of its cache (where
its older versions keep them too), and are renamed to ``blobs/ETAG`` when they are whole: there it finds them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .base import file_sha256

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: An ETag that is a SHA-256, as all large files of a hub have.
_SHA256 = re.compile("[0-9a-f]{64}")


def bring(hub: HfApi, repository: str, name: str, commit: str) -> None:
    """Fetch a file of a commit into the library's cache, unless it is there. Raises what the library raises.

    What an earlier command has left is kept if the hub still has the same file, and the whole is checked by its hash.
    Raises CheckpointError if that is another one.
    """
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(repository, name, revision=commit), str):
        return
    url = hf_hub_url(repository, name, revision=commit)
    about = hub.get_hf_file_metadata(url=url)
    if about.etag is None or about.size is None:  # the library knows what to do
        return
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE)
    blob, lock = cache / folder / "blobs" / about.etag, cache / ".locks" / folder / f"{about.etag}.lock"
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the library's own: two commands do not write one file
        if not blob.exists():
            _complete(url, blob, about.size, build_hf_headers(token=hub.token))


def _complete(url: str, blob: Path, size: int, headers: dict[str, str]) -> None:
    from huggingface_hub.file_download import http_get

    part = blob.with_name(f"{blob.name}.incomplete")
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    with part.open("ab") as stream:
        done = stream.tell()
        http_get(url, stream, resume_size=done, headers=headers, expected_size=size)
    if done and _SHA256.fullmatch(blob.name) and file_sha256(part) != blob.name:
        part.unlink()
        raise CheckpointError(
            f"{url}: what an earlier command had fetched does not belong to this file; it is removed, so try again"
        )
    part.replace(blob)
