"""The version, in a place that every layer may import."""

VERSION = "0.1.0"
