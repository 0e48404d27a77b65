"""Lightning strategies over the engine."""
