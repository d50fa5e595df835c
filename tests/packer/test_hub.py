"""``hf:OWNER/NAME``: only what is needed is fetched, faults of the hub are one error, a broken download goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from gguf import GGMLQuantizationType as Q

from packer.pack import Pack
from tests.packer.gguf_files import write_model
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cli import one_error, run_cli, start_cli
from tests.support.hub import COMMIT, Hub, serve_hub

MODEL = "someone/tiny-1.58"
WEIGHTS = "model.safetensors"
CHUNK = 1000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model; the library's settings, which it reads when it is imported, point there."""
    with serve_hub() as found:
        found.models[MODEL] = tiny_checkpoint(tmp_path / "model", shards=1)
        (found.models[MODEL] / "README.md").write_text("---\nlicense: mit\n---\n")
        (found.models[MODEL] / "pytorch_model.bin").write_bytes(b"not needed")
        (found.models[MODEL] / "picture.png").write_bytes(b"not needed")
        point_to(found.endpoint, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)  # it keeps whole ones only
        monkeypatch.setattr("time.sleep", lambda _: None)  # between the library's own attempts
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield found


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def refused(tmp_path: Path, spec: str, *words: str) -> str:
    """One error, and nothing where the pack would be."""
    target = tmp_path / "made" / "pack"
    error = one_error(run_cli("export", spec, "--out", target), *words)
    assert not target.parent.exists() or os.listdir(target.parent) == []
    return error


def test_a_model_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    result = run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "one")
    assert result.status == 0, result.err
    assert hub.fetched() == ["README.md", "config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"]
    pack = Pack(tmp_path / "one")
    pack.verify()
    manifest = pack.manifest
    assert (manifest["name"], manifest["license"]) == ("tiny-1.58", "mit")
    assert (manifest["source"]["repository"], manifest["source"]["revision"]) == (MODEL, COMMIT)
    hub.requests.clear()
    assert run_cli("export", f"hf:{MODEL}@main", "--out", tmp_path / "two").status == 0
    assert hub.fetched() == []
    assert (tmp_path / "one" / "pack.json").read_bytes() == (tmp_path / "two" / "pack.json").read_bytes()
    assert run_cli("export", hub.models[MODEL], "--out", tmp_path / "local").status == 0
    for shard in manifest["shards"]:
        assert (tmp_path / "one" / shard["file"]).read_bytes() == (tmp_path / "local" / shard["file"]).read_bytes()


def test_shards_are_fetched_by_the_index(hub: Hub, tmp_path: Path) -> None:
    shutil.rmtree(hub.models[MODEL])
    folder = tiny_checkpoint(hub.models[MODEL], shards=3)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-of-another-kind.safetensors")
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0
    shards = [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    assert [name for name in hub.fetched() if "safetensors" in name] == [*shards, "model.safetensors.index.json"]
    (folder / "model-00002-of-00003.safetensors").unlink()
    shutil.rmtree(tmp_path / "cache")
    refused(tmp_path, f"hf:{MODEL}", "model-00002-of-00003.safetensors", "incomplete")


def test_gguf_files(hub: Hub, tmp_path: Path) -> None:
    folder = hub.models["someone/files"] = tmp_path / "files"
    folder.mkdir()
    write_model(folder / "one-TQ2_0.gguf", [Q.TQ2_0])
    assert run_cli("export", "hf:someone/files", "--out", tmp_path / "one").status == 0
    assert Pack(tmp_path / "one").manifest["name"] == "one-TQ2_0"
    write_model(folder / "two-TQ1_0.gguf", [Q.TQ1_0])
    refused(tmp_path, "hf:someone/files", "2 GGUF files", "one-TQ2_0.gguf, two-TQ1_0.gguf")
    refused(tmp_path, "hf:someone/files/three.gguf", "no GGUF file three.gguf", "two-TQ1_0.gguf")
    hub.requests.clear()
    assert run_cli("export", "hf:someone/files/two-TQ1_0.gguf@main", "--out", tmp_path / "two").status == 0
    assert hub.fetched() == ["two-TQ1_0.gguf"]
    assert Pack(tmp_path / "two").manifest["name"] == "two-TQ1_0"


def test_the_environment_is_honoured(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: HF_ENDPOINT, HF_HOME and HF_TOKEN as a person sets them; then without network."""
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TQDM_POSITION", "-1")  # bars although nobody looks
    for name, (variable, value) in {"pack": ("HF_TOKEN", "hf_secret"), "again": ("HF_HUB_OFFLINE", "1")}.items():
        monkeypatch.setenv(variable, value)
        process = start_cli("export", f"hf:{MODEL}", "--out", tmp_path / name)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        if name == "pack":
            assert "100%" in err and "model.safetensors" in err  # the library's bars: amount, rate, time left
            hub.requests.clear()
    assert hub.requests == []
    assert (tmp_path / "pack" / "pack.json").read_bytes() == (tmp_path / "again" / "pack.json").read_bytes()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, ("401", "HF_TOKEN")),
        (403, ("403", "access", "HF_TOKEN")),
        (404, ("404", "check the name")),
        (429, ("429", "wait")),
        (500, ("500", "try again later")),
        (503, ("503", "try again later")),
    ],
)
@pytest.mark.parametrize("path", [f"/api/models/{MODEL}", f"/{MODEL}/resolve/{COMMIT}/{WEIGHTS}"])
def test_what_the_hub_answers(path: str, status: int, words: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    hub.answer[path] = status
    refused(tmp_path, f"hf:{MODEL}", f"hf:{MODEL}: the hub answered", *words)
    hub.answer.clear()
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0


def ranges(hub: Hub) -> list[str | None]:
    """What was asked of the weights, request by request."""
    return [asked for method, path, asked in hub.requests if method == "GET" and path.endswith(WEIGHTS)]


def incomplete(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("cache/**/*.incomplete"))


def test_a_download_that_breaks_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken[WEIGHTS] = 0
    refused(tmp_path, f"hf:{MODEL}", "broke off", "the same command goes on")
    hub.broken[WEIGHTS] = 50 * CHUNK  # each attempt brings so much
    hub.requests.clear()
    result = run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack")
    assert result.status == 0, result.err
    assert ranges(hub)[:2] == [None, f"bytes={50 * CHUNK}-"]
    Pack(tmp_path / "pack").verify()
    assert incomplete(tmp_path) == []


@pytest.fixture
def broken_off(hub: Hub, tmp_path: Path) -> Path:
    """What a command has left that got 70 chunks, and then 500 for an answer when it wanted to go on."""
    path = f"/{MODEL}/resolve/{COMMIT}/{WEIGHTS}"
    hub.broken[WEIGHTS] = 70 * CHUNK

    class Once(dict):
        def items(self):  # type: ignore[no-untyped-def]
            gets = [request for request in hub.requests if request[:2] == ("GET", path)]
            return [(path, 500)] if len(gets) > 1 else []

    hub.answer = Once()
    refused(tmp_path, f"hf:{MODEL}", "500", "what has arrived is kept")
    hub.answer, hub.broken = {}, {}
    hub.requests.clear()
    (left,) = incomplete(tmp_path)
    assert left.read_bytes() == (hub.models[MODEL] / WEIGHTS).read_bytes()[: 70 * CHUNK]
    return left


def test_the_next_command_fetches_only_what_is_not_there(hub: Hub, broken_off: Path, tmp_path: Path) -> None:
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0
    assert hub.fetched() == [WEIGHTS] and ranges(hub) == [f"bytes={70 * CHUNK}-"]
    Pack(tmp_path / "pack").verify()
    hub.requests.clear()
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "again").status == 0
    assert hub.fetched() == [] and incomplete(tmp_path) == []


def test_what_was_left_is_checked(hub: Hub, broken_off: Path, tmp_path: Path) -> None:
    """Bytes of something else become no part of a model, and are not in the way of the next try."""
    broken_off.write_bytes(bytes(70 * CHUNK))
    refused(tmp_path, f"hf:{MODEL}", WEIGHTS, "does not belong", "try again")
    assert not broken_off.exists()
    broken_off.write_bytes(bytes(10**6))  # more than there is
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0
    assert ranges(hub) == [f"bytes={70 * CHUNK}-", None]
    Pack(tmp_path / "pack").verify()


def test_a_file_that_broke_off_is_fetched_anew_if_the_hub_has_another(
    hub: Hub, broken_off: Path, tmp_path: Path
) -> None:
    shutil.rmtree(hub.models[MODEL])
    tiny_checkpoint(hub.models[MODEL], seed=1)
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0
    assert ranges(hub) == [None]
    Pack(tmp_path / "pack").verify()


def test_a_hub_that_knows_no_ranges_sends_all_of_it(hub: Hub, broken_off: Path, tmp_path: Path) -> None:
    hub.ranges = False
    assert run_cli("export", f"hf:{MODEL}", "--out", tmp_path / "pack").status == 0
    assert ranges(hub) == [f"bytes={70 * CHUNK}-"]
    Pack(tmp_path / "pack").verify()


@pytest.mark.parametrize("spec", ["hf:", "hf:tiny", "hf:a/b@", "hf:a b/c", "hf:/x"])
def test_specifications_that_are_none(spec: str, hub: Hub, tmp_path: Path) -> None:
    refused(tmp_path, spec, "expected hf:OWNER/NAME")
    assert hub.requests == []


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    refused(tmp_path, "hf:someone/else", "someone/else", "404")
    refused(tmp_path, f"hf:{MODEL}@v9", "404", "no such revision")
    empty = hub.models["someone/empty"] = tmp_path / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("nothing")
    refused(tmp_path, "hf:someone/empty", "expected config.json", "GGUF")


def test_no_hub_at_all(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    refused(tmp_path, f"hf:{MODEL}", f"hf:{MODEL}", "goes on from there")
