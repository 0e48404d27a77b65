"""The COPUS callback for Fabric and Trainer."""
