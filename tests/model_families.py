"""Every family and option that our decoder claims to support, by a name that says what is varied."""

from __future__ import annotations

from typing import Any

from tests.dense_families import DENSE
from tests.expert_families import OF_EXPERTS
from tests.family_options import SHAPE
from tests.latent_families import LATENTS
from tests.recurrent_families import RECURRENT

VARIANTS = DENSE | OF_EXPERTS | LATENTS | RECURRENT  # name -> (family, options)


def make_config(variant: str) -> Any:
    from transformers import AutoConfig

    family, options = VARIANTS[variant]
    return AutoConfig.for_model(family, **{**SHAPE, **options})
