"""BitNet checkpoints in every meaning of ``quantization_config``, each against transformers' own layers.

One model of master weights W is stored as ``autobitlinear`` offline (packed, scale mean|W|, multiply), ``bitlinear``
(packed, scale 1 / mean|W|, divide) and ``autobitlinear`` online (W itself). All three are the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packer.export import ExportOptions, export
from packer.linears import bitnet_scheme
from packer.pack import Pack
from packer.ternarize import from_master, unpack_bitnet
from shaders.interpreter import ReferenceModel
from shaders.reference import quantize, unpack_trits
from tests.support.checkpoints import change_json, tiny_config, tiny_tensors, write_folder
from tests.support.numerics import relative_to_range
from tests.support.transformers_models import load_model, logits

from transformers.integrations.bitnet import (  # isort: skip  (after the line that sets up torch)
    ActQuant,
    BitLinear,
    WeightQuant,
    pack_weights,
    unpack_weights,
)

FORMS = {
    "multiply": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "divide": {"linear_class": "bitlinear", "quantization_mode": "offline"},
    "divide by default": {},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
IDS = [int(i) for i in np.random.default_rng(1).integers(0, 256, size=40)]
SIZES = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}


def master_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tiny model with Gaussian linears, of other sizes than 1 so that a wrong scale shows."""
    random = np.random.default_rng(5)
    return {
        name: (random.standard_normal(array.shape) * 0.05).astype(np.float32) if "_proj.weight" in name else array
        for name, array in tiny_tensors(config).items()
    }


def stored(tensors: dict[str, np.ndarray], form: str) -> dict[str, np.ndarray]:
    """The tensors as a checkpoint of this form holds them; packed by transformers."""
    if form == "online":
        return tensors
    found = {}
    for name, weight in tensors.items():
        if "_proj.weight" not in name:
            found[name] = weight
            continue
        scale = torch.from_numpy(weight).abs().mean()
        trits = (torch.from_numpy(weight) / scale).round().clamp(-1, 1)
        found[name] = pack_weights(trits).numpy()
        found[f"{name}_scale"] = (scale if form == "multiply" else 1 / scale).reshape(1).numpy()
    return found


def bitnet_folder(folder: Path, form: str, family: str = "bitnet", **changes: Any) -> Path:
    config = tiny_config(family, **SIZES | changes)
    quantization = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **FORMS[form]}
    return write_folder(folder, config | {"quantization_config": quantization}, stored(master_tensors(config), form))


@pytest.fixture(scope="module", params=[(f, form) for f in ("bitnet", "llama") for form in FORMS], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(family, checkpoint, pack) of each form."""
    family, form = request.param
    folder = tmp_path_factory.mktemp("bitnet")
    checkpoint = bitnet_folder(folder / "checkpoint", form, family)
    export(checkpoint, folder / "pack", ExportOptions(embedding="f16"))
    return family, checkpoint, folder / "pack"


def test_trits_and_scales_are_those_of_the_master_weights(model: tuple[str, Path, Path]) -> None:
    family, _, path = model
    pack = Pack(path)
    pack.verify()
    masters = master_tensors(tiny_config(family, **SIZES))
    prefix = "model.layers.1"
    parts = {
        "layers.1.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "layers.1.o": ["self_attn.o_proj"],
        "layers.1.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers.1.down": ["mlp.down_proj"],
    }
    for name, sources in parts.items():
        tensor = pack.tensor(name)
        weights = [masters[f"{prefix}.{source}.weight"] for source in sources]
        assert (tensor.encoding, tensor.scale_kind) == ("ternary", "parts")
        assert tensor.parts == tuple(len(weight) for weight in weights)
        # WeightQuant is what transformers trains with: trits / scale of the master weights.
        values = [WeightQuant.apply(torch.from_numpy(weight)).numpy() for weight in weights]
        trits = np.concatenate([np.sign(value) for value in values])
        np.testing.assert_array_equal(unpack_trits(tensor.data, tensor.columns), trits)
        # Scales: mean|W|, once or twice through a reciprocal, each within half a unit in the last place.
        np.testing.assert_allclose(tensor.scales, [np.abs(value).max() for value in values], rtol=3 * 2**-23)


def test_logits_are_those_of_transformers_layers(model: tuple[str, Path, Path]) -> None:
    """In a8. Both round activations to int8: a value within float32 noise of a rounding border may go either way, by
    1/127 of its token's greatest. A few do; a wrong scale moves all logits by a tenth of their range and more."""
    _, checkpoint, path = model
    pack = Pack(path)
    assert pack.manifest["activations"] == "a8"
    reference = ReferenceModel(pack.program, pack.tensors(), capacity=len(IDS))
    found, expected = reference.step(IDS, rows=len(IDS)), logits(load_model(checkpoint), IDS)
    assert np.quantile(np.abs(found - expected), 0.9) < 1e-3 * (expected.max() - expected.min())
    assert relative_to_range(found, expected) < 2e-2


@pytest.mark.parametrize(("true", "told"), [("multiply", "divide"), ("divide", "multiply")])
def test_the_wrong_meaning_is_another_model(true: str, told: str, tmp_path: Path) -> None:
    """Dividing where one must multiply: the comparison above can fail (microsoft/BitNet#616)."""
    folder = bitnet_folder(tmp_path / "checkpoint", true)
    expected = logits(load_model(folder), IDS)
    change_json(folder / "config.json", quantization_config={"quant_method": "bitnet", **FORMS[told]})
    export(folder, tmp_path / "pack", ExportOptions(embedding="f16"))
    pack = Pack(tmp_path / "pack")
    found = ReferenceModel(pack.program, pack.tensors(), capacity=len(IDS)).step(IDS, rows=len(IDS))
    assert relative_to_range(found, expected) > 0.1


def test_the_forms_make_one_model(tmp_path: Path) -> None:
    """The same trits, and scales equal but for the reciprocal's rounding."""
    packs = {}
    for form in FORMS:
        export(bitnet_folder(tmp_path / form, form), tmp_path / f"pack {form}", ExportOptions())
        packs[form] = Pack(tmp_path / f"pack {form}").tensors()
    for form, tensors in packs.items():
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.data, packs["multiply"][name].data, err_msg=f"{form} {name}")
            if tensor.encoding == "ternary":
                np.testing.assert_allclose(tensor.scales, packs["multiply"][name].scales, rtol=3 * 2**-23)


def test_1bitllm_has_other_names_for_the_same_model(tmp_path: Path) -> None:
    """Masters of ``model_type: llama`` with ``weight_bits`` and ``input_bits``, as in 1bitLLM/bitnet_b1_58-3B."""
    config = tiny_config("bitnet", **SIZES)
    names = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
    renamed = {}
    for name, array in master_tensors(config).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        renamed[name] = array
    other = {**config, "model_type": "llama", "weight_bits": 1, "input_bits": 8}
    export(write_folder(tmp_path / "other", other, renamed), tmp_path / "two", ExportOptions())
    export(bitnet_folder(tmp_path / "online", "online"), tmp_path / "one", ExportOptions())
    one, two = Pack(tmp_path / "one"), Pack(tmp_path / "two")
    assert one.manifest["shards"] == two.manifest["shards"] and one.program == two.program
    assert two.manifest["family"] == "bitnet" and two.manifest["activations"] == "a8"


def test_an_embedding_that_happens_to_be_ternary_stays_a_float_product(tmp_path: Path) -> None:
    """BitNet's layers do not convert the head, so its inputs must not be rounded to 8 bits."""
    config = tiny_config("bitnet", **SIZES)
    tensors = master_tensors(config)
    tensors["model.embed_tokens.weight"] = np.sign(tensors["model.embed_tokens.weight"]) / 4
    quantization = {"quant_method": "bitnet", **FORMS["online"]}
    source = write_folder(tmp_path / "checkpoint", {**config, "quantization_config": quantization}, tensors)
    pack = Pack(export(source, tmp_path / "pack", ExportOptions()).path)
    assert pack.entries["embed"].encoding == "q8" and pack.program["logits"][1]["x"] == "last"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 33])
def test_packed_rows_need_be_no_multiple_of_four(rows: int) -> None:
    trits = np.random.default_rng(rows).integers(-1, 2, size=(rows, 13)).astype(np.int8)
    packed = pack_weights(torch.from_numpy(trits.astype(np.float32)))
    np.testing.assert_array_equal(unpack_bitnet(packed.numpy(), rows), trits)
    np.testing.assert_array_equal(unpack_weights(packed, torch.float32).numpy()[:rows], trits)


def test_a_model_with_rows_no_multiple_of_four(tmp_path: Path) -> None:
    """transformers' layers cannot hold such a matrix (they round the row count down), so the float model is asked."""
    changes = {"intermediate_size": 98}
    packed = bitnet_folder(tmp_path / "packed", "multiply", **changes)
    config = tiny_config("bitnet", **SIZES | changes)
    dense = {
        name: WeightQuant.apply(torch.from_numpy(w)).numpy() if "_proj.weight" in name else w
        for name, w in master_tensors(config).items()
    }
    export(packed, tmp_path / "pack", ExportOptions(embedding="f16", activations="f32"))
    pack = Pack(tmp_path / "pack")
    found = ReferenceModel(pack.program, pack.tensors(), capacity=len(IDS)).step(IDS, rows=len(IDS))
    expected = logits(load_model(write_folder(tmp_path / "dense", config, dense)), IDS)
    assert relative_to_range(found, expected) < 1e-4


def test_activation_rounding_is_bitnets() -> None:
    """q and scale of a8 against BitLinear.activation_quant and ActQuant, on values of many sizes."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((64, 100)) * 10.0 ** random.integers(-7, 4, size=(64, 1))).astype(np.float32)
    x[0] = 0
    q, scale = BitLinear(100, 4, bias=False, dtype=torch.float32).activation_quant(torch.from_numpy(x))
    found = quantize(x, "a8")
    np.testing.assert_array_equal(found.q, q.numpy())
    np.testing.assert_allclose(found.scale, 1 / scale.numpy()[:, 0], rtol=2**-22)
    np.testing.assert_allclose(
        found.q * found.scale[:, None], ActQuant.apply(torch.from_numpy(x)).numpy(), rtol=2**-22, atol=1e-30
    )


def test_master_weights_round_as_in_training() -> None:
    random = np.random.default_rng(2)
    for size in (1e-6, 1e-3, 1.0, 300.0):
        weight = (size * random.standard_normal((40, 50))).astype(np.float32)
        weight[0, :2] = [0, -0.0]
        pieces = [weight[:7], weight[7:]]
        found = from_master(pieces.copy)
        expected = WeightQuant.apply(torch.from_numpy(weight)).numpy()
        np.testing.assert_array_equal(found.trits, np.sign(expected))
        np.testing.assert_allclose(found.trits * found.scales, expected, rtol=3 * 2**-23, atol=1e-30)


def test_scheme_defaults_are_those_of_transformers() -> None:
    from transformers import BitNetQuantConfig

    default = BitNetQuantConfig()
    scheme = bitnet_scheme({"quantization_config": {"quant_method": "bitnet"}}, "config")
    assert scheme is not None
    assert scheme.divide == (default.linear_class == "bitlinear")
    assert scheme.online == (default.quantization_mode == "online")
