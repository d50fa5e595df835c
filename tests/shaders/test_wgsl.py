"""The WGSL files against kernels.json, and against the limits that any WebGPU device has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shaders import contract
from shaders.contract import Kernel
from shaders.native_device import FIRST_STORAGE_BINDING

FOLDER = Path(contract.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.wgsl"))
BY_NAME = {kernel.name: kernel for kernel in contract.kernels()}
MOST_THREADS, MOST_STORAGE_BUFFERS, MOST_WORKGROUP_BYTES = 256, 8, 16384
TYPE_BYTES = {"u32": 4, "i32": 4, "f32": 4, "atomic<u32>": 4, "atomic<i32>": 4, "vec4<f32>": 16, "vec4<u32>": 16}


def source(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


def code(file: str) -> str:
    return re.sub(r"//.*", "", source(file))


def header(file: str) -> str:
    lines = source(file).splitlines()
    comment = lines[: next(index for index, line in enumerate(lines) if not line.startswith("//"))]
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in comment)


@pytest.fixture(params=BY_NAME)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return BY_NAME[request.param]


def test_every_file_is_in_the_contract() -> None:
    assert set(FILES) == {kernel.file for kernel in BY_NAME.values()}


def test_header_has_formula_bindings_dispatch_and_limits(kernel: Kernel) -> None:
    text = header(kernel.file)
    assert kernel.name in text.split("\n\n")[0], "the first lines name the kernel"
    assert re.search(r"^  .*=", text, re.MULTILINE), "a formula"
    for binding in kernel.bindings:
        wanted = rf"^{binding.name} +{re.escape(binding.dtype)} \[.*\] +(read_write|read|write)\b"
        assert re.search(wanted, text, re.MULTILINE), f"{binding.name} with dtype, shape and access"
    assert re.search(r"[Oo]ne workgroup|[Ff]our rows a workgroup|A workgroup makes", text), "the dispatch"
    assert re.search(r"WORKGROUP|limit", text), "the limits"


def test_bindings_are_those_of_the_contract(kernel: Kernel) -> None:
    pattern = r"@group\(0\) @binding\((\d+)\) var<(\w+)(?:, (\w+))?> (\w+): ([^;]+);"
    found = {
        int(at): (space, access, name, kind) for at, space, access, name, kind in re.findall(pattern, code(kernel.file))
    }
    assert code(kernel.file).count("@binding") == len(found)
    expected = {0: ("uniform", "", "params", "Params")}
    if "step" in kernel.uniforms:
        expected[1] = ("uniform", "", "step", "vec4<u32>")
    for index, binding in enumerate(kernel.bindings, FIRST_STORAGE_BINDING):
        access = "read" if binding.access == "read" else "read_write"
        kind = "array<atomic<u32>>" if binding.dtype == "atomic" else f"array<{binding.dtype}>"
        expected[index] = ("storage", access, binding.name, kind)
    assert found == expected


def test_parameters_are_those_of_the_contract(kernel: Kernel) -> None:
    body = re.search(r"struct Params \{(.*?)\}", code(kernel.file), re.DOTALL)
    assert body
    members = re.findall(r"(\w+): (\w+),", body.group(1))
    assert members == [(name, kind) for name, kind, _ in kernel.params]
    assert all(kind in ("u32", "f32") for _, kind in members), "offset = 4 x index holds for scalars only"


def test_overrides_are_those_of_the_contract(kernel: Kernel) -> None:
    found = dict(re.findall(r"override (\w+): u32 = (\d+);", code(kernel.file)))
    assert len(re.findall(r"\boverride\b", code(kernel.file))) == len(found)
    assert set(found) == {*kernel.overrides, *kernel.tuned}
    for name, candidates in kernel.tuned.items():
        assert int(found[name]) == candidates[0], f"{name}: the file's default is the first candidate"


def test_nothing_changes_with_the_step_but_dispatches(kernel: Kernel) -> None:
    changing = {"T", "X_T", "R"}
    assert not changing & {str(dim) for _, _, dim in kernel.params} and not changing & set(
        map(str, kernel.overrides.values())
    )


def test_limits(kernel: Kernel) -> None:
    text = code(kernel.file)
    assert len(kernel.bindings) <= MOST_STORAGE_BUFFERS
    assert re.findall(r"@workgroup_size\((.*?)\)", text) == ["WORKGROUP"]
    assert max(kernel.tuned["WORKGROUP"]) <= MOST_THREADS
    for threads in kernel.tuned["WORKGROUP"]:
        assert workgroup_bytes(text, threads) <= MOST_WORKGROUP_BYTES


def workgroup_bytes(text: str, threads: int) -> int:
    total = 0
    for kind in re.findall(r"var<workgroup> \w+: ([^;]+);", text):
        array = re.fullmatch(r"array<(.+), ([\w *]+)>", kind)
        element, length = array.groups() if array else (kind, "1")
        numbers = [threads if part == "WORKGROUP" else int(part) for part in length.split(" * ")]
        count = 1
        for number in numbers:
            count *= number
        total += TYPE_BYTES[element] * count
    return total


@pytest.mark.parametrize("file", FILES)
def test_the_base_form_needs_no_extension(file: str) -> None:
    assert not re.search(r"\b(enable|requires|f16|subgroup\w*|pack4xI8Clamp)\b", code(file))
