"""Checkpoints of a Hugging Face hub: ``hf:OWNER/NAME[/FILE.gguf][@REVISION]``, through ``huggingface_hub``.

That library has the cache, the tokens, ``HF_ENDPOINT`` and the progress bars. Here is which files are needed, one clear
error for whatever goes wrong, and that large files which broke off are taken up again (``resume.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..card import CARD
from ..errors import CheckpointError
from .huggingface import INDEX, NOTICES, SINGLE, TORCH_INDEX, TORCH_SINGLE, read_json
from .resume import bring

PREFIX = "hf:"
_SPEC = re.compile(r"hf:([\w.-]+/[\w.-]+?)(?:/([^@]+))?(?:@(.+))?")
_LARGE = (".safetensors", ".bin", ".gguf")
_SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Fetched:
    """What was fetched. path: folder or GGUF file in the cache. revision: the commit."""

    path: Path
    name: str
    repository: str
    revision: str


def is_hub(source: Path | str) -> bool:
    """Whether a source is one of a hub."""
    return str(source).startswith(PREFIX)


def fetch(spec: str) -> Fetched:
    """Bring the files that an export needs into the cache.

    A connection that breaks off in mid-file is taken up where it ended, again and again as long as bytes come. Raises
    CheckpointError if that does not help; what has arrived stays in the cache, and the next call fetches the rest.
    """
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise CheckpointError(f"{spec}: expected hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/FILE.gguf")
    repository, file, revision = found.groups()
    try:
        return _fetch(spec, repository, file, revision)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises its own errors, its HTTP client's and the system's
        raise CheckpointError(_reason(spec, error)) from None


def _fetch(spec: str, repository: str, file: str | None, revision: str | None) -> Fetched:
    from huggingface_hub import HfApi, snapshot_download  # late: it is slow to import and rarely needed
    from huggingface_hub.errors import OfflineModeIsEnabled

    hub = HfApi()
    try:
        info = hub.model_info(repository, revision=revision)
    except OfflineModeIsEnabled:  # what is in the cache must do
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        commit = folder.name
    else:
        names, commit = {item.rfilename for item in info.siblings or ()}, str(info.sha)

    def get(name: str, at: str | None = commit) -> Path:
        if name.endswith(_LARGE):
            bring(hub, repository, name, commit)  # into the cache, where the library finds it
        return Path(hub.hf_hub_download(repository, name, revision=at))

    wanted = needed(spec, names, file, get)
    get(wanted[0], revision)  # notes which commit that is, for use without network
    paths = [get(name) for name in wanted]
    model = paths[0] if wanted[0].endswith(".gguf") else paths[0].parent
    title = Path(wanted[0]).stem if wanted[0].endswith(".gguf") else repository.partition("/")[2]
    return Fetched(model, title, repository, commit)


def needed(spec: str, names: Collection[str], file: str | None, get: Callable[[str], Path]) -> list[str]:
    """The files of a repository that an export reads. names: all files. get: fetches one, for an index.

    Raises CheckpointError if there is no checkpoint among them, or several.
    """
    if file is not None:
        if file not in names or not file.endswith(".gguf"):
            raise CheckpointError(f"{spec}: there is no GGUF file {file}; there are {_listed(names, '.gguf')}")
        return [file]
    small = [name for name in (*_SMALL, *NOTICES, CARD, "README.md") if name in names]
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if "config.json" in names and index in names:
            return [*small, index, *_shards(spec, names, get(index))]
        if "config.json" in names and single in names:
            return [*small, single]
    files = sorted(name for name in names if name.endswith(".gguf"))
    if not files:
        raise CheckpointError(
            f"{spec}: expected config.json with {SINGLE} or {INDEX}, or a GGUF file, found {len(names)} other files"
        )
    if len(files) > 1:
        raise CheckpointError(
            f"{spec}: has {len(files)} GGUF files, of which one must be named as in {PREFIX}OWNER/NAME/{files[0]}: "
            f"{_listed(names, '.gguf')}"
        )
    return files


def _shards(spec: str, names: Collection[str], index: Path) -> list[str]:
    where = read_json(index, "").get("weight_map")
    shards = sorted({str(file) for file in where.values()}) if isinstance(where, dict) else []
    missing = [file for file in shards if file not in names]
    if missing or not shards:
        what = f"the shard {missing[0]}, which {index.name} names" if missing else f"a weight_map in {index.name}"
        raise CheckpointError(f"{spec}: the repository lacks {what}; it is incomplete")
    return shards


def _listed(names: Collection[str], suffix: str) -> str:
    found = sorted(name for name in names if name.endswith(suffix))
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") if found else "none"


def _reason(spec: str, error: BaseException) -> str:
    """In words, what went wrong and what to do; an error may be hidden in what another one was made of."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for each in chain:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return f"{spec}: the hub answered {status}: {_status(status, type(each).__name__)}"
    kinds = [type(each).__name__ for each in chain]
    if "OfflineModeIsEnabled" in kinds or "LocalEntryNotFoundError" in kinds[:1] and len(chain) == 1:
        return f"{spec}: not in the cache as a whole, and HF_HUB_OFFLINE forbids to fetch it; unset that"
    last = next((each for each in chain if str(each)), chain[-1])
    text: Any = " ".join(str(last).split())[:300]
    return (
        f"{spec}: the download broke off ({type(last).__name__}: {text}); what has arrived is kept, "
        "so the same command goes on from there"
    )


def _status(status: int, kind: str) -> str:
    if "Gated" in kind or status == 403:
        return "access must be granted on the model's page first; then set HF_TOKEN or run `hf auth login`"
    if kind == "RevisionNotFoundError":
        return "there is no such revision; leave out what follows the @, or correct it"
    if status == 401:
        return "no such model, or one that needs a token; check the name, set HF_TOKEN or run `hf auth login`"
    if status == 404:
        return "no such model or file; check the name, and HF_ENDPOINT if that is set"
    if status == 429:
        return "too many requests; wait a few minutes, or set HF_TOKEN; what has arrived is kept"
    if status >= 500:
        return "the hub has a fault of its own; try again later; what has arrived is kept"
    return "this is not expected; check the name and HF_ENDPOINT"
