"""Weight tensors on the GPU: uploaded in the disk layout, ternary ones expanded there, tall ones cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import wgpu

from .contract import quotient_up, select
from .native_device import Device
from .native_errors import DeviceUnsupported
from .resident import disk_words, scale_words
from .symbols import Symbols, constants, params_bytes, weight_symbols, workgroups
from .weights import WeightTensor

#: Pieces start at a multiple of this, so that two f16 scales of a word belong to one piece.
PIECE_ROWS = 64


@dataclass
class Piece:
    """Whole rows of a matrix in buffers of their own."""

    symbols: Symbols
    data: wgpu.GPUBuffer
    scale: wgpu.GPUBuffer | None

    @property
    def buffers(self) -> dict[str, wgpu.GPUBuffer | None]:
        """By the name after ``w.`` in kernels.json."""
        return {"data": self.data, "scale": self.scale}


class WeightStore:
    """All tensors of a model. ``binding_limit``: most bytes of one buffer that a kernel can see."""

    def __init__(self, device: Device, binding_limit: int):
        self.pieces: dict[str, list[Piece]] = {}
        self.vectors: dict[str, wgpu.GPUBuffer] = {}
        self._joined: dict[tuple[str, ...], wgpu.GPUBuffer] = {}
        self._device, self._limit = device, binding_limit
        self._staging: wgpu.GPUBuffer | None = None

    def add(self, weight: WeightTensor) -> None:
        """Upload a tensor. Raises OutOfDeviceMemory, and DeviceUnsupported if 64 rows exceed the binding limit."""
        if len(weight.shape) == 1:
            self.vectors[weight.name] = self._upload(weight.data.reshape(-1), weight.name)
            return
        self.pieces[weight.name] = []
        for first, rows in row_ranges(weight, self._limit):
            symbols = weight_symbols(weight, first, rows)
            scales = scale_words(weight, slice(first, first + rows))
            label = f"{weight.name}[{first}:{first + rows}]"
            words = disk_words(weight, slice(first, first + rows))
            data = self._expand(words, symbols, label) if weight.encoding == "ternary" else self._upload(words, label)
            scale = self._upload(scales, f"{label} scales") if scales.size else None
            self.pieces[weight.name].append(Piece(symbols, data, scale))

    def joined(self, names: Sequence[str]) -> wgpu.GPUBuffer:
        """Vectors one after another in one buffer, for kernels that have a single binding for them."""
        known = tuple(names)
        if known not in self._joined:
            parts = [self.vectors[name] for name in names]
            buffer = self._device.storage(sum(part.size for part in parts), " and ".join(names))
            encoder = self._device.wgpu.create_command_encoder(label=buffer.label)
            at = 0
            for part in parts:
                encoder.copy_buffer_to_buffer(part, 0, buffer, at, part.size)
                at += part.size
            self._device.submit(encoder)
            self._joined[known] = buffer
        return self._joined[known]

    def finish(self) -> None:
        """Free what only uploading needed."""
        if self._staging:
            self._staging.destroy()
            self._staging = None

    def close(self) -> None:
        """Free all buffers."""
        self.finish()
        for piece in (piece for pieces in self.pieces.values() for piece in pieces):
            piece.data.destroy()
            if piece.scale:
                piece.scale.destroy()
        for buffer in (*self.vectors.values(), *self._joined.values()):
            buffer.destroy()
        self.pieces.clear()
        self.vectors.clear()
        self._joined.clear()

    def _upload(self, data, label: str) -> wgpu.GPUBuffer:
        buffer = self._device.storage(data.nbytes, label)
        self._device.write(buffer, data)
        return buffer

    def _expand(self, words, symbols: Symbols, label: str) -> wgpu.GPUBuffer:
        """Base-3 words u32 ``[rows, ceil(K/20)]`` to 2-bit codes u32 ``[rows, ceil(K/64), 4]``, on the GPU."""
        device, kernel = self._device, select("expand", symbols)
        if self._staging is None or self._staging.size < words.nbytes:
            # Writes and submits keep their order, so one staging buffer serves tensor after tensor.
            self.finish()
            self._staging = device.storage(words.nbytes, "base-3 words")
        codes = device.storage(4 * symbols["N"] * symbols["ROW_WORDS"], label)
        device.write(self._staging, words)
        params = device.uniform(params_bytes(kernel, symbols), f"{label} params")
        storage = [(buffer, 0, buffer.size) for buffer in (self._staging, codes)]
        encoder = device.wgpu.create_command_encoder(label=f"expand {label}")
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(device.pipeline(kernel, constants(kernel, symbols)))
        compute.set_bind_group(0, device.bind_group(kernel, params, params, storage))
        compute.dispatch_workgroups(*workgroups(kernel, symbols))
        compute.end()
        device.submit(encoder)
        return codes


def row_ranges(weight: WeightTensor, binding_limit: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the pieces of a matrix. Raises DeviceUnsupported if 64 rows are too many."""
    row_bytes = 4 * max(weight.row_words, weight.groups)
    most = binding_limit // row_bytes // PIECE_ROWS * PIECE_ROWS
    if most == 0 and weight.rows * row_bytes > binding_limit:
        raise DeviceUnsupported(
            f"tensor {weight.name}: {PIECE_ROWS} rows have {PIECE_ROWS * row_bytes:,} bytes, "
            f"the GPU binds {binding_limit:,}",
            "use another GPU",
            PIECE_ROWS * row_bytes,
            binding_limit,
        )
    pieces = quotient_up(weight.rows, most) if most else 1
    # Pieces of about the same height load the GPU evenly.
    height = quotient_up(quotient_up(weight.rows, pieces), PIECE_ROWS) * PIECE_ROWS
    for first in range(0, weight.rows, height):
        yield first, min(height, weight.rows - first)
