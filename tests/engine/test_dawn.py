"""The engine in Node on Dawn, Chrome's WebGPU: tiny models must give the ids of the NumPy reference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.export import ExportOptions
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from shaders.sampling import Sampling
from tests.engine.node import SWIFTSHADER, WEBGPU, node_json
from tests.support.packs import change_manifest, change_program, change_shard, recode, tiny_pack

pytestmark = [
    pytest.mark.skipif(not SWIFTSHADER.is_file(), reason=f"needs Chromium's Vulkan driver, {SWIFTSHADER}"),
    pytest.mark.skipif(not WEBGPU.is_dir(), reason="needs web/node_modules (make test installs it)"),
]

#: Prompt of three prefill steps: two full ones and one of three tokens. Other models than the first read token by
#: token, which spares their kernels for many tokens the slow compiler of the CPU driver.
PROMPT = [int(token) for token in np.random.default_rng(2).integers(0, 256, 19)]
CHUNK = 8
TOKENS = 8
#: Below this distance of the two highest logits, rounding may decide; what comes after is not compared.
NEAR_TIE = 0.02
RANDOM = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 2**40 + 77}


#: Most of the time goes into compiling for the CPU driver, so all questions go to one process with one device.
Jobs = dict[str, dict[str, Any]]


def reference(pack: Path, kv: str, options: Sampling, prompt: list[int] = PROMPT) -> list[int]:
    """The reference's ids, up to the first near tie; at least half of them must be left."""
    opened = Pack(pack)
    model = ReferenceModel(opened.program, opened.tensors(), capacity=128, kv=kv)
    ids = []
    for token, logits in model.generate(prompt, options, TOKENS):
        second, first = np.sort(logits)[-2:]
        if options.greedy and first - second < NEAR_TIE:
            break
        ids.append(token)
    assert len(ids) >= TOKENS // 2, "the test's model decides too closely: take another seed"
    return ids


def run(**options: Any) -> dict[str, Any]:
    return {"ids": PROMPT, "options": {"temperature": 0, "max_tokens": TOKENS, "stopIds": [], **options}}


OPTIONS = {"contextLength": 64, "prefillChunk": CHUNK}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bitnet a8, q8 embedding, f16 cache": ("bitnet", {"activations": "a8"}, {"num_hidden_layers": 2}, "f16"),
    "llama a16, q4 embedding, q8 cache": (
        "llama",
        {"activations": "a16", "embedding": "q4"},
        {"num_hidden_layers": 1, "attention_bias": True},
        "q8",
    ),
    "llama f32, f16 embedding and head, f32 cache, norms of heads, window, post-norms": (
        "llama",
        {"activations": "f32", "embedding": "f16"},
        {"num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "gelu_pytorch_tanh"},
        "f32",
    ),
}
FIRST, _, NORMED = MODELS
FOUR_BITS = "llama f32, nvfp4, mxfp4 and q4a"
MODELS[FOUR_BITS] = (
    "llama",
    {"activations": "f32", "embedding": "f16"},
    {"num_hidden_layers": 1, "tie_word_embeddings": False},
    "f16",
)
#: The tensors of that model that are stored so.
CODED = {
    "embed": "nvfp4",
    "layers.0.qkv": "nvfp4",
    "layers.0.o": "q4a",
    "layers.0.gate_up": "mxfp4",
    "layers.0.down": "nvfp4",
    "lm_head": "q4a",
}
FOLLOW = {"ids": [*PROMPT, 7, 8], "options": {"temperature": 0, "max_tokens": 3, "stopIds": []}}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (family, options, changes, _) in MODELS.items():
        folder = tmp_path_factory.mktemp("pack")
        made[name] = tiny_pack(folder, family, options=ExportOptions(name="tiny", **options), seed=4, **changes)
    add_norms(made[NORMED])
    for name, encoding in CODED.items():
        recode(made[FOUR_BITS], name, encoding)
    return made


def add_norms(pack: Path) -> None:
    """Norms of query and key heads, a window, and a norm of what attention adds."""

    def operations(program: dict[str, Any]) -> None:
        body = program["body"]
        rope, attention, product = (
            next(op for op in body if op["op"] == name and (name != "linear" or op.get("accumulate")))
            for name in ("rope_append", "attention", "linear")
        )
        rope |= {"q_gain": "q gain", "k_gain": "k gain", "eps": 1e-3}
        attention["window"] = 5
        added = {"op": "norm", "x": "y", "gain": "final_norm", "eps": 1e-5, "out": product["out"], "accumulate": True}
        body.insert(body.index(product) + 1, added)
        program["values"]["y"] = program["values"][product["out"]]
        product |= {"out": "y", "accumulate": False}

    width = Pack(pack).program["body"][3]["head_dim"]
    rng = np.random.default_rng(8)
    gains = {name: (1 + 0.3 * rng.normal(size=width)).astype(np.float32) for name in ("q gain", "k gain")}
    described = {name: {"encoding": "f32", "shape": [width], "slices": [1]} for name in gains}
    change_shard(pack, lambda arrays: arrays.update({f"{name}.data.0": gain for name, gain in gains.items()}))
    change_manifest(pack, lambda manifest: manifest["tensors"].update(described))
    change_program(pack, operations)


def model_jobs(packs: dict[str, Path]) -> Jobs:
    """Each model; then the first one with bindings so small that its embedding is cut, and loaded twice."""
    jobs: Jobs = {}
    for name, pack in packs.items():
        options = {**OPTIONS, "kvCache": MODELS[name][3], "prefillChunk": CHUNK if name == FIRST else 1}
        jobs[name] = {"pack": str(pack), "options": options, "runs": [run(), run(**RANDOM)]}
    options = {**OPTIONS, "kvCache": MODELS[FIRST][3]}
    small = {**options, "maxBindingBytes": 9216}
    jobs["pieces"] = {"pack": str(packs[FIRST]), "options": small, "runs": [run(), FOLLOW]}
    jobs["again"] = {"pack": str(packs[FIRST]), "options": options, "runs": [FOLLOW], "loads": 2}
    return jobs


def hostile_jobs(source: Path, folder: Path) -> Jobs:
    """What goes wrong, before, during and after a load."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(source, folder / name))

    broken, unknown, absent = copy("broken"), copy("unknown"), copy("absent")
    change_shard(broken, lambda arrays: arrays["final_norm.data.0"].fill(3e38))
    change_program(unknown, lambda program: program["body"][1].update(op="teleport"))
    for pack in (unknown, absent):  # the program is refused before a shard is looked for
        next(pack.glob("*.safetensors")).unlink()
    shaders = Path(shutil.copytree(Path(__file__).parents[2] / "shaders", folder / "shaders"))
    text = (shaders / "argmax.wgsl").read_text()
    assert text.count("picks[at + 1u] = best_id;") == 1
    (shaders / "argmax.wgsl").write_text(text.replace("picks[at + 1u] = best_id;", "picks[at + 1u] = best_id ^ 1u;"))
    good = {"pack": str(source), "options": OPTIONS}
    return {
        "broken numbers": {"pack": str(broken), "options": OPTIONS, "runs": [run()]},
        "unknown operation": {"pack": str(unknown), "options": OPTIONS},
        "missing shard": {"pack": str(absent), "options": OPTIONS},
        "wrong kernel": {**good, "options": {**OPTIONS, "shadersUrl": shaders.as_uri()}},
        "small bindings": {**good, "options": {**OPTIONS, "maxBindingBytes": 1024}},
        "long context": {**good, "options": {**OPTIONS, "contextLength": 1000}},
        "unknown cache": {**good, "options": {**OPTIONS, "kvCache": "f8"}},
        "no pack": {"pack": str(folder / "nothing"), "options": OPTIONS},
        "lost device": {**good, "runs": [run(max_tokens=20)], "lose": True},
    }


@pytest.fixture(scope="module")
def results(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    jobs = model_jobs(packs) | hostile_jobs(packs[FIRST], tmp_path_factory.mktemp("hostile"))
    env = {"VK_ICD_FILENAMES": str(SWIFTSHADER), "XDG_RUNTIME_DIR": "/tmp"}
    answers = node_json("dawn_answers.mjs", {"jobs": list(jobs.values())}, env=env, seconds=500)
    return dict(zip(jobs, answers, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_reference(name: str, results: dict[str, dict[str, Any]], packs: dict[str, Path]) -> None:
    assert "error" not in results[name], results[name]["error"]
    greedy, random = results[name]["answers"]
    expected = reference(packs[name], MODELS[name][3], Sampling())
    assert greedy["ids"][: len(expected)] == expected
    assert random["ids"] == reference(packs[name], MODELS[name][3], Sampling(**RANDOM))


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_says_what_is_used(name: str, results: dict[str, dict[str, Any]]) -> None:
    info = results[name]["info"]
    used = info["weightsBytes"] + info["kvBytes"] + info["workBytes"]
    assert used <= info["buffers"] < used + 64 * 1024
    assert set(info["phases"]) == {"plan", "download", "expand", "compile", "check", "ready"}


def test_a_tensor_cut_into_pieces_gives_the_same(results: dict[str, dict[str, Any]], packs: dict[str, Path]) -> None:
    expected = reference(packs[FIRST], MODELS[FIRST][3], Sampling())
    assert results["pieces"]["answers"][0]["ids"][: len(expected)] == expected


def test_a_follow_up_on_a_used_cache_gives_the_same_as_on_a_fresh_one(
    results: dict[str, dict[str, Any]],
) -> None:
    fresh = [answer["ids"] for answer in results["again"]["answers"]]
    assert [results["pieces"]["answers"][1]["ids"]] * 2 == fresh


def test_nothing_is_left_on_the_gpu(results: dict[str, dict[str, Any]]) -> None:
    assert len(results["again"]["alive"]) == 2
    for name, result in results.items():
        assert set(result["alive"]) == {0}, name


CODES = {
    "unknown operation": "pack-unsupported",
    "missing shard": "download-failed",
    "wrong kernel": "self-check-failed",
    "small bindings": "limit-too-small",
    "long context": "bad-request",
    "unknown cache": "bad-request",
    "no pack": "download-failed",
}


def test_what_goes_wrong_is_told_by_name(results: dict[str, dict[str, Any]]) -> None:
    assert {name: results[name]["error"]["code"] for name in CODES} == CODES
    detail = {name: results[name]["error"]["detail"] for name in CODES}
    assert detail["unknown operation"]["rule"] == "operation"
    assert "teleport" in results["unknown operation"]["error"]["message"]
    assert detail["missing shard"]["rule"] == "missing"
    assert detail["wrong kernel"]["kernel"] == "argmax"
    assert detail["small bindings"]["needed"] > detail["small bindings"]["available"] == 1024


def test_broken_numbers_and_a_lost_device_end_an_answer(results: dict[str, dict[str, Any]]) -> None:
    assert results["broken numbers"]["answers"][0]["error"]["code"] == "numbers-broken"
    assert results["broken numbers"]["answers"][0]["ids"] == []
    lost = results["lost device"]
    assert lost["answers"][0]["error"]["code"] == lost["lost"] == "device-lost"
    assert 2 <= len(lost["answers"][0]["ids"]) < 20
