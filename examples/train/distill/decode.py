"""One token at a time for thousands of rows: static keys and values, and a CUDA graph of the whole step.

A step reads all keys and values before it, which is what its time goes to: attention is a kernel that stops at the
step's position. The position is a tensor, so that one captured graph serves all steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TrainError
from .nets import BF16, Net


class Decoder:
    """Rows of one net that grow together.

    keys, values: bf16 ``[L, rows, G, length, E]``. graph: capture the step (CUDA only); the net's weights must not move
    while it is used, so a student is frozen.
    """

    def __init__(self, net: Net, rows: int, length: int, graph: bool = True) -> None:
        if length > len(net.cos):
            raise TrainError(f"decoding {length} tokens: the net was made for {len(net.cos)} at most")
        config, device = net.config, net.device
        self.net, self.rows, self.length = net, rows, length
        shape = (config.layers, rows, config.kv_heads, length, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=BF16, device=device) for _ in range(2))
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self._whole = graph and device.type == "cuda"
        self._graph: Any = None
        self._attend = _attention(device)
        if self._whole:
            self._capture()

    @torch.no_grad()
    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Normed last states bf16 ``[rows, D]`` of tokens int ``[rows]`` at a position; the same tensor each time."""
        self._tokens.copy_(tokens)
        self._position.fill_(position)
        if self._graph is None:
            self._hidden = self._run()
        else:
            self._graph.replay()
        return self._hidden

    def _run(self) -> Tensor:
        net = self.net
        # Compiling pays for rows by the thousand, not for a few answers.
        project, finish = (net.project, net.finish) if self._whole else (net._project, net._finish)
        x = net.embedding[self._tokens][:, None]  # [rows, 1, D]
        cos, sin = (table.index_select(0, self._position) for table in (net.cos, net.sin))
        for layer, weights in enumerate(net.layers()):
            q, k, v = project(x, cos, sin, *weights)
            mixed = self._attend(q, k, v, self.keys[layer], self.values[layer], self._position)
            x = finish(x, mixed, *weights)
        return net.last(x)[:, 0]

    @torch.no_grad()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and lets libraries take their workspaces
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._hidden = self._run()
        self._graph = graph


def plain_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Stores k and v at a position and attends to all up to it.

    q: ``[rows, 1, H, E]``; k, v: ``[rows, 1, G, E]``; keys, values: ``[rows, G, length, E]``; position: int64 ``[1]``.
    Returns ``[rows, 1, H E]``.
    """
    keys.index_copy_(2, position, k.transpose(1, 2))
    values.index_copy_(2, position, v.transpose(1, 2))
    seen = torch.arange(keys.shape[2], device=q.device) <= position
    mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen[None], enable_gqa=True)
    return mixed.transpose(1, 2).reshape(q.shape[0], 1, -1)


def _attention(device: torch.device) -> Any:
    """The kernel on a GPU, if it works there."""
    if device.type != "cuda":
        return plain_attention
    try:
        from .decode_kernel import attention  # Triton comes with torch's CUDA builds only

        _check(attention, device)
    except Exception as error:  # a compiler may fail in any way
        warnings.warn(f"the decoding kernel does not work here, decoding will be slow: {error}", stacklevel=2)
        return plain_attention
    return attention


def _check(attention: Any, device: torch.device) -> None:
    q, k, v = (torch.randn(3, 1, heads, 64, device=device).to(BF16) for heads in (9, 3, 3))
    keys, values = (torch.randn(3, 3, 160, 64, device=device).to(BF16) for _ in range(2))
    for position in (0, 70, 159):
        at = torch.tensor([position], device=device)
        wanted = plain_attention(q, k, v, keys.clone(), values.clone(), at).float()
        error = (attention(q, k, v, keys.clone(), values.clone(), at).float() - wanted).abs().max().item()
        if not error < 0.05:
            raise RuntimeError(f"at position {position} it is {error} off")
