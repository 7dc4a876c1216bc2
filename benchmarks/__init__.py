"""Skerry beside bare processes, bubblewrap, runc, Docker and llm-sandbox, measured in one run.

Absolute times depend on the machine, so only ratios count. All subjects take turns, round after round,
so a busy moment of the machine falls on every one.
"""
