"""Follow one token from the prompt to the logits, operation by operation, in the NumPy reference.

    python examples/follow_one_token.py [PACK]

Prints what each operation of the first layer writes (shape, precision, range), then the five likeliest next tokens.
"""

import sys
from pathlib import Path

import numpy as np

from packer.pack import Pack
from packer.text import ChatText
from shaders.interpreter import ReferenceModel
from shaders.reference import Quantized

DEFAULT = Path(__file__).parent / "packs" / "smollm2-135m-ternary"


def describe(section: str, index: int, op: dict, result: np.ndarray | Quantized) -> None:
    """One line for the operations of the embedding, the first layer and the head."""
    if section == "body" and ".0" not in str(op.get("w", op.get("gain", op.get("k", ".0")))) and op["op"] != "embed":
        return
    if isinstance(result, Quantized):
        text = f"{result.kind} {list(result.q.shape)}, {result.q.min()} to {result.q.max()}, x {result.scale[-1]:.3g}"
    else:
        text = f"f32 {list(result.shape)}, {result.min():.3g} to {result.max():.3g}"
    print(f"{section}[{index}] {op['op']:<12} {op.get('w', ''):<18} -> {op['out']:<12} {text}")


def main() -> None:
    """Run the prompt once and print the way."""
    pack = Pack(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    text = ChatText(pack)
    ids = text.encode_messages([{"role": "user", "content": "What is the capital of France?"}])
    model = ReferenceModel(pack.program, pack.tensors(), capacity=len(ids))
    model.observer = describe
    logits = model.step(ids)[-1]
    for token in np.argsort(-logits)[:5]:
        print(f"{logits[token]:8.3f}  {text.decode([token])!r}")


if __name__ == "__main__":
    main()
