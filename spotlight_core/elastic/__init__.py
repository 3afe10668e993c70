"""Decisions about SP groups: which GPUs of a node work together, and how one layout becomes another."""
