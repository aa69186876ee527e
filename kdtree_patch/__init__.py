"""Sends SGLang's speculative-decoding verify attention to a CUDA kernel of our own. See docs/architecture.md."""

__version__ = "0.1.0"
