"""A server of the Model Context Protocol (`skerry mcp`, `pip install 'skerry[mcp]'`)."""
