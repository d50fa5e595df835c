"""Headers, hosts and paths: what a hostile page or request must not get."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from server.errors import StartupError
from server.hosts import HostCheck, check_host_name, without_port

CSP = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "worker-src 'self'",
    "font-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
}


def assert_secured(headers: http.client.HTTPMessage | dict[str, str]) -> None:
    assert set(headers["content-security-policy"].split("; ")) == CSP
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-embedder-policy"] == "require-corp"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "camera=()" in headers["permissions-policy"]
    assert not [name for name in headers if name.lower().startswith("access-control-")]


@pytest.mark.parametrize(
    ("url", "headers", "status"),
    [
        ("/", {}, 200),
        ("/health", {}, 200),
        ("/api/models", {}, 200),
        ("/app/main.js", {}, 200),
        ("/engine/index.js", {}, 200),
        ("/vendor/jinja.js", {}, 200),
        ("/shaders/kernels.json", {}, 200),
        ("/packs/tiny/pack.json", {}, 200),
        ("/packs/tiny/program.json", {"range": "bytes=0-3"}, 206),
        ("/packs/tiny/program.json", {"range": "bytes=999-"}, 416),
        ("/packs/tiny/program.json", {"range": "nonsense"}, 400),
        ("/packs/tiny/pack.json", {"if-none-match": "*"}, 304),
        ("/app/main.js", {"if-none-match": "*"}, 304),
        ("/packs/none/pack.json", {}, 404),
        ("/none", {}, 404),
        ("/", {"host": "evil.example"}, 421),
    ],
)
def test_headers_on_every_response(client: TestClient, url: str, headers: dict[str, str], status: int) -> None:
    response = client.get(url, headers={"origin": "https://evil.example", **headers})
    assert response.status_code == status
    assert_secured(dict(response.headers))


def test_headers_on_405(client: TestClient) -> None:
    for url in ("/", "/api/models", "/app/main.js", "/packs/tiny/pack.json"):
        response = client.post(url)
        assert response.status_code == 405
        assert_secured(dict(response.headers))


def test_headers_on_an_unexpected_error(app: FastAPI, client: TestClient) -> None:
    @app.get("/fails")
    def fails() -> None:
        raise RuntimeError("a detail that nobody should see")

    response = client.get("/fails")
    assert response.status_code == 500
    assert "nobody" not in response.text
    assert_secured(dict(response.headers))


def test_preflight_is_not_answered(client: TestClient) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "GET"}
    response = client.options("/api/models", headers=asked)
    assert response.status_code == 405
    assert_secured(dict(response.headers))


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"],
)
def test_local_hosts(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example#localhost",
        "localhost:80@evil.example",
        "[::1].evil.example",
        "[::2]",
        "[::1",
        "127.0.0.2",
        "0.0.0.0",
        "",
        ".",
    ],
)
def test_other_hosts(client: TestClient, host: str) -> None:
    response = client.get("/health", headers={"host": host})
    assert response.status_code == 421
    assert "--allow-host" in response.text


async def _no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("never called")


def test_allowed_hosts() -> None:
    allowed = HostCheck(_no_app, ["Tercet.lan", "192.168.1.5", "fe80::1"]).allowed
    assert {"tercet.lan", "192.168.1.5", "[fe80::1]", "localhost"} <= allowed
    assert without_port("Tercet.LAN:8000") in allowed
    assert without_port("[FE80::1]:8000") in allowed


@pytest.mark.parametrize("name", ["*", "", "http://tercet.lan", "tercet.lan:8000", "a b", ".lan"])
def test_allowed_host_that_is_none(name: str) -> None:
    with pytest.raises(StartupError, match="--allow-host"):
        check_host_name(name)


@pytest.fixture
def connection(packs: Path, start_server: Callable) -> http.client.HTTPConnection:
    """A connection to the real server, which sends paths as they are written."""
    return http.client.HTTPConnection("127.0.0.1", start_server("--packs", packs, "--port", "0").port())


def test_no_path_leads_out(connection: http.client.HTTPConnection, packs: Path) -> None:
    (packs.parent / "secret").write_text("top secret")
    (packs / "secret").write_text("top secret")
    bases = ("/packs", "/packs/tiny", "/app", "/engine", "/shaders", "/vendor")
    steps = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "%252e%252e%252f", "....//", "/")
    ends = ("secret", "etc/passwd", "pyproject.toml", "server/app.py", "packer/FORMAT.md")
    for base in bases:
        for step in steps:
            for depth in (1, 2, 12):
                for end in ends:
                    path = f"{base}/{step * depth}{end}"
                    connection.request("GET", path)
                    response = connection.getresponse()
                    body = response.read()
                    assert response.status == 404, (path, body)
                    assert b"top secret" not in body
    for path in ("/packs/tiny/%00", "/packs/tiny/pack.json%00.txt", "/app/%00", "/packs/" + "a" * 5000):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == 404, path
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


def test_real_server_says_nothing_about_itself(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.headers["server"] is None
    assert_secured(response.headers)


def test_request_without_or_with_two_hosts(connection: http.client.HTTPConnection) -> None:
    for hosts in ((), ("localhost", "evil.example")):
        connection.putrequest("GET", "/health", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        response = connection.getresponse()
        response.read()
        assert response.status in (400, 421), hosts
        connection.close()
