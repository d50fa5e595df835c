"""The page, its files, /api/models and /health."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from packer import __version__
from packer.card import CARD
from server.app import create_app
from server.errors import StartupError

MakePack = Callable[..., Path]


def test_page(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.text == f"<p>{__version__}</p>"
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert client.head("/").status_code == 200


def test_health(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok", "version": __version__}


@pytest.mark.parametrize(
    ("url", "media_type"),
    [
        ("/app/main.js", "text/javascript; charset=utf-8"),
        ("/app/look.css", "text/css; charset=utf-8"),
        ("/engine/index.js", "text/javascript; charset=utf-8"),
        ("/vendor/jinja.js", "text/javascript; charset=utf-8"),
        ("/vendor/jinja.LICENSE.txt", "text/plain; charset=utf-8"),
        ("/shaders/kernels.json", "application/json"),
        ("/shaders/add.wgsl", "text/wgsl; charset=utf-8"),
    ],
)
def test_files_of_the_page(client: TestClient, url: str, media_type: str) -> None:
    response = client.get(url)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type
    assert response.headers["cache-control"] == "no-cache"
    again = client.get(url, headers={"if-none-match": response.headers["etag"]})
    assert again.status_code == 304
    assert again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "url",
    [
        "/app/index.html",  # the template, not the page
        "/app/.hidden.js",
        "/app/",
        "/app",
        "/engine/notes.md",
        "/vendor/jinja.d.ts",
        "/shaders/native.py",
        "/shaders/__init__.py",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/api/models/",
        "/nothing",
    ],
)
def test_what_is_not_served(client: TestClient, url: str) -> None:
    assert client.get(url, follow_redirects=False).status_code == 404


def test_link_out_of_a_folder_of_the_page(client: TestClient, page: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "secret.js").write_text("secret")
    (page["/engine"] / "linked.js").symlink_to(tmp_path / "secret.js")
    assert client.get("/engine/linked.js").status_code == 404


def test_models(make_pack: MakePack, packs: Path, page: dict[str, Path]) -> None:
    big = make_pack("a-big-one", shard=bytes(10_000), name="Big", grade="good", ternary_bits_per_weight=None)
    client = TestClient(create_app(packs, folders=page), base_url="http://localhost:8000")
    response = client.get("/api/models")
    assert response.headers["cache-control"] == "no-cache"
    assert response.json() == [
        {
            "id": "a-big-one",
            "url": "/packs/a-big-one/",
            "name": "Big",
            "description": "A pack for tests.",
            "family": "llama",
            "license": "apache-2.0",
            "parameters": 1000,
            "bytes": sum(path.stat().st_size for path in big.iterdir()),
            "resident_bytes": 4096,
            "kv": {"layers": 2, "kv_heads": 1, "head_dim": 8},
            "context": 128,
            "activations": "a8",
            "bits_per_weight": 2.5,
            "ternary_bits_per_weight": None,
            "grade": "good",
            "about": None,
            "default": False,
        },
        {
            "id": "tiny",
            "url": "/packs/tiny/",
            "name": "Tiny",
            "description": "A pack for tests.",
            "family": "llama",
            "license": "apache-2.0",
            "parameters": 1000,
            "bytes": sum(path.stat().st_size for path in (packs / "tiny").iterdir()),
            "resident_bytes": 4096,
            "kv": {"layers": 2, "kv_heads": 1, "head_dim": 8},
            "context": 128,
            "activations": "a8",
            "bits_per_weight": 2.5,
            "ternary_bits_per_weight": 1.6,
            "grade": None,
            "about": None,
            "default": True,
        },
    ]


CARD_TEXT = {"trained_on": "Two books.", "tokens": 9, "held_out": [{"text": "a third", "loss": 2.5}], "samples": []}


@pytest.mark.parametrize("content", [json.dumps(CARD_TEXT), "[]"])
def test_what_a_pack_says_of_itself(packs: Path, page: dict[str, Path], content: str) -> None:
    pack = packs / "tiny"
    (pack / CARD).write_text(content)
    manifest = json.loads((pack / "pack.json").read_text())
    manifest["files"][CARD] = {"bytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    (pack / "pack.json").write_text(json.dumps(manifest))
    client = TestClient(create_app(packs, folders=page), base_url="http://localhost:8000")
    (model,) = client.get("/api/models").json()
    if content == "[]":
        assert model["about"] is None
    else:
        assert model["about"] == CARD_TEXT


@pytest.mark.parametrize(
    ("packs_there", "expected"),
    [
        ({"large": {"parameters": 2000}, "small": {}}, "large"),
        ({"large": {"parameters": 2000, "grade": "BROKEN"}, "small": {}}, "small"),
        ({"slow": {"parameters": 2000, "shard": bytes(5000)}, "small": {}}, "small"),
        ({"slow": {"shard": bytes(5000)}, "slower": {"parameters": 3000, "shard": bytes(6000)}}, "slow"),
        ({"b": {}, "a": {}}, "b"),
    ],
)
def test_the_default_is_the_largest_that_comes_quickly(
    packs_there: dict[str, dict[str, Any]],
    expected: str,
    make_pack: MakePack,
    page: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.models.QUICK_BYTES", 5000)
    for name, changes in packs_there.items():
        folder = make_pack(name, **changes).parent
    client = TestClient(create_app(folder, folders=page), base_url="http://localhost:8000")
    assert [model["id"] for model in client.get("/api/models").json() if model["default"]] == [expected]


def test_pack_exported_while_the_server_runs(client: TestClient, make_pack: MakePack) -> None:
    assert [model["id"] for model in client.get("/api/models").json()] == ["tiny"]
    make_pack("new")
    assert [model["id"] for model in client.get("/api/models").json()] == ["new", "tiny"]
    assert client.get("/packs/new/pack.json").status_code == 200


@pytest.mark.parametrize("missing", ["/app/index.html", "/vendor/jinja.js", "/shaders/kernels.json"])
def test_page_that_is_not_complete(packs: Path, page: dict[str, Path], missing: str) -> None:
    _, mount, name = missing.split("/")
    (page[f"/{mount}"] / name).unlink()
    with pytest.raises(StartupError, match=f"{name} is missing"):
        create_app(packs, folders=page)


def test_the_real_page(packs: Path) -> None:
    client = TestClient(create_app(packs), base_url="http://localhost:8000")
    page = client.get("/")
    assert page.status_code == 200
    assert __version__ in page.text
    for url in ("/engine/index.js", "/engine/worker.js", "/vendor/tokenizers.js", "/shaders/kernels.json"):
        assert client.get(url).status_code == 200, url


def test_everything_for_a_visit_without_network(packs: Path) -> None:
    client = TestClient(create_app(packs), base_url="http://localhost:8000")
    worker = client.get("/sw.js")
    assert worker.status_code == 200
    assert worker.headers["content-type"].startswith("text/javascript")
    assert worker.headers["cache-control"] == "no-cache"
    urls = client.get("/api/assets").json()
    assert {"/", "/api/models", "/app/main.js", "/engine/worker.js", "/shaders/kernels.json"} <= set(urls)
    assert not any(url.startswith("/packs") or url.endswith(".py") for url in urls)
    for url in urls:
        assert client.get(url).status_code == 200, url
