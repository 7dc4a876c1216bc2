"""Environments that a Docker Engine runs, through its API: see `backend`."""
