"""What agents call: tools for models, each a thin client of the daemon."""
