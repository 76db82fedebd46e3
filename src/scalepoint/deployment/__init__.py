"""The one call: deploy, its config file, and what it returns."""

from scalepoint.deployment.settings import DeployConfig
from scalepoint.deployment.story import Deployment, deploy

__all__ = ["DeployConfig", "Deployment", "deploy"]
