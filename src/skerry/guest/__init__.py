"""The host side of the guest protocol. The guest is treated as hostile."""
