"""X-LoRA: a classifier that mixes LoRA adapters per token and site."""

from workbench.xlora.classifier import Classifier
from workbench.xlora.config import XLoRAConfig
from workbench.xlora.files import MixtureFiles, find_mixture
from workbench.xlora.mixture import Mixture
from workbench.xlora.policy import ReusePolicy, exact, lagged, non_granular, periodic, policy_named

__all__ = [
    "Classifier",
    "Mixture",
    "MixtureFiles",
    "ReusePolicy",
    "XLoRAConfig",
    "exact",
    "find_mixture",
    "lagged",
    "non_granular",
    "periodic",
    "policy_named",
]
