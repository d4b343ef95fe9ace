"""The lab: the git repository with the marker `tuneplane.yaml` and the experiments in it."""
