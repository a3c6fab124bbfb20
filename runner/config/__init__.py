"""The schema of a run: Hydra composes it, pydantic checks it once, plain keyword arguments go below.

`SpeculativeConfig.parse(mapping)` returns the checked, frozen configuration or raises a ConfigError that lists
every problem as name, rule, value, remedy. Imports no torch, so `python -m runner --help` stays quick.
"""

from runner.config.drafter_methods import (
    DflashMethod,
    DrafterMethod,
    DraftModelMethod,
    DsparkMethod,
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
    MlpSpeculatorMethod,
    MtpMethod,
    PardMethod,
)
from runner.config.hardware import HardwareConfig
from runner.config.hybrid_method import HybridMethod
from runner.config.method import MethodConfig
from runner.config.method_union import (
    CustomClassMethod,
    NgramGpuMethod,
    NgramMethod,
    NoneMethod,
    parse_method,
)
from runner.config.model import DraftDefaults, ModelConfig
from runner.config.problem import ConfigError, Problem
from runner.config.root import SpeculativeConfig
from runner.config.sampler import SamplerConfig
from runner.config.self_speculation_methods import EarlyExitMethod, SelfSpeculationMethod, SparseKVMethod
from runner.config.suffix_method import SuffixKeys, SuffixMethod
from runner.config.suffix_recycling_method import SuffixRecyclingMethod
from runner.config.workload import DemoWorkload, JsonlWorkload, SyntheticWorkload, WorkloadConfig

__all__ = [
    "ConfigError",
    "CustomClassMethod",
    "DemoWorkload",
    "DflashMethod",
    "DraftDefaults",
    "DraftModelMethod",
    "DrafterMethod",
    "DsparkMethod",
    "Eagle3Method",
    "EagleMethod",
    "EarlyExitMethod",
    "HardwareConfig",
    "HybridMethod",
    "JsonlWorkload",
    "MedusaMethod",
    "MethodConfig",
    "MlpSpeculatorMethod",
    "ModelConfig",
    "MtpMethod",
    "NgramGpuMethod",
    "NgramMethod",
    "NoneMethod",
    "PardMethod",
    "Problem",
    "SamplerConfig",
    "SelfSpeculationMethod",
    "SparseKVMethod",
    "SpeculativeConfig",
    "SuffixKeys",
    "SuffixMethod",
    "SuffixRecyclingMethod",
    "SyntheticWorkload",
    "WorkloadConfig",
    "parse_method",
]
