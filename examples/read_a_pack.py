"""Read a pack with nothing but NumPy-level calls: decode one ternary matrix and count its weights.

python examples/read_a_pack.py [PACK] [TENSOR]
"""

import sys
from pathlib import Path

import numpy as np

from packer.pack import Pack
from shaders.reference import dequantize, unpack_trits

DEFAULT = Path(__file__).parent / "packs" / "smollm2-135m-ternary"


def main() -> None:
    """Print the share of -1, 0 and +1, the scales, and the size on disk."""
    pack = Pack(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    tensor = pack.tensor(sys.argv[2] if len(sys.argv) > 2 else "layers.0.qkv")
    trits = unpack_trits(tensor.data, tensor.columns)
    for value in (-1, 0, 1):
        print(f"{value:+d}: {np.mean(trits == value):6.1%}")
    print(f"scales: {tensor.scales.tolist()} for {list(tensor.parts)} rows")
    print(f"on disk: {8 * tensor.data.nbytes / trits.size:.3f} bits a weight")
    print(f"values: {sorted(set(np.round(dequantize(tensor)[0].tolist(), 4)))} in row 0")


if __name__ == "__main__":
    main()
