"""Samples by global position: every sample once and in order over any sequence of switches."""
