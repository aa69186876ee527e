"""Stands first on the path of a child process that must not be patched: Python imports this one and never ours."""
