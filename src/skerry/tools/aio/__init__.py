"""The asynchronous tools."""
