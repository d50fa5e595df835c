"""Synthesized packs: sound, the same each time, with finite numbers, and readable by every tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packer.encodings import encode_trits
from packer.errors import PackerError
from packer.pack import Pack
from packer.shapes import stand_in
from packer.synthesize import _tokenizer, cached_pack, random_weights, synthesize
from packer.text import ChatText
from shaders.interpreter import ReferenceModel
from shaders.reference import dequantize
from tests.support.shapes import tiny_shape


@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_a_pack_is_sound_and_its_numbers_are_finite(tmp_path: Path, family: str) -> None:
    shape = tiny_shape(family)
    pack = Pack(synthesize(shape, tmp_path / "pack"))
    pack.verify()
    assert pack.manifest["resident_bytes"] == sum(tensor.resident_bytes for tensor in pack.tensors().values())
    assert pack.program == shape.program()
    model = ReferenceModel(pack.program, pack.tensors(), capacity=64, kv="f16")
    logits = model.step(list(range(40)), 40)
    assert np.isfinite(logits).all()
    assert 0.01 < logits.std() < 100  # neither all alike nor about to overflow


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    one, two = (synthesize(tiny_shape(), tmp_path / name) for name in ("one", "two"))
    other = synthesize(tiny_shape(), tmp_path / "other", seed=1)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert (one / "weights-00001.safetensors").read_bytes() != (other / "weights-00001.safetensors").read_bytes()


@pytest.mark.parametrize("encoding", ["q8", "q4", "q4a", "nvfp4", "mxfp4", "f16", "f32", "ternary"])
def test_every_encoding_of_the_embedding(tmp_path: Path, encoding: str) -> None:
    """301 x 72: no whole group of 32 in a row."""
    pack = Pack(synthesize(tiny_shape(embedding=encoding), tmp_path / "pack"))
    pack.verify()
    values = dequantize(pack.tensor("embed"))
    # Powers of two come no nearer than within a factor of the square root of 2.
    assert values.std() == pytest.approx(72**-0.5, rel=0.5 if encoding == "mxfp4" else 0.1)


def test_trits_are_equally_probable_and_padded() -> None:
    rng = np.random.default_rng(0)
    entry = Pack(Path("examples/packs/smollm2-135m-ternary")).entries["layers.0.qkv"]
    weight = random_weights(rng, stand_in(entry))
    values = dequantize(weight)
    shares = [np.mean(values < 0), np.mean(values == 0), np.mean(values > 0)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)
    trits = np.sign(values).astype(np.int8)
    np.testing.assert_array_equal(weight.data, encode_trits(trits))


def test_tokenizers_read_it(tmp_path: Path) -> None:
    text = ChatText(Pack(synthesize(tiny_shape(), tmp_path / "pack")))
    ids = text.encode_messages([{"role": "user", "content": "Grüße 你好"}])
    assert ids[0] == 257 and max(ids) < 259
    assert "Grüße 你好" in text.decode(ids)
    assert sorted(_tokenizer(301)["model"]["vocab"].values()) == list(range(301))
    with pytest.raises(PackerError, match="vocabulary of 258"):
        _tokenizer(258)


def test_the_cache_keeps_whole_packs_only(tmp_path: Path) -> None:
    shape, made = tiny_shape(), []
    first = cached_pack(shape, lambda done, total: made.append(done), tmp_path)
    assert made and first.parent == tmp_path
    made.clear()
    assert cached_pack(shape, lambda done, total: made.append(done), tmp_path) == first and not made
    (first / "weights-00001.safetensors").write_bytes(b"")
    assert cached_pack(shape, lambda done, total: made.append(done), tmp_path) == first and made
    Pack(first).verify()
    assert cached_pack(tiny_shape(activations="a16"), folder=tmp_path) != first


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_pack(tiny_shape(), stop, tmp_path)
    assert list(tmp_path.iterdir()) == []
