"""``python -m examples.train COMMAND``, also under ``torchrun -m``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
