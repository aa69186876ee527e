"""What verify attention has to compute: the reference of the package, which the self-test uses too."""

from kdtree_patch.reference import LATENT, attention, rel

__all__ = ["LATENT", "attention", "rel"]
