"""The wheel holds all that the server needs: it serves the page without a checkout beside it."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, root], check=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_contents_of_the_wheel(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "tercet = packer.__main__:main" in archive.read(scripts).decode()
        assert "\nLicense-Expression: Apache-2.0\n" in archive.read(metadata).decode()
        assert "\nRequires-Python: >=3.11\n" in archive.read(metadata).decode()
    assert {name.split("/")[0] for name in names} == {
        "packer",
        "server",
        "shaders",
        metadata.split("/")[0],
    }
    assert {"packer/FORMAT.md", "packer/__main__.py", "shaders/kernels.json", "server/app.py"} <= names
    for folder in ("app", "engine", "vendor"):
        served = {
            f"server/_web/{path.relative_to(root / 'web').as_posix()}"
            for path in (root / "web" / folder).rglob("*")
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".d.ts")
        }
        assert served
        assert served == {name for name in names if name.startswith(f"server/_web/{folder}/")}
    wgsl = {f"shaders/{path.name}" for path in (root / "shaders").glob("*.wgsl")}
    assert wgsl
    assert wgsl <= names


def test_wheel_serves_the_page(wheel: Path, packs: Path, tmp_path: Path, start_server: Callable[..., Any]) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    server = start_server("--packs", packs, "--port", "0", cwd=tmp_path, env={"PYTHONPATH": str(site)})
    connection = http.client.HTTPConnection("127.0.0.1", server.port())
    for url in ("/", "/vendor/jinja.js", "/engine/index.js", "/shaders/kernels.json", "/api/models"):
        connection.request("GET", url)
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, url
        if url == "/vendor/jinja.js":
            assert body == (site / "server" / "_web" / "vendor" / "jinja.js").read_bytes()
    # Without its page it cannot start: so it was the wheel's page, not the checkout's.
    shutil.rmtree(site / "server" / "_web" / "app")
    again = start_server("--packs", packs, "--port", "0", cwd=tmp_path, env={"PYTHONPATH": str(site)})
    status, _, err = again.finish()
    assert status == 2
    assert str(site / "server" / "_web" / "app" / "index.html") in err
