"""The COPUS callback for Fabric and Trainer."""

from copus_lightning.callbacks.copus import CopusCallback

__all__ = ["CopusCallback"]
