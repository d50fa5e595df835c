"""``kernels.json``: its grammar as Python reads it, and its agreement with packs and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from packer import encodings
from packer.manifest import ENCODINGS, SCALE_KINDS, TensorEntry, data_layout, scale_layout
from shaders import contract
from shaders.contract import ContractError, Kernel, document, evaluate, kernels, select

SYMBOLS = {"N": 130, "K": 65, "T": 1, "encoding": "q8", "scale": "group"}
#: What the kernels of a product ask for.
LINEAR = {"T": 1, "encoding": "ternary", "activation": "a8", "few": 0, "software": 0, "K_REST": 0}


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(7, 7), ("N", 130), (["N", 64], 3), (["K", 65], 1), ([["K", 64], 2], 1), (["N", ["K", 64]], 65), ([0, 4], 0)],
)
def test_dimensions_round_up(dim: Any, expected: int) -> None:
    assert evaluate(dim, SYMBOLS) == expected


def test_an_unknown_symbol_is_an_error() -> None:
    with pytest.raises(KeyError, match="M"):
        evaluate(["M", 4], SYMBOLS)


def test_elements_are_the_product() -> None:
    assert contract.element_count(("N", ["K", 64], 4), SYMBOLS) == 130 * 2 * 4
    assert contract.element_count((), SYMBOLS) == 1


@pytest.mark.parametrize(("number", "divisor"), [(0, 4), (1, 4), (4, 4), (5, 4), (10**15 + 1, 10)])
def test_quotients_round_up(number: int, divisor: int) -> None:
    quotient = contract.quotient_up(number, divisor)
    assert (quotient - 1) * divisor < number <= quotient * divisor


def test_messages_stay_short() -> None:
    assert contract.short("x") == "'x'"
    assert len(contract.short(["y" * 10] * 1000)) == 80


def test_every_operation_has_a_kernel_and_every_kernel_an_operation() -> None:
    served = {kernel.op for kernel in kernels()}
    inner, utilities = set(document()["inner_ops"]), set(document()["utilities"])
    assert inner | utilities <= served <= {*document()["ops"], *inner, *utilities}
    # What no kernel runs as it stands has a rewrite of its own, which every device and every step takes.
    always = {rule["ops"][0] for rule in document()["rewrites"] if len(rule["ops"]) == 1 and not LIMITS & set(rule)}
    assert set(document()["ops"]) <= served | always
    assert not set(document()["ops"]) & inner, "op_spec() finds a name in one of the two"


def test_rewrites_name_what_exists() -> None:
    """Each field of an inner operation comes from one of the operations that match, and nothing is left out."""
    for rule in document()["rewrites"]:
        assert set(rule) <= {"ops", "into", *LIMITS}
        specs = [document()["ops"][name] for name in rule["ops"]]
        for pattern in rule["into"]:
            spec = document()["inner_ops"][pattern["op"]]
            wanted = fields(spec) | ({spec["via"]} if "via" in spec else set())
            given = set(pattern) - {"op"}
            assert given <= wanted, f"{pattern['op']} has no {given - wanted}"
            if pattern["op"] not in ("pick", "weigh", "draw", "accept"):
                assert wanted - given <= optional(spec), f"{pattern['op']} needs {wanted - given}"
            for source in (source for name, source in pattern.items() if name != "op" and isinstance(source, str)):
                index, _, field = source.partition(".")
                assert field in fields(specs[int(index)]), f"{pattern['op']}: {source}"


#: Keys of a rewrite that keep it from some devices or steps.
LIMITS = {"gpu", "most_keys"}


def fields(spec: Mapping[str, Any]) -> set[str]:
    """All fields that an operation may have."""
    kinds = ("reads", "writes", "weights", "vectors", "optional_vectors", "caches", "tables", "integers", "numbers")
    return {field for kind in (*kinds, "optional_integers", "strings", "flags") for field in spec.get(kind, ())}


def optional(spec: Mapping[str, Any]) -> set[str]:
    """Fields that an operation may lack."""
    defaults = {name for name, default in spec.get("numbers", {}).items() if default is not None}
    lists = ("optional_vectors", "optional_integers", "flags")
    return {*(field for kind in lists for field in spec.get(kind, ())), *defaults}


def test_tiles_are_kernels_of_their_own() -> None:
    entry = next(entry for entry in document()["kernels"] if entry["name"] == "linear_ternary")
    made = [kernel for kernel in kernels() if kernel.name.rstrip("_48") == "linear_ternary"]
    assert [kernel.name for kernel in made] == ["linear_ternary", "linear_ternary_4", "linear_ternary_8"]
    assert [kernel.overrides["TOKENS"] for kernel in made] == entry["tiles"] == [1, 4, 8]
    assert [kernel.when["T"] for kernel in made] == [[1, 1], [2, 4], [5, 8]]
    assert [kernel.when.get("few") for kernel in made] == [None, [1, 1], [1, 1]]


def test_fused_products_are_for_one_token_that_fits_workgroup_memory() -> None:
    """Each workgroup makes the integers anew: of several tokens that costs more than a dispatch."""
    fused = [kernel for kernel in kernels() if kernel.file in ("linear_fused.wgsl", "linear_rows.wgsl")]
    assert len(fused) == 8
    assert all(kernel.when["T"] == [1, 1] and kernel.when["Q_BYTES"] == [0, 12096] for kernel in fused)


def test_the_most_tokens_of_a_verification_have_kernels() -> None:
    for entry in document()["kernels"]:
        if "needs" in entry:
            continue  # another kernel takes what this one does not
        assert max(entry.get("tiles", [contract.constant("most_drafted")])) == contract.constant("most_drafted")


def test_a_key_chunk_is_the_same_everywhere() -> None:
    chunk = contract.constant("key_chunk")
    for kernel in kernels():
        if kernel.op in ("rope_attention", "attention_merge", "merge_linear"):
            assert kernel.overrides["CHUNKS"] == ["S", chunk]
            parts = next(binding for binding in kernel.bindings if binding.source == "@parts")
            assert list(parts.shape) == ["T", "heads", ["S", chunk], "PART_VECTORS"]
        if kernel.op == "rope_attention":
            assert list(kernel.dispatch) == ["kv_heads", ["KEYS", chunk], "T"]


def test_words_of_packs_have_numbers() -> None:
    enums = document()["enums"]
    assert set(enums["encoding"]) == set(ENCODINGS) == set(document()["encodings"])
    assert set(enums["scale"]) == set(SCALE_KINDS)
    assert set(enums["activation"]) == {"f32", *contract.INTEGER_ACTIVATIONS}
    ops = document()["ops"]
    assert set(enums["act"]) - {"none"} == {act for op in ("glu", "activate") for act in ops[op]["strings"]["act"]}
    for kind, values in enums.items():
        if kind != "scale":  # by part and by row are one case to a kernel: both are one scale a row
            assert len(set(values.values())) == len(values), kind


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("columns", [1, 20, 21, 64, 65, 576])
def test_disk_blocks_are_those_of_packs(encoding: str, columns: int) -> None:
    block = contract.encoding(encoding)
    dtype, width = data_layout(encoding, columns)
    words = contract.quotient_up(columns, block["disk_block"]) * block["disk_block_words"]
    assert 4 * words == width * {"U8": 1, "I8": 1, "F16": 2, "F32": 4}[dtype]


def test_groups_of_scales_are_those_of_packs() -> None:
    for encoding in ("q8", "q4", "q4a", "mxfp4"):
        assert contract.encoding(encoding)["group"] == encodings.GROUP


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if contract.encoding(name)["scale_bytes"]])
@pytest.mark.parametrize("columns", [1, 16, 17, 33, 576])
def test_scale_bytes_are_those_of_packs(encoding: str, columns: int) -> None:
    block = contract.encoding(encoding)
    group = block["group"] or 64
    dtype, width = scale_layout(encoding, columns, group)
    assert width * {"U8": 1, "F16": 2}[dtype] == contract.quotient_up(columns, group) * block["scale_bytes"]
    entry = TensorEntry("w", encoding, (3, columns), "group" if encoding == "ternary" else None, (), group, (3,))
    assert ("w.tensor_scale" in entry.keys()) == bool(block.get("tensor_scale"))  # noqa: SIM118 (a method)


def test_the_first_kernel_that_fits_is_chosen() -> None:
    for kernel in kernels():
        earlier = [other for other in kernels() if other.op == kernel.op]
        assert not shadowed(kernel, earlier), f"{kernel.name} can never be chosen"
        assert earlier[0].when or earlier == [kernel], (
            f"{kernel.name} can never be chosen: the first one takes everything"
        )
    one, many = select("linear", LINEAR), select("linear", {**LINEAR, "T": 64})
    assert one.name != many.name
    assert one.when["T"][1] >= 1 and many.when["T"][0] <= 64 <= many.when["T"][1]
    assert select("linear", {**LINEAR, "encoding": "q8", "activation": "f32"}).name != one.name


def shadowed(kernel: Kernel, all_of_op: list[Kernel]) -> bool:
    """Whether a kernel before this one takes all that this one takes."""

    def takes(outer: list[Any], inner: list[Any]) -> bool:
        if isinstance(inner[0], str):
            return set(inner) <= set(outer)
        return outer[0] <= inner[0] and inner[1] <= outer[1]

    before = all_of_op[: all_of_op.index(kernel)]
    return any(
        all(symbol in kernel.when and takes(allowed, kernel.when[symbol]) for symbol, allowed in other.when.items())
        for other in before
    )


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "linear_ternary"),
        ({"T": 2}, "linear_ternary_tiled"),
        ({"T": 2, "software": 1}, "linear_ternary_narrow"),
        ({"T": 2, "few": 1}, "linear_ternary_4"),
        ({"T": 4, "few": 1, "software": 1}, "linear_ternary_4"),
        ({"T": 5, "few": 1}, "linear_ternary_8"),
        ({"T": 8, "few": 1}, "linear_ternary_8"),
        ({"encoding": "q8", "activation": "f32"}, "linear_float_wide"),
        ({"encoding": "q8", "activation": "f32", "K_REST": 1}, "linear_float"),
        ({"encoding": "f16", "activation": "f32"}, "linear_float"),
        ({"encoding": "q8", "activation": "f32", "T": 8, "few": 1}, "linear_float_wide_8"),
        ({"encoding": "q8", "activation": "f32", "T": 8}, "linear_float_tiled"),
    ],
)
def test_the_kernel_of_a_product(changed: dict[str, Any], name: str) -> None:
    assert select("linear", LINEAR | changed).name == name


def test_features_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = LINEAR
    plain = select("linear", symbols)
    fast = dataclasses.replace(plain, name="fast", needs=("subgroups",))
    monkeypatch.setattr(contract, "kernels", lambda: (fast, plain))
    assert select("linear", symbols).name == plain.name
    assert select("linear", symbols, frozenset({"subgroups"})).name == "fast"


def test_no_kernel_is_an_error_with_the_rules_name() -> None:
    with pytest.raises(ContractError, match="fold") as caught:
        select("fold", {})
    assert caught.value.rule == "operation"
    with pytest.raises(ContractError):
        select("linear", {**LINEAR, "activation": "a4"})
    with pytest.raises(ContractError):
        select("linear", {**LINEAR, "T": 9, "few": 1})


def test_overrides_become_numbers() -> None:
    kernel = dataclasses.replace(
        kernels()[0],
        tuned={"WORKGROUP": [64, 128]},
        overrides={"ENCODING": "encoding", "GATHER": 1, "ROWS": "N", "BLOCKS": ["K", 64], "EPS": "eps"},
    )
    assert contract.override_values(kernel, {**SYMBOLS, "eps": 0.25}) == {
        "WORKGROUP": 64, "ENCODING": 1, "GATHER": 1, "ROWS": 130, "BLOCKS": 2, "EPS": 0.25
    }  # fmt: skip


def test_integer_sums_cannot_overflow() -> None:
    """The greatest magnitude of a8 is 128 and of a16 32639; a sum of that many of them still fits an i32."""
    most = contract.document()["ops"]["linear"]["most_columns"]
    for dtype, magnitude in {"a8": contract.constant("a8_max") + 1, "a16": contract.constant("a16_max")}.items():
        assert most[dtype] == (2**31 - 1) // magnitude
