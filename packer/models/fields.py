"""Typed access to config fields, with errors that name file and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError


class Fields:
    """A config object and the place to name in errors."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default if it is absent."""
        return self.values.get(name, default)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with fields that the config leaves out; null is left as it is."""
        return Fields({**defaults, **self.values}, self.where)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises CheckpointError if it is missing or of another kind."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: field {name!r} is missing, expected a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.where}: field {name!r} is {value!r}, expected a positive integer")
        return value

    def count(self, name: str) -> int:
        """An integer of 0 or more. Raises CheckpointError if it is missing or of another kind."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.where}: field {name!r} is {value!r}, expected an integer of 0 or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises CheckpointError if it is missing or of another kind."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: field {name!r} is missing, expected a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
            raise CheckpointError(f"{self.where}: field {name!r} is {value!r}, expected a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Raises CheckpointError if it is missing or of another kind."""
        value = self.number(name, default)
        if value <= 0:
            raise CheckpointError(f"{self.where}: field {name!r} is {value!r}, expected a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. Raises CheckpointError if it is of another kind."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: field {name!r} is {value!r}, expected true or false")
        return value

    def refuse(self, name: str, harmless: tuple[Any, ...]) -> None:
        """Refuse a field that changes the mathematics in a way that is not supported."""
        value = self.values.get(name)
        if value is not None and value not in harmless:
            raise CheckpointError(
                f"{self.where}: field {name!r} is {value!r}, which this model family does not support here; "
                "packing it anyway would give a model that computes something else"
            )
