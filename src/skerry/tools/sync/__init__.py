"""The synchronous tools. Generated from `skerry.tools.aio`."""
