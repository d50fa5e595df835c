"""shaders/README.md describes every operation, field, kernel, symbol and tolerance of kernels.json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shaders import contract

README = (Path(contract.__file__).parent / "README.md").read_text(encoding="utf-8")
OPS = contract.document()["ops"]
LISTS = ("vectors", "optional_vectors", "weights", "integers", "optional_integers", "flags", "caches", "tables")


def row_of(name: str, table: list[str]) -> str:
    """The row whose first cell names something."""
    rows = [row for row in table if row.startswith("|") and f"`{name}`" in row.split("|")[1]]
    assert len(rows) == 1, f"{name} is in the first column of {len(rows)} rows"
    return rows[0]


def section(title: str) -> list[str]:
    return README.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()


@pytest.mark.parametrize("op", OPS)
def test_operation(op: str) -> None:
    spec = OPS[op]
    row = row_of(op, section("A program"))
    fields = [*spec.get("reads", {}), *(field for part in LISTS for field in spec.get(part, ()))]
    fields += [*spec.get("numbers", {}), *spec.get("strings", {}), *spec.get("writes", {})]
    fields += [choice for choices in spec.get("strings", {}).values() for choice in choices]
    assert [field for field in fields if f"`{field}`" not in row and f"{field}`" not in row] == []


@pytest.mark.parametrize("op", contract.document()["inner_ops"])
def test_inner_operation(op: str) -> None:
    row = row_of(op, section("A program"))
    for rule in contract.document()["rewrites"]:
        if len(rule["into"]) == 1 and rule["into"][0]["op"] == op:
            assert [name for name in rule["ops"] if f"`{name}`" not in row] == []


def test_buffers() -> None:
    table = section("Layouts on the GPU")
    sources = {binding.source for kernel in contract.kernels() for binding in kernel.bindings}
    utilities = {"@data", "@sums"}  # of read_bandwidth alone
    for name in (source for source in sources - utilities if source.startswith("@")):
        row_of(name, table)


@pytest.mark.parametrize("kernel", [kernel.name for kernel in contract.kernels()])
def test_kernel(kernel: str) -> None:
    row_of(kernel, section("kernels.json"))


def test_utilities_encodings_and_tolerances() -> None:
    for name in contract.document()["utilities"]:
        assert f"`{name}`" in README
    for name in contract.document()["encodings"]:
        assert name in "\n".join(row.split("|")[1] for row in section("Layouts on the GPU") if row.startswith("|"))
    for kernel in contract.kernels():
        row_of(kernel.tolerance, section("How results are compared"))


def test_symbols() -> None:
    text = "\n".join(section("kernels.json"))

    def symbols(dim: contract.Dim) -> set[str]:
        if isinstance(dim, list):
            return {symbol for part in dim for symbol in symbols(part)}
        return {dim} if isinstance(dim, str) else set()

    own = {field for spec in OPS.values() for part in ("numbers", "strings") for field in spec.get(part, {})}
    own |= {
        field
        for spec in OPS.values()
        for part in ("integers", "optional_integers", "flags")
        for field in spec.get(part, ())
    }
    own |= {"activation", "WORKGROUP", "ROWS"}  # the dtype of a value, and tuned overrides
    changing = {symbol for kernel in contract.kernels() for symbol in kernel.when} | {"KEYS"}
    assert [symbol for symbol in changing - own if not re.search(rf"\b{symbol}\b", text)] == []
    for kernel in contract.kernels():
        dims = [*(dim for _, _, dim in kernel.params), *kernel.overrides.values(), *kernel.dispatch]
        dims += [dim for binding in kernel.bindings for dim in binding.shape]
        for symbol in {symbol for dim in dims for symbol in symbols(dim)} - own:
            assert re.search(rf"\b{symbol}\b", text), f"{kernel.name}: {symbol}"


def test_shared_numbers() -> None:
    constants = contract.document()["constants"]
    for name in ("a8_max", "a16_max", "kv_f16_max", "ring", "invalid_id"):
        assert str(constants[name]) in README
    assert f"`most_drafted` = {constants['most_drafted']}" in README
    assert f"{constants['key_chunk']} keys (`key_chunk`)" in README
    [most_keys] = {rule["most_keys"] for rule in contract.document()["rewrites"] if "most_keys" in rule}
    assert f"({most_keys} keys)" in README
    assert f"{constants['absmax_floor']:.0e}".replace("e-0", "e-") in README
    assert constants["weight_one"] == 2**31
