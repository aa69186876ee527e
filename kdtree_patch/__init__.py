"""Sends SGLang's speculative-decoding verify attention to a CUDA kernel of our own. See docs/architecture.md.

`__version__` is the one place of the version: the wheel takes it from here, `installed` lines, `--version`, benchmark
files and the names of releases on hosts (VERSION-GITSHA) say it. CONTRIBUTING.md says what its numbers mean.
"""

__version__ = "0.1.0"
