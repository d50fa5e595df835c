"""Ask the default model one question on this machine's GPU, with Tercet as a library.

python examples/ask.py [QUESTION]
"""

import sys
from pathlib import Path

from packer.pack import Pack
from packer.runner import load_model
from packer.text import ChatText
from shaders.sampling import Sampling

DEFAULT = Path(__file__).parent / "packs" / "smollm2-135m-ternary"


def main() -> None:
    """Print the answer as it comes."""
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    pack = Pack(DEFAULT)
    text = ChatText(pack)
    ids = text.encode_messages([{"role": "user", "content": question}])
    model = load_model(pack, "native", capacity=512, kv="f16")
    stream = text.stream()
    for token, _ in model.generate(ids, Sampling(temperature=0), max_tokens=64, stop=pack.eos_ids):
        if token not in pack.eos_ids:
            print(stream.push(token), end="", flush=True)
    print(stream.finish())


if __name__ == "__main__":
    main()
