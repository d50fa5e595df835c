"""The WGSL files against kernels.json, and against the limits that any WebGPU device has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shaders import contract
from shaders.contract import Kernel
from shaders.native_device import FIRST_STORAGE_BINDING
from shaders.symbols import shared_symbols

FOLDER = Path(contract.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.wgsl"))
BY_NAME = {kernel.name: kernel for kernel in contract.kernels()}
MOST_THREADS, MOST_STORAGE_BUFFERS, MOST_WORKGROUP_BYTES = 256, 8, 16384
TYPE_BYTES = {
    "u32": 4, "i32": 4, "f32": 4, "atomic<u32>": 4, "atomic<i32>": 4, "vec2<u32>": 8, "vec4<f32>": 16, "vec4<u32>": 16,
}  # fmt: skip


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
    tile = kernel.overrides.get("TOKENS", 1)
    name = kernel.name.removesuffix(f"_{tile}") if tile != 1 else kernel.name
    assert re.search(rf"\b{name}\b", text.split("\n\n")[0]), "the first lines name the kernel, as its entry does"
    assert re.search(r"^  .*=", text, re.MULTILINE), "a formula"
    for binding in kernel.bindings:
        wanted = rf"^{binding.name} +{re.escape(binding.dtype)} \[.*\] +(read_write|read|write)\b"
        assert re.search(wanted, text, re.MULTILINE), f"{binding.name} with dtype, shape and access"
    assert re.search(r"[Oo]ne workgroup|\w+ rows a workgroup|A workgroup makes", text), "the dispatch"
    assert re.search(r"WORKGROUP|limit", text), "the limits"


def test_bindings_are_those_of_the_contract(kernel: Kernel) -> None:
    pattern = r"@group\(0\) @binding\((\d+)\) var<(\w+)(?:, (\w+))?> (\w+): ([^;]+);"
    found = {
        int(at): (space, access, name, kind) for at, space, access, name, kind in re.findall(pattern, code(kernel.file))
    }
    assert code(kernel.file).count("@binding") == len(found)
    expected = {0: ("uniform", "", "params", "Params")} if kernel.params else {}
    if "step" in kernel.uniforms:
        expected[1] = ("uniform", "", "step", "vec4<u32>")
    for index, binding in enumerate(kernel.bindings, FIRST_STORAGE_BINDING):
        access = "read" if binding.access == "read" else "read_write"
        kind = "array<atomic<u32>>" if binding.dtype == "atomic" else f"array<{binding.dtype}>"
        expected[index] = ("storage", access, binding.name, kind)
    assert found == expected


def test_parameters_are_those_of_the_contract(kernel: Kernel) -> None:
    assert "params" in kernel.uniforms, "executors bind it, whether the file declares it or not"
    body = re.search(r"struct Params \{(.*?)\}", code(kernel.file), re.DOTALL)
    if not kernel.params:
        assert not body and not re.search(r"\bparams\b", code(kernel.file))
        return
    assert body
    members = re.findall(r"(\w+): (\w+),", body.group(1))
    assert members == [(name, kind) for name, kind, _ in kernel.params]
    assert all(kind in ("u32", "f32") for _, kind in members), "offset = 4 x index holds for scalars only"


def test_overrides_are_those_of_the_contract(kernel: Kernel) -> None:
    text = code(kernel.file)
    found = {name: (kind, value) for name, kind, value in re.findall(r"override (\w+): (u32|f32) = ([\d.]+);", text)}
    assert len(re.findall(r"\boverride\b", text)) == len(found)
    own, sharing = {*kernel.overrides, *kernel.tuned}, [one for one in BY_NAME.values() if one.file == kernel.file]
    assert own <= set(found) == {name for one in sharing for name in (*one.overrides, *one.tuned)}
    for name, (kind, value) in found.items():
        sources = {one.op: one.overrides.get(name) for one in sharing}
        is_number = any(
            source in contract.op_spec(op).get("numbers", {})
            for op, source in sources.items()
            if isinstance(source, str)
        )
        assert kind == ("f32" if is_number else "u32"), name
        assert (kind == "f32") == ("." in value), name
    for name, candidates in kernel.tuned.items():
        assert int(found[name][1]) == candidates[0], f"{name}: the file's default is the first candidate"
    if "TOKENS" in found:
        assert found["TOKENS"] == ("u32", "1")
    for stage in {"ACT", "MERGE", "NORM", "GAIN"} & set(found) - own:
        assert found[stage] == ("u32", "0"), f"{stage}: a stage that a kernel does not name is off"


def symbols_of(dim: contract.Dim) -> set[str]:
    if isinstance(dim, list):
        return {symbol for part in dim for symbol in symbols_of(part)}
    return {dim} if isinstance(dim, str) else set()


def test_nothing_changes_with_the_step_but_dispatches(kernel: Kernel) -> None:
    dims = [*(dim for _, _, dim in kernel.params), *kernel.overrides.values()]
    assert not {"T", "X_T", "R", "KEYS"} & {symbol for dim in dims for symbol in symbols_of(dim)}


def test_limits(kernel: Kernel) -> None:
    text = code(kernel.file)
    assert len(kernel.bindings) <= MOST_STORAGE_BUFFERS
    assert re.findall(r"@workgroup_size\((.*?)\)", text) == ["WORKGROUP"]
    assert max(kernel.tuned["WORKGROUP"]) <= MOST_THREADS
    for threads in kernel.tuned["WORKGROUP"]:
        for sizes in largest_sizes(kernel):
            assert workgroup_bytes(text, {"WORKGROUP": threads, **sizes}) <= MOST_WORKGROUP_BYTES


def largest_sizes(kernel: Kernel) -> list[dict[str, int]]:
    """Constants of lengths in workgroup memory, at the most that ``when`` lets through, for each activation."""
    sizes = {"TOKENS": int(str(kernel.overrides.get("TOKENS", 1)))}
    if "Q_VECTORS" not in kernel.overrides:
        return [sizes]
    most = kernel.when["Q_BYTES"][1]
    found = []
    for planes in (1, 2):
        blocks = max(
            n for n in range(1, kernel.when["K"][1] // 64 + 1) if shared_symbols(64 * n, planes)["Q_BYTES"] <= most
        )
        found.append({**sizes, "BLOCKS": blocks, "Q_VECTORS": shared_symbols(64 * blocks, planes)["Q_VECTORS"]})
    return found


def workgroup_bytes(text: str, sizes: dict[str, int]) -> int:
    """Bytes of workgroup memory as devices count them: each variable rounded up to 16."""
    total = 0
    for kind in re.findall(r"var<workgroup> \w+: ([^;]+);", text):
        array = re.fullmatch(r"array<(.+), ([\w *]+)>", kind)
        element, length = array.groups() if array else (kind, "1")
        count = 1
        for part in length.split(" * "):
            count *= sizes[part] if part in sizes else int(part)
        total += 16 * contract.quotient_up(TYPE_BYTES[element] * count, 16)
    return total


@pytest.mark.parametrize("file", FILES)
def test_the_base_form_needs_no_extension(file: str) -> None:
    """A file that uses subgroups says so in kernels.json, and another one stands in where there are none."""
    assert not re.search(r"\b(enable|requires|f16|pack4xI8Clamp)\b", code(file))
    users = [kernel for kernel in BY_NAME.values() if kernel.file == file]
    assert all((kernel.needs == ("subgroups",)) == bool(re.search(r"\bsubgroup[A-Z]", code(file))) for kernel in users)
    for kernel in users:
        if kernel.needs:
            base = BY_NAME[kernel.name.replace("_rows", "")]
            assert base.op == kernel.op and not base.needs


#: Functions and structs that several files have, for WGSL includes nothing: what changes in one changes in all.
TWINS = {
    ("linear_rows", "linear_ternary_rows"): "Ahead Codes Words load planes unpack",
    ("linear_fused", "linear_ternary"): "Codes add_partials dot16 dots group_scale half planes unpack",
    ("linear_ternary", "linear_ternary_tiled"): "Codes FloatSums Sums dot16 dots half unpack",
    ("linear_ternary_tiled", "linear_ternary_narrow"): "Params dot16 group_scale half",
    ("linear_ternary", "linear_float_wide", "linear_ternary_rows"): "token_count",
    ("linear_fused", "linear_rows"): "activate integer_limit largest pack_bytes planes",
    ("linear_fused", "normalize"): "Totals integer_limit pack_bytes",
    ("normalize_wide", "normalize"): "Totals integer_limit pack_bytes reduce",
    ("normalize_wide", "linear_rows"): "activate gained largest",
    ("attention_group", "rope_attention"): "Mixed key_dots quad_dots quad_of row_vectors signed_bytes vector_quads",
    ("attention_group", "rope_attention", "attention", "attention_merge"): "first_key",
    ("rope_append", "rope_attention"): "head_value",
    ("argmax", "draw", "weigh"): "key",
    ("argmax", "weigh"): "was_seen",
    ("draw", "weigh"): "scaled value_of weight",
    ("dequantize", "linear_float", "linear_float_tiled"): "four half scale_of signed_bytes",
    ("dequantize", "linear_float", "linear_float_tiled", "linear_float_wide"): (
        "doubled e4m3 factors_of four_bits scale_byte"
    ),
    ("linear_float_wide", "linear_float"): "half signed_bytes",
}


def parts_of(file: str) -> dict[str, str]:
    """Functions and structs of a file by name, without comments and layout."""
    found = re.findall(r"^((?:fn|struct) (\w+)[^{]*\{.*?^\})", code(f"{file}.wgsl"), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for text, name in found}


@pytest.mark.parametrize("files", TWINS, ids="-".join)
def test_what_several_files_repeat_is_the_same_in_all(files: tuple[str, ...]) -> None:
    first, *others = (parts_of(file) for file in files)
    for name in TWINS[files].split():
        assert all(other[name] == first[name] for other in others), name
