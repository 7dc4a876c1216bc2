"""Skerry beside bare processes, bubblewrap, runc, Docker and llm-sandbox, measured in one run.

Absolute times depend on the machine, so what counts are ratios. All subjects take turns, round after round,
so that a busy moment of the machine falls on every one of them.
"""
