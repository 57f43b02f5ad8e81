"""Global state: a small key-value protocol over Redis, leases, event streams, the registry of replicas."""

from shared.state.store import StateStore, open_store

__all__ = ["StateStore", "open_store"]
