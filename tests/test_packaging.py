"""The JavaScript libraries of the page: locked, installed by the build hook, usable as they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def hook(root: Path) -> ModuleType:
    """web/build_hook.py as a module."""
    spec = spec_from_file_location("build_hook", root / "web" / "build_hook.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def web_copy(root: Path, tmp_path: Path) -> Path:
    """A folder with what the build hook reads of web/, and nothing installed."""
    copy = tmp_path / "web"
    copy.mkdir()
    for name in (".npmrc", "package.json", "package-lock.json"):
        shutil.copy(root / "web" / name, copy / name)
    return copy


def test_lock_has_hashes_and_no_host(root: Path) -> None:
    text = (root / "web" / "package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    del packages[""]
    assert "@huggingface/tokenizers" in text
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
    assert not re.search(r"https?:|registry", text)
    assert "omit-lockfile-registry-resolved=true" in (root / "web" / ".npmrc").read_text().splitlines()


def test_versions_are_exact(root: Path) -> None:
    package = json.loads((root / "web" / "package.json").read_text())
    versions = package["dependencies"] | package["devDependencies"]
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []


def test_libraries_are_installed_as_locked(root: Path, hook: ModuleType) -> None:
    assert hook.is_up_to_date(root / "web" / "vendor", hook.expected_stamp(root / "web"))


@pytest.mark.parametrize(
    ("name", "export"),
    [("jinja", "Template"), ("tokenizers", "Tokenizer"), ("marked", "marked"), ("dompurify", "default")],
)
def test_library_is_one_module_that_the_page_may_run(root: Path, tmp_path: Path, name: str, export: str) -> None:
    # Alone in a folder, so an import of anything else fails.
    module = tmp_path / f"{name}.mjs"
    shutil.copy(root / "web" / "vendor" / f"{name}.js", module)
    source = module.read_text()
    assert not re.search(r"\beval\(|\bnew Function\(|\bimport\(", source), "forbidden by the page's CSP"
    script = f"console.log(JSON.stringify(Object.keys(await import({json.dumps(str(module))}))))"
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert export in json.loads(done.stdout or "[]"), done.stderr


def test_stamp_follows_the_lock(hook: ModuleType, root: Path, web_copy: Path) -> None:
    vendor = web_copy / "vendor"
    shutil.copytree(root / "web" / "vendor", vendor)
    assert hook.update_vendor(web_copy) is False  # nothing to do, so npm is not run
    (vendor / "jinja.js").unlink()
    assert not hook.is_up_to_date(vendor, hook.expected_stamp(web_copy))
    (vendor / "jinja.js").write_text("")
    assert hook.is_up_to_date(vendor, hook.expected_stamp(web_copy))
    lock = web_copy / "package-lock.json"
    lock.write_text(lock.read_text().replace("sha512-", "sha512-A", 1))
    assert not hook.is_up_to_date(vendor, hook.expected_stamp(web_copy))


def test_npm_that_fails(hook: ModuleType, web_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 of this machine: nobody answers, as without a network.
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(web_copy / "cache"))
    with pytest.raises(hook.VendorError, match="check the network connection") as error:
        hook.update_vendor(web_copy)
    assert "ECONNREFUSED" in str(error.value)
    assert not (web_copy / "vendor").exists()


def test_library_without_its_module(hook: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "dompurify"
    package.mkdir(parents=True)
    with pytest.raises(hook.VendorError, match="npm package dompurify has no file dist/purify.es.mjs"):
        hook.copy_libraries(tmp_path / "node_modules", tmp_path / "vendor", "stamp")
    assert not (tmp_path / "vendor" / ".stamp").exists()
