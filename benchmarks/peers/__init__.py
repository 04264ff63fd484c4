"""The same work done by other projects; each needs an extra installation, see README.md."""
