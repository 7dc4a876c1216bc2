"""Images: immutable root filesystems, and where they come from."""
