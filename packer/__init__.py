"""Turns trained checkpoints into Tercet packs. The pack format: ``FORMAT.md`` beside this file."""

__version__ = "0.1.0"
