"""Logs and metrics of every service."""
