"""The messages and stubs of gRPC. Written by scripts/generate_grpc.py from proto/skerry/v1."""
