"""The only way out of an environment: what it may reach, and who takes it there."""
