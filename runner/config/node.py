"""The base of every configuration node: unknown keys refused, frozen, no silent conversion of types.

An int is taken where a float is asked for (Hydra reads `1` as an int); a bool is never taken for a number,
and a number never for a string.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """One node of the configuration. Messages of its validators start with the name of the field they are about."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Keys people bring from elsewhere, and the key that does here what they want.
    renamed_keys: ClassVar[dict[str, str]] = {}
