"""How long the pure decisions of a scheduler take, with as many workers and jobs as a large cluster has."""
