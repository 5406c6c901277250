"""X-LoRA: a classifier that mixes LoRA adapters per token and site."""

from workbench.xlora.classifier import Classifier
from workbench.xlora.config import XLoRAConfig
from workbench.xlora.files import MixtureFiles, find_mixture
from workbench.xlora.mixture import Mixture
from workbench.xlora.policy import ReusePolicy, exact, non_granular

__all__ = [
    "Classifier",
    "Mixture",
    "MixtureFiles",
    "ReusePolicy",
    "XLoRAConfig",
    "exact",
    "find_mixture",
    "non_granular",
]
