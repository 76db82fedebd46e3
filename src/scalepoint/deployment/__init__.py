"""The one call: deploy, its config file, and what it returns."""

from scalepoint.deployment.result import Deployment
from scalepoint.deployment.settings import DeployConfig
from scalepoint.deployment.story import deploy

__all__ = ["DeployConfig", "Deployment", "deploy"]
