"""`python -m server` as a person starts it: what it prints, and how it refuses."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.launch import page_url

StartServer = Callable[..., Any]  # returns a ServerProcess of tests/conftest.py


def assert_refused(server: Any, *parts: str) -> None:
    """The server ended with status 2 and one line on stderr that has all of `parts`."""
    status, out, err = server.finish()
    assert status == 2, (out, err)
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(part in last for part in parts), err
    assert "Traceback" not in err


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_start_answer_and_stop(start_server: StartServer, packs: Path) -> None:
    server = start_server("--packs", packs, "--port", "0")
    port = server.port()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/packs/tiny/program.json", headers={"Range": "bytes=1-13"})
    response = connection.getresponse()
    assert (response.status, response.read()) == (206, b'"ops_version"')
    server.process.send_signal(signal.SIGINT)
    status, out, err = server.finish()
    assert (status, err) == (0, "")
    assert "Tiny" in out
    assert "Ctrl-C" in out


def test_broken_packs_are_named(start_server: StartServer, packs: Path) -> None:
    (packs / "broken").mkdir()
    (packs / "broken" / "pack.json").write_text("{")
    server = start_server("--packs", packs, "--port", "0")
    server.port()
    server.process.send_signal(signal.SIGTERM)
    _, out, err = server.finish()
    assert err.startswith("WARNING: pack 'broken' left out: ")
    assert "not valid JSON" in err
    assert "broken" not in out


def test_no_browser_without_a_screen(start_server: StartServer, packs: Path, tmp_path: Path) -> None:
    marker = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {marker}\n')
    browser.chmod(0o755)
    for display, opened in (("", False), (":99", True)):
        env = {"BROWSER": f"{browser} %s", "DISPLAY": display, "WAYLAND_DISPLAY": ""}
        server = start_server("--packs", packs, "--port", "0", "--open", env=env)
        port = server.port()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        for _ in range(100 if opened else 5):
            if marker.exists() and marker.read_text().endswith("\n"):
                break
            time.sleep(0.1)
        assert marker.exists() == opened
        server.process.kill()
    assert marker.read_text() == f"http://127.0.0.1:{port}/\n"


def test_missing_packs_folder(start_server: StartServer, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert_refused(start_server("--packs", none), str(none), "found nothing", "--packs")


def test_no_pack_in_the_folder(start_server: StartServer, tmp_path: Path) -> None:
    assert_refused(start_server("--packs", tmp_path), "no usable pack", "tercet export")


def test_taken_port(start_server: StartServer, packs: Path, taken_port: int) -> None:
    server = start_server("--packs", packs, "--port", str(taken_port))
    assert_refused(server, f"port {taken_port} on 127.0.0.1 is taken", "--port")


def test_host_that_is_not_of_this_machine(start_server: StartServer, packs: Path) -> None:
    assert_refused(start_server("--packs", packs, "--host", "192.0.2.1"), "192.0.2.1")


def test_host_that_is_no_address(start_server: StartServer, packs: Path) -> None:
    assert_refused(start_server("--packs", packs, "--host", "no such host"), "--host no such host")


def test_allow_host_that_is_no_name(start_server: StartServer, packs: Path) -> None:
    assert_refused(start_server("--packs", packs, "--allow-host", "http://a.example"), "http://a.example")


def test_port_out_of_range(start_server: StartServer, packs: Path) -> None:
    status, _, err = start_server("--packs", packs, "--port", "70000").finish()
    assert status == 2
    assert "--port" in err
    assert "Traceback" not in err


def test_allowed_host_answers(start_server: StartServer, packs: Path) -> None:
    port = start_server("--packs", packs, "--port", "0", "--allow-host", "tercet.lan").port()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    answers = {}
    for host in ("tercet.lan", f"tercet.lan:{port}", "other.lan"):
        connection.request("GET", "/api/models", headers={"Host": host})
        response = connection.getresponse()
        answers[host] = (response.status, response.read())
    assert {host: status for host, (status, _) in answers.items()} == {
        "tercet.lan": 200,
        f"tercet.lan:{port}": 200,
        "other.lan": 421,
    }
    assert json.loads(answers["tercet.lan"][1])[0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("::1", "http://[::1]:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
    ],
)
def test_page_url(host: str, url: str) -> None:
    assert page_url(host, 80) == url
