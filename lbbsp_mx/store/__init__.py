"""The KVStore, its keys, and the collectives built on it."""
