"""/packs/ID/FILE: ranges, validators, caching, and nothing but what pack.json lists."""

from __future__ import annotations

import email
import hashlib
import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

SHARD = "/packs/tiny/weights-00001.safetensors"
IMMUTABLE = "public, max-age=31536000, immutable"


@pytest.fixture
def shard(packs: Path) -> bytes:
    return (packs / "tiny" / "weights-00001.safetensors").read_bytes()


def test_whole_file(client: TestClient, shard: bytes) -> None:
    response = client.get(SHARD)
    assert response.status_code == 200
    assert response.content == shard
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["cache-control"] == IMMUTABLE


def test_head_has_the_length_and_no_body(client: TestClient, shard: bytes) -> None:
    response = client.head(SHARD)
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["content-length"] == str(len(shard))


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=256-511", 256, 512),
        ("bytes=2000-", 2000, 2048),
        ("bytes=-48", 2000, 2048),
        ("bytes=-9999", 0, 2048),
        ("bytes=2047-99999", 2047, 2048),
    ],
)
def test_one_range(client: TestClient, shard: bytes, asked: str, start: int, stop: int) -> None:
    response = client.get(SHARD, headers={"range": asked})
    assert response.status_code == 206
    assert response.content == shard[start:stop]
    assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(shard)}"
    assert response.headers["cache-control"] == IMMUTABLE


def test_several_ranges(client: TestClient, shard: bytes) -> None:
    response = client.get(SHARD, headers={"range": "bytes=0-9,100-109"})
    assert response.status_code == 206
    head = f"Content-Type: {response.headers['content-type']}\r\n\r\n".encode()
    parts = email.message_from_bytes(head + response.content).get_payload()
    assert isinstance(parts, list)
    assert [part["content-range"] for part in parts] == ["bytes 0-9/2048", "bytes 100-109/2048"]
    assert [part.get_payload(decode=True) for part in parts] == [shard[:10], shard[100:110]]


@pytest.mark.parametrize("asked", ["bytes=2048-", "bytes=5000-6000"])
def test_range_beyond_the_end(client: TestClient, asked: str) -> None:
    response = client.get(SHARD, headers={"range": asked})
    assert response.status_code == 416
    assert response.headers["content-range"] == "bytes */2048"


@pytest.mark.parametrize("asked", ["bytes=9-3", "lines=1-2", "bytes=x-y", "bytes"])
def test_range_that_means_nothing(client: TestClient, asked: str) -> None:
    assert client.get(SHARD, headers={"range": asked}).status_code == 400


def test_etag_is_strong_and_made_from_the_content(client: TestClient, packs: Path) -> None:
    manifest = json.loads((packs / "tiny" / "pack.json").read_bytes())
    chunks = "".join(manifest["shards"][0]["chunks"]).encode()
    expected = {
        "weights-00001.safetensors": hashlib.sha256(chunks).hexdigest(),
        "program.json": hashlib.sha256((packs / "tiny" / "program.json").read_bytes()).hexdigest(),
        "pack.json": hashlib.sha256((packs / "tiny" / "pack.json").read_bytes()).hexdigest(),
    }
    found = {name: client.get(f"/packs/tiny/{name}").headers["etag"] for name in expected}
    assert found == {name: f'"{etag}"' for name, etag in expected.items()}


@pytest.mark.parametrize("name", ["pack.json", "program.json", "weights-00001.safetensors"])
def test_not_modified(client: TestClient, name: str) -> None:
    first = client.get(f"/packs/tiny/{name}")
    again = client.get(f"/packs/tiny/{name}", headers={"if-none-match": f'"other", {first.headers["etag"]}'})
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["cache-control"] == first.headers["cache-control"]
    assert client.get(f"/packs/tiny/{name}", headers={"if-none-match": '"other"'}).status_code == 200


def test_if_range(client: TestClient, shard: bytes) -> None:
    etag = client.get(SHARD).headers["etag"]
    same = client.get(SHARD, headers={"range": "bytes=0-9", "if-range": etag})
    assert (same.status_code, same.content) == (206, shard[:10])
    other = client.get(SHARD, headers={"range": "bytes=0-9", "if-range": '"older"'})
    assert (other.status_code, other.content) == (200, shard)


def test_pack_json_is_asked_for_each_time(client: TestClient) -> None:
    response = client.get("/packs/tiny/pack.json")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["content-type"] == "application/json"
    assert response.json()["name"] == "Tiny"


def test_licence_opens_as_text(client: TestClient) -> None:
    response = client.get("/packs/tiny/LICENSE")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_only_listed_files(client: TestClient, packs: Path) -> None:
    (packs / "tiny" / "notes.txt").write_text("private")
    (packs / "tiny" / "weights-00001.safetensors.part").write_text("private")
    (packs / "tiny" / "sub").mkdir()
    (packs / "tiny" / "sub" / "program.json").write_text("private")
    names = ("notes.txt", "weights-00001.safetensors.part", "sub/program.json", "sub", "", ".", "PACK.JSON")
    for name in names:
        assert client.get(f"/packs/tiny/{name}").status_code == 404, name


def test_methods(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        response = client.request(method, SHARD)
        assert response.status_code == 405
        assert response.headers["allow"] == "GET, HEAD"


def test_file_that_changed_after_the_start_is_not_served(client: TestClient, packs: Path) -> None:
    assert client.get(SHARD).status_code == 200
    (packs / "tiny" / "weights-00001.safetensors").write_bytes(b"short")
    response = client.get(SHARD)
    assert response.status_code == 500
    assert "expected 2048 bytes, found 5" in response.json()["detail"]


def test_file_that_became_a_link_is_not_served(client: TestClient, packs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 2048)
    assert client.get(SHARD).status_code == 200
    (packs / "tiny" / "weights-00001.safetensors").unlink()
    (packs / "tiny" / "weights-00001.safetensors").symlink_to(secret)
    response = client.get(SHARD)
    assert response.status_code == 500
    assert b"ssss" not in response.content


def test_file_that_went_is_not_found(client: TestClient, packs: Path) -> None:
    assert client.get(SHARD).status_code == 200
    (packs / "tiny" / "weights-00001.safetensors").unlink()
    response = client.get(SHARD)
    assert response.status_code == 404
    assert "has gone" in response.json()["detail"]
