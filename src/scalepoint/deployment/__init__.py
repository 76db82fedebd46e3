"""The one call: deploy, its config file, and what it returns."""

from scalepoint.deployment.result import Deployment
from scalepoint.deployment.settings import DeployConfig, SweepConfig
from scalepoint.deployment.story import deploy
from scalepoint.deployment.sweep import sweep
from scalepoint.progress import Event

__all__ = ["DeployConfig", "Deployment", "Event", "SweepConfig", "deploy", "sweep"]
