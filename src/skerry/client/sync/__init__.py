"""The synchronous client. Generated from `skerry.client.aio`, except `stream.py`."""
