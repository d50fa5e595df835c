"""``python -m packer``, also installed as ``tercet``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
