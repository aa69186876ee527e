"""`make deploy`: puts the patch on a host over ssh, and takes it back. See docs/architecture.md, "Deployment"."""
